"""The reconstruction as a Gaussian model: a network trained on one measurement, linearised at its weights."""

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
from ntkgp.inverse.operators import Measurement, as_measurement, in_double
from ntkgp.inverse.predcp import add_predcp
from ntkgp.inverse.priors import PRIORS
from ntkgp.inverse.ray_transform import RayTransform
from ntkgp.inverse.setting import METHODS, PriorChoice, Setting, settled
from ntkgp.inverse.unet import UNet
from ntkgp.likelihoods import Gaussian
from ntkgp.linearization import Linearization
from ntkgp.posteriors import SampledPosterior, fit
from ntkgp.posteriors.data import as_source
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import ConvFilterGP

__all__ = ["Reconstruction", "reconstruct"]

_KEEP_NOTHING = 0  # bytes for features of the measurement, which the exact posterior does not need


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

    def _patch_covariances(self, index: Tensor) -> Tensor:  # (m, n) -> (m, n, n)
        return self.posterior.image_covariance()[index.unsqueeze(2), index.unsqueeze(1)]


class SampledReconstruction(BySamples, Reconstruction):
    """The same model by samples of its posterior, and covariances by averages over them.

    Nothing is larger than a few images and weight vectors for each sample; with S samples standard deviations have a
    relative error of about 1 / √(2 S).
    """

    posterior: SampledPosterior

    def refine(self, **options: Any) -> "Reconstruction":
        """Return the reconstruction whose mean is that of the linear model; noise is Gaussian, so samples stay.

        Args:
            options: of :meth:`SampledPosterior.refine`, as ``steps=5`` to bound the search.
        """
        return super().refine(**{"curvature_at": "map"} | options)

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
    prior: PriorChoice | None = ...,
    tune: str | None = ...,
    method: str = ...,
    noise: float | None = ...,
    penalty: float = ...,
    steps: int = ...,
    rate: float = ...,
    patience: int | None = ...,
    seed: int = ...,
    progress: bool | None = ...,
    **options: Any,
) -> Reconstruction: ...


def reconstruct(
    A: Any,
    y: Tensor,
    net: nn.Module | None = None,
    z: Tensor | None = None,
    prior: PriorChoice | None = None,
    tune: str | None = "evidence",
    method: str = "auto",
    noise: float | None = None,
    penalty: float = 3e-5,
    steps: int = 5000,
    rate: float = 1e-4,
    patience: int | None = None,
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
        prior: over convolution weights (other parameters have none, unless there is no convolution): "conv_filter",
            "iid", "layerwise", "g_prior" (in the units of the measurement), or a function of the linearisation; by
            default "conv_filter" for the exact method, where there are filters, and "layerwise" for samples.
        tune: "evidence"; "predcp" for type-II MAP with the TV-PredCP hyperprior; None to leave the prior as it is.
        method: "exact"; "sampled", matrix-free, whose evidence is maximised by EM and which knows no PredCP; "auto" for
            exact if the Jacobian and its Gram matrices fit 2 GB; or, without network and error bars, "fbp", "tikhonov"
            and "tv" (see :func:`classical`), which take no argument but ``penalty``.
        noise: σ², the variance of the measurement's noise; None to learn it, starting at the network's residual.
        penalty: γ, of total variation while training.
        steps: of training.
        rate: of training.
        patience: stop training after so many steps without a better loss; None to take all steps.
        seed: of the default network, and of the samples.
        progress: whether to show bars; by default in a terminal.
        options: ``tuning_steps``, see :func:`linearized`, and those of :class:`SampledPosterior` for samples.

    Raises:
        TypeError: if an option is not known.
        ValueError: if a name is not known, a shape does not fit, or choices do not go together.
    """
    if method not in (*METHODS, *CLASSICAL):
        raise ValueError(f"method must be one of {', '.join((*METHODS, *CLASSICAL))}, but is {method!r}")
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
    tuning_steps = options.pop("tuning_steps", None)
    setting = settled(operator, net, prior, tune, method, noise, penalty, options)  # before hours of training
    if not setting.exact:
        setting.options.setdefault("seed", seed)
    z = _input(operator, y) if z is None else z
    dip = train(operator, y, net, z, penalty, steps, rate, patience=patience, progress=progress)
    return _linearized(dip, operator, y, setting, tuning_steps, progress)


def linearized(
    dip: DeepImagePrior,
    A: Measurement,
    y: Tensor,
    prior: PriorChoice | None = None,
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
    setting = settled(A, dip.net, prior, tune, method, noise, penalty, options)
    return _linearized(dip, A, y, setting, tuning_steps, progress)


def _linearized(
    dip: DeepImagePrior, A: Measurement, y: Tensor, setting: Setting, tuning_steps: int | None, progress: bool | None
) -> Reconstruction:
    dtype = torch.float64 if setting.exact else y.dtype
    net = deepcopy(dip.net).to(dtype).requires_grad_(True)
    operator = in_double(A, y) if setting.exact else deepcopy(A)
    z, y = dip.z.to(dtype), y.to(dtype)
    names = [f"net.{name}" for name in setting.parameters]
    measured, pixels = (
        Linearization(part, parameters=names, example=z) for part in (Measured(net, operator), Pixels(net))
    )
    with torch.no_grad():
        residual = (operator(net(z)) - y).square().mean().item()
    noise = residual if setting.noise is None else setting.noise
    likelihood = Gaussian(noise, learn_noise=setting.noise is None).to(dtype)
    prior = setting.prior
    chosen = PRIORS[prior](measured, net) if isinstance(prior, str) else prior(measured)
    data = z, y.flatten(1)
    if setting.exact:
        model = LinearModel(measured, as_source(data, measured, likelihood), likelihood, _KEEP_NOTHING)
        posterior = ObservationSpacePosterior(model, chosen, likelihood, K=PixelGram(pixels, z), A=operator)
        posterior._prepare()
        found = Reconstruction(dip, operator, posterior, pixels)
        if setting.tune == "predcp":
            if not isinstance(chosen, ConvFilterGP):
                raise ValueError(f'tune="predcp" is for a ConvFilterGP, but prior returned a {type(chosen).__name__}')
            rate = setting.penalty * y.numel() / (2 * noise)
            add_predcp(chosen, posterior.K.atoms(chosen), found.mean[0], rate)
    else:
        posterior = fit(measured, data, likelihood, "sampled", chosen, tune=False, **setting.options)
        found = SampledReconstruction(dip, operator, posterior, pixels)
    if setting.tune is not None:
        found.posterior.tune(steps=tuning_steps or (100 if setting.exact else 5), progress=progress)
    return found


def _input(A: Measurement, y: Tensor) -> Tensor:  # (1, *image_shape)
    if isinstance(A, RayTransform):
        return A.fbp(y)
    x = A.A_adjoint(y)
    return x / x.square().mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
