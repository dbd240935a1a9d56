"""The kernel against dense Jacobians, for every network and prior, and inside GPyTorch's models."""

import copy
import pickle

import gpytorch
import pytest
import torch
from cases import BY_NAME, dense_jacobian, relative_error
from torch import nn
from torch.testing import assert_close

from ntkgp import Linearization, LinearizedMean, NTKKernel, priors


def dense_gram(J, S0):
    """J S₀ Jᵀ with everything dense."""
    J = J.flatten(0, 1)
    return J @ S0 @ J.mT


def test_gram_blocks_and_operator_are_the_oracle_in_float64(case):
    net, x = case.build()
    lin = Linearization(net, case.parameters, example=x)
    J = dense_jacobian(net, x, lin.layout.names)
    N, C, _ = J.shape
    K = J.flatten(0, 1) @ J.flatten(0, 1).mT / 2.5
    kernel = NTKKernel(lin, priors.Isotropic(lin, 2.5))
    with torch.no_grad():
        assert relative_error(kernel.gram(x), K) <= 1e-8
        assert relative_error(kernel.blocks(x), K.view(N, C, N, C).diagonal(dim1=0, dim2=2).movedim(-1, 0)) <= 1e-8
        v = torch.randn(N * C, 2, dtype=K.dtype)
        assert relative_error(kernel.operator(x) @ v, K @ v) <= 1e-8


def test_float32_grams_stay_close_to_the_float64_oracle(case):
    net, x = case.build()
    J = dense_jacobian(net, x, Linearization(net, case.parameters, example=x).layout.names).flatten(0, 1)
    net, x = case.build(torch.float32)
    lin = Linearization(net, case.parameters, example=x)
    K = NTKKernel(lin, priors.Isotropic(lin)).gram(x)
    assert K.dtype == torch.float32
    assert relative_error(K, J @ J.mT) <= 1e-4


PRIORS = {
    "isotropic": lambda lin: priors.Isotropic(lin, 0.7),
    "by layer": lambda lin: priors.Grouped(lin, precision=0.5 + torch.rand(len(lin.groups))),
    "normalized": lambda lin: priors.Grouped(lin, by="normalized", precision=2.0),
    "diagonal": lambda lin: priors.Diagonal(lin, 0.5 + torch.rand(lin.num_params)),
    "kronecker": lambda lin: _correlated(priors.Kronecker(lin, 0.5 + torch.rand(len(lin.layout.names)))),
    "filters": lambda lin: priors.ConvFilterGP(lin, 0.5 + torch.rand(len(lin.layout.names)), 0.8),
}
CONVOLUTIONAL = ["lenet", "transposed", "3-d"]


def _correlated(prior):
    for root in prior.roots.values():
        root.data += 0.3 * torch.randn_like(root)
    return prior


WITH_PRIORS = [
    (name, prior)
    for name in ("mlp", "norms", "transformer", "lstm", "tied", "called twice", *CONVOLUTIONAL)
    for prior in PRIORS
    if prior != "filters" or name in CONVOLUTIONAL
]


@pytest.mark.parametrize(("name", "prior_name"), WITH_PRIORS)
def test_every_prior_gives_its_own_gram(name, prior_name, float64):
    net, x = BY_NAME[name].build()
    lin = Linearization(net, example=x)
    prior = PRIORS[prior_name](lin)
    J, S0 = lin.jacobian(x), prior.covariance().to_dense()
    K, C = dense_gram(J, S0), lin.num_outputs
    kernel = NTKKernel(lin, prior)
    with torch.no_grad():
        assert relative_error(kernel.gram(x), K) < 1e-10
        assert relative_error(kernel.gram(x, x[:2]), K[:, : 2 * C]) < 1e-10
        assert relative_error(kernel.operator(x).to_dense(), K) < 1e-10
        assert relative_error(kernel.operator(x) @ torch.eye(len(K)), K) < 1e-10
        assert relative_error(kernel.operator(x).diagonal(), K.diagonal()) < 1e-10
    assert relative_error(kernel.gram(x), K) < 1e-10
    W = torch.randn_like(K)
    hyperparameters = list(prior.parameters())
    found = torch.autograd.grad((kernel.gram(x) * W).sum(), hyperparameters)
    truth = torch.autograd.grad((dense_gram(J, prior.covariance().to_dense()) * W).sum(), hyperparameters)
    lazy = torch.autograd.grad((W * (kernel.operator(x) @ torch.eye(len(K)))).sum(), hyperparameters)
    for f, t, z in zip(found, truth, lazy, strict=True):
        assert_close(f, t, rtol=1e-8, atol=1e-8)
        assert_close(z, t, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["lenet", "norms"])
