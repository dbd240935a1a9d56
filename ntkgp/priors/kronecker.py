"""Weights whose rows and columns are correlated: a Kronecker product for every matrix."""

import torch
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.priors.base import Prior, positive
from ntkgp.priors.covariance import Covariance, Separable, Uniform

__all__ = ["Kronecker"]


class Kronecker(Prior):
    r"""S₀ = :math:`\alpha^{-1}\, U \otimes V` for every (d_0, rest) weight, and :math:`\alpha^{-1} I` for vectors.

    U and V are kept as lower triangular roots, U = L_U L_Uᵀ, and learnt through them; both start at the identity.

    Args:
        lin: whose parameters the prior is over.
        precision: α, a number or one for each parameter tensor.
        mean: m₀.
        factors: {parameter name: (U, V)} to start from, positive definite; None leaves a factor the identity.

    Raises:
        ValueError: if a precision is not positive, or a factor does not fit its parameter or is not positive definite.
    """

    def __init__(
        self,
        lin: Linearization,
        precision: float | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
        factors: dict[str, tuple[Tensor | None, Tensor | None]] | None = None,
    ) -> None:
        super().__init__(lin, mean)
        value = positive("precision", precision).to(self.mean)
        self._positive("precision", value.expand(len(self.layout.names)).clone())
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        unknown = set(factors or {}) - {name for name, shape in shapes.items() if len(shape) > 1}
        if unknown:
            raise ValueError(f"factors names {sorted(unknown)}, which are not weights of the network")
        self._d_0: dict[str, int] = {}
        self.roots = nn.ParameterDict()
        for name, shape in shapes.items():
            if len(shape) > 1:
                sizes = shape[0], shape[1:].numel()
                given = (factors or {}).get(name, (None, None))
                self._d_0[name] = shape[0]
                for side, size, factor in zip("UV", sizes, given, strict=True):
                    root = _root(f"factors[{name!r}]", factor, size, self.mean)
                    self.roots[_key(name, side)] = nn.Parameter(root)

    @property
    def precision_index(self) -> Tensor:  # (P,)
        """The parameter tensor of each parameter."""
        sizes = torch.tensor(self.layout.sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.mean.device)

    @property
    def precision(self) -> Tensor:  # (number of parameter tensors,)
        """α, the precision of each parameter tensor."""
        return self._get_positive("precision")

    @precision.setter
    def precision(self, value: float | Tensor) -> None:
        self._set_positive("precision", value)

    def covariances(self) -> dict[str, Covariance]:
        """Return α⁻¹ U ⊗ V for matrices, α⁻¹ I for vectors."""
        result: dict[str, Covariance] = {}
        for name, variance in zip(self.layout.names, self.precision.reciprocal().unbind(), strict=True):
            if name not in self._d_0:
                result[name] = Uniform(variance)
                continue
            U, V = (self.roots[_key(name, side)].tril() for side in "UV")
            result[name] = Separable(variance * (U @ U.mT), V @ V.mT, self._d_0[name])
        return result


def _key(name: str, side: str) -> str:
    return f"{name}:{side}".replace(".", "/")  # torch does not allow dots in parameter names


def _root(argument: str, factor: Tensor | None, size: int, like: Tensor) -> Tensor:  # (size, size), lower triangular
    if factor is None:
        return torch.eye(size, dtype=like.dtype, device=like.device)
    if factor.shape != (size, size):
        raise ValueError(f"{argument} must have shape {(size, size)}, but has {tuple(factor.shape)}")
    L, info = torch.linalg.cholesky_ex(factor.to(like))
    if info != 0:
        raise ValueError(f"{argument} must be positive definite, but its leading minor {int(info)} is not positive")
    return L
