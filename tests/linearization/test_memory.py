"""Large results lie on huge pages, and are tensors like any other."""

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