def test_groups_with_equal_precisions_keep_their_own_gradients(name, float64):
    net, x = BY_NAME[name].build()
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin)
    J = lin.jacobian(x)
    W = torch.randn(J.shape[0] * J.shape[1], J.shape[0] * J.shape[1])
    truth = torch.autograd.grad((dense_gram(J, prior.covariance().to_dense()) * W).sum(), prior.raw_precision)
    found = torch.autograd.grad((NTKKernel(lin, prior).operator(x).to_dense() * W).sum(), prior.raw_precision)
    assert_close(found, truth, rtol=1e-8, atol=1e-8)


def test_group_grams_are_cached_and_the_network_is_not_differentiated_again(float64, monkeypatch):
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin)
    kernel = NTKKernel(lin, prior)
    kernel.gram(x)
    monkeypatch.setattr(Linearization, "features", lambda *_: pytest.fail("differentiated again"))
    prior.precision = {group: 2.0 + i for i, group in enumerate(prior.groups)}
    K = kernel.gram(x.clone())
    with torch.no_grad():
        assert_close(kernel.gram(x), K)
    assert relative_error(K, dense_gram(lin.jacobian(x), prior.covariance().to_dense())) < 1e-10


def test_a_changed_input_is_not_mistaken_for_a_cached_one(float64):
    net, x = BY_NAME["mlp"].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Isotropic(lin))
    before = kernel.gram(x)
    x[0] += 1
    assert relative_error(kernel.gram(x), dense_gram(lin.jacobian(x), torch.eye(lin.num_params))) < 1e-10
    assert not torch.allclose(kernel.gram(x), before)


@pytest.mark.parametrize("prior_name", ["by layer", "diagonal", "kronecker"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "norms", "transformer"])
def test_gradients_reach_the_inputs(name, prior_name, float64):
    net, x = BY_NAME[name].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, PRIORS[prior_name](lin))
    x, z = x[:2], x[2:].clone().requires_grad_(True)
    S0 = kernel.prior.covariance().to_dense().detach()
    W = torch.randn(2 * lin.num_outputs, len(z) * lin.num_outputs)
    J = lin.jacobian(x).flatten(0, 1)
    (truth,) = torch.autograd.grad((J @ S0 @ lin.jacobian(z).flatten(0, 1).mT * W).sum(), z)
    (found,) = torch.autograd.grad((kernel.gram(x, z) * W).sum(), z)
    lazy_loss = (W * (kernel.operator(x, z) @ torch.eye(W.shape[1]))).sum()
    (lazy,) = torch.autograd.grad(lazy_loss, z)
    assert_close(found, truth, rtol=1e-8, atol=1e-9)
    assert_close(lazy, truth, rtol=1e-8, atol=1e-9)
    JJ = lin.jacobian(z).flatten(0, 1)
    V = torch.randn(len(JJ), len(JJ))
    (truth,) = torch.autograd.grad((JJ @ S0 @ JJ.mT * V).sum(), z)
    assert_close(torch.autograd.grad((kernel.gram(z) * V).sum(), z)[0], truth, rtol=1e-8, atol=1e-9)
    assert_close(torch.autograd.grad((kernel.gram(z, z) * V).sum(), z)[0], truth, rtol=1e-8, atol=1e-9)
    diagonal = kernel(z.flatten(1), diag=True) if name == "mlp" else kernel.operator(z).diagonal()
    JJ = lin.jacobian(z).flatten(0, 1)
    (truth,) = torch.autograd.grad((JJ @ S0 * JJ).sum(), z)
    assert_close(torch.autograd.grad(diagonal.sum(), z)[0], truth, rtol=1e-8, atol=1e-9)


