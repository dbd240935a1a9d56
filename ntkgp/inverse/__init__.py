"""Inverse problems: measurements y = A x + ε of images whose prior is a network."""

from ntkgp.inverse import design, phantoms
from ntkgp.inverse.baselines import Draws, UnitNoise, ensemble, mc_dropout
from ntkgp.inverse.classical import Classical, tikhonov, total_variation_reconstruction
from ntkgp.inverse.deep_image_prior import DeepImagePrior, train
from ntkgp.inverse.gaussian_image import GaussianImage
from ntkgp.inverse.operators import Blur, Fourier, Mask, Matrix, Measurement, Physics, as_measurement
from ntkgp.inverse.ray_transform import RayTransform
from ntkgp.inverse.reconstruction import Reconstruction, SampledReconstruction, linearized, reconstruct
from ntkgp.inverse.total_variation import total_variation
from ntkgp.inverse.unet import UNet

__all__ = [
    "Blur",
    "Classical",
    "DeepImagePrior",
    "Draws",
    "Fourier",
    "GaussianImage",
    "Mask",
    "Matrix",
    "Measurement",
    "Physics",
    "RayTransform",
    "Reconstruction",
    "SampledReconstruction",
    "UNet",
    "UnitNoise",
    "as_measurement",
    "design",
    "ensemble",
    "linearized",
    "mc_dropout",
    "phantoms",
    "reconstruct",
    "tikhonov",
    "total_variation",
    "total_variation_reconstruction",
    "train",
]
