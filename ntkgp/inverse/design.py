"""Experimental design: which projections to measure next."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.inverse.ray_transform import RayTransform

__all__ = ["CRITERIA", "Design", "next_angle"]

CRITERIA = ("information", "variance")


@dataclass(frozen=True)
class Design:
    """Angles in the order of choice, and what each was expected to bring when it was chosen."""

    chosen: list[int]  # which of the candidates
    angles: Tensor  # radians, (count,)
    scores: list[Tensor]  # of all candidates at each choice, (candidates,); −inf for those that are taken


def next_angle(
    samples: Tensor,
    candidates: RayTransform,
    noise: float,
    count: int = 1,
    criterion: str = "information",
    taken: tuple[int, ...] = (),
) -> Design:
    r"""Choose the projections that say most about an image, given samples of its posterior.

    With centred samples X (S, d_x) the image has the covariance Σ = Xᵀ X / S, and a projection A_a of it measured with
    noise σ² the expected information gain

    .. math:: \tfrac12 \log \det(I + A_a \Sigma A_a^\top / \sigma^2) = \tfrac12 \log \det(I + Y Y^\top / S \sigma^2),
       \qquad Y = X A_a^\top

    or, by variance, tr A_a Σ A_aᵀ. After a choice the covariance becomes that given the projection, whatever its
    outcome: X ← L⁻¹ X with L Lᵀ = I + Y Yᵀ / S σ². So batches are chosen greedily with nothing measured between.

    Args:
        samples: posterior samples, (S, *image_shape); their mean is taken off.
        candidates: the transform at all angles that could be measured.
        noise: σ², of a measurement.
        count: how many angles to choose.
        criterion: "information" or "variance".
        taken: candidates that are not to be chosen.

    Raises:
        ValueError: if an argument cannot be.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, but is {criterion!r}")
    if not noise > 0:
        raise ValueError(f"noise must be positive, but is {noise}")
    angles = candidates.geometry.angles
    if wrong := [i for i in taken if not 0 <= i < len(angles)]:
        raise ValueError(f"taken must be numbers of the {len(angles)} candidates, but has {wrong}")
    if not 1 <= count <= len(angles) - len(set(taken)):
        raise ValueError(f"count must be from 1 to the {len(angles) - len(set(taken))} candidates left, but is {count}")
    if len(samples) < 2:
        raise ValueError(f"samples must be at least 2, but are {len(samples)}")
    S = len(samples)
    # Projections are linear: those of the conditioned samples are combinations of these.
    Y = candidates(samples - samples.mean(0))[:, 0].transpose(0, 1).double() / (S * noise) ** 0.5  # (A, S, D)
    chosen: list[int] = []
    scores: list[Tensor] = []
    for _ in range(count):
        gain = _information(Y) if criterion == "information" else Y.square().sum((1, 2)) * noise
        gain[[*taken, *chosen]] = -torch.inf
        best = int(gain.argmax())
        scores.append(gain)
        chosen.append(best)
        L = torch.linalg.cholesky(_one_plus_gram(Y[best]))
        Y = torch.linalg.solve_triangular(L, Y, upper=False)
    return Design(chosen, angles[chosen], scores)


def _information(Y: Tensor) -> Tensor:  # (A, S, D) -> (A,)
    """Return ½ log det(I + Y Yᵀ), with the smaller of both Gram matrices."""
    return (
        torch.linalg.cholesky(_one_plus_gram(Y if Y.shape[1] <= Y.shape[2] else Y.mT))
        .diagonal(dim1=-2, dim2=-1)
        .log()
        .sum(-1)
    )


def _one_plus_gram(Y: Tensor) -> Tensor:  # (..., n, m) -> (..., n, n)
    G = Y @ Y.mT
    G.diagonal(dim1=-2, dim2=-1).add_(1)
    return G