def test_a_cnn_gram_passes_gradcheck_in_its_inputs(float64):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    lin = Linearization(net, example=torch.randn(2, 1, 3, 3))
    kernel = NTKKernel(lin, priors.Isotropic(lin), input_shape=(1, 3, 3))
    z = torch.randn(2, 9, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: kernel(z).to_dense(), (z,))
    assert torch.autograd.gradcheck(lambda z: kernel(torch.ones(1, 9), z).to_dense(), (z,))


def test_images_are_rows_to_gpytorch(float64):
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Isotropic(lin), input_shape=(1, 16, 16))
    rows = x.flatten(1)
    K = kernel.gram(x)
    assert_close(kernel(rows).to_dense(), K)
    assert_close(kernel(rows, rows[:1]).to_dense(), K[:, :4])
    assert_close(kernel(rows, diag=True), K.diagonal())
    assert_close(kernel(rows)[4:8, :4].to_dense(), K[4:8, :4])
    assert_close(kernel(rows)[..., 3:7, 2:].to_dense(), K[3:7, 2:])


@pytest.mark.parametrize(
    "index", [(slice(4, 8), slice(None)), (slice(3, 9), slice(1, 2)), (slice(None, None, 3), [0, 7, 7])]
)
def test_slices_of_the_operator_stay_lazy(index, float64, monkeypatch):
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Isotropic(lin))
    K = kernel.gram(x).detach()
    index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
    monkeypatch.setattr(Linearization, "features", lambda *_: pytest.fail("a dense matrix was formed"))
    part = kernel.operator(x)[index]
    assert_close((part @ torch.eye(part.shape[-1])).detach(), K[index])


def test_gradients_pass_through_lazy_slices_and_their_transposes(float64):
    net, x = BY_NAME["mlp"].build()
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin)
    J, V = lin.jacobian(x), torch.randn(5, 2)
    K = dense_gram(J, prior.covariance().to_dense())
    part = NTKKernel(lin, prior).operator(x)[2:9, 1:6]
    truth = torch.autograd.grad((K[2:9, 1:6] @ V).square().sum(), prior.raw_precision)[0]
    found = torch.autograd.grad((part @ V).square().sum(), prior.raw_precision)[0]
    assert_close(found, truth, rtol=1e-8, atol=1e-8)
    assert_close(numbers(part.mT @ torch.eye(7)), numbers(K)[2:9, 1:6].mT)
    assert_close(numbers(part[1:3].to_dense()), numbers(K)[3:5, 1:6])


def numbers(K):
    """The numbers alone."""
    return K.detach()


def test_batches_of_inputs_and_of_precisions_broadcast(float64):
    net, _ = BY_NAME["mlp"].build()
    lin = Linearization(net)
    precision = torch.tensor([[0.5], [1.0], [4.0]])
    kernel = NTKKernel(lin, priors.Isotropic(lin, precision))
    x, z = torch.randn(2, 1, 4, 5), torch.randn(3, 2, 5)
    K = kernel(x, z).to_dense()
    assert K.shape == (2, 3, 12, 6)
    single = NTKKernel(lin, priors.Isotropic(lin))
    for i in range(2):
        for j in range(3):
            assert_close(K[i, j], single(x[i, 0], z[j]).to_dense() / precision[j])
    assert_close(kernel(x, diag=True), kernel(x).to_dense().diagonal(dim1=-1, dim2=-2))
    assert_close(kernel.blocks(x[0, 0])[1], single.blocks(x[0, 0]))


def test_single_outputs_and_sums_of_outputs(float64):
    net, x = BY_NAME["mlp"].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Grouped(lin, precision=3.0))
    K = kernel.gram(x).view(4, 3, 4, 3)
    assert_close(kernel.select(1).gram(x), K[:, 1, :, 1])
    assert_close(kernel.select([2, 0]).gram(x), K[:, [2, 0]][..., [2, 0]].reshape(8, 8))
    assert_close(kernel.select("sum").gram(x), K.sum((1, 3)))
    assert_close(kernel.select(1)(x).to_dense(), K[:, 1, :, 1])


