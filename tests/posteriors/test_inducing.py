"""Inducing values: which they are, what their features are, and how they are chosen."""

import pytest
import torch
from cases import BY_NAME
from problems import Problem
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp import priors
from ntkgp.operators import gram
from ntkgp.posteriors import Inducing
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.inducing import choose
from ntkgp.posteriors.model import LinearModel


def model_of(p):
    likelihood = p.make_likelihood()
    return LinearModel(p.lin, Data(p.x, likelihood.validate(p.y, p.lin.num_outputs)), likelihood)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet20", "transformer", "lstm", "tied", "keywords"])
def test_pairs_are_rows_of_the_gram_matrix(name):
    net, x = BY_NAME[name].build()
    lin = ntkgp.Linearization(net, example=x)
    n, C = lin(x).shape
    outputs = torch.arange(n).flip(0) % C
    S0 = priors.Grouped(lin, precision=torch.linspace(0.5, 2.0, len(lin.groups))).covariances()
    F, Z = lin.features(x), Inducing(x, outputs).features(lin)
    K = gram(F, None, S0)
    rows = torch.arange(n) * C + outputs
    assert_close(gram(F, Z, S0), K[:, rows], rtol=1e-8, atol=1e-10)
    assert_close(gram(Z, None, S0), K[rows][:, rows], rtol=1e-8, atol=1e-10)
    assert Inducing(x, outputs).num_values(lin) == n
    assert Inducing(x).num_values(lin) == n * C


@pytest.mark.parametrize("how", ["kmeans", "random", "greedy"])
@pytest.mark.parametrize("M", [1, 7, 30, 50])
def test_there_are_as_many_as_asked_for_and_no_pair_twice(how, M, float64):
    p = Problem("mlp", "categorical", n=20)
    found, N = choose(how, model_of(p), p.make_prior(), M, seed=1)
    assert N == 20
    assert found.num_values(p.lin) == M
    pairs = {(*point.tolist(), c) for point, c in zip(found.x, found.outputs.tolist(), strict=True)}
    assert len(pairs) == M
    assert {tuple(point.tolist()) for point in found.x} <= {tuple(point.tolist()) for point in p.x}
    again, _ = choose(how, model_of(p), p.make_prior(), M, seed=1)
    assert torch.equal(found.x, again.x)


@pytest.mark.parametrize("how", ["kmeans", "random"])
def test_outputs_have_even_shares(how, float64):
    p = Problem("mlp", "categorical", n=20)
    found, _ = choose(how, model_of(p), p.make_prior(), 12, seed=0)
    assert torch.bincount(found.outputs).tolist() == [4, 4, 4]


def test_the_greedy_choice_is_the_pivoted_cholesky_factorisation(float64):
    p = Problem("mlp", "categorical", n=10)
    prior = p.make_prior()
    found, _ = choose("greedy", model_of(p), prior, 6, seed=0)
    J = p.lin.jacobian(p.x).flatten(0, 1)
    left = (J @ prior.covariance().to_dense() @ J.mT).detach()
    for x, c in zip(found.x, found.outputs, strict=True):
        at = (p.x == x).all(1).nonzero().item() * 3 + c
        assert left.diagonal().max() <= left[at, at] * (1 + 1e-10)
        left = left - left[:, at : at + 1] @ left[at : at + 1] / left[at, at]


def test_the_greedy_choice_ends_where_nothing_is_left_to_tell(float64):
    net = nn.Linear(1, 2)  # four weights: four values tell all others
    x = torch.randn(30, 1)
    post = ntkgp.fit(
        net, (x, torch.randn(30, 2)), "gaussian", "variational", tune=False, inducing="greedy", num_inducing=9
    )
    assert post.num_inducing == 4
    full = ntkgp.fit(net, (x, post.model.data.y), "gaussian", "full", tune=False)
    assert_close(post.latent(x).covariance_matrix, full.latent(x).covariance_matrix, rtol=1e-6, atol=1e-9)


def test_a_loader_is_drawn_from(float64):
    p = Problem("mlp", "categorical", n=20)
    loader = DataLoader(TensorDataset(p.x, p.y), batch_size=6)
    likelihood = p.make_likelihood()
    for how in ("kmeans", "random", "greedy"):
        found, N = choose(how, LinearModel(p.lin, loader, likelihood), p.make_prior(), 8, seed=0)
        assert (N, found.num_values(p.lin)) == (20, 8)


def test_what_cannot_be_is_named(float64):
    p = Problem("mlp", "categorical")
    with pytest.raises(TypeError, match="outputs must be a tensor of integers"):
        Inducing(p.x, torch.zeros(8))
    with pytest.raises(ValueError, match=r"outputs must have shape \(8,\), one for each point, but has \(3,\)"):
        Inducing(p.x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="outputs must be from 0 to 2, but are from 0 to 3"):
        Inducing(p.x, torch.arange(8) % 4).features(p.lin)
    for options, message in [
        ({"num_inducing": 25}, "num_inducing must be from 1 to the 24 values at the training points, but is 25"),
        ({"num_inducing": 0}, "num_inducing must be at least 1, but is 0"),
        ({"inducing": "magic"}, "inducing must be an Inducing, kmeans, greedy, random, but is 'magic'"),
    ]:
        with pytest.raises(ValueError, match=message):
            p.fit("variational", **options)
    net, tokens = BY_NAME["lstm"].build()
    with pytest.raises(ValueError, match="learn_inducing needs inputs of floating-point numbers"):
        ntkgp.fit(
            net, (tokens, torch.arange(4) % 3), method="variational", num_inducing=3, learn_inducing=True, tune=False
        )
