"""A private, frozen copy of the user's network: what is linearised never moves and never touches the original."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ntkgp.linearization.inputs import Input
from ntkgp.linearization.layout import ParameterLayout

__all__ = ["CallConvention", "Snapshot", "outputs_of"]

_COMPILED = "_orig_mod"  # where torch.compile keeps the eager module
Selection = None | Callable[[str, nn.Parameter], bool] | Sequence[str]


class Snapshot:
    """Copy of a network in evaluation mode, with gradients on for the Bayesian parameters only.

    Compiled modules are replaced by the eager modules they wrap: a compiled graph cannot be taken apart.

    Args:
        net: the network; it is copied, never changed.
        parameters: None for all parameters that require gradients, a predicate on (name, parameter), or names.
            A name may also be that of a module: all its parameters are meant.

    Raises:
        TypeError: if ``net`` is not a module.
        ValueError: if no parameter, or a name that does not exist, is selected, or dtypes or devices are mixed.
    """

    def __init__(self, net: nn.Module, parameters: Selection = None) -> None:
        _check_module(net)
        self.module = _eager_copy(net).eval()
        named = dict(self.module.named_parameters())
        chosen = _select(named, parameters)
        for name, parameter in named.items():
            parameter.requires_grad_(name in chosen)
            parameter.grad = None
        self.parameters = {name: named[name] for name in named if name in chosen}
        for kind in ("dtype", "device"):
            values = {str(getattr(p, kind)) for p in self.parameters.values()}
            if len(values) > 1:
                raise ValueError(f"the Bayesian parameters have several {kind}s: {sorted(values)}")
        self.layout = ParameterLayout(
            tuple(self.parameters), tuple(parameter.shape for parameter in self.parameters.values())
        )
        self._unpack = CallConvention.of(self.module)
        self._has_rnn = any(isinstance(module, nn.RNNBase) for module in self.module.modules())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the Bayesian parameters."""
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        """Device of the Bayesian parameters."""
        return next(iter(self.parameters.values())).device

    @property
    def groups(self) -> dict[str, list[str]]:
        """Parameter names by the layer (module) that owns them, in order."""
        groups: dict[str, list[str]] = {}
        for name in self.layout.names:
            groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return groups

    def __call__(self, x: Input, theta: dict[str, Tensor] | None = None) -> Tensor:  # -> (N, C)
        """Evaluate the network, flattened to C outputs per example, at θ* or at the parameters ``theta``."""
        args, kwargs = self._unpack(x)
        if theta is None:
            f = self.module(*args, **kwargs)
        else:
            f = torch.func.functional_call(self.module, theta, args, kwargs)
        return outputs_of(f)

    def fingerprint(self) -> str:
        """Return a digest of all parameters and buffers."""
        digest = hashlib.sha256()
        for name, value in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Run kernels that autograd can take apart; every switch is put back on leaving.

        Fused attention has no forward mode and no second derivative, and the fused LSTM hides its steps, so the
        plain implementations stand in for them.
        """
        fast_path = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self._has_rnn:
                stack.enter_context(_without_mkldnn())
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                yield
            finally:
                torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    # torch.backends.mkldnn.flags also sets a TF32 switch and warns about it on machines without Intel GPUs.
    enabled = bool(torch.backends.mkldnn.enabled)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def outputs_of(f: Any) -> Tensor:  # -> (N, C)
    """Return what a network returned, or the ``logits`` of it, flattened to C numbers for each example.

    Raises:
        TypeError: if there is no such tensor.
        ValueError: if it is a scalar.
    """
    f = f if isinstance(f, Tensor) else getattr(f, "logits", f)
    if not isinstance(f, Tensor):
        raise TypeError(
            f"the network must return one tensor, or an object with its logits, but returned a {type(f).__name__}: "
            "wrap it in a module that picks the output to linearise"
        )
    if f.ndim == 0:
        raise ValueError("the network returned a scalar: it must return one output per example")
    return f if f.ndim == 2 else f.reshape(f.shape[0], -1)


def _check_module(net: object) -> None:
    if not isinstance(net, nn.Module):
        hint = ": pass its module()" if type(net).__name__ == "ExportedProgram" else ""
        raise TypeError(f"net must be a torch.nn.Module, but is a {type(net).__name__}{hint}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in net.modules()):
        raise TypeError(
            "net is, or holds, a TorchScript module, which cannot be taken apart: pass the Python module that it was "
            "made from, or one that torch.export made"
        )


def _eager_copy(net: nn.Module) -> nn.Module:
    """Deep copy without compiled wrappers and without the graph of derived tensors that are kept as attributes."""
    memo: dict[int, object] = {}
    modules = list(net.modules())
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    for module in reversed(modules):  # children first, so that a compiled parent finds its eager parts copied
        if hasattr(module, _COMPILED):
            memo[id(module)] = deepcopy(getattr(module, _COMPILED), memo)
    copy = deepcopy(net, memo)
    for module in copy.modules():
        module._compiled_call_impl = None  # set by Module.compile()
    return copy


def _select(named: dict[str, nn.Parameter], selection: Selection) -> set[str]:
    if selection is None:
        chosen = {name for name, parameter in named.items() if parameter.requires_grad}
    elif callable(selection):
        chosen = {name for name, parameter in named.items() if selection(name, parameter)}
    else:
        if isinstance(selection, str):
            selection = [selection]
        wanted = [name.replace(f"{_COMPILED}.", "") for name in selection]
        chosen = {name for name in named for w in wanted if name == w or name.startswith(f"{w}.")}
        unknown = [w for w in wanted if not any(name == w or name.startswith(f"{w}.") for name in named)]
        if unknown:
            raise ValueError(f"parameters names {unknown}, which the network does not have; it has {list(named)}")
    floating = {name for name in chosen if named[name].is_floating_point()}
    if not floating:
        raise ValueError(
            f"parameters selects nothing to linearise: the network has {len(named)} parameters, "
            f"{sum(p.requires_grad for p in named.values())} of them require gradients"
        )
    return floating


@dataclass(frozen=True)
class CallConvention:
    """How ``forward`` wants its input: a mapping by keywords if it takes its keys, a tuple by position if it fits."""

    names: frozenset[str]
    required: frozenset[str]
    positional: float
    any_keyword: bool

    @classmethod
    def of(cls, module: nn.Module) -> "CallConvention":
        """Read what the module's ``forward`` takes."""
        parameters = inspect.signature(module.forward).parameters
        kinds = [p.kind for p in parameters.values()]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        unlimited, any_keyword = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
        required = {
            name for name, p in parameters.items() if p.kind in by_position and p.default is inspect.Parameter.empty
        }
        positional = inf if unlimited else sum(kind in by_position for kind in kinds)
        return cls(frozenset(parameters), frozenset(required), positional, any_keyword)

    def __call__(self, x: Input) -> tuple[tuple, dict]:
        """Return positional and keyword arguments."""
        if isinstance(x, Mapping) and (self.names.issuperset(x) or (self.any_keyword and self.required.issubset(x))):
            return (), dict(x)
        if isinstance(x, tuple | list) and self.positional >= len(x) > 1:
            return tuple(x), {}
        return (x,), {}
