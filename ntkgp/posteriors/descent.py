"""θ_⋆ by minibatches: the mode of the linear model over data that are read, not held."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntkgp.likelihoods import Likelihood
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.data import Data, as_source, draw
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.mode import Certificate, Mode
from ntkgp.posteriors.model import LinearModel, Minibatch
from ntkgp.posteriors.tuning import hidden
from ntkgp.priors import Grouped, Prior
from ntkgp.solvers import Momentum, Product, largest_eigenvalue

if TYPE_CHECKING:
    from ntkgp.posteriors.base import Posterior

__all__ = ["KRONECKER_POINTS", "descend", "kronecker_preconditioner"]

KRONECKER_POINTS = 512  # that precondition: their factors take as long as twenty minibatches
_COLUMNS = 32  # of the root of Λ that a Kronecker factor is made of where there are more outputs
_POWER_BATCHES = 3
_EXPLODED = 1.0  # nats a point that the likelihood may lose in an epoch before the rate is held to be too large
_SLOWER, _RESTARTS = 4.0, 12


def descend(
    posterior: "Posterior",
    data: Any = None,
    epochs: int = 3,
    batch_size: int = 256,
    seed: int = 0,
    start: Tensor | None = None,
    tolerance: float = 1e-2,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Mode:
    r"""Return θ_⋆ − θ* by preconditioned stochastic descent: per minibatch one J v forward and one Jᵀu backward.

    .. math:: \hat g = \tfrac{N}{|I|} J_I^\top r_I(f_I + J_I \delta) - S_0^{-1}(\theta^* + \delta - m_0), \qquad
       v \leftarrow \beta v + M^{-1} \hat g, \qquad \delta \leftarrow \delta + \eta_t v

    M is the Hessian of a Kronecker-factored posterior of a few hundred points. η falls linearly to zero from
    1 / λ_max(M⁻¹ Ĥ_I), found by power iteration over a few minibatches, so there is no rate to tune; if the likelihood
    falls apart all the same, as where a network too sure of itself has no curvature at θ*, the run begins again more
    slowly. The last pass, over all data, is for the certificate. Under ``torchrun`` processes share each minibatch.

    Args:
        posterior: whose prior and likelihood.
        data: (X, y), a Dataset or a DataLoader, of all data where the posterior has a subset; by default its own.
        epochs: passes over the data.
        batch_size: points in a minibatch; a loader has its own.
        seed: of the order of the data, which a loader of an iterable dataset decides itself.
        start: δ to start from; by default where the posterior is.
        tolerance: the certificate says converged if the error of θ in the norm of M is so small beside ‖θ_⋆ − m₀‖ in
            that of the prior.
        checkpoint: a file that holds the state after every epoch; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if an argument cannot be, or the checkpoint belongs to another run.
    """
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, but is {tolerance}")
    lin, prior, likelihood = posterior.lin, posterior.prior, posterior.likelihood
    model = posterior.model
    if data is not None:
        model = model.with_source(as_source(data, lin, likelihood))
    model = model.shared()
    if start is None:
        start = torch.zeros_like(lin.theta) if posterior.shift is None else posterior.shift
    with torch.no_grad():
        chosen, N = draw(model.source, lin, likelihood, KRONECKER_POINTS, seed)
        objective = Objective(model, prior, likelihood, N)
        # With Λ at θ*: where the linear model explains all data there is next to none, and steps would have no bound.
        precondition = kronecker_preconditioner(model, prior, likelihood, None, chosen, N)
        run = Run(objective, precondition, epochs, batch_size, seed)
        before = objective.value(run.minibatches(epochs), start)
        identity = {"fingerprint": lin.fingerprint(), "epochs": str(epochs), "batch_size": str(batch_size)}
        identity |= {"seed": str(seed), "points": str(N)}
        file = None if checkpoint is None else Checkpoint(Path(checkpoint), identity)
        end = run.from_(start, before, file, progress)
        start_value = before + objective.prior_part(start)[0].item()
        end_value, g = objective(run.minibatches(epochs), end)
        if not end_value >= start_value:
            warnings.warn(
                f"{epochs} epochs of descent ended {start_value - end_value:.3g} nats below their start, which is "
                "returned: take more epochs or larger minibatches",
                stacklevel=4,
            )
            end, (_, g) = start, objective(run.minibatches(epochs), start)
        decrement = (g @ precondition(g.unsqueeze(0))[0]).item() / 2
        close = decrement <= tolerance**2 * -objective.prior_part(end)[0].item()
        return Mode(end, Certificate(close, run.steps, prior.whiten(g).norm().item(), decrement))


def kronecker_preconditioner(
    model: LinearModel, prior: Prior, likelihood: Likelihood, delta: Tensor | None, chosen: Data, N: int
) -> Product:
    """Return v -> Σ v of the Kronecker-factored posterior of some points that stand for all N.

    Its prior has a variance for each parameter, the mean of those that S₀ has: any positive definite matrix will do.
    """
    lin = model.lin
    sizes = zip(lin.layout.names, lin.layout.sizes, strict=True)
    variances = [prior.covariances()[name].diagonal(size).mean() for name, size in sizes]
    plain = Grouped(lin, {name: [name] for name in lin.layout.names}, torch.stack(variances).reciprocal().detach())
    columns = None if lin.num_outputs <= _COLUMNS else _COLUMNS
    source = chosen.standing_for(torch.full((len(chosen),), N / len(chosen)).to(lin.theta))
    return KroneckerPosterior(
        model.with_source(source), plain, likelihood, delta, num_samples=columns
    )._covariance_times


@dataclass(frozen=True)
class Objective:
    """ψ(δ) = Σ_n log p(y_n | f_n + J_n δ) − ½ ‖θ* + δ − m₀‖²_{S₀⁻¹}, by minibatches."""

    model: LinearModel
    prior: Prior
    likelihood: Likelihood
    N: int

    @property
    def mass(self) -> float:
        """How many points the data stand for."""
        source = self.model.source
        return (
            self.N if not isinstance(source, Data) or source.weights is None else source.weights.mean().item() * self.N
        )

    def likelihood_part(self, batch: Minibatch, delta: Tensor) -> tuple[Tensor, Tensor]:  # (P,) -> (), (P,)
        """Return log p(y_I | f_I + J_I δ) and its gradient, summed over processes."""
        data, lin = batch.data, self.model.lin
        total = torch.zeros(1 + lin.num_params).to(delta)
        if len(data):
            f, moved = lin.value_and_jvp(data.x, delta)
            total[0] = self.likelihood.weighted_log_prob(data.y, f + moved, data.weights)
            total[1:] = lin.vjp(data.x, self.likelihood.weighted_residual(data.y, f + moved, data.weights))
        total = self.model.summed(total)
        return total[0], total[1:]

    def prior_part(self, delta: Tensor) -> tuple[Tensor, Tensor]:  # (P,) -> (), (P,)
        """Return −½ ‖θ* + δ − m₀‖²_{S₀⁻¹} and its gradient."""
        distance = self.model.lin.theta + delta - self.prior.mean
        g = -self.prior.precision_times(distance)
        return distance @ g / 2, g

    def __call__(self, batches: Iterator[Minibatch], delta: Tensor) -> tuple[float, Tensor]:  # (P,) -> (), (P,)
        """Return ψ and its gradient, in a pass over all data."""
        penalty, g = self.prior_part(delta)
        value = penalty.item()
        for batch in batches:
            more, gradient = self.likelihood_part(batch, delta)
            value, g = value + more.item(), g + gradient
        return value, g

    def value(self, batches: Iterator[Minibatch], delta: Tensor) -> float:  # (P,)
        """Return log p(y | f + J δ) of all data, in a forward pass over them."""
        total = torch.zeros((), dtype=torch.float64, device=delta.device)
        for batch in batches:
            if len(data := batch.data):
                f = self.model.lin(data.x)
                f = f + self.model.lin.jvp(data.x, delta) if delta.any() else f
                total += self.likelihood.weighted_log_prob(data.y, f, data.weights)
        return self.model.summed(total).item()

    def hessian(self, batch: Minibatch) -> Product:
        """Return v -> (N/|I|) J_Iᵀ Λ_I J_I v + S₀⁻¹ v, Λ at θ*."""
        data, lin = batch.data, self.model.lin
        if len(data):
            R = self.likelihood.expand(data.y, lin(data.x), data.weights).R

        def times(v: Tensor) -> Tensor:  # (1, P)
            total = torch.zeros_like(v)
            if len(data):
                total = lin.vjp(data.x, R.apply(R.mT.apply(lin.jvp(data.x, v))))
            return self.model.summed(total) * (self.N / batch.size) + self.prior.precision_times(v)

        return times


@dataclass
class Run:
    """A descent of so many epochs; its state is a :class:`Momentum`, how far it has come, and the rate."""

    objective: Objective
    precondition: Product
    epochs: int
    batch_size: int
    seed: int
    steps: int = 0

    def from_(
        self, start: Tensor, log_prob: float, file: Checkpoint | None, progress: bool | None
    ) -> Tensor:  # (P,) -> (P,)
        """Run to the end, from ``start``, where log p(y | f + J δ) is so much, or from what the file holds."""
        state, epoch, rate = Momentum.at(start.unsqueeze(0)), 0, 0.0
        if file is not None and file.path.exists():
            kept, told = file.load()
            state = Momentum(kept["delta"].to(start), kept["velocity"].to(start))
            epoch, rate, self.steps = int(told["epoch"]), float(told["rate"]), int(told["steps"])
        else:
            rate = self._first_rate()
        slowest = rate / _SLOWER**_RESTARTS
        with tqdm(total=self.epochs, initial=epoch, desc="descent", disable=hidden(progress)) as bar:
            while epoch < self.epochs:
                after, found = self._epoch(state, epoch, rate)
                state, epoch = after, epoch + 1
                if not found >= log_prob - _EXPLODED * self.objective.mass:
                    if rate <= slowest:
                        return start
                    state, epoch, rate = Momentum.at(start.unsqueeze(0)), 0, rate / _SLOWER
                    bar.reset()
                    continue
                bar.set_postfix_str(f"log p {found:.5g}, rate {rate:.2g}")
                bar.update()
                if file is not None and self.objective.model.ranks.rank == 0:
                    told = {"epoch": str(epoch), "rate": repr(rate), "steps": str(self.steps)}
                    file.save({"delta": state.x, "velocity": state.velocity}, told)
        return state.x[0]

    def minibatches(self, epoch: int) -> Iterator[Minibatch]:
        """Return the minibatches of an epoch, in an order of its own."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return self.objective.model.minibatches(self.batch_size, generator)

    def _epoch(self, state: Momentum, epoch: int, rate: float) -> tuple[Momentum, float]:
        objective, N = self.objective, self.objective.N
        seen, value = 0, 0.0
        for batch in self.minibatches(epoch):
            log_prob, g = objective.likelihood_part(batch, state.x[0])
            g = g * (N / batch.size) + objective.prior_part(state.x[0])[1]
            left = max(0.0, 1 - (epoch + seen / N) / self.epochs)
            state = state.step(self.precondition(g.unsqueeze(0)), rate * left)
            seen, value, self.steps = seen + batch.size, value + log_prob.item(), self.steps + 1
        return state, value

    def _first_rate(self) -> float:
        generator, like = torch.Generator().manual_seed(self.seed), self.objective.model.lin.theta.unsqueeze(0)
        largest = 0.0
        for batch, _ in zip(self.minibatches(0), range(_POWER_BATCHES), strict=False):
            H = self.objective.hessian(batch)
            A: Callable[[Tensor], Tensor] = lambda v: self.precondition(H(v))  # noqa: B023, E731
            largest = max(largest, largest_eigenvalue(A, like, generator))
        return 1 / largest
