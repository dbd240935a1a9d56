"""Which weights a normalisation layer makes scale invariant."""

from ntkgp.linearization.graph import Edge, Trace, Use

__all__ = ["normalized_by"]

_NORMS = ("NativeBatchNormBackward0", "NativeLayerNormBackward0", "NativeGroupNormBackward0")
_RESHAPES = (
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "TBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)
_DATA_ARGUMENT = 0


def normalized_by(t: Trace, uses: list[Use], data: set[Edge]) -> dict[str, int]:
    """Return for every parameter the node of the norm that divides its scale out, where there is one.

    A weight w is scale invariant if all it reaches is norm(w x + b), up to reshapes: then so is its bias b, and the
    norm of (k w, k b) is that of (w, b).
    """
    users: dict[int, list[tuple[int, int]]] = {}
    for node, children in enumerate(t.edges):
        for slot, edge in enumerate(children):
            if edge is not None:
                users.setdefault(edge[0], []).append((node, slot))
    found: dict[str, set[int | None]] = {}
    for use in uses:
        norm = None if use.operation in _NORMS else _norm_above(t, users, use.node, data)
        for name in use.target.parameters:
            found.setdefault(name, set()).add(norm)
    single = {name: next(iter(norms)) for name, norms in found.items() if len(norms) == 1}
    return {name: norm for name, norm in single.items() if norm is not None}


def _norm_above(t: Trace, users: dict[int, list[tuple[int, int]]], node: int, data: set[Edge]) -> int | None:
    """Follow a value upwards through reshapes and biases; return the norm it ends in."""
    while True:
        above = users.get(node, [])
        if len(above) != 1:
            return None
        node, slot = above[0]
        if t.names[node] in _NORMS:
            return node if slot == _DATA_ARGUMENT else None
        # A summand without an edge may be data that needs no gradient: only parameters are known not to be.
        bias = t.names[node] == "AddBackward0" and sum(edge is None or edge in data for edge in t.edges[node]) == 1
        if t.names[node] not in _RESHAPES and not bias:
            return None
