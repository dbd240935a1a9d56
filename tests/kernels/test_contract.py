"""The kernel keeps the promises that GPyTorch's own test case asks for."""

import unittest

import gpytorch
import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from torch import nn

from ntkgp import Linearization, NTKKernel, priors


class FirstColumns(nn.Module):
    """A network that takes rows of any length, as the test case asks of kernels: it reads the first two numbers."""

    def __init__(self, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))

    def forward(self, x):
        return self.net(x[:, :2])


class _KernelCase(BaseKernelTestCase):
    outputs: int

    def create_kernel_no_ard(self, batch_shape=None, **kwargs):
        torch.manual_seed(1)
        lin = Linearization(FirstColumns(self.outputs))
        shape = torch.Size([]) if batch_shape is None else batch_shape
        return NTKKernel(lin, priors.Isotropic(lin, 0.5 + torch.rand(*shape, 1)), **kwargs)


class TestOneOutput(_KernelCase, unittest.TestCase):
    outputs = 1


class TestThreeOutputs(_KernelCase, unittest.TestCase):
    outputs = 3


def test_the_test_case_is_the_one_gpytorch_ships():
    assert BaseKernelTestCase.__module__.startswith(gpytorch.__name__)
