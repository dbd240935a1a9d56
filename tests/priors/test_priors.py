"""Priors: their covariance as a lazy matrix, their atoms, their hyperparameters, and what they refuse."""

import pickle

import gpytorch
import pytest
import torch
from cases import BY_NAME
from torch import nn
from torch.testing import assert_close

from ntkgp import Linearization, priors


@pytest.fixture
def lin(float64):
    net, x = BY_NAME["lenet"].build()
    return Linearization(net, example=x)


def test_isotropic_is_a_multiple_of_the_identity(lin):
    S0 = priors.Isotropic(lin, precision=4.0).covariance()
    assert_close(S0.to_dense(), torch.eye(lin.num_params) / 4)
    assert_close(S0.diagonal(), torch.full((lin.num_params,), 0.25))


def test_grouped_gives_each_layer_its_own_variance(lin):
    precision = {group: 1.0 + i for i, group in enumerate(lin.groups)}
    prior = priors.Grouped(lin, precision=precision)
    diagonal = prior.covariance().diagonal()
    for i, names in enumerate(lin.groups.values()):
        for name in names:
            assert_close(
                diagonal[lin.layout.slices[name]], torch.full_like(diagonal[lin.layout.slices[name]], 1 / (1 + i))
            )


def test_any_partition_makes_groups_and_modules_stand_for_their_parameters(lin):
    prior = priors.Grouped(
        lin, by={"convolutions": ["0", "3"], "biases": ["7.bias", "9.bias"], "rest": ["7.weight", "9.weight"]}
    )
    assert prior.groups["convolutions"] == ("0.weight", "0.bias", "3.weight", "3.bias")
    assert prior.precision.shape == (3,)


def test_kronecker_is_the_product_of_its_factors(lin):
    U, V = (torch.randn(n, n) for n in (4, 27))
    U, V = U @ U.mT + torch.eye(4), V @ V.mT + torch.eye(27)
    prior = priors.Kronecker(lin, precision=2.0, factors={"3.weight": (U, V)})
    at = lin.layout.slices["3.weight"]
    S0 = prior.covariance().to_dense()
    assert_close(S0[at, at], torch.kron(U, V) / 2)
    assert_close(S0[: at.start, : at.start], torch.eye(at.start) / 2)


BLOCK = {"convolutions": ["0.weight", "2.weight"]}


@pytest.fixture
def alike(float64):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Tanh(), torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    return Linearization(net, example=torch.randn(2, 1, 6, 6))


