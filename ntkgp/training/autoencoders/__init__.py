"""Autoencoders that know what they do not know, and what one asks of them."""

from ntkgp.training.autoencoders.dropout import DropoutAutoencoder
from ntkgp.training.autoencoders.ensemble import AutoencoderEnsemble
from ntkgp.training.autoencoders.imputation import generated, imputed
from ntkgp.training.autoencoders.laplacian import LaplacianAutoencoder
from ntkgp.training.autoencoders.moments import Decoding, Reconstruction, codes, decoded, reconstructed
from ntkgp.training.autoencoders.neighbours import CodeNeighbours
from ntkgp.training.autoencoders.network import Autoencoder, Heads
from ntkgp.training.autoencoders.objective import AutoencoderObjective, Draw, StochasticAutoencoder
from ntkgp.training.autoencoders.ood import ood_scores
from ntkgp.training.autoencoders.plain import PlainAutoencoder
from ntkgp.training.autoencoders.variational import VariationalAutoencoder

__all__ = [
    "Autoencoder",
    "AutoencoderEnsemble",
    "AutoencoderObjective",
    "CodeNeighbours",
    "Decoding",
    "Draw",
    "DropoutAutoencoder",
    "Heads",
    "LaplacianAutoencoder",
    "PlainAutoencoder",
    "Reconstruction",
    "StochasticAutoencoder",
    "VariationalAutoencoder",
    "codes",
    "decoded",
    "generated",
    "imputed",
    "ood_scores",
    "reconstructed",
]
