"""A network as its own first-order expansion: f, J v, Jᵀ u, and J in factored form."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.linearization.cache import InputCache
from ntkgp.linearization.capture import Analysis, Workspace, capture, fallback_jacobian
from ntkgp.linearization.factors import Dense, Factor
from ntkgp.linearization.features import Features
from ntkgp.linearization.graph import trace
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, rebuild, take, wants_grad
from ntkgp.linearization.known import Known, shapes_of
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.linearization.products import JVP, JVPS, JVPS_IN_REVERSE, DifferentiableJVP, first_consistent, vjp
from ntkgp.linearization.rules import CONVOLUTION
from ntkgp.linearization.snapshot import Selection, Snapshot

__all__ = ["Linearization"]

_CAPTURE_BYTES = 256 << 20  # cotangents held at a time: 4 examples of a ResNet-20 at a time take twice as long as 16
_PRODUCT_BYTES = 256 << 20  # activations held at a time in products


class Linearization:
    r"""f_lin(x; θ) = f(x; θ*) + J(x)(θ − θ*), the network's expansion at its own weights.

    The network is copied: it is never changed, and training it further does not move the linearisation.

    Args:
        net: any module that takes a tensor (or a mapping or tuple of tensors), examples first, and returns one tensor,
            or an object with ``logits``.
        parameters: which parameters are Bayesian: None for all that require gradients, a predicate on
            (name, parameter), or a list of parameter or module names.
        example: an input from which shapes are learnt at once; otherwise the first input teaches them.

    Raises:
        TypeError: if ``net`` or ``example`` is of the wrong type.
        ValueError: if nothing is selected, or ``net`` is random, mixes examples, or resists differentiation.
    """

    def __init__(self, net: nn.Module, parameters: Selection = None, example: Input | None = None) -> None:
        self._net = Snapshot(net, parameters)
        self._seeds: Tensor | None = None  # (C, outputs of the network) where only some are wanted
        self._known = Known(self._net)
        self._pilots: dict[tuple, Features] = {}
        self._jvp: JVP | None = None
        self.cache = InputCache()
        if example is not None:
            self.learn(example)

    @property
    def layout(self) -> ParameterLayout:
        """Names, shapes and order of the Bayesian parameters."""
        return self._net.layout

    @property
    def num_params(self) -> int:
        """P, the number of Bayesian parameters."""
        return self.layout.num_params

    @property
    def num_outputs(self) -> int:
        """C, the outputs per example."""
        if self._seeds is not None:
            return self._seeds.shape[0]
        return self._known.first("num_outputs").num_outputs

    @property
    def groups(self) -> dict[str, list[str]]:
        """Parameter names by layer, in order."""
        return self._net.groups

    @property
    def convolutions(self) -> list[str]:
        """Parameters that the network convolves with."""
        uses = self._known.first("convolutions").uses
        found = {use.target.parameters[0] for use in uses if use.operation == CONVOLUTION and use.slot == 1}
        return [name for name in self.layout.names if name in found]

    def normalized_groups(self) -> dict[str, tuple[str, ...]]:
        """Return the parameters that each normalisation layer makes scale invariant, and the rest as one group."""
        norms = self._known.first("what is normalised").norms
        groups: dict[int, list[str]] = {}
        for name in self.layout.names:
            if name in norms:
                groups.setdefault(norms[name], []).append(name)
        layers = {name: layer for layer, names in self.groups.items() for name in names}
        named = {layers[names[0]]: tuple(names) for names in groups.values()}
        rest = tuple(name for name in self.layout.names if name not in norms)
        return {**named, "rest": rest} if rest else named

    @property
    def theta(self) -> Tensor:  # (P,)
        """θ*, the linearisation point (a copy)."""
        return self.layout.join({name: p.detach() for name, p in self._net.parameters.items()})

    @property
    def example(self) -> Input:
        """Two examples like those seen last."""
        return self._known.examples[self._known.last_seen("an example")]

    @property
    def outputs(self) -> Tensor | None:  # (C, outputs of the network)
        """Which combinations of the network's outputs are meant; None for the outputs themselves."""
        return self._seeds

    def fingerprint(self) -> str:
        """Return a digest of all parameters and buffers of the network, whatever is Bayesian."""
        return self._net.fingerprint()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self._net.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._net.device

    def learn(self, x: Input) -> Analysis:
        """Check ``x``, and probe the network if it has not seen inputs of these shapes."""
        return self._known.learn(x)

    def __call__(self, x: Input, theta: Tensor | None = None) -> Tensor:  # (N, C)
        """Return f(x; θ*), or the network itself at other weights (P,); differentiable in x if that asks for it."""
        analysis = self.learn(x)
        at = None if theta is None else self.layout.split(theta)
        if wants_grad(x):
            with self._net.differentiable():
                return self._project(self._net(x, at))
        with torch.no_grad():
            return torch.cat([self._project(self._net(part, at)) for part in _parts(x, _product_batch(analysis))])

    def jvp(self, x: Input, v: Tensor) -> Tensor:  # (P,) or (S, P) -> (N, C) or (S, N, C)
        """Return J(x) v; differentiable in x and v where they require gradients."""
        analysis = self.learn(x)
        _check_shape("v", v, (self.num_params,))
        V = v.reshape(-1, self.num_params)
        product = self._forward_product(x, analysis)
        if wants_grad(x) or wants_grad(v):
            out = DifferentiableJVP.apply(self._net, product, partial(rebuild, x), V, *leaves(x))
        else:
            out = self._values_and_products(x, V)[1]
        return self._project(out).reshape(*v.shape[:-1], batch_size(x), self.num_outputs)

    def value_and_jvp(self, x: Input, v: Tensor) -> tuple[Tensor, Tensor]:  # (P,) -> (N, C), (N, C)
        """Return f(x; θ*) and J(x) v from one forward pass, without gradients."""
        _check_shape("v", v, (self.num_params,))
        f, (moved,) = self._values_and_products(x, v.detach().reshape(1, self.num_params))
        return self._project(f), self._project(moved)

    def _values_and_products(self, x: Input, V: Tensor) -> tuple[Tensor, Tensor]:  # (S, P)
        analysis = self.learn(x)
        product, batch = self._forward_product(x, analysis), _product_batch(analysis, copies=1 + len(V))
        values, products = zip(*(product(self._net, part, V) for part in _parts(x, batch)), strict=True)
        return torch.cat(values), torch.cat(products, dim=1)

    def vjp(self, x: Input, u: Tensor) -> Tensor:  # (N, C) or (S, N, C) -> (P,) or (S, P)
        """Return J(x)ᵀ u; differentiable in x and u where they require gradients."""
        analysis = self.learn(x)
        n = batch_size(x)
        _check_shape("u", u, (n, self.num_outputs))
        U = self._unprojected(u.reshape(-1, n, self.num_outputs))
        if wants_grad(x) or wants_grad(u):
            total = vjp(self._net, x, U, differentiable=True)
        else:
            total, batch = u.new_zeros(U.shape[0], self.num_params), _product_batch(analysis)
            for part, cotangents in zip(_parts(x, batch), U.split(batch, dim=1), strict=True):
                total += vjp(self._net, part, cotangents)
        return total.reshape(*u.shape[:-2], self.num_params)

    def jacobian(self, x: Input) -> Tensor:  # (N, C, P)
        """Return J(x) as a dense tensor, example by example with plain backward passes: the oracle of all else."""
        self.learn(x)
        return self._by_example(x, self.layout.names, wants_grad(x))

    def features(self, x: Input) -> Features:
        """Return J(x) in factored form; differentiable in x where x requires gradients."""
        analysis = self.learn(x)
        if wants_grad(x):
            return self._capture(x, differentiable=True)
        x = map_leaves(Tensor.detach, x)
        batch, n = self._capture_batch(analysis), batch_size(x)
        if n <= batch:
            return self._capture(x)
        features = self._pilot(x).allocate(n)
        work: Workspace = {}
        for start in range(0, n, batch):
            place = features[start : start + batch]
            part = self._capture(take(x, slice(start, start + batch)), into=place, work=work)
            if part.form != place.form:  # batches of different sizes are computed in different ways
                return Features(n, self.num_outputs, (), ()).joined(self.jacobian(x), self._sizes)
            place.copy_(part)
        return features

    def factors(self, x: Input, u: Tensor | None = None) -> Iterator[tuple[slice, dict[str, list[Factor]]]]:
        """Yield, for a few examples at a time, which they are and the factors of every use of each parameter.

        This is what features are assembled from, before positions are contracted. Parameters without a rule have one
        dense factor.

        Args:
            x: the examples.
            u: combinations of outputs whose gradients are wanted in place of J, (S, N, C): S backward passes, not C.
        """
        analysis = self.learn(x)
        for start in range(0, batch_size(x), batch := self._capture_batch(analysis, None if u is None else len(u))):
            part = take(map_leaves(Tensor.detach, x), slice(start, start + batch))
            n = batch_size(part)
            pair = part if n > 1 else map_leaves(_twice, part)
            with self._net.differentiable(), torch.enable_grad():
                f = self._net(pair)
                t = trace(f, leaves(pair))
                here = self._known.of_graph(pair, t)
                seeds = self._basis(f) if u is None else self._unprojected(u[:, start : start + n])
                found = capture(self._net, f, t, here, seeds if u is None else seeds.expand(-1, len(f), -1))
            uses: dict[str, list[Factor]] = {name: [factor[:n] for _, factor in parts] for name, parts in found.items()}
            if here.fallback:
                J = self._by_example(part, here.fallback, False, None if u is None else seeds)
                sizes = [self._sizes[name] for name in here.fallback]
                uses |= {name: [Dense(dense)] for name, dense in zip(here.fallback, J.split(sizes, -1), strict=True)}
            yield slice(start, start + n), uses

    def pilot(self) -> Features:
        """Return the features of two examples like those seen last: their sizes tell the cost of many."""
        return self._pilot(self._known.examples[self._known.last_seen("the size of features")])

    def _pilot(self, x: Input) -> Features:
        shapes = shapes_of(x)
        if shapes not in self._pilots:
            self._pilots[shapes] = self._capture(self._known.examples[shapes])
        return self._pilots[shapes]

    @property
    def flops(self) -> float:
        """Operations of a forward pass with one example like those seen last."""
        return self._known.analyses[self._known.last_seen("the cost of a forward pass")].flops

    @property
    def capture_bytes(self) -> int:
        """What the features of one example like those seen last take while they are computed."""
        return self._capture_bytes(self._known.first("the size of cotangents"))

    def select(self, outputs: int | Sequence[int] | str | Tensor) -> "Linearization":
        """Return the linearisation of some outputs only, or of linear combinations W f of them.

        Args:
            outputs: an index, several, "sum", or a matrix W with a row for each combination, (C', C).

        Raises:
            ValueError: if ``outputs`` is none of these.
        """
        C = self.num_outputs
        if isinstance(outputs, str):
            if outputs != "sum":
                raise ValueError(f'outputs must be indices, a matrix or "sum", but is {outputs!r}')
            W = torch.ones(1, C)
        elif isinstance(outputs, Tensor) and outputs.is_floating_point():
            if outputs.ndim != 2 or outputs.shape[1] != C:
                raise ValueError(f"outputs must have shape (C', {C}) as a matrix, but has {tuple(outputs.shape)}")
            W = outputs
        else:
            index = torch.as_tensor(outputs).reshape(-1)
            if index.numel() == 0 or index.min() < -C or index.max() >= C:
                raise ValueError(f"outputs must be indices into {C} outputs, but is {outputs}")
            W = torch.eye(C)[index]
        W = W.to(dtype=self.dtype, device=self.device)
        selected = copy(self)
        selected._seeds = W if self._seeds is None else W @ self._seeds
        selected.cache, selected._pilots = InputCache(), {}
        return selected

    def again(self, net: nn.Module) -> "Linearization":
        """Return the linearisation of the same network where it is now: what was learnt of its graph stays.

        Args:
            net: the network, at other weights.

        Raises:
            ValueError: if its parameters are not those of this linearisation.
        """
        new = copy(self)
        new._net = Snapshot(net, list(self.layout.names))
        now = new.layout.shapes, new.dtype, new.device
        if now != (self.layout.shapes, self.dtype, self.device):
            raise ValueError("net has parameters of other shapes, another dtype or device: it is another network")
        new._known, new._pilots, new.cache = self._known.at(new._net), {}, InputCache()
        return new

    def restrict(self, parameters: Selection) -> "Linearization":
        """Return the linearisation in some of the parameters alone; the others stay at θ*.

        Args:
            parameters: a predicate on (name, parameter), or a list of parameter or module names.
        """
        names = set(self.layout.names)
        new = copy(self)
        new._net = Snapshot(self._net.module, parameters)
        extra = [name for name in new.layout.names if name not in names]
        if extra:
            raise ValueError(f"parameters names {extra}, which are not among those of this linearisation")
        new._known, new._jvp = self._known.restricted(new._net), None
        new._pilots, new.cache = {}, InputCache()
        return new

    def to(self, *args: Any, **kwargs: Any) -> "Linearization":
        """Return the linearisation on another device or in another dtype (itself if nothing changes)."""
        return self.converted(lambda module: module.to(*args, **kwargs))

    def double(self) -> "Linearization":
        """Return the linearisation in float64."""
        return self.to(torch.float64)

    def float(self) -> "Linearization":
        """Return the linearisation in float32."""
        return self.to(torch.float32)

    def converted(self, convert: Callable[[nn.Module], nn.Module]) -> "Linearization":
        """Return the linearisation of a copy that ``convert`` moved to another dtype or device."""
        pilot = next(convert(nn.ParameterList([torch.empty(0, dtype=self.dtype, device=self.device)])).parameters())
        if (pilot.dtype, pilot.device) == (self.dtype, self.device):
            return self
        new = copy(self)
        new._net = Snapshot(convert(deepcopy(self._net.module)), self.layout.names)
        new._seeds = None if self._seeds is None else self._seeds.to(pilot)
        new.cache, new._pilots = InputCache(), {}
        new._known = self._known.converted(
            new._net, lambda leaf: leaf.to(pilot) if leaf.is_floating_point() else leaf.to(pilot.device)
        )
        return new

    def __deepcopy__(self, memo: dict) -> "Linearization":
        return self  # immutable: copies of what is built on it share it

    def _capture(
        self, x: Input, differentiable: bool = False, into: Features | None = None, work: Workspace | None = None
    ) -> Features:
        n = batch_size(x)
        pair = x if n > 1 else map_leaves(_twice, x)
        with self._net.differentiable(), torch.enable_grad():
            f = self._net(pair)
            t = trace(f, leaves(pair))
            analysis = self._known.of_graph(pair, t)
            factors = capture(self._net, f, t, analysis, self._basis(f), differentiable, work)
            with torch.set_grad_enabled(differentiable):
                features = Features.assemble(len(f), self.num_outputs, factors, into if n > 1 else None)[:n]
        if analysis.fallback:
            J = self._by_example(x, analysis.fallback, differentiable)
            features = features.joined(J, {name: self._sizes[name] for name in analysis.fallback})
        return features

    def _capture_batch(self, analysis: Analysis, columns: int | None = None) -> int:
        return max(2, _CAPTURE_BYTES // max(1, self._capture_bytes(analysis, columns)))

    def _capture_bytes(self, analysis: Analysis, columns: int | None = None) -> int:
        if columns is None:
            return analysis.cotangents * (self.num_outputs + 1) * self.dtype.itemsize
        return (analysis.cotangents * (columns + 1) + analysis.windows) * self.dtype.itemsize

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.layout.names, self.layout.sizes, strict=True))

    def _by_example(
        self, x: Input, names: Sequence[str], differentiable: bool, u: Tensor | None = None
    ) -> Tensor:  # (N, C, p), or (N, S, p) for u of shape (S, N, outputs)
        parameters = [self._net.parameters[name] for name in names]
        rows = []
        for n in range(batch_size(x)):
            with self._net.differentiable(), torch.enable_grad():
                f = self._net(take(x, slice(n, n + 1)))
                seeds = self._basis(f) if u is None else u[:, n]
                rows.append(fallback_jacobian(f, parameters, seeds, differentiable))
        return torch.cat(rows)

    def _basis(self, f: Tensor) -> Tensor:  # (C, outputs)
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device) if self._seeds is None else self._seeds

    def _unprojected(self, u: Tensor) -> Tensor:  # (..., C) -> (..., outputs)
        return u if self._seeds is None else u @ self._seeds

    def _project(self, f: Tensor) -> Tensor:  # (..., outputs) -> (..., C)
        return f if self._seeds is None else f @ self._seeds.mT

    def _forward_product(self, x: Input, analysis: Analysis) -> JVP:
        if self._jvp is None:
            ways = JVPS if analysis.forward_mode else JVPS_IN_REVERSE
            self._jvp = first_consistent(ways, self._net, take(map_leaves(Tensor.detach, x), slice(2)))
        return self._jvp


def _twice(leaf: Tensor) -> Tensor:
    """Repeat a single example: a batch of one may be computed in another way. A copy, as strides change the graph."""
    return leaf.repeat_interleave(2, dim=0)


def _parts(x: Input, batch: int) -> Iterator[Input]:
    for start in range(0, batch_size(x), batch):
        yield take(x, slice(start, start + batch))


def _product_batch(analysis: Analysis, copies: int = 1) -> int:
    return max(1, _PRODUCT_BYTES // max(1, 4 * copies * analysis.activations))


def _check_shape(argument: str, value: Tensor, tail: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a tensor, but is a {type(value).__name__}")
    if value.shape[-len(tail) :] != tail or value.ndim not in (len(tail), len(tail) + 1):
        raise ValueError(f"{argument} must have shape {tail} or (S, *{tail}), but has {tuple(value.shape)}")
