"""Hyperparameters of sparse processes, by their bound."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ntkgp.evidence import maximise
from ntkgp.likelihoods import Gaussian
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.sparse_training import beside
from ntkgp.posteriors.tuning import log_hyperprior, settings

if TYPE_CHECKING:
    from ntkgp.posteriors.sparse import VariationalPosterior

__all__ = ["tune_sparse"]

PLACES = ("map", "linear_mode", "network")
_STEPS = 200  # of Adam, at least


def tune_sparse(
    posterior: "VariationalPosterior",
    at: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    steps: int = 50,
    rate: float = 0.05,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> None:
    r"""Maximise a bound over all hyperparameters that require gradients, and inducing points that learn; then train q.

    A process whose mean is fixed to the network is no judge of priors: no variance at all would suit its bound best, as
    E_q[log p] is never above log p at the mean. But the same q is one of the linear model's weights, with mean θ* and
    covariance S₀ − G (I − S) Gᵀ, and their divergence from the prior also has ½ ‖θ* − m₀‖²_{S₀⁻¹}, which holds the
    variance up: with that term it bounds the linear model's evidence, however few the inducing values are.

    Args:
        posterior: whose prior and likelihood to tune, in place.
        at: "map" for that bound, with the mean at θ*, the default for mean="network"; "linear_mode" for the bound with
            a mean that is free within the span of the inducing values, the default for mean="linear", and only as good
            as these can tell the mean; "network" for a process whose mean is fixed to the network, which α-energies,
            but not the ELBO, can judge.
        method: "adam" for Adam's steps by minibatches; "collapsed" for quasi-Newton steps up the collapsed bound of
            Gaussian noise, the default where it can be.
        epochs: passes over the data of "adam"; by default at least as many as q is trained with, and 200 steps.
        steps: of "collapsed", at most.
        rate: of Adam's first steps, in logarithms of hyperparameters; it falls linearly to zero.
        checkpoint: a file that holds the state of "adam"; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if there is nothing to tune, or a name is not known.
    """
    by_energy = posterior.objective in ("alpha", "predictive")
    at = at or ("linear_mode" if posterior.free else "map")
    _check_place(at, posterior.free, by_energy)
    collapses = isinstance(posterior.likelihood, Gaussian) and not by_energy
    if method is None:
        method = "collapsed" if collapses and isinstance(posterior.model.source, Data) else "adam"
    if method not in ("adam", "collapsed"):
        raise ValueError(f'method must be "adam" or "collapsed", but is {method!r}')
    if method == "collapsed" and not collapses:
        raise ValueError('method="collapsed" is for Gaussian noise and no α-energy: use method="adam"')
    learnt = {name: p for name, p in posterior.named_parameters() if p.requires_grad}
    if not learnt:
        raise ValueError("there is nothing to tune: no hyperparameter of prior and likelihood requires gradients")
    mean = "linear" if at == "linear_mode" else "network"
    objective = posterior.objective if by_energy else "elbo"
    itself = (mean, objective) == (posterior.mean, posterior.objective)
    judge = posterior if itself else posterior.twin(mean=mean, objective=objective)
    if method == "collapsed":
        _climb(judge, at == "map", list(learnt.values()), steps)
    else:
        N, batch_size = posterior.process.N, posterior.batch_size
        enough = 1 + -(-_STEPS // -(-N // (batch_size or N)))
        epochs = epochs or max(posterior.epochs, enough)
        plan = judge.plan(epochs=epochs, learnt=learnt, rate=rate, anchored=at == "map")
        q = judge.train_q(plan, beside(checkpoint or posterior.checkpoint, "tune"), progress)
        if itself and by_energy:
            posterior.settle(q)
    if not itself:
        posterior.history += judge.history
    posterior._q(move_points=False)


def _check_place(at: str, free: bool, by_energy: bool) -> None:
    if at not in PLACES:
        raise ValueError(f'at must be "map", "linear_mode" or "network", but is {at!r}')
    if free and at != "linear_mode":
        raise ValueError(f'at must be "linear_mode" where the mean is free, but is {at!r}')
    if at == "network" and not by_energy:
        raise ValueError('at="network" needs an α-energy: the ELBO of a process with a fixed mean prefers no variance')


def _climb(judge: "VariationalPosterior", anchored: bool, learnt: list[nn.Parameter], steps: int) -> None:
    def objective() -> Tensor:
        anchor = judge.distance_to_prior() if anchored else 0.0
        return judge.collapsed_bound() - anchor + log_hyperprior(judge)

    tolerance = 1e-6 if judge.lin.dtype == torch.float64 else 1e-4
    for step in maximise(objective, learnt, steps, tolerance):
        judge.history.append({"bound": step.value, "gradient_norm": step.gradient_norm} | settings(judge))
