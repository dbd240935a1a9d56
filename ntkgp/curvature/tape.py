"""A network as a list of operations, each with what it was given: what curvature is pulled back through.

The forward method is followed once, symbolically (torch.fx), down to functions: a ``Linear``, an ``F.linear`` and a
layer of one's own that calls it are the same entry. Weights are read anew at every recording, so that a tape outlives
the steps of an optimiser.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg

__all__ = ["Call", "Key", "Kind", "Recording", "Tape", "described"]

Key = fx.Node | str  # a tensor that an operation was given: a node of the graph, or a parameter of the layer itself
Kind = Callable | type[nn.Module]  # what rules are found by: a function, a method of Tensor, or a type of layer


@dataclass(frozen=True)
class Call:
    """One operation z = run({}), and the tensors it was given; ``run`` takes others in their place."""

    node: fx.Node
    kind: Kind
    given: dict[Key, Tensor]
    data: tuple[fx.Node, ...]  # which of them carry examples, in their first dimension
    learnt: tuple[fx.Node, ...]  # which of these depend on Bayesian parameters: where curvature is pulled back to
    parameters: dict[Key, str]  # which of them are Bayesian, and their names
    values: tuple[tuple, dict]  # all arguments
    run: Callable[[Mapping[Key, Tensor]], Tensor]
    layer: nn.Module | None = None  # if it is a layer as a whole

    def __str__(self) -> str:
        stack = self.node.meta.get("nn_module_stack") or {}
        inside = [f"{name!r} ({type_.__name__})" for name, type_ in list(stack.values())[-1:] if name]
        return f"{described(self.kind)}{' in layer ' + inside[0] if inside else ''}"

    def key(self, position: int, name: str) -> Key | None:
        """Return the tensor at this place of the arguments, or None."""
        found = self.node.args[position] if position < len(self.node.args) else self.node.kwargs.get(name)
        return found if isinstance(found, fx.Node) and found in self.given else None

    def value(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at this place, whatever it is."""
        args, kwargs = self.values
        return args[position] if position < len(args) else kwargs.get(name, default)

    def pull(
        self, v: Tensor, wanted: Sequence[Key], instead: Mapping[Key, Tensor] | None = None, columns: bool = False
    ) -> dict[Key, Tensor]:
        """Return Jᵀ v for each wanted tensor, a parameter's summed over examples.

        Args:
            v: as z, or with leading ``columns``, (k, *z.shape).
            wanted: which tensors.
            instead: tensors to take in place of those that were given.
            columns: whether v holds k vectors.
        """
        instead = instead or {}
        leaves = {key: instead.get(key, self.given[key]).detach().requires_grad_() for key in wanted}
        with torch.enable_grad():
            z = self.run({**instead, **leaves})
        found = torch.autograd.grad(z, list(leaves.values()), v, is_grads_batched=columns)
        return dict(zip(wanted, found, strict=True))

    def of_example(self, n: int) -> dict[Key, Tensor]:
        """Return the data of one example, to be run in place of those of all."""
        return {key: self.given[key][n : n + 1] for key in self.data}


@dataclass(frozen=True)
class Recording:
    """What a forward pass did, in order."""

    calls: list[Call]
    output: fx.Node
    f: Tensor  # (N, *)


