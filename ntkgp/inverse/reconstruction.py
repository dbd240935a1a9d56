"""The reconstruction as a Gaussian model: a network trained on one measurement, linearised at its weights."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from ntkgp.inverse.classical import CLASSICAL, Classical, classical
from ntkgp.inverse.deep_image_prior import DeepImagePrior, train
from ntkgp.inverse.gaussian_image import BySamples, GaussianImage
from ntkgp.inverse.observation_space import ObservationSpacePosterior, PixelGram
from ntkgp.inverse.operators import Measurement, as_measurement
from ntkgp.inverse.predcp import add_predcp
from ntkgp.inverse.priors import PRIORS
from ntkgp.inverse.ray_transform import RayTransform
from ntkgp.inverse.unet import UNet
from ntkgp.likelihoods import Gaussian
from ntkgp.linearization import Linearization
from ntkgp.posteriors import SampledPosterior, fit
from ntkgp.posteriors.data import as_source
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import ConvFilterGP, Prior

__all__ = ["Reconstruction", "reconstruct"]

TUNINGS = ("evidence", "predcp")
METHODS = ("auto", "exact", "sampled")
_EXACT_BYTES = 2 << 30  # that the Jacobians of image and measurement may take for the exact method


_NO_PREDCP = 'tune="predcp" is for prior="conv_filter" and method="exact", but the prior is {} and the method {}'


class Pixels(nn.Module):
    """A network whose outputs are the pixels of its image, in a row."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor) -> Tensor:  # (1, ...) -> (1, d_x)
        """Return the image."""
        return self.net(z).flatten(1)


class Measured(Pixels):
    """A network whose outputs are what is measured of its image."""

    def __init__(self, net: nn.Module, A: Measurement) -> None:
        super().__init__(net)
        self.A = A

    def forward(self, z: Tensor) -> Tensor:  # (1, ...) -> (1, d_y)
        """Return A f(z)."""
        return self.A(self.net(z)).flatten(1)


@dataclass(frozen=True)
class Reconstruction(GaussianImage):
    r"""x = f* + J(θ − θ*), θ ~ N(m₀, S₀), y = A x + ε, ε ~ N(0, σ² I): a Gaussian model of image and measurement.

    With K = J S₀ Jᵀ over pixels and Σ_yy = A K Aᵀ + σ² I the image has covariance K − K Aᵀ Σ_yy⁻¹ A K, and the mean f*,
    or after :meth:`refine` that of the linear model, μ₀ + K Aᵀ Σ_yy⁻¹ (y − A μ₀) with μ₀ = f* + J(m₀ − θ*). All of it
    is the posterior of a network that returns A f, in function space (:class:`ObservationSpacePosterior`).
    """

    dip: DeepImagePrior
    A: Measurement
    posterior: ObservationSpacePosterior | SampledPosterior  # of the network that returns measurements
    pixels: Linearization  # of the network that returns images

    @property
    def shape(self) -> torch.Size:
        """Of the image."""
        return self.A.image_shape

    @cached_property
    def mean(self) -> Tensor:  # (*image_shape)
        """The posterior mean."""
        z, shift = self._z, self.posterior.shift
        x = self.pixels(z)[0] if shift is None else torch.stack(self.pixels.value_and_jvp(z, shift)).sum(0)[0]
        return x.view(self.shape)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:  # (n, *image_shape)
        """Draw images: x = f* + J(θ − θ*) with θ from the posterior, by Matheron's rule."""
        theta = self.posterior.sample_weights(n, generator)
        moved = self.pixels.jvp(self._z, theta - self.pixels.theta)[:, 0]
        with torch.no_grad():
            return (self.pixels(self._z) + moved).unflatten(1, self.shape)

    def sample_prior(self, n: int, generator: torch.Generator | None = None) -> Tensor:  # (n, *image_shape)
        """Draw images before anything was measured, around the network's: x = f* + J θ₀, θ₀ ~ N(0, S₀)."""
        theta = self.pixels.theta
        with torch.no_grad():
            noise = torch.randn(n, len(theta), generator=generator, dtype=theta.dtype, device=theta.device)
            moved = self.pixels.jvp(self._z, self.posterior.prior.spread(noise))[:, 0]
            return (self.pixels(self._z) + moved).unflatten(1, self.shape)

    def log_evidence(self, at: str = "linear_mode") -> Tensor:  # ()
        """Return log p(y), differentiable in the hyperparameters; see :meth:`Posterior.log_evidence`."""
        return self.posterior.log_evidence(at=at)

    def refine(self, **options: Any) -> "Reconstruction":
        """Return the reconstruction whose mean is that of the linear model, too.

        Args:
            options: of :meth:`Posterior.refine`, for samples as ``steps=5`` to bound the search.
        """
        return type(self)(self.dip, self.A, self.posterior.refine(**options), self.pixels)

    @property
    def _z(self) -> Tensor:
        return self.dip.z.to(self.pixels.theta)

    def _covariance(self, patch: Tensor | slice) -> Tensor:  # (n, n)
        return self.posterior.image_covariance()[patch][:, patch]


