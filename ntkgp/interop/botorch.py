"""A posterior as a BoTorch model: what acquisition functions are optimised over."""

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior as AnyPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from ntkgp.likelihoods import Gaussian
from ntkgp.posteriors import Posterior

__all__ = ["BotorchModel"]


class BotorchModel(Model):
    r"""q(f) for BoTorch: b x q x d numbers in, b joint Gaussians over q points and C outputs out.

    Acquisition functions see derivatives in X, of the mean f(x) + J(x) δ and of the covariance J(x) Σ J(x')ᵀ. The mean
    is the posterior's own: refine it first (:meth:`Posterior.refine`), as a network trained by early stopping is not at
    the mode of its linear model, which a Gaussian process is.

    Args:
        posterior: any posterior whose outputs are numbers to optimise; it is shared, not copied.
        input_shape: how a row of d numbers becomes the network's input; None if rows are what it takes.

    Raises:
        TypeError: if ``posterior`` is none.
    """

    def __init__(self, posterior: Posterior, input_shape: tuple[int, ...] | None = None) -> None:
        if not isinstance(posterior, Posterior):
            raise TypeError(f"posterior must be an ntkgp posterior, but is a {type(posterior).__name__}")
        super().__init__()
        self.fitted = posterior
        self.input_shape = None if input_shape is None else torch.Size(input_shape)

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.fitted.lin.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Empty: one posterior, not several."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> AnyPosterior:
        """Return q(f(X)), or of y.

        Args:
            X: (..., q, d): joint distributions over q points each.
            output_indices: which outputs; all by default.
            observation_noise: whether to add the likelihood's noise; or variances to add, broadcast to (..., q, C).
            posterior_transform: what BoTorch makes of the posterior.

        Raises:
            ValueError: if ``X`` has fewer than two dimensions, or noise is asked for that is not Gaussian.
        """
        if X.ndim < 2:
            raise ValueError(f"X must have shape (..., q, d), but has {tuple(X.shape)}")
        *batch, q, d = X.shape
        points = X.reshape(-1, q, *(self.input_shape or (d,)))
        joint = self.fitted.latent(points, joint=True)
        mean, covariance = joint.mean, joint.lazy_covariance_matrix.to_dense()  # (B, q, C), (B, q C, q C)
        if observation_noise is not False:
            covariance = covariance + torch.diag_embed(self._noise(observation_noise, mean).flatten(-2))
        if output_indices is not None:
            C = self.num_outputs
            rows = (torch.arange(q).unsqueeze(1) * C + torch.as_tensor(output_indices) % C).flatten().to(X.device)
            mean, covariance = mean[..., output_indices], covariance[..., rows, :][..., rows]
        mean, covariance = mean.reshape(*batch, q, -1), covariance.reshape(*batch, *covariance.shape[-2:])
        found = GPyTorchPosterior(_normal(mean, covariance))
        return found if posterior_transform is None else posterior_transform(X=X, posterior=found)

    def _noise(self, noise: bool | Tensor, mean: Tensor) -> Tensor:  # (B, q, C)
        if isinstance(noise, Tensor):
            return noise.to(mean).expand(mean.shape)
        likelihood = self.fitted.likelihood
        if not isinstance(likelihood, Gaussian):
            raise ValueError(
                f"observation_noise is for Gaussian likelihoods, but this one is {type(likelihood).__name__}: its y is "
                "not Gaussian given f"
            )
        return likelihood.noise.detach().expand(mean.shape)


def _normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:  # (..., q, C), (..., q C, q C)
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean.squeeze(-1), to_linear_operator(covariance))
    return MultitaskMultivariateNormal(mean, to_linear_operator(covariance))
