"""A variational strategy for kernels with several outputs per input, to be used in GPyTorch's own models."""

from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ApproximateGP
from gpytorch.utils.memoize import cached, pop_from_cache_ignore_args
from gpytorch.variational._variational_distribution import _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.kernels.ntk import NTKKernel

__all__ = ["MultiOutputVariationalStrategy"]


class MultiOutputVariationalStrategy(_VariationalStrategy):
    r"""q(f) = ∫ p(f | u) q(u) du where each input has C correlated outputs; whitened.

    GPyTorch's strategies take an inducing point for a value. Here a point has C of them, or one that ``outputs`` names,
    and with L Lᵀ = K_ZZ + jitter I, W = K_xZ L⁻ᵀ and any of GPyTorch's distributions q(v) = N(m, S) of M values

    .. math:: q(f(x)) = N(\mu + W m,\; K_{xx} - W W^\top + W S W^\top)

    .. code-block:: python

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self, lin, prior, Z):  # Z: (m, D)
                q = gpytorch.variational.CholeskyVariationalDistribution(len(Z) * lin.num_outputs)
                super().__init__(ntkgp.MultiOutputVariationalStrategy(self, Z, q))
                self.mean_module, self.covar_module = LinearizedMean(lin, prior), NTKKernel(lin, prior)

            def forward(self, x):
                return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    In training mode covariances between points are left out: bounds do not see them, and what is between the outputs of
    a point, which likelihoods do see, is kept. If C = 1 the result is a MultivariateNormal over points.

    Args:
        model: the model, whose ``forward`` is the prior process.
        inducing_points: Z, rows of D numbers, (m, D).
        variational_distribution: q(v), over m C values, or m if ``outputs`` is given.
        outputs: which output of each inducing point, (m,); None for all.
        learn_inducing_locations: whether Z is a parameter.
        jitter_val: what is added to the diagonal of K_ZZ; GPyTorch's setting by default. u are then values seen through
            noise of that variance, and the bound stays one.

    Raises:
        ValueError: if the distribution is not over as many values as there are, or ``outputs`` does not fit.
    """

    def __init__(
        self,
        model: ApproximateGP,
        inducing_points: Tensor,
        variational_distribution: _VariationalDistribution,
        outputs: Tensor | None = None,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
    ) -> None:
        if inducing_points.ndim > 2:
            raise ValueError(f"inducing_points must have shape (m, D), but has {tuple(inducing_points.shape)}")
        super().__init__(model, inducing_points, variational_distribution, learn_inducing_locations, jitter_val)
        m = len(inducing_points)
        if outputs is not None and (outputs.shape != (m,) or outputs.is_floating_point()):
            raise ValueError(f"outputs must hold an integer for each of {m} inducing points, but is {outputs}")
        self.register_buffer("outputs", outputs)

    @property
    @cached(name="prior_distribution_memo")
    def prior_distribution(self) -> MultivariateNormal:
        """p(v) = N(0, I)."""
        q = self._variational_distribution
        zeros = torch.zeros(q.shape(), dtype=q.dtype, device=q.device)
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    def forward(
        self,
        x: Tensor,
        inducing_points: Tensor,
        inducing_values: Tensor,
        variational_inducing_covar: LinearOperator | None = None,
        diag: bool = True,
        **kwargs: Any,
    ) -> MultivariateNormal:  # over (..., n, C), or (..., n) if C = 1
        """Return q(f(x)) for q(v) with this mean and covariance."""
        m = inducing_points.shape[-2]
        prior = self.model.forward(torch.cat([inducing_points, x], dim=-2), **kwargs)
        mean, K = self._by_point(prior)  # (..., m + n, C)
        C = mean.shape[-1]
        index = self._index(m, C)
        if len(index) != inducing_values.shape[-1]:
            raise ValueError(
                f"variational_distribution must be over the {len(index)} values of {m} inducing points, "
                f"but is over {inducing_values.shape[-1]}"
            )
        L = self._cholesky_factor(K[..., : m * C, : m * C], index)
        if L.shape[:-2] != K.shape[:-2]:  # kept from a call with other batch dimensions
            pop_from_cache_ignore_args(self, "cholesky_factor")
            L = self._cholesky_factor(K[..., : m * C, : m * C], index)
        cross = to_dense(K[..., : m * C, m * C :])[..., index, :]
        W = solve_triangular(L, cross.to(L.dtype), upper=False).mT.to(cross.dtype)  # (..., n C, M)
        mean = mean[..., m:, :] + (W @ inducing_values.unsqueeze(-1)).view(mean[..., m:, :].shape)
        V = None if variational_inducing_covar is None else W @ _root(variational_inducing_covar)
        if diag and self.training:
            covariance = _blocks(K[..., m * C :, m * C :], C)
            covariance = covariance - _by_rows(W, C) @ _by_rows(W, C).mT
            covariance = covariance if V is None else covariance + _by_rows(V, C) @ _by_rows(V, C).mT
            return self._distribution(mean, BlockDiagLinearOperator(to_linear_operator(covariance)))
        covariance = to_dense(K[..., m * C :, m * C :]) - W @ W.mT
        return self._distribution(mean, to_linear_operator(covariance if V is None else covariance + V @ V.mT))

    def _index(self, m: int, C: int) -> Tensor:  # (M,)
        """Return which of the m C values at the inducing points are u."""
        everything = torch.arange(m * C, device=self.inducing_points.device)
        return everything if self.outputs is None else everything.view(m, C)[:, 0] + self.outputs

    @cached(name="cholesky_factor", ignore_args=True)
    def _cholesky_factor(self, K: LinearOperator, index: Tensor) -> Tensor:  # (..., M, M)
        dense = to_dense(K)[..., index[:, None], index].double()
        L, info = torch.linalg.cholesky_ex(dense + self.jitter_val * torch.eye(len(index)).to(dense))
        if info.any():
            raise torch.linalg.LinAlgError(
                f"K_ZZ of {len(index)} inducing values is not positive definite with jitter_val={self.jitter_val:.1e}: "
                "use lin.double(), fewer or other inducing points, or a larger jitter_val"
            )
        return L

    @staticmethod
    def _by_point(prior: MultivariateNormal) -> tuple[Tensor, LinearOperator]:  # (..., n, C), (..., n C, n C)
        if not isinstance(prior, MultitaskMultivariateNormal):
            return prior.mean.unsqueeze(-1), prior.lazy_covariance_matrix
        if not prior._interleaved:
            raise ValueError("the model's forward must return a MultitaskMultivariateNormal with interleaved=True")
        return prior.mean, prior.lazy_covariance_matrix

    @staticmethod
    def _distribution(mean: Tensor, covariance: LinearOperator) -> MultivariateNormal:
        if mean.shape[-1] == 1:
            return MultivariateNormal(mean.squeeze(-1), covariance)
        return MultitaskMultivariateNormal(mean, covariance)


def _by_rows(W: Tensor, C: int) -> Tensor:  # (..., n C, M) -> (..., n, C, M)
    return W.unflatten(-2, (-1, C))


def _root(S: LinearOperator) -> Tensor:  # (..., M, M)
    """Return a root of q's covariance: the factor that Cholesky and natural distributions have."""
    return S.cholesky().to_dense()


def _blocks(K: LinearOperator, C: int) -> Tensor:  # (..., n C, n C) -> (..., n, C, C)
    """Return k(x_n, x_n): where the kernel is ours without the rest of K."""
    if isinstance(K, LazyEvaluatedKernelTensor) and isinstance(K.kernel, NTKKernel) and K.x1.ndim == 2:
        return K.kernel.row_blocks(K.x1)
    blocks = to_dense(K).unflatten(-1, (-1, C)).unflatten(-3, (-1, C))  # (..., n, C, n, C)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
