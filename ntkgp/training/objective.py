r"""What is minimised when a Gaussian over weights is trained: one loss for a minibatch, in any PyTorch loop.

With q = N(μ, diag(σ²)) over the weights and the prior N(0, diag(s²)), the bound on the evidence of N data is

.. math:: \mathcal{L} = E_q[\log p(y \mid w)] - \beta \, \mathrm{KL}(q \,\|\, p), \qquad
   \mathrm{KL} = \tfrac12 \sum_i \Bigl(\frac{\sigma_i^2 + \mu_i^2}{s_i^2} - 1 + \log \frac{s_i^2}{\sigma_i^2}\Bigr)

and objectives differ in how they get at the expectation. A minibatch of S points estimates L/N, so that learning rates
do not know the size of the data (Unlu & Aitchison 2021, Eq. 30, with the prior's s² where that has σ²).
"""

from abc import abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.linearization.memory import keep_freed_memory
from ntkgp.linearization.snapshot import CallConvention, outputs_of
from ntkgp.posteriors import GivenDiagonalPosterior, Posterior
from ntkgp.posteriors.data import Source
from ntkgp.posteriors.fit import as_likelihood
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Diagonal, Isotropic, Prior
from ntkgp.priors.base import positive

__all__ = ["GaussianWeights", "Terms", "WeightObjective"]


@dataclass(frozen=True)
class Terms:
    """The parts of an objective, each for one of N points."""

    log_prob: Tensor  # (), mean log p(y | f)
    penalty: Tensor  # (), what the expectation under q takes off it
    divergence: Tensor  # (), KL(q ‖ p) / N, or the prior's −log density / N
    beta: float

    @property
    def loss(self) -> Tensor:
        """−L / N, to be minimised."""
        return self.penalty - self.log_prob + self.beta * self.divergence


