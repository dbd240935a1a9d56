"""Large results lie on huge pages, and are tensors like any other; what is freed is there for the next time."""

import platform
import subprocess
import sys
from threading import Thread

import pytest
import torch
from cases import BY_NAME, relative_error
from torch.testing import assert_close

from ntkgp import Linearization, NTKKernel, priors
from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import memory


def test_copies_without_gaps_are_made_where_there_are_gaps(monkeypatch):
    monkeypatch.setattr(memory, "_WORTH_IT", 1)
    x = torch.arange(6.0).view(2, 3)
    assert memory.contiguous(x) is x
    assert torch.equal(memory.contiguous(x.mT), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    learnt = x.clone().requires_grad_()
    memory.contiguous(learnt.mT)[1].sum().backward()
    assert torch.equal(learnt.grad, torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(("k", "columns"), [(1, 1), (3, 3), (3, 2), (1, 2)])
def test_blocks_times_jacobians_on_such_a_block_are_products_of_matrices(T, k, columns, float64, monkeypatch):
    monkeypatch.setattr(memory, "_WORTH_IT", 1)
    R, J = SiteBlocks(torch.randn(4, T, k, columns)), torch.randn(4, columns * T, 5)
    found = R.columns(J)
    assert (found.shape, found.dtype) == ((4, k * T, 5), torch.float64)
    assert_close(found, R.dense() @ J, rtol=1e-12, atol=1e-12)
    R.values.requires_grad_()
    assert_close(R.columns(J), found, rtol=1e-12, atol=1e-12)
    assert R.columns(J).requires_grad


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


@pytest.fixture
def spare(monkeypatch):
    monkeypatch.setattr(memory, "_SPARE", memory._Spare())
    monkeypatch.setattr(memory, "_WORTH_IT", 1 << 12)
    monkeypatch.setattr(memory, "_SPARE_BYTES", 3 << 13)  # three blocks of the tests' size
    return memory._SPARE


def block(size=2048):
    return memory.empty((size,), torch.zeros(1))


def test_a_freed_block_is_there_for_the_next_result_of_its_size(spare):
    first = block()
    place, view = first.data_ptr(), first[7:]
    del first
    assert block().data_ptr() != place  # a view still uses it
    del view
    assert block(2049).data_ptr() != place
    again = block().double()  # a copy, so the block is free at once
    assert block().data_ptr() == place
    assert again.dtype == torch.float64


def test_blocks_in_use_never_share_memory(spare):
    blocks = [block().fill_(i) for i in range(5)]
    del blocks[1::2]
    blocks += [block().fill_(i) for i in range(10, 14)]
    assert [b.unique().tolist() for b in blocks] == [[0], [2], [4], [10], [11], [12], [13]]
    assert len({b.data_ptr() for b in blocks}) == 7


def test_no_more_memory_is_kept_than_is_allowed(spare):
    blocks = [block() for _ in range(5)]
    last = {b.data_ptr() for b in blocks[2:]}
    while blocks:
        del blocks[0]
    assert sum(map(len, spare._blocks)) == 3 << 13
    assert {block().data_ptr()} < last
    large = block(1 << 14)
    del large
    assert {len(b) for b in spare._blocks} == {1 << 13}  # it goes at once, and the others stay


def lazily_freed():
    with open("/proc/self/smaps") as maps:
        return sum(int(line.split()[1]) << 10 for line in maps if line.startswith("LazyFree:"))


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux tells what it may take back")
def test_the_system_may_take_the_pages_of_what_is_kept(spare, monkeypatch):
    monkeypatch.setattr(memory, "_SPARE_BYTES", 16 << 20)
    held = block(4 << 20).fill_(1)
    before, place = lazily_freed(), held.data_ptr()
    del held
    assert lazily_freed() - before >= 8 << 20  # the last pages may still wait in a list of a processor's own
    assert block(4 << 20).data_ptr() == place


def test_a_block_that_is_freed_by_another_thread_is_kept(spare):
    held = [block()]
    place = held[0].data_ptr()
    thread = Thread(target=held.clear)
    thread.start()
    thread.join()
    assert block().data_ptr() == place


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
