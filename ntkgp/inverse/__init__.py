"""Inverse problems: measurements y = A x + ε of images whose prior is a network."""

from ntkgp.inverse.operators import Blur, Fourier, Mask, Matrix, Measurement, Physics, as_measurement
from ntkgp.inverse.ray_transform import RayTransform

__all__ = ["Blur", "Fourier", "Mask", "Matrix", "Measurement", "Physics", "RayTransform", "as_measurement"]
