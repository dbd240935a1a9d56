"""Layer by layer, inputs times outputs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntkgp.curvature import KroneckerFactors
from ntkgp.curvature.kronecker import KroneckerBlock, random_columns
from ntkgp.likelihoods import SiteBlocks
from ntkgp.posteriors.model import Chunk
from ntkgp.posteriors.weight_space import BlockPosterior
from ntkgp.priors import Covariance, Separable, Uniform
from ntkgp.priors.covariance import Rotated

__all__ = ["KroneckerPosterior"]


class KroneckerPosterior(BlockPosterior):
    r"""Σ = (G ⊗ A + S₀⁻¹)⁻¹ for each layer, exactly, through the eigenvectors of the factors.

    With S₀ = L Lᵀ the eigendecomposition is that of the whitened factors.

    Args:
        state: as for :class:`Posterior`.
        damped: whether to replace G ⊗ A + α I by (G + √α I) ⊗ (A + √α I), as Ritter et al. (2018) do.
        num_samples: for networks with very many outputs, estimate G from so many random columns R ε of each point, with
            as many backward passes, instead of taking all of R.
        seed: of these columns.
    """

    method = "kron"

    def __init__(self, *state: Any, damped: bool = False, num_samples: int | None = None, seed: int = 0) -> None:
        super().__init__(*state)
        self.damped, self.num_samples, self.seed = damped, num_samples, seed
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
        for name, cov in self.prior.covariances().items():
            whole = isinstance(cov, Separable) and (cov.V is None or cov.V.shape[-1] * cov.d_0 == self._size(name))
            if not (isinstance(cov, Uniform) or (whole and not damped)):
                raise ValueError(
                    f'method="kron" needs a prior that keeps Kronecker structure: Isotropic, Grouped or Kronecker; '
                    f"{name} has another{' (damping needs one variance a layer)' if damped else ''}"
                )

    def _size(self, name: str) -> int:
        return dict(zip(self.lin.layout.names, self.lin.layout.sizes, strict=True))[name]

    @property
    def _options(self) -> dict[str, Any]:
        return {"damped": self.damped, "num_samples": self.num_samples, "seed": self.seed}

    def _collect(self) -> dict[str, KroneckerBlock]:
        factors, generator = KroneckerFactors(), torch.Generator(self.lin.device).manual_seed(self.seed)
        for chunk in self.model:
            roots = self._roots(chunk)
            if self.num_samples is None:
                for some, uses in self.lin.factors(chunk.data.x):
                    factors.add(uses, [root[some].mT.columns for root in roots], some.stop - some.start)
            else:
                self._add_samples(factors, chunk, roots, generator)
        return factors.finished()

    def _add_samples(
        self, factors: KroneckerFactors, chunk: Chunk, roots: list[SiteBlocks], generator: torch.Generator
    ) -> None:
        """Add g gᵀ for g = Jᵀ R ε / √S, whose mean is Jᵀ Λ J; each atom of Λ has draws of its own."""
        S, A = self.num_samples or 1, len(roots)
        columns = [random_columns(R, S, generator) for R in roots]
        picks = [partial(_outputs, which=slice(i * S, (i + 1) * S)) for i in range(A)]
        for some, uses in self.lin.factors(chunk.data.x, torch.cat(columns)):
            factors.add(uses, picks, some.stop - some.start)

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:  # (d_out, d_out), (d_in, d_in)
        """Return G and A under the current noise, in the order in which the parameter is stored."""
        block = self._statistics()[name]
        G = torch.tensordot(self._coefficients(), block.G, 1)
        A = G.new_ones(1, 1) if block.A is None else block.A
        return (A, G) if block.transposed else (G, A)

    def _whitened(self, name: str, cov: Covariance) -> tuple[Tensor, Tensor]:
        """Return L_Uᵀ G L_U and L_Vᵀ A L_V, with a common variance in the first."""
        G, A = self._factors(name)
        if isinstance(cov, Uniform):
            return cov.s * G, A
        root = _separable_root(cov)
        if root.U is not None:
            G = root.U.mT @ G @ root.U
        if root.V is not None:
            A = root.V.mT @ A @ root.V
        return G, A

    def _covariances(self) -> dict[str, Covariance]:
        found: dict[str, Covariance] = {}
        for name, cov in self.prior.covariances().items():
            if name not in self._statistics():  # data say nothing of it
                found[name] = cov
                continue
            G, A = self._whitened(name, cov)
            (g, QG), (a, QA) = _eigh(G), _eigh(A)
            if isinstance(cov, Uniform):
                QG = QG * cov.s.sqrt()
                found[name] = Rotated(QG, QA, self._damped(g, a, cov.s) if self.damped else 1 / (1 + torch.outer(g, a)))
            else:
                root = _separable_root(cov)
                QG = QG if root.U is None else root.U @ QG
                QA = QA if root.V is None else root.V @ QA
                found[name] = Rotated(QG, QA, 1 / (1 + torch.outer(g, a)))
        return found

    @staticmethod
    def _damped(g: Tensor, a: Tensor, s: Tensor) -> Tensor:  # s G and A have eigenvalues g and a
        root = s.rsqrt()
        return 1 / (s * torch.outer(g / s + root, a + root))

    def _log_det(self) -> Tensor:  # ()
        total = torch.zeros_like(self.lin.theta[0])
        for name, cov in self.prior.covariances().items():
            if name not in self._statistics():
                continue
            G, A = self._whitened(name, cov)
            g, a = torch.linalg.eigvalsh(G).clamp(min=0), torch.linalg.eigvalsh(A).clamp(min=0)
            if self.damped and isinstance(cov, Uniform):
                total = total - self._damped(g, a, cov.s).log().sum()
            else:
                total = total + torch.log1p(torch.outer(g, a)).sum()
        return total


def _outputs(J: Tensor, which: slice) -> Tensor:  # (n, C, p) -> (n, S, p)
    return J[:, which]


def _separable_root(cov: Covariance) -> Separable:
    if not isinstance(cov, Separable):
        raise TypeError(f"a Kronecker posterior cannot have a {type(cov).__name__} prior covariance")
    return cov.root()


def _eigh(M: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(M)
    return values.clamp(min=0), vectors
