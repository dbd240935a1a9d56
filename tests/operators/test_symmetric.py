"""One triangle of A Aᵀ, and Gram matrices that are made of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threadpoolctl import ThreadpoolController
from torch.testing import assert_close

import ntkgp
from ntkgp.operators import symmetric
from ntkgp.operators.symmetric import add_square, has_square, mirror

DTYPES = [(torch.float32, 1e-5), (torch.float64, 1e-12)]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(symmetric, "_WORTH_IT", 0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_lower_triangle_is_written_and_nothing_else(dtype, tolerance, fresh, transposed, always):
    torch.manual_seed(0)
    A, K = torch.randn(7, 5, dtype=dtype), torch.randn(7, 7, dtype=dtype)
    A = A.mT.contiguous().mT if transposed else A
    before = K.clone()
    assert has_square(A, K)
    add_square(K, A, 0.3, fresh)
    truth = 0.3 * A.double() @ A.double().mT + (0 if fresh else before.double())
    assert_close(K.double().tril(), truth.tril(), rtol=tolerance, atol=tolerance)
    assert torch.equal(K.triu(1), before.triu(1))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_large_triangles_are_taken_in_panels(dtype, tolerance, fresh, transposed, always, monkeypatch):
    monkeypatch.setattr(symmetric, "_SIDE", 3)
    monkeypatch.setattr(symmetric, "_AT_ONCE", 18)  # two columns of a square, one of what is left of it
    called, real = [], symmetric._blas
    monkeypatch.setattr(symmetric, "_blas", lambda *which: called.append(which[0]) or real(*which))
    test_the_lower_triangle_is_written_and_nothing_else(dtype, tolerance, fresh, transposed, always)
    assert (called.count("syrk"), called.count("gemm")) == (3 + 3 + 1, 3 + 2)


def test_what_was_there_does_not_count_if_fresh(always):
    A, K = torch.ones(3, 2), torch.full((3, 3), float("nan"))
    add_square(K, A, 1.0, fresh=True)
    assert_close(K.tril(), torch.full((3, 3), 2.0).tril())


def test_views_foreign_dtypes_and_small_matrices_are_left_to_torch(always, monkeypatch):
    A, K = torch.randn(6, 4), torch.zeros(6, 6)
    assert has_square(A, K)
    assert has_square(A.mT.contiguous().mT, K)
    assert not has_square(torch.randn(6, 8)[:, ::2], K)
    assert not has_square(A, torch.zeros(6, 7)[:, :6])
    assert not has_square(A.half(), K)
    assert not has_square(A.double(), K)
    monkeypatch.undo()
    assert not has_square(A, K)


def test_blas_takes_as_many_threads_as_torch_and_then_its_own_again(always, monkeypatch):
    def counts():
        return [lib.num_threads for lib in ThreadpoolController().select(user_api="blas").lib_controllers]

    seen, syrk = [], symmetric._blas("syrk", torch.float32)
    monkeypatch.setattr(symmetric, "_blas", lambda name, dtype: lambda *words: seen.extend(counts()) or syrk(*words))
    symmetric._threads()
    before = counts()
    A, K = torch.randn(3, 2), torch.zeros(4, 3, 3)
    with ThreadPoolExecutor(4) as pool:  # one after the other: the number is the whole process's
        list(pool.map(lambda k: add_square(k, A, 1.0, fresh=True), K))
    assert seen
    assert set(seen) == {torch.get_num_threads()}
    assert counts() == before
    assert_close(K.tril(), (A @ A.mT).tril().expand(4, 3, 3))


@pytest.mark.parametrize("transposed", [True, False])
def test_long_products_are_taken_in_parts(transposed, always, monkeypatch):
    calls, syrk = [], symmetric._blas("syrk", torch.float64)
    monkeypatch.setattr(symmetric, "_AT_ONCE", 60)
    monkeypatch.setattr(symmetric, "_blas", lambda name, dtype: lambda *words: calls.append(1) or syrk(*words))
    A, K = torch.randn(5, 7, dtype=torch.float64), torch.full((5, 5), float("nan"), dtype=torch.float64)
    A = A.mT.contiguous().mT if transposed else A
    add_square(K, A, 2.0, fresh=True)
    assert len(calls) == 4
    assert_close(K.tril(), (2 * A @ A.mT).tril())


def test_the_lower_triangle_is_mirrored_square_by_square(monkeypatch):
    monkeypatch.setattr(symmetric, "_MIRROR", 3)
    torch.manual_seed(0)
    K = torch.randn(8, 8)
    lower = K.tril()
    K[torch.ones(8, 8).triu(1).bool()] = float("nan")
    mirror(K)
    assert torch.equal(K, lower + lower.tril(-1).mT)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_curvature_is_that_of_the_dense_jacobian(dtype, tolerance, always, monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).to(dtype)
    x, y = torch.randn(9, 4, dtype=dtype), torch.randint(3, (9,))
    called, real = [], symmetric._blas
    monkeypatch.setattr(symmetric, "_blas", lambda *which: called.append(which[0]) or real(*which))
    lin = ntkgp.Linearization(net, example=x)
    post = ntkgp.fit(lin, (x, y), "categorical", "full", ntkgp.priors.Isotropic(lin, 2.0))
    J, p = lin.jacobian(x).double(), net(x).softmax(-1).detach().double()
    curvature = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    H = torch.einsum("ncp,ncd,ndq->pq", J, curvature, J)
    Sigma = torch.linalg.inv(H + 2 * torch.eye(len(H), dtype=torch.float64))
    truth = J @ Sigma @ J.mT
    found = post.latent(x).covariance_matrix
    assert called
    assert found.dtype == dtype
    assert_close(found.double(), truth, rtol=tolerance, atol=tolerance * truth.abs().max().item())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("prior", ["isotropic", "grouped"])
def test_gram_matrices_of_convolutions_are_the_dense_ones(dtype, tolerance, prior, always, monkeypatch):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(2, 3, 3), torch.nn.Tanh(), torch.nn.Conv2d(3, 2, 2), torch.nn.Flatten()
    net, x = torch.nn.Sequential(*conv, torch.nn.Linear(32, 3)).to(dtype), torch.randn(5, 2, 7, 7, dtype=dtype)
    lin = ntkgp.Linearization(net, example=x)
    S0 = ntkgp.priors.Isotropic(lin, 0.7) if prior == "isotropic" else ntkgp.priors.Grouped(lin)
    if prior == "grouped":
        S0.precision = torch.tensor([0.5, 1.0, 2.0])
    called, real = [], symmetric._blas
    monkeypatch.setattr(symmetric, "_blas", lambda *which: called.append(which[0]) or real(*which))
    J = lin.jacobian(x).flatten(0, 1).double()
    truth = J @ S0.covariance().to_dense().double() @ J.mT
    kernel = ntkgp.NTKKernel(lin, S0)
    with torch.no_grad():
        K = kernel.gram(x)
    assert called
    assert K.dtype == dtype
    assert_close(K.double(), truth, rtol=tolerance, atol=tolerance * truth.abs().max().item())
    assert torch.equal(K, K.mT)
