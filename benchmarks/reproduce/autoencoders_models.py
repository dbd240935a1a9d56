"""The networks of autoencoders.py, and how each model is trained."""

from collections.abc import Callable
from pathlib import Path

import torch
from settings import claimed
from torch import Tensor, nn

from ntkgp.training.autoencoders import (
    AutoencoderEnsemble,
    DropoutAutoencoder,
    Heads,
    LaplacianAutoencoder,
    PlainAutoencoder,
    StochasticAutoencoder,
    VariationalAutoencoder,
)

LATENT, FLOOR = 2, 0.01  # numbers in a code; the least variance of a pixel that is predicted


# Networks


def layers(parts: list[list[nn.Module]], dropout: float) -> nn.Sequential:
    """Join what lies between trainable layers, with dropout before all but the first."""
    joined = [[nn.Dropout(dropout), *part] if dropout and i else part for i, part in enumerate(parts)]
    return nn.Sequential(*(module for part in joined for module in part))


def conv_encoder(dropout: float = 0.0) -> nn.Module:
    return layers(
        [
            [nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)],
            [nn.Conv2d(8, 12, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()],
            [nn.Linear(588, 64), nn.Tanh()],
            [nn.Linear(64, 32), nn.Tanh()],
            [nn.Linear(32, LATENT)],
        ],
        dropout,
    )


def conv_decoder(dropout: float = 0.0) -> nn.Module:
    return layers(
        [
            [nn.Linear(LATENT, 32), nn.Tanh()],
            [nn.Linear(32, 64), nn.Tanh()],
            [nn.Linear(64, 588), nn.Tanh(), nn.Unflatten(1, (12, 7, 7)), nn.Upsample(scale_factor=2)],
            [nn.Conv2d(12, 8, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2)],
            [nn.Conv2d(8, 1, 3, padding=1)],
        ],
        dropout,
    )


def linear_encoder(dropout: float = 0.0) -> nn.Module:
    hidden = [[nn.Flatten(), nn.Linear(784, 256), nn.Tanh()], [nn.Linear(256, 64), nn.Tanh()]]
    return layers([*hidden, [nn.Linear(64, LATENT)]], dropout)


def linear_decoder(dropout: float = 0.0) -> nn.Module:
    hidden = [[nn.Linear(LATENT, 64), nn.Tanh()], [nn.Linear(64, 256), nn.Tanh()]]
    return layers([*hidden, [nn.Linear(256, 784)]], dropout)


class Floor(nn.Module):
    """log(e^s + c): without a floor, pixels that are always black draw their variance to 0, and training diverges."""

    def forward(self, s: Tensor) -> Tensor:
        """Return logarithms of variances."""
        return torch.logaddexp(s, s.new_tensor(FLOOR).log())


PAIRS = {"conv": (conv_encoder, conv_decoder), "linear": (linear_encoder, linear_decoder)}


# Models: each is trained, or taken from the cache