class WeightObjective(nn.Module):
    """A network, a likelihood and a prior over the network's weights, and a loss for minibatches.

    The network is trained in place: its parameters are μ.

    Args:
        net: the network; parameters that require gradients are learnt.
        likelihood: a name or an object; its hyperparameters that require gradients are learnt as well.
        num_data: N, how many points the training data have; ``fit`` finds out itself.
        prior_std: s, a number, or {parameter or module name: number} for all parameters.
        beta: β, the weight of the divergence; below 1 the posterior is tempered.
        seed: of labels and noise that are drawn.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a number is not positive, or ``prior_std`` does not name every parameter once.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        prior_std: float | Mapping[str, float] = 1.0,
        beta: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net must be a torch.nn.Module, but is a {type(net).__name__}")
        learnt = {name: p for name, p in net.named_parameters() if p.requires_grad}
        if not learnt:
            raise ValueError("net has no parameter that requires gradients: there is nothing to train")
        if num_data is not None and num_data < 1:
            raise ValueError(f"num_data must be at least 1, but is {num_data}")
        self.net, self.likelihood = net, as_likelihood(likelihood)
        self.layout = ParameterLayout(tuple(learnt), tuple(p.shape for p in learnt.values()))
        self.num_data, self.beta, self.seed = num_data, float(positive("beta", beta)), seed
        like = next(iter(learnt.values()))
        self.likelihood.to(device=like.device, dtype=like.dtype)
        self.register_buffer("prior_std", _scales(prior_std, self.layout).to(like))
        self.prior_std: Tensor  # (P,)
        self.generator = torch.Generator(like.device).manual_seed(seed)
        self.history: list[dict[str, Any]] = []  # one entry for each epoch of ``fit``
        self._isotropic = not isinstance(prior_std, Mapping)
        self._told = {"prior_std": str(prior_std), "beta": str(self.beta)}  # what tells this objective from others
        self._unpack = CallConvention.of(net)
        keep_freed_memory()

    # What an objective defines

    @abstractmethod
    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective for a minibatch, differentiable.

        Args:
            x: S inputs.
            y: their targets.
            generator: where randomness comes from; by default this object's own.
        """

    @abstractmethod
    def posterior_of(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return q as a posterior of the linear model at μ."""

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return what an optimiser takes: each group of parameters with its learning rate."""
        groups = [{"params": list(self.weights().values()), "lr": lr}]
        hyperparameters = [p for p in self.likelihood.parameters() if p.requires_grad]
        return groups + ([{"params": hyperparameters, "lr": lr}] if hyperparameters else [])

    # What all have

    def loss(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Tensor:  # ()
        """Return the loss of a minibatch, an estimate of −L / N."""
        return self.terms(x, y, generator).loss

    def fit(self, data: Any, epochs: int, **options: Any) -> Posterior:
        """Train on data, and return the posterior; see :func:`ntkgp.training.loop.fit`."""
        from ntkgp.training.loop import fit  # it knows objectives, so it cannot come before them

        return fit(self, data, epochs, **options)

    def posterior(self, data: Any, memory_budget: int = 4 << 30) -> Posterior:
        """Return q, as it is now, as a posterior of the network linearised at μ.

        Args:
            data: the training data, for evidence and tuning: (X, y), a Dataset or a DataLoader.
            memory_budget: bytes that features may take.
        """
        from ntkgp.training.loop import checked_source

        lin, source = checked_source(self, data)
        return self._posterior(lin, source, memory_budget)

    def _posterior(self, lin: Linearization, source: Source, memory_budget: int) -> Posterior:
        likelihood = deepcopy(self.likelihood)  # training may go on
        posterior = self.posterior_of(LinearModel(lin, source, likelihood, memory_budget), self.prior_over(lin))
        posterior.history = list(self.history)
        return posterior

    def prior_over(self, lin: Linearization) -> Prior:
        """Return the prior as an object over the linearised network's weights."""
        s = self.prior_std.detach()
        return Isotropic(lin, s[0] ** -2) if self._isotropic else Diagonal(lin, s**-2)

    def identity(self) -> dict[str, str]:
        """Return what tells this objective from others, for checkpoints."""
        shapes = zip(self.layout.names, self.layout.shapes, strict=True)
        network = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes)
        kinds = {"objective": type(self).__name__, "likelihood": type(self.likelihood).__name__}
        return kinds | {"network": network, "points": str(self.num_data)} | self._told

    # What ``fit`` asks for between steps and epochs

    def before_step(self, x: Input, y: Tensor) -> None:
        """Do what is due once a minibatch has its gradient, at the weights where it was taken."""

    def after_epoch(self, epoch: int, lin: Linearization, source: Source) -> dict[str, Any]:
        """Do what is due after an epoch, and return what the history should tell of it."""
        return {}

    @property
    def finished(self) -> bool:
        """Whether training may stop before its last epoch."""
        return False

    def settle(self) -> None:
        """Do what is due after the last epoch."""

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are learnt, by name."""
        named = dict(self.net.named_parameters())
        return {name: named[name] for name in self.layout.names}

    def mean(self) -> Tensor:  # (P,)
        """Return μ, differentiable."""
        return self.layout.join(self.weights())

    def outputs(self, x: Input, weights: Mapping[str, Tensor] | None = None) -> Tensor:  # (S, C)
        """Return the network's outputs, at μ or at other weights, flattened to C numbers for each input."""
        args, kwargs = self._unpack(x)
        if weights is None:
            f = self.net(*args, **kwargs)
        else:
            f = torch.func.functional_call(self.net, dict(weights), args, kwargs)
        return outputs_of(f)

    def _targets(self, y: Tensor, f: Tensor) -> Tensor:
        y = self.likelihood.validate(y, f.shape[1])
        if len(y) != len(f):
            raise ValueError(f"y must have a target for each of {len(f)} inputs, but has {len(y)}")
        return y.to(device=f.device, dtype=f.dtype if y.is_floating_point() else y.dtype)

    def _size(self) -> int:
        if self.num_data is None:
            raise ValueError("num_data is not known: pass it to the constructor, or train with fit")
        return self.num_data


class GaussianWeights(WeightObjective):
    r"""An objective with q = N(μ, diag(σ²)): log σ is learnt, with a learning rate of its own.

    Args:
        net: the network.
        likelihood: a name or an object.
        num_data: N.
        prior_std: s.
        beta: β.
        seed: of labels and noise that are drawn.
        log_sigma_rate: how many times larger the learning rate of log σ is: with the weights' own, training ends before
            the variances converge (Unlu & Aitchison 2021, Section 5.1).
        log_sigma_start: log σ − log s at the start.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        prior_std: float | Mapping[str, float] = 1.0,
        beta: float = 1.0,
        seed: int = 0,
        log_sigma_rate: float = 10.0,
        log_sigma_start: float = -3.0,
    ) -> None:
        super().__init__(net, likelihood, num_data, prior_std, beta, seed)
        self.log_sigma_rate = float(positive("log_sigma_rate", log_sigma_rate))
        self._told |= {"log_sigma_rate": str(log_sigma_rate), "log_sigma_start": str(log_sigma_start)}
        self.log_sigma = nn.Parameter(self.prior_std.log() + log_sigma_start)  # (P,)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return what an optimiser takes: weights, likelihood, and log σ with its larger rate."""
        return [*super().parameter_groups(lr), {"params": [self.log_sigma], "lr": self.log_sigma_rate * lr}]

    def variances(self) -> Tensor:  # (P,)
        """Return σ², differentiable."""
        return (2 * self.log_sigma).exp()

    def divergence(self) -> Tensor:  # ()
        """Return KL(q ‖ p)."""
        return _Divergence.apply(self.mean(), self.log_sigma, self.prior_std)

    def posterior_of(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return N(μ, diag(σ²))."""
        return GivenDiagonalPosterior.of(model, prior, model.likelihood, self.variances().detach())


class _Divergence(Function):
    """KL(q ‖ p), with its gradients μ/s² and σ²/s² − 1 in μ and log σ."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, log_sigma: Tensor, s: Tensor) -> Tensor:  # (P,), (P,), (P,) -> ()
        z, log_ratio = mu / s, 2 * (log_sigma - s.log())
        surplus = log_ratio.expm1()
        ctx.save_for_backward(z, surplus, s)
        return torch.addcmul(surplus - log_ratio, z, z).sum() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, Tensor, None]:
        z, surplus, s = ctx.saved_tensors
        return c * z / s, c * surplus, None


def _scales(prior_std: float | Mapping[str, float], layout: ParameterLayout) -> Tensor:  # (P,)
    if not isinstance(prior_std, Mapping):
        value = positive("prior_std", prior_std)
        if value.numel() != 1:
            raise ValueError(f"prior_std must be a number or a dict by name, but has shape {tuple(value.shape)}")
        return value.reshape(1).expand(layout.num_params).clone()
    parts = []
    for name, size in zip(layout.names, layout.sizes, strict=True):
        found = [wanted for wanted in prior_std if name == wanted or name.startswith(f"{wanted}.")]
        if len(found) != 1:
            raise ValueError(f"prior_std must name every parameter once, but {name!r} is named by {found or 'nothing'}")
        parts.append(positive(f"prior_std[{found[0]!r}]", prior_std[found[0]]).expand(size))
    return torch.cat(parts)
