r"""The diagonal of Jᵀ Λ J by pulling M = Λ back through the network, operation by operation: M ← J_lᵀ M J_l.

M lives as a sum diag(m) + Σ_b V_b V_bᵀ. Columns V are pulled back by J_lᵀ V alone, and where a tensor is used twice,
those of the same origin b add up: exact for any network. The diagonal m costs no more than a tensor of the forward
pass, but what leaves the diagonal is dropped after each operation, and so is what two uses of a tensor have in common
(Miani et al. 2022, Section 3 and Appendix E).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from ntkgp.curvature.squares import RULES
from ntkgp.curvature.sums import ParameterSums
from ntkgp.curvature.tape import Call, Recording, Tape, described
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, validate_input
from ntkgp.linearization.snapshot import CallConvention

__all__ = ["METHODS", "LayerwiseCurvature", "OutputRoot", "size_limit"]

METHODS = ("approximate", "mixed", "exact")


def size_limit(method: str, bound: float | None) -> float:
    """Return up to how many columns M is kept whole.

    Raises:
        ValueError: if the method is not known, or has a bound that it does not take.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, but is {method!r}")
    if (method == "mixed") != (bound is not None) or (bound is not None and not bound >= 0):
        raise ValueError(f'bound must be a number from 0 on for method="mixed", and None else, but is {bound}')
    return bound if bound is not None else 0.0 if method == "approximate" else inf


class OutputRoot(Protocol):
    """R at the outputs of N examples, as ``likelihood.expand(y, f).R`` has it."""

    @property
    def values(self) -> Tensor:  # (N, T, k, k')
        """The blocks, one for each of T sites of k outputs, which lie T apart."""

    def dense(self) -> Tensor:  # (N, C, C')
        """Return each example's block as a matrix."""


class LayerwiseCurvature:
    r"""Diagonals and diagonal blocks of :math:`\sum_n J_n^\top \Lambda_n J_n`, for networks of many outputs.

    Weights are read at every call: a network that is being trained needs one such object only.

    Args:
        net: the network in evaluation mode, or its linearisation. What it does may not depend on the values of its
            input, and the first dimension of every tensor must hold the examples.

    Raises:
        TypeError: if ``net`` is neither.
        ValueError: if it is in training mode, or cannot be followed; the layer is named.
    """

    def __init__(self, net: nn.Module | Linearization) -> None:
        self._lin = net if isinstance(net, Linearization) else None
        if not isinstance(net, nn.Module | Linearization):
            raise TypeError(f"net must be a torch.nn.Module or a Linearization, but is a {type(net).__name__}")
        module = net._net.module if isinstance(net, Linearization) else net
        names = net.layout.names if isinstance(net, Linearization) else None
        self._tape = Tape(module, names, {kind for kind in RULES if isinstance(kind, type)})
        self._unpack = CallConvention.of(module)
        if not self._tape.names:
            raise ValueError("net has no parameter that requires gradients")

    def diagonal(
        self,
        x: Input,
        root: Callable[[Tensor], OutputRoot],
        method: str = "approximate",
        bound: float | None = None,
    ) -> dict[str, Tensor]:  # {name: (p,)}
        """Return the diagonal by parameter, summed over the examples.

        Args:
            x: a batch of examples.
            root: what turns outputs f, (N, C), into R with R Rᵀ = Λ, as ``lambda f: likelihood.expand(y, f).R``.
            method: "approximate" keeps diag(M) alone, in memory linear in the size of every layer; "exact" all of M;
                "mixed" all of M where it has at most ``bound`` columns, diag(M) elsewhere: exact at layers of at most
                ``bound`` numbers an example, and from a bottleneck on back to the input.
            bound: for "mixed" only.

        Raises:
            ValueError: if a name is not known, R does not fit the outputs, or an operation has no rule; it is named.
        """
        sums = ParameterSums(blocks=False, tied=self._tape.tied)
        self._pull(x, root, size_limit(method, bound), sums)
        return {name: sums.total(name, p) for name, p in self._parameters()}

    def blocks(self, x: Input, root: Callable[[Tensor], OutputRoot]) -> dict[str, Tensor]:  # {name: (p, p)}
        """Return the exact diagonal block of each parameter, summed over the examples.

        Args:
            x: a batch of examples.
            root: as for :meth:`diagonal`.
        """
        sums = ParameterSums(blocks=True, tied=self._tape.tied)
        self._pull(x, root, inf, sums)
        return {name: sums.total(name, p) for name, p in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach()) for name, p in self._tape.net.named_parameters() if name in self._tape.names)

    def _pull(self, x: Input, root: Callable[[Tensor], OutputRoot], limit: float, sums: ParameterSums) -> None:
        p = next(self._tape.net.parameters())
        validate_input(x, p.dtype, p.device)
        with torch.no_grad():
            record = self._tape.record(*self._unpack(x))
            W = None if self._lin is None else self._lin.outputs
            _Pullback(record, sums, limit).run(_at_output(record, root, W, limit))


