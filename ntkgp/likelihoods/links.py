r"""Class probabilities under a Gaussian over logits, in closed form.

Softmax is blind to a shift of all logits, so the part of mean and covariance along 1 must not count: either only
differences of logits appear, or both are projected with I − 11ᵀ/K first.
"""

import math

from torch import Tensor

__all__ = ["bridge", "centred", "probit_bernoulli", "probit_categorical"]


def centred(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:  # (..., K), (..., K, K)
    """Project a Gaussian over logits on those that sum to zero."""
    covariance = covariance - covariance.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), covariance - covariance.mean(-2, keepdim=True)


def probit_bernoulli(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Return σ(κ m), κ = (1 + π v / 8)^(−1/2) (MacKay 1992)."""
    return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()


def probit_categorical(mean: Tensor, covariance: Tensor) -> Tensor:  # (..., K), (..., K, K) -> (..., K)
    r"""Return class probabilities from the differences of logits, each treated as a probit treats one.

    .. math:: p_k \propto \Bigl(\sum_l \exp\bigl(-\kappa_{kl} (m_k - m_l)\bigr)\Bigr)^{-1}, \quad
        \kappa_{kl} = \bigl(1 + \tfrac{\pi}{8} (\Sigma_{kk} + \Sigma_{ll} - 2 \Sigma_{kl})\bigr)^{-1/2}

    (Lu, Ie & Sha 2020). Differences do not see shifts, and for two classes this is MacKay's formula; scaling each
    centred logit by its own κ is not, and is further from the truth (on random Gaussians up to ten times).
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    variance = variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance
    z = (mean.unsqueeze(-1) - mean.unsqueeze(-2)) * (1 + math.pi / 8 * variance).rsqrt()
    return (-(-z).logsumexp(-1)).softmax(-1)


def bridge(mean: Tensor, covariance: Tensor) -> Tensor:  # (..., K), (..., K, K) -> (..., K)
    r"""Return the parameters of the Dirichlet distribution of the Laplace bridge (Hobbhahn et al. 2022).

    .. math:: \alpha_k = \frac{1}{\Sigma_{kk}} \Bigl(1 - \frac{2}{K} + \frac{e^{m_k}}{K^2} \sum_l e^{-m_l}\Bigr)

    for centred m and Σ.
    """
    mean, covariance = centred(mean, covariance)
    K = mean.shape[-1]
    exponent = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(K)
    return (1 - 2 / K + exponent.exp()) / covariance.diagonal(dim1=-2, dim2=-1)