def test_dicts_are_inputs_too(float64):
    net, x = BY_NAME["keywords"].build()
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Isotropic(lin))
    J = dense_jacobian(net, x, lin.layout.names)
    part = {key: value[:1] for key, value in x.items()}
    K = dense_gram(J, torch.eye(lin.num_params))
    assert relative_error(kernel.gram(x, part), K[:, :2]) < 1e-10
    assert relative_error(kernel.operator(x, part) @ torch.eye(2), K[:, :2]) < 1e-10
    assert relative_error(kernel.operator(x)[1:, 2:5].to_dense(), K[1:, 2:5]) < 1e-10


def test_a_matrix_over_budget_stays_lazy(float64):
    net, x = BY_NAME["mlp"].build()
    lin = Linearization(net, example=x)
    lazy = NTKKernel(lin, priors.Isotropic(lin), memory_budget=100)
    assert not torch.is_tensor(lazy.forward(x, x))
    assert_close(lazy(x).to_dense(), NTKKernel(lin, priors.Isotropic(lin))(x).to_dense())


class Regression(gpytorch.models.ExactGP):
    """A GP with a network's linear model as its prior."""

    def __init__(self, x, y, likelihood, mean, kernel):
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = mean, kernel

    def forward(self, x):
        mean, K = self.mean(x), self.kernel(x)
        if mean.ndim == 1:
            return gpytorch.distributions.MultivariateNormal(mean, K)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, K)


@pytest.mark.parametrize("outputs", [1, 3])
def test_exact_gp_regression_is_bayesian_linear_regression_on_the_weights(outputs, float64):
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))
    x, y, z = torch.randn(8, 2), torch.randn(8, outputs), torch.randn(3, 2)
    lin = Linearization(net, example=x)
    prior, noise = priors.Grouped(lin, precision=torch.tensor([0.5, 2.0]), mean=0.1), 0.3
    mean, kernel = LinearizedMean(lin, prior), NTKKernel(lin, prior)
    if outputs == 1:
        likelihood, targets = gpytorch.likelihoods.GaussianLikelihood(), y[:, 0]
    else:
        likelihood, targets = gpytorch.likelihoods.MultitaskGaussianLikelihood(outputs, has_task_noise=False), y
    likelihood.noise = noise
    model = Regression(x, targets, likelihood, mean, kernel)

    J, J_z = lin.jacobian(x).flatten(0, 1), lin.jacobian(z).flatten(0, 1)
    S0 = prior.covariance().to_dense()
    S = torch.linalg.inv(J.mT @ J / noise + torch.linalg.inv(S0))
    prior_mean = (lin(x) + lin.jvp(x, prior.mean - lin.theta)).flatten()
    w = S @ J.mT @ (y.flatten() - prior_mean) / noise
    f = (lin(z) + lin.jvp(z, prior.mean - lin.theta)).flatten() + J_z @ w
    evidence = torch.distributions.MultivariateNormal(prior_mean, J @ S0 @ J.mT + noise * torch.eye(len(J)))

    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    value = mll(model(x), targets)
    assert_close(value * targets.numel(), evidence.log_prob(y.flatten()))
    value.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        predicted = model(z)
    assert_close(predicted.mean.flatten(), f.detach(), rtol=1e-8, atol=1e-8)
    assert_close(predicted.covariance_matrix, (J_z @ S @ J_z.mT).detach(), rtol=1e-7, atol=1e-8)


def test_kernels_compose_with_gpytorchs_own(float64):
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(5, 2)
    lin = Linearization(net, example=x)
    kernel, rbf = NTKKernel(lin, priors.Isotropic(lin)), gpytorch.kernels.RBFKernel()
    K, R = kernel.gram(x), rbf(x).to_dense()
    scaled = gpytorch.kernels.ScaleKernel(kernel)
    scaled.outputscale = 2.5
    assert_close(scaled(x).to_dense(), 2.5 * K)
    assert_close((kernel + rbf)(x).to_dense(), K + R)
    assert_close((kernel * rbf)(x).to_dense(), K * R)
    assert_close((kernel * rbf)(x, x[:2]).to_dense(), (K * R)[:, :2])
    assert_close((kernel + rbf)(x, diag=True), (K + R).diagonal())