@dataclass
class _Matrix:
    """M of a tensor: diag(m) + Σ_b V_b V_bᵀ, example by example."""

    diagonal: Tensor | None = None  # (N, *)
    roots: dict[int, Tensor] = field(default_factory=dict)  # by origin, (k, N, *)

    def add(self, other: "_Matrix") -> None:
        """Add what another use of the tensor pulled back."""
        if other.diagonal is not None:
            self.diagonal = other.diagonal if self.diagonal is None else self.diagonal + other.diagonal
        for origin, V in other.roots.items():
            self.roots[origin] = self.roots[origin] + V if origin in self.roots else V

    def collapsed(self) -> "_Matrix":
        """Return the diagonal alone."""
        M = _Matrix(self.diagonal)
        for V in self.roots.values():
            M.add(_Matrix(V.square().sum(0)))
        return M


def _at_output(record: Recording, root: Callable[[Tensor], OutputRoot], W: Tensor | None, limit: float) -> _Matrix:
    f = record.f.flatten(1)
    R = root(f if W is None else f @ W.mT)
    N, T, k = R.values.shape[:3]
    C = f.shape[1] if W is None else len(W)
    if (N, T * k) != (len(f), C):
        raise ValueError(f"root must have blocks for {len(f)} examples of {C} outputs, but has {N} of {T * k}")
    if f.shape[1] > limit and W is None:
        return _Matrix(R.values.square().sum(-1).mT.reshape(record.f.shape))
    V = R.dense() if W is None else W.mT @ R.dense()  # (N, C, C')
    return _Matrix(None, {-1: V.movedim(-1, 0).reshape(-1, *record.f.shape)})


class _Pullback:
    """A pass from the output back to the input; what it finds of parameters goes into ``sums``."""

    def __init__(self, record: Recording, sums: ParameterSums, limit: float) -> None:
        self.record, self.sums, self.limit = record, sums, limit
        self.pending: dict[fx.Node, _Matrix] = {}
        self.origins = count()

    def run(self, M: _Matrix) -> None:
        """Pull M of the output back."""
        self.pending[self.record.output] = M
        for call in reversed(self.record.calls):
            if call.node in self.pending:
                self._through(call, self.pending.pop(call.node))
        if self.pending:
            raise ValueError(
                f"{next(iter(self.pending)).format_node()} is taken from several tensors at once, and has no rule"
            )

    def _through(self, call: Call, M: _Matrix) -> None:
        M = self._switched(M)
        for origin, V in M.roots.items():
            if call.parameters:
                self.sums.add_columns(call, origin, V)
            for node, pulled in (call.pull(V, call.learnt, columns=True) if call.learnt else {}).items():
                self._add(node, _Matrix(None, {origin: pulled}))
        if M.diagonal is not None and (call.learnt or call.parameters):
            if call.kind not in RULES:
                raise ValueError(
                    f"there is no rule for {call}: add one, ntkgp.curvature.RULES[{described(call.kind)}] = rule, "
                    'with rule elementwise, routed, bilinear, by_jacobian or your own; or use method="exact"'
                )
            found = RULES[call.kind](call, M.diagonal, [*call.learnt, *call.parameters])
            for key, name in call.parameters.items():
                self.sums.add(name, found[key].flatten())
            for node in call.learnt:
                self._add(node, _Matrix(found[node]))

    def _add(self, node: fx.Node | str, M: _Matrix) -> None:
        assert isinstance(node, fx.Node)
        self.pending.setdefault(node, _Matrix()).add(M)

    def _switched(self, M: _Matrix) -> _Matrix:
        """Return M as as few columns as there can be, or as its diagonal if these are too many."""
        like = next(iter(M.roots.values()))[0] if M.diagonal is None else M.diagonal
        size, columns = like[0].numel(), sum(len(V) for V in M.roots.values())
        if (size if M.diagonal is not None else min(columns, size)) > self.limit:
            return M.collapsed()
        elsewhere = any(M.roots.keys() & other.roots.keys() for other in self.pending.values())
        if M.diagonal is not None:
            M = _Matrix(None, M.roots | {next(self.origins): _columns(M.diagonal)})
        elif columns <= size:
            return M
        if (
            elsewhere or self.sums.tied
        ):  # these columns meet others of their origin later on: they must stay what they are
            return M
        V = torch.cat(list(M.roots.values()))
        if len(V) > size:  # V Vᵀ = Uᵀ U for the triangle U of Vᵀ
            U = torch.linalg.qr(V.flatten(2).movedim(1, 0), mode="r").R  # (N, size, size)
            V = U.transpose(0, 1).reshape(-1, *like.shape)
        return _Matrix(None, {next(self.origins): V})


def _columns(diagonal: Tensor) -> Tensor:  # (N, *) -> (size, N, *)
    """Return V with V Vᵀ = diag(m)."""
    V = torch.diag_embed(diagonal.flatten(1).sqrt())
    return V.movedim(-1, 0).reshape(-1, *diagonal.shape)