class SampledReconstruction(BySamples, Reconstruction):
    """The same model by samples of its posterior, and covariances by averages over them.

    Nothing is larger than a few images and weight vectors for each sample; with S samples standard deviations have a
    relative error of about 1 / √(2 S).
    """

    posterior: SampledPosterior

    def _moves(self) -> Tensor:  # J ζ, (S, d_x)
        with torch.no_grad():
            return self.posterior._current(
                "image samples", lambda: self.pixels.jvp(self._z, self.posterior._statistics())[:, 0]
            )


@overload
def reconstruct(A: Any, y: Tensor, *, method: Literal["fbp", "tikhonov", "tv"], penalty: float = ...) -> Classical: ...


@overload
def reconstruct(
    A: Any,
    y: Tensor,
    net: nn.Module | None = ...,
    z: Tensor | None = ...,
    prior: str | Callable[[Linearization], Prior] | None = ...,
    tune: str | None = ...,
    method: str = ...,
    noise: float | None = ...,
    penalty: float = ...,
    steps: int = ...,
    rate: float = ...,
    seed: int = ...,
    progress: bool | None = ...,
    **options: Any,
) -> Reconstruction: ...


def reconstruct(
    A: Any,
    y: Tensor,
    net: nn.Module | None = None,
    z: Tensor | None = None,
    prior: str | Callable[[Linearization], Prior] | None = None,
    tune: str | None = "evidence",
    method: str = "auto",
    noise: float | None = None,
    penalty: float = 3e-5,
    steps: int = 5000,
    rate: float = 1e-4,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Reconstruction | Classical:
    """Reconstruct an image with error bars from one measurement y = A x + ε.

    Train a network on the measurement (:func:`train`), linearise it, and tune prior and noise by the evidence of the
    linear model: exactly, in double precision, for images and measurements of about a thousand numbers, or by samples.

    Args:
        A: a :class:`Measurement` as :class:`RayTransform`, a matrix, or an object with ``A(x)`` and ``A_adjoint(y)``.
        y: the measurement, (1, *measured_shape).
        net: a network from z to images; by default a :class:`UNet` that ``seed`` initialises.
        z: its input; by default what ``A.fbp`` makes of y, or A_adjoint(y) with unit mean square where there is none.
        prior: over convolution weights (other parameters have none): "conv_filter", "iid", "layerwise", "g_prior" (in
            the units of the measurement), or a function of the linearisation; by default "conv_filter" for the exact
            method and "layerwise" for samples.
        tune: "evidence"; "predcp" for type-II MAP with the TV-PredCP hyperprior; None to leave the prior as it is.
        method: "exact"; "sampled", matrix-free, whose evidence is maximised by EM and which knows no PredCP; "auto" for
            exact if the Jacobians fit 2 GB; or, without network and error bars, "fbp", "tikhonov" and "tv" (see
            :func:`classical`), which take no argument but ``penalty``.
        noise: σ², the variance of the measurement's noise; None to learn it, starting at the network's residual.
        penalty: γ, of total variation while training.
        steps: of training.
        rate: of training.
        seed: of the default network.
        progress: whether to show bars; by default in a terminal.
        options: of the Gaussian model, see :func:`linearized`.

    Raises:
        ValueError: if a name is not known, or a shape does not fit.
    """
    _check_names(prior, tune, method, (*METHODS, *CLASSICAL))
    operator = as_measurement(A, y)
    if method in CLASSICAL:
        return classical(operator, y, method, penalty)
    if net is None:
        if len(operator.image_shape) != 3:
            shape = tuple(operator.image_shape)
            raise ValueError(f"net must be given for images of shape {shape}: the default is for (channels, H, W)")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = UNet(in_channels=operator.image_shape[0], out_channels=operator.image_shape[0]).to(y)
    if tune == "predcp" and not _is_exact(method, operator, net):
        raise ValueError(_NO_PREDCP.format(prior or "conv_filter", "sampled"))  # before hours of training
    dip = train(operator, y, net, _input(operator, y) if z is None else z, penalty, steps, rate, progress=progress)
    return linearized(dip, operator, y, prior, tune, method, noise, penalty, progress=progress, **options)


def _check_names(prior: Any, tune: str | None, method: str, methods: tuple[str, ...] = METHODS) -> None:
    if tune is not None and tune not in TUNINGS:
        raise ValueError(f"tune must be one of {', '.join(TUNINGS)} or None, but is {tune!r}")
    if isinstance(prior, str) and prior not in PRIORS:
        raise ValueError(f"prior must be one of {', '.join(PRIORS)} or a function, but is {prior!r}")
    if method not in methods:
        raise ValueError(f"method must be one of {', '.join(methods)}, but is {method!r}")


def linearized(
    dip: DeepImagePrior,
    A: Measurement,
    y: Tensor,
    prior: str | Callable[[Linearization], Prior] | None = None,
    tune: str | None = "evidence",
    method: str = "auto",
    noise: float | None = None,
    penalty: float = 3e-5,
    tuning_steps: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Reconstruction:
    """Return the Gaussian model of a network that has been trained.

    Args:
        dip: the network and its input.
        A: the operator.
        y: the measurement.
        prior: as for :func:`reconstruct`, like all that is not here.
        tune: by what to tune.
        method: how to compute.
        noise: σ².
        penalty: γ, that the network was trained with; PredCP matches it.
        tuning_steps: at most; by default 100 of the exact evidence, 5 of EM.
        progress: whether to show bars.
        options: of :class:`SampledPosterior`.
    """
    _check_names(prior, tune, method)
    exact = _is_exact(method, A, dip.net)
    dtype = torch.float64 if exact else y.dtype
    net, operator = deepcopy(dip.net).to(dtype).requires_grad_(True), deepcopy(A).to(dtype)
    z, y = dip.z.to(dtype), y.to(dtype)
    names = [f"net.{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    measured, pixels = (
        Linearization(part, parameters=names, example=z) for part in (Measured(net, operator), Pixels(net))
    )
    with torch.no_grad():
        residual = (operator(net(z)) - y).square().mean().item()
    likelihood = Gaussian(residual if noise is None else noise, learn_noise=noise is None).to(dtype)
    prior = prior or ("conv_filter" if exact else "layerwise")
    chosen = PRIORS[prior](measured, net) if isinstance(prior, str) else prior(measured)
    if tune == "predcp" and not (exact and isinstance(chosen, ConvFilterGP)):
        raise ValueError(_NO_PREDCP.format(type(chosen).__name__, "exact" if exact else "sampled"))
    data = z, y.flatten(1)
    if exact:
        model = LinearModel(measured, as_source(data, measured, likelihood), likelihood, memory_budget=0)
        posterior = ObservationSpacePosterior(model, chosen, likelihood, K=PixelGram(pixels, z), A=operator)
        posterior._prepare()
        found = Reconstruction(dip, operator, posterior, pixels)
        if tune == "predcp":
            rate = penalty * y.numel() / (2 * residual)
            add_predcp(chosen, posterior.K.atoms(chosen), found.mean[0], rate)
    else:
        posterior = fit(measured, data, likelihood, "sampled", chosen, tune=False, **options)
        found = SampledReconstruction(dip, operator, posterior, pixels)
    if tune is not None:
        found.posterior.tune(steps=tuning_steps or (100 if exact else 5), progress=progress)
    return found


def _is_exact(method: str, A: Measurement, net: nn.Module) -> bool:
    weights = sum(m.weight.numel() for m in net.modules() if isinstance(m, nn.Conv2d))
    bytes_ = (A.image_shape.numel() + A.measured_shape.numel()) * weights * 8
    return method == "exact" or (method == "auto" and bytes_ <= _EXACT_BYTES)


def _input(A: Measurement, y: Tensor) -> Tensor:  # (1, *image_shape)
    if isinstance(A, RayTransform):
        return A.fbp(y)
    x = A.A_adjoint(y)
    return x / x.square().mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
