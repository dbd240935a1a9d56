"""The linear model's prior mean as a GPyTorch mean."""

from collections.abc import Callable

import gpytorch
import torch
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.priors import Prior

__all__ = ["LinearizedMean"]


class LinearizedMean(gpytorch.means.Mean):
    r"""f_lin(x; m₀) = f(x; θ*) + J(x)(m₀ − θ*), or the network itself, f(x; θ*).

    Args:
        lin: the linearised network.
        prior: whose mean m₀ is meant.
        input_shape: how a row of D numbers becomes the network's input; None if rows are what it takes.
        at: "prior" for f_lin(x; m₀), "map" for f(x; θ*).

    Raises:
        ValueError: if ``at`` is neither.
    """

    def __init__(
        self, lin: Linearization, prior: Prior, input_shape: tuple[int, ...] | None = None, at: str = "prior"
    ) -> None:
        super().__init__()
        if at not in ("prior", "map"):
            raise ValueError(f'at must be "prior" or "map", but is {at!r}')
        self.lin, self.prior, self.at = lin, prior, at
        self.input_shape = None if input_shape is None else torch.Size(input_shape)

    def forward(self, x: Tensor) -> Tensor:  # (..., N, D) -> (..., N, C), or (..., N) if C = 1
        """Return the mean of every row."""
        inputs = x.reshape(-1, *(x.shape[-1:] if self.input_shape is None else self.input_shape))
        f = self.lin(inputs)
        if self.at == "prior" and not torch.equal(self.prior.mean, self.lin.theta):
            f = f + self._shift(inputs)
        f = f.unflatten(0, x.shape[:-1])
        return f.squeeze(-1) if self.lin.num_outputs == 1 else f

    def _shift(self, x: Tensor) -> Tensor:  # J(x)(m₀ − θ*), (N, C)
        m0 = self.prior.mean
        if torch.is_grad_enabled() and x.requires_grad:
            return self.lin.jvp(x, m0 - self.lin.theta)
        return self.lin.cache.get("mean", (x, m0), lambda: self.lin.jvp(x.detach(), m0 - self.lin.theta))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.lin = self.lin.converted(lambda module: module._apply(fn))
        return self