class Tape:
    """The operations of a network in evaluation mode.

    Args:
        net: the network; it is not copied.
        names: its Bayesian parameters; by default all that require gradients.
        leaves: types of layers that are one operation each, whatever they do inside.

    Raises:
        ValueError: if the network is in training mode, or what it does depends on the values of its input.
    """

    def __init__(self, net: nn.Module, names: Collection[str] | None, leaves: Collection[type[nn.Module]]) -> None:
        if any(module.training for module in net.modules()):
            raise ValueError("net must be in evaluation mode, but is in training mode: call net.eval()")
        self.net = net
        named = dict(net.named_parameters())
        self.names = tuple(name for name, p in named.items() if (p.requires_grad if names is None else name in names))
        self.graph = _Tracer(leaves).trace(net)
        uses = [_attribute(net, node.target) for node in self.graph.nodes if node.op == "get_attr" for _ in node.users]
        uses += [p for node in self.graph.nodes if node.op == "call_module" for p in self._layer(node).parameters()]
        self.tied = frozenset(name for name in self.names if sum(p is named[name] for p in uses) > 1)

    def record(self, args: tuple, kwargs: dict[str, Any] | None = None) -> Recording:
        """Run the network and keep what every operation was given.

        Raises:
            ValueError: if an operation loses the examples, or makes something of parameters alone.
        """
        known = {id(p): name for name, p in self.net.named_parameters() if name in self.names}
        kwargs, given = kwargs or {}, iter(args)
        values: dict[fx.Node, Any] = {}
        carries: set[fx.Node] = set()  # nodes that depend on the input
        learns: set[fx.Node] = set()  # nodes that depend on Bayesian parameters
        calls: list[Call] = []
        num_examples = 0
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = kwargs[node.name] if node.name in kwargs else next(given, *node.args)
                num_examples = num_examples or len(values[node])
                carries.add(node)
            elif node.op == "get_attr":
                values[node] = _attribute(self.net, node.target)
            elif node.op == "output":
                (output,) = node.args
                if not isinstance(output, fx.Node):
                    raise ValueError("the network must return one tensor, but returns several")
                return Recording(calls, output, values[output])
            else:
                call = self._call(node, values, carries, learns, known)
                with torch.no_grad():
                    values[node] = call.run({})
                z = values[node]
                if isinstance(z, Tensor) and z.is_floating_point() and (call.data or call.parameters):
                    _check(call, z, num_examples)
                    calls.append(call)
                if any(n in carries for n in node.all_input_nodes):
                    carries.add(node)
                if call.parameters or any(n in learns for n in node.all_input_nodes):
                    learns.add(node)
        raise AssertionError("a graph ends in its output")

    def _call(
        self,
        node: fx.Node,
        values: dict[fx.Node, Any],
        carries: set[fx.Node],
        learns: set[fx.Node],
        known: dict[int, str],
    ) -> Call:
        given: dict[Key, Tensor] = {n: values[n] for n in node.all_input_nodes if isinstance(values[n], Tensor)}
        layer = self._layer(node) if node.op == "call_module" else None
        if layer is not None:
            given |= dict(layer.named_parameters())
        kind = _kind(node, layer)
        data = tuple(n for n in given if isinstance(n, fx.Node) and n in carries and given[n].is_floating_point())
        parameters = {key: known[id(t)] for key, t in given.items() if id(t) in known}

        def arguments(instead: Mapping[Key, Tensor]) -> tuple[tuple, dict]:
            return map_arg((node.args, node.kwargs), lambda n: instead.get(n, values[n]))

        def run(instead: Mapping[Key, Tensor]) -> Any:
            args, kwargs = arguments(instead)
            if layer is not None:
                own = {key: instead.get(key, t) for key, t in given.items() if isinstance(key, str)}
                return functional_call(layer, own, args, kwargs)
            if kwargs.get("inplace"):
                kwargs = {**kwargs, "inplace": False}
            return kind(*args, **kwargs)

        learnt = tuple(n for n in data if n in learns)
        return Call(node, kind, given, data, learnt, parameters, arguments({}), run, layer)

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.net.get_submodule(str(node.target))


class _Tracer(fx.Tracer):
    """Follows everything but the layers it is told to leave whole."""

    def __init__(self, leaves: Collection[type[nn.Module]]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a layer is one operation."""
        return type(m) in self.leaves

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Follow a layer, and say which it was if that fails."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Unfollowed:
            raise
        except Exception as error:
            kind = type(m)
            raise _Unfollowed(
                f"layer {self.path_of_module(m)!r} ({kind.__name__}) cannot be followed, as what it does depends on "
                f"its input ({error}); give it a rule as a whole: ntkgp.curvature.RULES[{described(kind)}] = ..."
            ) from error


class _Unfollowed(ValueError):
    pass


def _kind(node: fx.Node, layer: nn.Module | None) -> Kind:
    if layer is not None:
        return type(layer)
    if node.op != "call_method":
        return node.target  # type: ignore[return-value]
    name = str(node.target)
    if name.endswith("_") and not name.endswith("__"):
        raise ValueError(f"Tensor.{name} overwrites its input, which is needed later: write {name[:-1]} in its place")
    return getattr(Tensor, name)


def described(kind: Kind) -> str:
    """Return what an operation is called in code."""
    module = getattr(kind, "__module__", None) or ""
    name = getattr(kind, "__qualname__", getattr(kind, "__name__", str(kind)))
    return name if module in ("builtins", "") else f"{module.replace('torch._C._nn', 'torch.nn.functional')}.{name}"


def _check(call: Call, z: Tensor, num_examples: int) -> None:
    if not call.data:
        raise ValueError(
            f"{call} makes something of parameter {next(iter(call.parameters.values()))!r} alone, before it meets "
            "data: curvature is pulled back to parameters that are used as they are"
        )
    for t in (z, *(call.given[n] for n in call.data)):
        if t.ndim == 0 or len(t) != num_examples:
            raise ValueError(
                f"{call} has a tensor of shape {tuple(t.shape)}: its first dimension must hold the {num_examples} "
                "examples"
            )


def _attribute(net: nn.Module, target: Any) -> Any:
    found: Any = net
    for part in str(target).split("."):
        found = getattr(found, part)
    return found