class Trainer:
    """Trains models on the images of one experiment, from one seed."""

    def __init__(self, x: Tensor, S: dict, E: dict, seed: int, cache: Path) -> None:
        self.x, self.S, self.E, self.seed, self.cache = x, S, E, seed, cache
        self.encoder, self.decoder = PAIRS[E["network"]]

    def fit(self, model: object, file: str) -> object:
        """Train a model, or go on where it was."""
        return self._fit(model, file, self.E["epochs"], lr=self.S["lr"], milestones=self.E["milestones"])

    def plain(self, seed: int) -> PlainAutoencoder:
        """Return an autoencoder."""
        torch.manual_seed(seed)
        return self.fit(PlainAutoencoder(self.encoder(), self.decoder(), seed=seed), f"AE-{seed}")

    def learned_variance(self) -> PlainAutoencoder:
        """Return an autoencoder that predicts its noise."""
        torch.manual_seed(self.seed)
        model = PlainAutoencoder(self.encoder(), self.heads(), "heteroscedastic", seed=self.seed)
        return self.fit(model, f"AE-variance-{self.seed}")

    def heads(self) -> Heads:
        """Return decoders of means and of logarithms of variances."""
        return Heads(self.decoder(), nn.Sequential(self.decoder(), Floor()))

    def variational(self) -> VariationalAutoencoder:
        """Return a variational autoencoder with two encoders and two decoders."""
        torch.manual_seed(self.seed)
        parts = Heads(self.encoder(), self.encoder()), self.heads()
        options = {"kl_weight": self.S["kl weight"], "seed": self.seed}
        model = VariationalAutoencoder(*parts, "heteroscedastic", **options)
        return self.fit(model, f"VAE-{self.seed}")

    def dropout(self) -> DropoutAutoencoder:
        """Return an autoencoder with dropout."""
        torch.manual_seed(self.seed)
        rate = self.S["dropout"]
        model = DropoutAutoencoder(self.encoder(rate), self.decoder(rate), seed=self.seed)
        return self.fit(model, f"MC-AE-{self.seed}")

    def ensemble(self) -> AutoencoderEnsemble:
        """Return autoencoders from several seeds."""
        return AutoencoderEnsemble([self.plain(self.seed + i) for i in range(self.S["members"])])

    def post_hoc(self, method: str, **memory: float | str) -> LaplacianAutoencoder:
        """Return the autoencoder with the curvature of all images, its prior tuned."""
        net = self.plain(self.seed).net
        model = LaplacianAutoencoder(net.encoder, net.decoder, **self._structure(method), **memory)
        model.post_hoc(self.x, self.S["post hoc batch"], progress=False)
        model.tune()
        return model

    def online(self, method: str, scale: float | str) -> LaplacianAutoencoder:
        """Return an autoencoder that was trained with its curvature.

        Weights start with the deviations of their prior, 1 / √fan-in: with 1 codes drown in noise, so that the encoder
        has no curvature, and the noise stays.
        """
        torch.manual_seed(self.seed)
        parts = {"encoder": self.encoder(), "decoder": self.decoder()}
        named = [(name, module) for name, module in nn.ModuleDict(parts).named_modules() if hasattr(module, "weight")]
        prior_std = {name: module.weight[0].numel() ** -0.5 for name, module in named}
        options = self._structure(method) | {"alpha": self.S["alpha"], "scale": scale, "prior_std": prior_std}
        return self.fit(LaplacianAutoencoder(**parts, **options), f"LAE-{method}-{scale}-{self.seed}")

    def warm(self, alpha: float, scale: float | str, method: str = "mixed") -> LaplacianAutoencoder:
        """Return the autoencoder, trained on with its curvature from where plain training ended."""
        model = self.post_hoc(method, alpha=alpha, scale=scale)
        return self._fit(model, f"LAE-warm-{method}-{scale}-{self.seed}", self.E["warm epochs"], lr=self.S["warm lr"])

    def _fit(self, model: object, file: str, epochs: int, **options: object) -> object:
        with claimed(self.cache / file, wait=True):
            checkpoint = self.cache / file
            model.fit(self.x, epochs, batch_size=self.S["batch"], checkpoint=checkpoint, progress=False, **options)
        return model

    def _structure(self, method: str) -> dict:
        return {"method": method, "bound": self.E["bound"] if method == "mixed" else None, "seed": self.seed}


MODELS: dict[str, Callable[[Trainer], StochasticAutoencoder]] = {
    "AE": lambda t: t.plain(t.seed),
    "AE ensemble": Trainer.ensemble,
    "LAE post hoc, Kronecker": lambda t: t.post_hoc("kron"),
    "LAE online, Kronecker": lambda t: t.warm(t.S["alpha"], 1.0, "kron"),
    "LAE online, calibrated, Kronecker": lambda t: t.warm(t.S["calibrated alpha"], "calibrated", "kron"),
    "LAE post hoc": lambda t: t.post_hoc("mixed"),
    "LAE online": lambda t: t.warm(t.S["alpha"], 1.0),
    "MC-AE": Trainer.dropout,
    "AE, learned variance": Trainer.learned_variance,
    "VAE": Trainer.variational,
    "LAE online, calibrated": lambda t: t.warm(t.S["calibrated alpha"], "calibrated"),
    "LAE online, from scratch": lambda t: t.online("mixed", 1.0),
    "LAE online, from scratch, Kronecker": lambda t: t.online("kron", 1.0),
}
