"""log |A| of a matrix known by its products: stochastic Lanczos quadrature, with its standard error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.solvers import Product

__all__ = ["Estimate", "log_det_estimate"]


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes."""

    value: Tensor  # ()
    standard_error: Tensor  # ()


def log_det_estimate(A: Product, probes: Tensor, steps: int) -> Estimate:  # (S, n)
    r"""Estimate log |A| = :math:`E[z^\top \log(A)\, z]` for symmetric positive definite A and z ~ N(0, I).

    Lanczos from z gives nodes λ_k and weights τ_k² of the Gauss quadrature of log over the spectrum that z sees
    (Ubaru, Chen & Saad 2017): zᵀ log(A) z ≈ ‖z‖² Σ_k τ_k² log λ_k.

    Args:
        A: v -> A v.
        probes: z, one a row.
        steps: of Lanczos, a product each, with full reorthogonalisation.
    """
    norms = probes.norm(dim=1)
    basis, alphas, betas = [probes / norms.unsqueeze(1)], [], []
    for _ in range(min(steps, probes.shape[1])):
        w = A(basis[-1])
        alphas.append((w * basis[-1]).sum(1))
        Q = torch.stack(basis)  # (k, S, n)
        for _ in range(2):  # twice is enough
            w = w - ((Q * w).sum(-1, keepdim=True) * Q).sum(0)
        betas.append(w.norm(dim=1))
        basis.append(w / betas[-1].clamp(min=torch.finfo(w.dtype).tiny).unsqueeze(1))
    T = torch.diag_embed(torch.stack(alphas, dim=1).double())
    off = torch.stack(betas, dim=1)[:, :-1].double()
    # A row whose Krylov space is exhausted meets rounding from there on: it is cut off.
    off = torch.where((off <= 1e-10 * T.diagonal(dim1=1, dim2=2)[:, :-1]).cumsum(1) > 0, 0, off)
    T = T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    nodes, vectors = torch.linalg.eigh(T)
    values = norms.double().square() * (vectors[:, 0].square() * nodes.clamp(min=1e-300).log()).sum(1)
    S = len(probes)
    error = values.std() / S**0.5 if S > 1 else torch.full_like(values[0], torch.inf)
    return Estimate(values.mean().to(probes), error.to(probes))
