"""What is known of a network's computations: shape by shape of its inputs, and graph by graph."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ntkgp.linearization.capture import Analysis
from ntkgp.linearization.graph import Trace
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, validate_input
from ntkgp.linearization.probe import probe
from ntkgp.linearization.snapshot import Snapshot

__all__ = ["Known", "shapes_of"]


class Known:
    """Analyses of one network, each found by a probe at the first input that asks for it.

    Args:
        net: the network.
        analyses: what is known of it already, by the shapes of inputs, and their graph where it is not the usual one.
        examples: two examples for each of these shapes.
    """

    def __init__(
        self, net: Snapshot, analyses: dict[tuple, Analysis] | None = None, examples: dict[tuple, Input] | None = None
    ) -> None:
        self._net = net
        self.analyses: dict[tuple, Analysis] = {} if analyses is None else analyses
        self.examples: dict[tuple, Input] = {} if examples is None else examples

    def learn(self, x: Input) -> Analysis:
        """Check ``x``, and probe the network if it has not seen inputs of these shapes."""
        validate_input(x, self._net.dtype, self._net.device)
        shapes = shapes_of(x)
        if shapes not in self.analyses:
            analysis = probe(self._net, map_leaves(Tensor.detach, x))
            known = next(iter(self.analyses.values()), analysis).num_outputs
            if known != analysis.num_outputs:
                raise ValueError(
                    f"x makes the network return {analysis.num_outputs} outputs per example, but it returned {known} "
                    "before"
                )
            self.analyses[shapes] = analysis
            self.examples[shapes] = map_leaves(lambda leaf: leaf[:1].detach().repeat_interleave(2, 0), x)
        return self.analyses[shapes]

    def of_graph(self, x: Input, t: Trace) -> Analysis:
        """Return what is known of this very graph; a network may compute a large batch in another way than a small."""
        known, n = self.analyses[shapes_of(x)], batch_size(x)
        if known.structure == t.structure:
            return known
        key = shapes_of(x), t.structure
        if key not in self.analyses:
            analysis = probe(self._net, x)
            if analysis.structure != t.structure and n > 2:
                analysis = probe(self._net, x, large=n, small=n - 1)
            if analysis.structure != t.structure:
                analysis = replace(known, structure=t.structure, uses=(), fallback=self._net.layout.names)
            self.analyses[key] = analysis
        return self.analyses[key]

    def first(self, what: str) -> Analysis:
        """Return the analysis of the first input, which ``what`` is to be learnt from."""
        if not self.analyses:
            raise ValueError(
                f"{what} is not known yet: pass example= to Linearization, or evaluate it at an input first"
            )
        return next(iter(self.analyses.values()))

    def last_seen(self, what: str) -> tuple:
        """Return the shapes of the last input that was new."""
        self.first(what)
        return next(reversed(self.examples))

    def at(self, net: Snapshot) -> "Known":
        """Return what stays known of the same network at other weights.

        What could not be told of it, as gradients were zero, may be told now: where a parameter has no rule, the graph
        is looked at again.
        """
        new = Known(net, {key: analysis for key, analysis in self.analyses.items() if not analysis.fallback})
        new.examples = dict(self.examples)
        return new.seen_again(self)

    def restricted(self, net: Snapshot) -> "Known":
        """Return what is known where other parameters of the same network are Bayesian: all graphs are new."""
        return Known(net).seen_again(self)

    def seen_again(self, other: "Known") -> "Known":
        """Learn from the examples of another, and return this."""
        for x in other.examples.values():
            self.learn(x)
        return self

    def converted(self, net: Snapshot, convert: Callable[[Tensor], Tensor]) -> "Known":
        """Return what is known of the network in another dtype or on another device."""
        examples = {shapes: map_leaves(convert, x) for shapes, x in self.examples.items()}
        return Known(net, dict(self.analyses), examples)


def shapes_of(x: Input) -> tuple:
    """Return the shapes of one example."""
    return tuple(leaf.shape[1:] for leaf in leaves(x))
