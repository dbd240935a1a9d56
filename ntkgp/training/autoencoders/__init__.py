"""Autoencoders that know what they do not know, and what one asks of them."""

from ntkgp.training.autoencoders.laplacian import LaplacianAutoencoder
from ntkgp.training.autoencoders.network import Autoencoder, Heads
from ntkgp.training.autoencoders.objective import AutoencoderObjective, Draw, StochasticAutoencoder

__all__ = ["Autoencoder", "AutoencoderObjective", "Draw", "Heads", "LaplacianAutoencoder", "StochasticAutoencoder"]
