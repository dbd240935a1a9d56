"""Large results lie on huge pages, and are tensors like any other; what is freed is there for the next time."""

import platform
import subprocess
import sys

import pytest
import torch
from cases import BY_NAME, relative_error

from ntkgp import Linearization, NTKKernel, priors
from ntkgp.linearization import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_from_the_system_has_the_shape_and_dtype_asked_for(dtype, monkeypatch):
    monkeypatch.setattr(memory, "_WORTH_IT", 1)
    block = memory.empty((700, 3001), torch.zeros(1, dtype=dtype))  # more than one page for each thread
    assert (block.shape, block.dtype) == ((700, 3001), dtype)
    block.copy_(torch.arange(block.numel(), dtype=dtype).view_as(block))
    assert torch.equal(block.flatten(), torch.arange(block.numel(), dtype=dtype))


def test_a_gram_on_such_a_block_is_the_oracle(float64, monkeypatch):
    monkeypatch.setattr(memory, "_WORTH_IT", 1)
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    monkeypatch.setattr("ntkgp.linearization.linearization._CAPTURE_BYTES", 1)
    J = lin.jacobian(x).flatten(0, 1)
    with torch.no_grad():
        K = NTKKernel(lin, priors.Isotropic(lin), engine="layerwise").gram(x)
    assert relative_error(K, J @ J.mT) < 1e-10


FAULTS = """
import resource
for step in range(15):
    if step == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    again()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
TRAINING = """
import torch
from torch import nn
from ntkgp.training import VariationalLaplace

torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Softplus(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(),
                    nn.Linear(3136, 10))
vl = VariationalLaplace(net, num_data=1000)
x, y = torch.rand(128, 1, 14, 14), torch.randint(10, (128,))
def again(): vl.loss(x, y).backward()
"""
GRAM = """
import torch, ntkgp
from torch import nn

torch.set_num_threads(1)
lin = ntkgp.Linearization(nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10)))
x, K = torch.randn(300, 50), torch.zeros(3000, 3000)
kernel = ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin))
def again(): kernel.gram(x, out=K)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back between steps")
@pytest.mark.parametrize("work", [TRAINING, GRAM], ids=["training", "gram"])
def test_what_is_freed_is_not_faulted_in_again(work):
    done = subprocess.run([sys.executable, "-c", work + FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400  # a tensor of activations has 392 pages; some four and two thousand without
