"""Scores that are larger the stranger an input is, all from one look at it."""

from torch import Tensor

from ntkgp.training.autoencoders.moments import Reconstruction

__all__ = ["ood_scores"]


def ood_scores(found: Reconstruction, reference: Reconstruction) -> dict[str, Tensor]:  # {name: (N,)}
    """Return the variance of the codes, that of the outputs, −log p(x), and how untypical that is.

    Typicality is |log p(x) − E log p| with the expectation over inputs from the training distribution: what is too
    probable is strange as well (Nalisnick et al. 2019, for single inputs).

    Args:
        found: what the model made of the inputs that are to be judged.
        reference: what it made of inputs from the distribution it was trained on.
    """
    total = found.variance.double() + found.noise.double()
    return {
        "latent variance": found.code_variance.double().sum(1),
        "output variance": total.sum(1),
        "likelihood": -found.log_prob.double(),
        "typicality": (found.log_prob.double() - reference.log_prob.double().mean()).abs(),
    }
