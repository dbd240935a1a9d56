"""The Laplacian autoencoder: weights are drawn while they are learnt, as their curvature says (Miani et al. 2022)."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntkgp.curvature.layerwise import METHODS
from ntkgp.evidence import precision_step
from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input
from ntkgp.posteriors import Posterior
from ntkgp.posteriors.data import shuffled
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.tuning import hidden
from ntkgp.priors import Covariance, Grouped, Prior
from ntkgp.priors.covariance import rows_times
from ntkgp.training.autoencoders.network import Autoencoder
from ntkgp.training.autoencoders.objective import AutoencoderObjective
from ntkgp.training.autoencoders.running import RunningCurvature, RunningDiagonal
from ntkgp.training.autoencoders.running_kronecker import RunningKronecker
from ntkgp.training.objective import Terms

__all__ = ["LaplacianAutoencoder"]

# Added to seeds, so that columns do not repeat draws; within 32 bits, as torch's generator on a CPU reads no more.
_ONLINE, _POST_HOC = 0x9E3779B9, 0x7F4A7C15


class LaplacianAutoencoder(AutoencoderObjective):
    r"""q = N(θ, (H + I/s²)⁻¹) over the weights of an autoencoder, H the GGN of the data in some structure.

    H is diagonal as in the paper, or, with ``method="kron"``, a Kronecker product for each layer: weights of a layer
    are drawn together, and what the data say of their sums is not taken for what they say of each.

    Online, by Monte Carlo EM: a step draws networks from q and goes down the gradient of E_q[−log p(x | f)] in θ
    (Eq. 8); H follows the curvature G of the minibatch of S points, at the θ where the step starts. ``scale`` says how:

    .. math:: H \leftarrow (1 - \alpha) H + c \, G \quad (c \text{ a number}), \qquad
       H \leftarrow (1 - a_t) H + a_t \frac{N}{S} G \quad (\text{"calibrated"})

    The first is Eq. 11 for c = 1; it settles at c S / (α N) times the curvature of the data, so that α decides how
    often these are counted. The second counts them once: a_t = α / (1 − (1 − α)^t) makes H a mean over all steps t, the
    latest with most weight. In the paper the prior is forgotten with the rest of H; here 1/s² stays. Kronecker factors
    are sums over data, and move one by one.

    Post hoc: train by any means, then :meth:`post_hoc`, one pass for H, that of all data. Online training goes on best
    from there. From scratch H is unknown, and a prior that is wide beside 1 / √fan-in drowns codes in noise:
    then the encoder has no curvature, and the noise stays. In a loop of one's own:

    .. code-block:: python

        lae = ntkgp.training.LaplacianAutoencoder(encoder, decoder, num_data=60_000)  # both trained
        lae.post_hoc(loader)
        lae.tune()
        optimizer = torch.optim.Adam(lae.parameter_groups(lr=1e-3))
        for x, _ in loader:
            optimizer.zero_grad()
            lae.loss(x).backward()
            lae.update(x)
            optimizer.step()
        post = lae.posterior(loader)

    Args:
        args: encoder, decoder, likelihood ... as :class:`AutoencoderObjective` takes them.
        method: "kron", or of a diagonal: "approximate", "mixed" or "exact", see :meth:`LayerwiseCurvature.diagonal`.
        bound: for "mixed", up to how many columns M is whole: with more than the codes have, encoders are exact.
        columns: for "kron", how many random columns of the curvature's root each example of a batch has: as many
            backward passes; by default 1.
        every: for "kron", steps between eigendecompositions: what is drawn from in training may be so old; by default
            50.
        alpha: α, how fast curvature is forgotten.
        scale: "calibrated", or c.
        num_samples: networks drawn at each step.
        options: as :class:`AutoencoderObjective` takes them.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a name is not known, a number is out of range, or the curvature of a layer has no rule.
    """

    def __init__(
        self,
        *args: Any,
        method: str = "approximate",
        bound: float | None = None,
        columns: int | None = None,
        every: int | None = None,
        alpha: float = 1e-4,
        scale: float | str = "calibrated",
        num_samples: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be above 0 and at most 1, but is {alpha}")
        if scale != "calibrated" and not (isinstance(scale, int | float) and 0 < scale < float("inf")):
            raise ValueError(f'scale must be "calibrated" or a positive number, but is {scale!r}')
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
        if method not in (*METHODS, "kron"):
            raise ValueError(f"method must be one of {', '.join((*METHODS, 'kron'))}, but is {method!r}")
        foreign = {"bound": bound} if method == "kron" else {"columns": columns, "every": every}
        for name, value in foreign.items():
            if value is not None:
                raise ValueError(f"{name} must be None for method={method!r}, but is {value}")
        self.method, self.alpha, self.scale, self.num_samples = method, float(alpha), scale, num_samples
        self._told |= {"method": method, "bound": str(bound), "alpha": str(self.alpha), "scale": str(scale)}
        self._told |= {"num_samples": str(num_samples)}
        common = self.net, self.layout, self._output_root, self.prior_std
        self.curvatures: RunningCurvature
        if method == "kron":
            columns, every = 1 if columns is None else columns, 50 if every is None else every
            self.curvatures = RunningKronecker(*common, columns, every)
            self._told |= {"columns": str(columns), "every": str(every)}
        else:
            self.curvatures = RunningDiagonal(*common, method, bound)
        self.register_buffer("mass", torch.zeros((), dtype=torch.float64, device=self.prior_std.device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=self.prior_std.device))
        self.mass: Tensor  # (), 1 − (1 − α)^t: how much of a mean H is
        self.updates: Tensor  # (), t

    def _output_root(self, y: Tensor, f: Tensor) -> SiteBlocks:
        return self.likelihood.expand(self._targets(y, f), f).R

    @property
    def h(self) -> Tensor:  # (P,)
        """The eigenvalues of H: its diagonal where it is diagonal."""
        return self.curvatures.eigenvalues()

    # q

    def variances(self) -> Tensor:  # (P,)
        """Return the diagonal of (H + I/s²)⁻¹."""
        covariances = self.curvatures.covariances(self.prior_std)
        sizes = zip(self.layout.names, self.layout.sizes, strict=True)
        return torch.cat([covariances[name].diagonal(p) for name, p in sizes])

    def draw(self, generator: torch.Generator | None = None) -> Tensor:  # (P,)
        """Return θ + L ε with L Lᵀ = (H + I/s²)⁻¹, differentiable in θ.

        Args:
            generator: of ε; by default this object's own.
        """
        return self._drawn(self.curvatures.covariances(self.prior_std, fresh=False), generator or self.generator)

    def _drawn(self, covariances: dict[str, Covariance], generator: torch.Generator) -> Tensor:  # (P,)
        theta = self.mean()
        noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
        return theta + rows_times(noise, {name: cov.root().mT for name, cov in covariances.items()}, self.layout)

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Autoencoder]:
        """Yield n networks drawn from q.

        Args:
            n: how many.
            generator: by default seed 0, so that they repeat.
        """
        generator = generator or torch.Generator(self.prior_std.device).manual_seed(0)
        covariances = self.curvatures.covariances(self.prior_std)
        for _ in range(n):
            drawn = deepcopy(self.net).eval().requires_grad_(False)
            with torch.no_grad():
                for name, value in self.layout.split(self._drawn(covariances, generator)).items():
                    drawn.get_parameter(name).copy_(value)
            yield drawn

    # Training

    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective for a minibatch, log p as a mean over drawn networks.

        Args:
            x: S inputs.
            y: what is reconstructed.
            generator: of the draws; by default this object's own.
        """
        total = torch.zeros_like(self.prior_std[0])
        for _ in range(self.num_samples):
            f = self.outputs(x, self.layout.split(self.draw(generator)))
            total = total + self.likelihood.log_prob(self._targets(y, f), f).mean()
        divergence = (self.mean() / self.prior_std).square().sum() / 2
        return Terms(total / self.num_samples, torch.zeros_like(total), divergence / self._size(), self.beta)

    def update(self, x: Input, y: Tensor | None = None) -> None:
        """Move H by a minibatch, at θ as it is now: call it between the gradient and the step.

        Args:
            x: S inputs.
            y: what is reconstructed; by default x.
        """
        y = self._own(x, y)
        seed = _ONLINE + self.seed * 1_000_003 + int(self.updates)
        G = self.curvatures.of(x, y, torch.Generator(self.prior_std.device).manual_seed(seed))
        with torch.no_grad():
            self.updates.add_(1)
            self.mass.mul_(1 - self.alpha).add_(self.alpha)
            if self.scale == "calibrated":
                a = self.alpha / self.mass.item()
                self.curvatures.move(G, 1 - a, a * self._size() / len(y))
            else:
                self.curvatures.move(G, 1 - self.alpha, float(self.scale))

    def before_step(self, x: Input, y: Tensor) -> None:
        """Move H."""
        self.update(x, y)

    # After training

    def post_hoc(
        self, data: Any, batch_size: int = 128, progress: bool | None = None, memory_budget: int = 4 << 30
    ) -> Posterior:
        """Set H to the curvature of all data at θ, by one pass, and return the posterior.

        Args:
            data: X, a Dataset or a DataLoader.
            batch_size: points at a time; a loader has its own.
            progress: whether to show a bar; by default in a terminal.
            memory_budget: bytes that the features of the posterior may take.

        Raises:
            ValueError: if data do not fit, or are not N.
        """
        from ntkgp.training.loop import checked_source

        lin, source = checked_source(self, self._pairs(data))
        total: dict[str, Tensor] = {}
        n, generator = 0, torch.Generator(lin.device).manual_seed(_POST_HOC + self.seed)
        batches = shuffled(source, batch_size, torch.Generator().manual_seed(self.seed), lin, self.likelihood)
        for batch in tqdm(batches, desc="curvature", unit="batches", disable=hidden(progress)):
            for name, t in self.curvatures.of(batch.x, batch.y, generator).items():
                total[name] = total[name].add_(t) if name in total else t
            n += len(batch)
        if self.num_data not in (None, n):
            raise ValueError(f"num_data is {self.num_data}, but data have {n} points")
        self.num_data = n
        self.curvatures.take(total)
        self.mass.fill_(1.0)
        return self._posterior(lin, source, memory_budget)

    def tune(self, steps: int = 100) -> float:
        """Move the precision 1/s² to MacKay's fixed point γ / ‖θ‖² under H, and return s.

        Args:
            steps: at most.

        Raises:
            ValueError: if the prior has more than one precision, or H is not known yet.
        """
        if not self._isotropic:
            raise ValueError("tune needs one prior_std for all weights, but it was given by name: tune the posterior")
        if not self.mass > 0:
            raise ValueError("there is no curvature yet: train, or call post_hoc, before tune")
        h, square = self.h.double(), self.mean().detach().double().square().sum()
        precision = self.prior_std[0].double() ** -2
        for _ in range(steps):
            before, gamma = precision, (h / (h + precision)).sum()
            precision = precision_step(before, gamma, before * square)
            if abs(precision / before - 1) < 1e-6:
                break
        self.prior_std.fill_(precision.rsqrt().item())
        return self.prior_std[0].item()

    def prior_over(self, lin: Linearization) -> Prior:
        """Return the prior; where it was given by name and H has correlations, with one precision a parameter."""
        if self._isotropic or self.method != "kron":
            return super().prior_over(lin)
        precisions = torch.stack([part[0] ** -2 for part in self.prior_std.split(self.layout.sizes)])
        return Grouped(lin, {name: [name] for name in self.layout.names}, precisions)

    def posterior_of(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return q."""
        return self.curvatures.posterior(model, prior)