def test_an_approximate_gp_learns_inducing_inputs_through_the_kernel(float64):
    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self, z, kernel):
            q = gpytorch.variational.CholeskyVariationalDistribution(len(z))
            super().__init__(gpytorch.variational.VariationalStrategy(self, z, q, learn_inducing_locations=True))
            self.mean, self.kernel = gpytorch.means.ZeroMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    x, y = torch.randn(12, 2), torch.randn(12)
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin)
    model, likelihood = Sparse(x[:4].clone(), NTKKernel(lin, prior)), gpytorch.likelihoods.GaussianLikelihood()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=12)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0] - 0.1
    assert not torch.equal(model.variational_strategy.inducing_points.detach(), x[:4])
    assert prior.raw_precision.grad.abs().min() > 0


def test_the_network_is_data_not_a_hyperparameter(float64):
    net, x = BY_NAME["resnet20"].build()
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin, precision=2.0)
    kernel = NTKKernel(lin, prior)
    assert {name for name, _ in kernel.named_parameters()} == {"prior.raw_precision"}
    assert not any("conv" in key for key in kernel.state_dict())
    f = lin(x)
    kernel.train()
    assert_close(lin(x), f)
    assert copy.deepcopy(kernel).lin is lin
    clone = pickle.loads(pickle.dumps(kernel))
    assert_close(clone.gram(x), kernel.gram(x))
    other = NTKKernel(lin, priors.Grouped(lin))
    other.load_state_dict(kernel.state_dict())
    assert_close(other.prior.precision, prior.precision)


def test_a_converted_kernel_converts_its_network():
    net, x = BY_NAME["mlp"].build(torch.float32)
    lin = Linearization(net, example=x)
    kernel = NTKKernel(lin, priors.Isotropic(lin))
    K = kernel.gram(x)
    kernel.double()
    assert kernel(x.double()).to_dense().dtype == torch.float64
    assert relative_error(K, kernel.gram(x.double())) < 1e-5
    assert lin.dtype == torch.float32


def test_the_linearized_mean_is_the_linear_model_at_the_prior_mean(float64):
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    J = lin.jacobian(x)
    rows = x.flatten(1)
    zero, at_map = priors.Isotropic(lin), priors.Isotropic(lin, mean="map")
    shape = (1, 16, 16)
    assert_close(LinearizedMean(lin, zero, shape)(rows), lin(x) - J @ lin.theta)
    assert_close(LinearizedMean(lin, at_map, shape)(rows), lin(x))
    assert_close(LinearizedMean(lin, zero, shape, at="map")(rows), lin(x))
    batch = LinearizedMean(lin, zero, shape)(rows.unsqueeze(0).expand(2, -1, -1))
    assert_close(batch[1], lin(x) - J @ lin.theta)
    assert LinearizedMean(lin.select(0), zero, shape)(rows).shape == (3,)


def test_the_mean_is_differentiable_in_its_inputs(float64):
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    lin = Linearization(net, example=torch.randn(2, 2))
    mean = LinearizedMean(lin, priors.Isotropic(lin, mean=0.3))
    assert torch.autograd.gradcheck(mean, (torch.randn(3, 2, requires_grad=True),))


def test_bad_arguments_are_named():
    lin = Linearization(nn.Linear(2, 1), example=torch.randn(2, 2))
    other = Linearization(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="prior is over other parameters than lin"):
        NTKKernel(lin, priors.Isotropic(other))
    with pytest.raises(ValueError, match=r"rows of 2 numbers, but input_shape \(1, 4\) needs 4"):
        NTKKernel(lin, priors.Isotropic(lin), input_shape=(1, 4))(torch.randn(3, 2)).to_dense()
    with pytest.raises(ValueError, match="x2 must look like x1"):
        NTKKernel(lin, priors.Isotropic(lin)).operator(torch.randn(3, 2), torch.randn(3, 1, 2))
    with pytest.raises(ValueError, match='at must be "prior" or "map"'):
        LinearizedMean(lin, priors.Isotropic(lin), at="mode")
