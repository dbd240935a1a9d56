"""Mean-field variational inference: the bound from samples of the weights (Blundell et al. 2015)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkgp.linearization.inputs import Input
from ntkgp.training.objective import GaussianWeights, Terms
from ntkgp.training.smoothness import evaluating

__all__ = ["MeanFieldVI"]

_TINY = 1e-30  # the root of a variance of zero has no derivative
NOISES = ("local", "positions", "weights")
_LINEAR = (nn.Linear,)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class MeanFieldVI(GaussianWeights):
    r"""E_q[log p(y | w)] from w = μ + σ ε.

    Where a layer computes z = x Wᵀ + b from one input an example, z given x is Gaussian by itself, with mean x μᵀ and
    variance x² (σ²)ᵀ: noise there, drawn for each example, has the same expectation and much less variance than one
    draw of W for all (the local reparameterisation, Kingma et al. 2015).

    Args:
        args: as :class:`GaussianWeights` takes them.
        noise: "weights" for one draw of all weights a minibatch; "local" for noise on the outputs of linear layers with
            one input an example, and a draw of all other weights; "positions" for noise on the outputs of all linear
            and convolutional layers, as if each position had weights of its own, which is common, but another bound.
            Layers that are used more than once a pass, or share parameters, have their weights drawn in any case.
        num_samples: draws for a minibatch.
        options: as :class:`GaussianWeights` takes them.

    Raises:
        ValueError: if ``noise`` is not known, or ``num_samples`` is less than one.
    """

    def __init__(self, *args: Any, noise: str = "local", num_samples: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        if noise not in NOISES:
            raise ValueError(f"noise must be one of {', '.join(NOISES)}, but is {noise!r}")
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
        self.noise, self.num_samples = noise, num_samples
        self._told |= {"noise": noise, "num_samples": str(num_samples)}
        self._noisy: dict[nn.Module, dict[str, str]] | None = None  # known after the first pass

    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective, log p as a mean over draws, which has the penalty in it.

        Args:
            x: S inputs.
            y: their targets.
            generator: of the noise; by default this object's own.
        """
        generator = generator or self.generator
        total = torch.zeros_like(self.prior_std[0])
        for _ in range(self.num_samples):
            f = self.sampled_outputs(x, generator)
            total = total + self.likelihood.log_prob(self._targets(y, f), f).mean()
        zero = torch.zeros_like(total)
        return Terms(total / self.num_samples, zero, self.divergence() / self._size(), self.beta)

    def sampled_outputs(self, x: Input, generator: torch.Generator | None = None) -> Tensor:  # (S, C)
        """Return the network's outputs under one draw of the noise, differentiable in μ and σ."""
        generator = generator or self.generator
        if self._noisy is None:
            self._noisy = self._noisy_layers(x)
        sigma = self.layout.split(self.log_sigma.exp())
        by_layer = {name for names in self._noisy.values() for name in names.values()}
        drawn = {
            name: p + sigma[name] * _noise(p, generator) for name, p in self.weights().items() if name not in by_layer
        }
        with _noise_on_outputs(self._noisy, {name: s.square() for name, s in sigma.items()}, generator):
            return self.outputs(x, drawn)

    def _noisy_layers(self, x: Input) -> dict[nn.Module, dict[str, str]]:
        """Return the layers whose outputs have noise, each with the names of its parameters, from a look at a pass."""
        kinds = {"weights": (), "local": _LINEAR, "positions": (*_LINEAR, *_CONVOLUTIONS)}[self.noise]
        names = {id(p): name for name, p in self.weights().items()}
        owners = Counter(id(p) for module in self.net.modules() for p in module._parameters.values())
        met = _inputs_met(self, x)
        found: dict[nn.Module, dict[str, str]] = {}
        for module in self.net.modules():
            own = dict(module.named_parameters(recurse=False))
            alone = len(met[module]) == 1 and all(id(p) in names and owners[id(p)] == 1 for p in own.values())
            if type(module) in kinds and alone and (self.noise == "positions" or met[module][0] == 2):
                found[module] = {key: names[id(p)] for key, p in own.items()}
        return found


def _inputs_met(objective: MeanFieldVI, x: Input) -> dict[nn.Module, list[int]]:
    """Return how many dimensions the inputs of each layer had, call by call, in a pass that leaves no trace."""
    met: dict[nn.Module, list[int]] = {module: [] for module in objective.net.modules()}

    def hook(module: nn.Module, args: tuple) -> None:
        met[module].append(args[0].ndim if args and isinstance(args[0], Tensor) else 0)

    handles = [module.register_forward_pre_hook(hook) for module in met]
    try:
        with torch.no_grad(), evaluating(objective.net):
            objective.outputs(x)
    finally:
        for handle in handles:
            handle.remove()
    return met


@contextmanager
def _noise_on_outputs(
    layers: dict[nn.Module, dict[str, str]], variances: dict[str, Tensor], generator: torch.Generator
) -> Iterator[None]:
    """Add noise to what layers return: the layer itself, of x² and σ², is its variance."""
    inside = False

    def hook(module: nn.Module, args: tuple, z: Tensor) -> Tensor:
        nonlocal inside
        if inside:  # the pass that computes the variance
            return z
        inside = True
        try:
            squares = {key: variances[name] for key, name in layers[module].items()}
            variance = functional_call(module, squares, (args[0].square(),))
        finally:
            inside = False
        return z + (variance + _TINY).sqrt() * _noise(z, generator)

    handles = [module.register_forward_hook(hook) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
