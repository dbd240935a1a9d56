"""Hyperparameters of sparse processes, by their bound."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntkgp.evidence import maximise
from ntkgp.likelihoods import Gaussian
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.sparse_training import beside
from ntkgp.posteriors.tuning import log_hyperprior, settings

if TYPE_CHECKING:
    from ntkgp.posteriors.sparse import VariationalPosterior

__all__ = ["tune_sparse"]

_STEPS = 500  # of Adam, at least


def tune_sparse(
    posterior: "VariationalPosterior",
    at: str = "linear_mode",
    method: str | None = None,
    epochs: int | None = None,
    steps: int = 50,
    rate: float = 0.05,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> None:
    """Maximise the bound over all hyperparameters that require gradients, and inducing points that learn; then train q.

    A bound with its mean fixed to the network is no judge of priors: no variance at all would suit it best, as
    E_q[log p] is never above log p at the mean. So hyperparameters are learnt for the linear model, whose mean is free,
    through the same inducing values, and q for the network's mean is trained under them: as for other posteriors,
    tuning judges priors for the linear model and does not move the mean. α-energies do judge the network's own mean.

    Args:
        posterior: whose prior and likelihood to tune, in place.
        at: "linear_mode", and nothing else.
        method: "adam" for Adam's steps by minibatches; "collapsed" for quasi-Newton steps up the collapsed bound of
            Gaussian noise, the default where it can be.
        epochs: passes over the data of "adam"; by default at least as many as q is trained with, and 500 steps.
        steps: of "collapsed", at most.
        rate: of Adam's first steps, in logarithms of hyperparameters; it falls linearly to zero.
        checkpoint: a file that holds the state of "adam"; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if there is nothing to tune, or a name is not known.
    """
    if at != "linear_mode":
        raise ValueError(f'at must be "linear_mode" for method="variational", but is {at!r}')
    by_energy = posterior.objective in ("alpha", "predictive")
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
    judge = posterior if by_energy else posterior.twin(mean="linear", objective="elbo")
    if method == "collapsed":
        _climb(judge, list(learnt.values()), steps)
    else:
        N, batch_size = posterior.process.N, posterior.batch_size
        enough = 1 + -(-_STEPS // -(-N // (batch_size or N)))
        plan = judge.plan(epochs=epochs or max(posterior.epochs, enough), learnt=learnt, rate=rate)
        q = judge.train_q(plan, beside(checkpoint or posterior.checkpoint, "tune"), progress)
        if by_energy:
            posterior.settle(q)
    if judge is not posterior:
        posterior.history += judge.history
    posterior._q(move_points=False)


def _climb(judge: "VariationalPosterior", learnt: list[nn.Parameter], steps: int) -> None:
    before = [p.detach().clone() for p in learnt]
    tolerance = 1e-6 if judge.lin.dtype == torch.float64 else 1e-4
    try:
        for step in maximise(lambda: judge.collapsed_bound() + log_hyperprior(judge), learnt, steps, tolerance):
            judge.history.append({"bound": step.value, "gradient_norm": step.gradient_norm} | settings(judge))
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(learnt, before, strict=True):
                parameter.copy_(value)
        raise
