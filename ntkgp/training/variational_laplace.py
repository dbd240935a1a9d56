"""Variational Laplace: the bound without a sample of the weights (Unlu & Aitchison 2021)."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ntkgp.linearization.inputs import Input, take
from ntkgp.training.objective import GaussianWeights, Terms
from ntkgp.training.smoothness import evaluating, require_smooth
from ntkgp.training.twice import QuickSecondDerivatives

__all__ = ["VariationalLaplace"]

CURVATURES = ("fisher", "hessian")


class VariationalLaplace(GaussianWeights):
    r"""E_q[log p(y | w)] to second order at μ, the Hessian's diagonal from gradients of labels that the model drew.

    .. math:: E_q[\log p(y \mid w)] \approx \log p(y \mid \mu) - \tfrac12 \sum_i \sigma_i^2 \sum_j \tilde g_{ji}^2,
       \qquad \tilde g_j = \nabla \log p(\tilde y_j \mid x_j, \mu), \quad \tilde y_j \sim p(y \mid x_j, \mu)

    over minibatches j (Eq. 28 and 29): labels drawn from the model are independent and their gradients have mean zero,
    so that the square of their sum has the Fisher diagonal for its expectation. As :math:`\tilde g` is differentiated
    in turn, activations must be smooth. In a loop of one's own:

    .. code-block:: python

        vl = ntkgp.training.VariationalLaplace(net, "categorical", num_data=60_000)
        optimizer = torch.optim.Adam(vl.parameter_groups(lr=1e-3))
        for x, y in loader:
            optimizer.zero_grad()
            vl.loss(x, y).backward()
            optimizer.step()
        post = vl.posterior(loader)

    Args:
        args: as :class:`GaussianWeights` takes them.
        curvature: "fisher", or "hessian" for the diagonal of the Hessian itself (Eq. 20), by one backward pass for each
            weight: for study, as variances then grow without bound where an entry exceeds 1/s² (Eq. 24).
        activations: "smooth" refuses piecewise-linear ones, "any" does not.
        options: as :class:`GaussianWeights` takes them.

    Raises:
        ValueError: if a name is not known, and by ``loss`` if the network has activations that are refused.
    """

    def __init__(self, *args: Any, curvature: str = "fisher", activations: str = "smooth", **options: Any) -> None:
        super().__init__(*args, **options)
        if curvature not in CURVATURES:
            raise ValueError(f"curvature must be one of {', '.join(CURVATURES)}, but is {curvature!r}")
        if activations not in ("smooth", "any"):
            raise ValueError(f'activations must be "smooth" or "any", but is {activations!r}')
        self.curvature, self.activations = curvature, activations
        self._told |= {"curvature": curvature}
        self._seen_smooth = activations == "any"

    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective for a minibatch of S points (Eq. 30).

        Args:
            x: S inputs.
            y: their targets.
            generator: of the labels; by default this object's own.
        """
        if not self._seen_smooth:
            with evaluating(self.net):
                require_smooth(self.outputs(take(x, slice(0, 1))))
            self._seen_smooth = True
        with QuickSecondDerivatives() if self.curvature == "fisher" else nullcontext():
            f = self.outputs(x)
        y, S = self._targets(y, f), len(f)
        log_prob = self.likelihood.log_prob(y, f).mean()
        if self.curvature == "fisher":
            g = self._label_gradient(f, generator or self.generator)
            penalty = _Penalty.apply(self.log_sigma, g) / S
        else:
            penalty = -(self.variances() * self._hessian_diagonal(log_prob)).sum() / 2
        return Terms(log_prob, penalty, self.divergence() / self._size(), self.beta)

    def label_gradient(self, x: Input, generator: torch.Generator | None = None) -> Tensor:  # (P,)
        """Return g̃ of a minibatch, the gradient of Σ log p(ỹ | x) for labels ỹ that the model draws.

        Args:
            x: the inputs.
            generator: of the labels; by default this object's own.
        """
        return self._label_gradient(self.outputs(x), generator or self.generator)

    def _label_gradient(self, f: Tensor, generator: torch.Generator) -> Tensor:  # (P,)
        y = self.likelihood.sample(f.detach(), generator).detach()
        return self._gradient(self.likelihood.log_prob(y, f).sum())

    def _gradient(self, value: Tensor) -> Tensor:  # () -> (P,)
        found = torch.autograd.grad(value, list(self.weights().values()), create_graph=True, materialize_grads=True)
        return self.layout.join(dict(zip(self.layout.names, found, strict=True)))

    def _hessian_diagonal(self, value: Tensor) -> Tensor:  # () -> (P,)
        g = self._gradient(value)
        rows = [
            self._gradient(entry)[i] if entry.requires_grad else torch.zeros_like(entry) for i, entry in enumerate(g)
        ]
        return torch.stack(rows)


class _Penalty(Function):
    """½ Σ σ² g², with its gradients σ² g² in log σ and σ² g in g: a third of the passes over weights of autograd's."""

    @staticmethod
    def forward(ctx: Any, log_sigma: Tensor, g: Tensor) -> Tensor:  # (P,), (P,) -> ()
        in_g = (2 * log_sigma).exp_().mul_(g)
        in_log_sigma = in_g * g
        ctx.save_for_backward(in_log_sigma, in_g)
        return in_log_sigma.sum() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, Tensor]:
        in_log_sigma, in_g = ctx.saved_tensors
        return c * in_log_sigma, c * in_g