def test_filters_are_gaussian_processes_on_their_grid(lin):
    prior = priors.ConvFilterGP(lin, variance=3.0, lengthscale=0.5)
    assert list(prior.filters) == ["0.weight", "3.weight"]
    at, grid = lin.layout.slices["3.weight"], torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    V = 3.0 * torch.exp(-torch.cdist(grid, grid) / 0.5)
    assert_close(prior.covariance().to_dense()[at, at], torch.kron(torch.eye(12), V))
    assert_close(prior.covariance().to_dense()[-1, -1], torch.tensor(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_that_are_all_but_constant_can_be_drawn(alike, dtype):
    prior = priors.ConvFilterGP(alike, lengthscale=1e17).to(dtype)
    theta = alike.layout.split(prior.spread(torch.randn(5, alike.num_params, dtype=dtype)))["2.weight"]
    assert theta.isfinite().all()
    assert (theta.flatten(-2).std(-1) < 0.2).all()
    v = torch.randn(alike.num_params, dtype=dtype)
    rounding = 1e-2 if dtype == torch.float32 else 1e-9
    assert_close(prior.precision_times(prior.covariance_times(v)), v, rtol=0, atol=rounding)


def test_filters_of_a_block_share_their_hyperparameters(alike):
    each, shared = priors.ConvFilterGP(alike), priors.ConvFilterGP(alike, blocks=BLOCK)
    assert list(shared.filters) == ["convolutions"]
    assert len(shared.variance) == len(each.variance) - 1
    assert len(shared.atoms) == len(each.atoms) - len(each.grid_distances("0.weight").unique())
    shared.lengthscale = 0.7
    shared.variance = torch.arange(1.0, 1 + len(shared.variance))
    at = dict(zip(shared.blocks, shared.variance.tolist(), strict=True))
    for name in BLOCK["convolutions"]:
        assert_close(shared.covariances()[name].V, at["convolutions"] * torch.exp(-each.grid_distances(name) / 0.7))
    with pytest.raises(ValueError, match="filters of a block must be of one size, but those of 'a' are not"):
        priors.ConvFilterGP(alike, blocks={"a": ["0.weight", "0.bias"]})
    with pytest.raises(ValueError, match=r"blocks must name parameters once each, but 'b' has '0\.weight'"):
        priors.ConvFilterGP(alike, blocks={"a": ["0.weight"], "b": ["0.weight"]})


@pytest.mark.parametrize(
    "make",
    [priors.Isotropic, priors.Grouped, priors.ConvFilterGP, lambda lin: priors.ConvFilterGP(lin, blocks=BLOCK)],
)
def test_the_atoms_add_up_to_the_covariance(make, alike):
    lin, prior = alike, make(alike)
    for parameter in prior.parameters():
        parameter.data += torch.randn_like(parameter)
    total = torch.zeros(lin.num_params, lin.num_params)
    for w, atom in zip(prior.coefficients(), prior.atoms, strict=True):
        for name, covariance in atom.items():
            at = lin.layout.slices[name]
            total[at, at] += w * covariance.apply(torch.eye(at.stop - at.start))
    assert_close(total, prior.covariance().to_dense())


@pytest.mark.parametrize(
    "make", [priors.Isotropic, priors.Grouped, priors.Diagonal, priors.Kronecker, priors.ConvFilterGP]
)
def test_the_diagonal_is_that_of_the_dense_matrix(make, lin):
    prior = make(lin)
    for parameter in prior.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    S0 = prior.covariance()
    assert_close(S0.diagonal(), S0.to_dense().diagonal())
    assert_close(S0 @ lin.theta, S0.to_dense() @ lin.theta)


def test_weight_decay_of_a_mean_loss_is_a_precision_of_n_times_as_much(lin):
    prior = priors.Isotropic.from_weight_decay(lin, 1e-3, num_data=500)
    assert_close(prior.precision, torch.tensor([0.5]))


@pytest.mark.parametrize(("mean", "expected"), [(0.5, 0.5), ("map", None), (torch.arange(320.0), torch.arange(320.0))])
def test_the_mean_is_a_number_a_vector_or_the_network(lin, mean, expected):
    found = priors.Isotropic(lin, mean=mean).mean
    expected = lin.theta if expected is None else torch.as_tensor(expected, dtype=torch.float64)
    assert_close(found, expected.expand(lin.num_params))


def test_norms_make_groups_of_the_weights_before_them(float64):
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.LayerNorm(4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    lin = Linearization(net, example=torch.randn(2, 1, 4, 4))
    groups = priors.Grouped(lin, by="normalized").groups
    assert groups == {
        "0": ("0.weight", "0.bias"),
        "4": ("4.weight", "4.bias"),
        "rest": ("1.weight", "1.bias", "5.weight", "5.bias", "7.weight", "7.bias"),
    }


def test_a_sum_before_a_norm_is_not_scale_invariant_in_one_term(float64):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

        def forward(self, x):
            return self.norm(x + self.inner(x))

    lin = Linearization(Residual(), example=torch.randn(2, 3))
    assert set(priors.Grouped(lin, by="normalized").groups) == {"rest"}


def test_hyperparameters_are_live_constrained_and_may_have_priors(lin):
    prior = priors.Grouped(lin, precision=2.0, precision_prior=gpytorch.priors.GammaPrior(2.0, 1.0))
    prior.precision = 3.0
    assert_close(prior.precision, torch.full((4,), 3.0))
    (_, module, hyperprior, closure, _), *_ = prior.named_priors()
    assert_close(
        hyperprior.log_prob(closure(module)).sum(), 4 * gpytorch.priors.GammaPrior(2.0, 1.0).log_prob(torch.tensor(3.0))
    )
    clone = pickle.loads(pickle.dumps(priors.Isotropic(lin, 5.0)))
    assert_close(clone.precision, torch.tensor([5.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lin: priors.Isotropic(lin, 0.0), "precision must be positive and finite, but its smallest entry is 0"),
        (lambda lin: priors.Isotropic(lin, float("inf")), "precision must be positive"),
        (lambda lin: priors.Isotropic(lin, torch.ones(3)), "one entry for each of the 1 groups"),
        (lambda lin: priors.Isotropic(lin, mean="mode"), "mean must be a number"),
        (lambda lin: priors.Isotropic(lin, mean=torch.zeros(3)), r"mean must be a number or a vector of 320 numbers"),
        (lambda lin: priors.Isotropic(lin, mean=float("nan")), "mean holds NaN"),
        (lambda lin: priors.Isotropic.from_weight_decay(lin, -1.0, 10), "weight_decay must be positive"),
        (lambda lin: priors.Grouped(lin, by="block"), 'by must be "layer"'),
        (lambda lin: priors.Grouped(lin, by={"a": ["0"]}), r"missing: \['3.weight'"),
        (lambda lin: priors.Grouped(lin, by={"a": ["0", "3", "7", "9"], "b": ["0.bias"]}), r"twice: \['0.bias'\]"),
        (lambda lin: priors.Grouped(lin, by={"a": ["0", "3", "7", "9"], "b": []}), r"empty: \['b'\]"),
        (lambda lin: priors.Grouped(lin, precision={"0": 1.0}), "precision must name the groups"),
        (lambda lin: priors.Diagonal(lin, torch.ones(5)), "precision must be a number or a vector of 320"),
        (lambda lin: priors.Kronecker(lin, factors={"0.bias": (None, None)}), "which are not weights"),
        (lambda lin: priors.Kronecker(lin, factors={"9.weight": (torch.eye(3), None)}), r"must have shape \(4, 4\)"),
        (lambda lin: priors.Kronecker(lin, factors={"9.weight": (-torch.eye(4), None)}), "must be positive definite"),
        (lambda lin: priors.ConvFilterGP(lin, lengthscale=-1.0), "lengthscale must be positive"),
        (lambda lin: priors.ConvFilterGP(lin, variance=torch.ones(3)), "variance must be a number or 8 numbers"),
        (lambda lin: priors.ConvFilterGP(lin, lengthscale={"0.weight": 1.0}), "lengthscale must name"),
    ],
)
def test_bad_arguments_are_named(make, message, lin):
    with pytest.raises(ValueError, match=message):
        make(lin)


def test_a_prior_on_filters_needs_filters(float64):
    lin = Linearization(nn.Linear(2, 1), example=torch.randn(2, 2))
    with pytest.raises(ValueError, match="lin must have convolutions"):
        priors.ConvFilterGP(lin)


def test_setting_a_bad_precision_changes_nothing(lin):
    prior = priors.Grouped(lin, precision=2.0)
    with pytest.raises(ValueError, match="precision must be positive"):
        prior.precision = torch.tensor([1.0, 1.0, -1.0, 1.0])
    assert_close(prior.precision, torch.full((4,), 2.0))
