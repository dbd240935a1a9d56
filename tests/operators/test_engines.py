"""Every engine gives the same matrix; plans count what they say."""

import pytest
import torch
from cases import BY_NAME, relative_error
from torch import nn

from ntkgp import Linearization, NTKKernel, priors
from ntkgp.linearization.inputs import take
from ntkgp.operators import gram


@pytest.mark.parametrize("engine", ["layerwise", "jacobian", "products", "auto"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer", "lstm", "tied"])
@pytest.mark.parametrize("make", [priors.Isotropic, priors.Grouped, priors.Kronecker])
def test_every_engine_gives_the_same_gram(engine, name, make, float64):
    net, x = BY_NAME[name].build()
    lin = Linearization(net, example=x)
    prior = make(lin, precision=1.7) if make is not priors.Grouped else make(lin, precision=0.3)
    kernel = NTKKernel(lin, prior, engine=engine)
    J = lin.jacobian(x).flatten(0, 1)
    K = (J @ prior.covariance().to_dense() @ J.mT).detach()
    with torch.no_grad():
        assert relative_error(kernel.gram(x), K) < 1e-10
        assert relative_error(kernel.gram(x, x[1:]), K[:, lin.num_outputs :]) < 1e-10
    place = torch.empty_like(K)
    assert kernel.gram(x, out=place).data_ptr() == place.data_ptr()
    assert relative_error(place, K) < 1e-10


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_features_over_budget_are_made_in_tiles(name, float64):
    net, x = BY_NAME[name].build()
    x = torch.cat([x, x + 1, x - 1])
    lin = Linearization(net, example=x)
    J = lin.jacobian(x).flatten(0, 1)
    two_points = lin.pilot().nbytes
    kernel = NTKKernel(lin, priors.Isotropic(lin), engine="layerwise", memory_budget=2 * two_points)
    C = lin.num_outputs
    with torch.no_grad():
        assert relative_error(kernel.gram(x), J @ J.mT) < 1e-10
        assert relative_error(kernel.gram(x, x[:5]), (J @ J.mT)[:, : 5 * C]) < 1e-10


@pytest.mark.parametrize(("n", "tile"), [(7, 3), (7, 9), (7, 100), (5, 15)])
def test_tiles_and_mirrors_of_any_size_agree(n, tile, float64, monkeypatch):
    monkeypatch.setattr("ntkgp.operators.dense._TILE", tile)
    monkeypatch.setattr("ntkgp.operators.dense._LEAF", 4)
    net, x = BY_NAME["mlp"].build()
    x = torch.randn(n, 5)
    lin = Linearization(net, example=x)
    J = lin.jacobian(x).flatten(0, 1)
    with torch.no_grad():
        K = NTKKernel(lin, priors.Isotropic(lin)).gram(x)
    assert relative_error(K, J @ J.mT) < 1e-12
    assert torch.equal(K, K.mT)


def test_positions_are_compared_in_pairs_where_that_is_cheaper(float64):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.wide, self.head = nn.Embedding(50, 30), nn.Linear(30, 60), nn.Linear(60, 2)

        def forward(self, tokens):
            return self.head(torch.tanh(self.wide(self.embedding(tokens))).mean(1))

    tokens = torch.randint(0, 50, (4, 2))
    lin = Linearization(Sequence(), example=tokens)
    kinds = {block.weight: block.outer.positions for block in lin.features(tokens).blocks}
    assert kinds == {"embedding.weight": 2, "wide.weight": 2, "head.weight": 1}
    J = lin.jacobian(tokens)
    for make in (priors.Isotropic, priors.Grouped, priors.Diagonal, priors.Kronecker):
        kernel = NTKKernel(lin, make(lin, precision=0.6))
        S0 = kernel.prior.covariance().to_dense()
        K = torch.einsum("ncp,pq,mdq->ncmd", J, S0, J)
        assert relative_error(kernel.operator(tokens).to_dense(), K.reshape(8, 8)) < 1e-10
        assert relative_error(kernel.blocks(tokens), K.diagonal(dim1=0, dim2=2).movedim(-1, 0)) < 1e-10
        F = lin.features(tokens)
        one = gram(F, F.weighted(lambda J: J[:, 1:]), kernel.prior.covariances())  # some outputs against all
        assert relative_error(one, K.reshape(8, 4, 2)[..., 1]) < 1e-10


def test_the_plan_counts_the_products_of_an_mlp():
    net = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4))
    lin = Linearization(net, example=torch.randn(2, 30))
    kernel = NTKKernel(lin, priors.Isotropic(lin))
    plan = kernel.plan(10)
    pairs, C = 55, 4
    by_layer = {cost.layer: cost for cost in plan.costs}
    assert by_layer["0"].rule == "outer"
    assert by_layer["0"].flops == 2 * pairs * (30 + C * C * 20) + 2 * pairs * C * C
    assert by_layer["0"].bytes == 10 * (30 + C * 20) * 4
    assert by_layer["2"].rule == "kronecker"
    assert by_layer["K"].bytes == (10 * C) ** 2 * 4
    assert by_layer["all"].flops == 10 * (1 + 2 * C) * 2 * (30 * 20 + 20 * 4)
    assert plan.engine == "layerwise"
    assert plan.seconds > 0
    text = str(plan)
    assert all(word in text for word in ("layer", "rule", "Gflop", "MB", "seconds", "outer", "kronecker", "total"))
    wide = kernel.plan(10, 20)
    assert {c.layer: c for c in wide.costs}["0"].flops == 2 * 200 * (30 + C * C * 20) + 2 * 200 * C * C


def test_many_outputs_of_a_small_network_are_better_computed_by_products():
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 300, bias=False))
    lin = Linearization(net, parameters=["0"], example=torch.randn(2, 4))
    plan = NTKKernel(lin, priors.Isotropic(lin)).plan(20)
    forced = NTKKernel(lin, priors.Isotropic(lin), engine="jacobian").plan(20)
    assert plan.flops <= forced.flops
    assert forced.reason == "forced"


def test_an_engine_that_does_not_fit_the_budget_is_not_chosen():
    lin = Linearization(nn.Linear(2, 1), example=torch.randn(2, 2))
    plan = NTKKernel(lin, priors.Isotropic(lin), memory_budget=100).plan(50)
    assert "jacobian needs 6e-07 GB" in plan.reason


def test_unknown_engines_and_empty_plans_are_refused():
    lin = Linearization(nn.Linear(2, 1), example=torch.randn(2, 2))
    with pytest.raises(ValueError, match="engine must be auto, layerwise or jacobian or products, but is 'fast'"):
        NTKKernel(lin, priors.Isotropic(lin), engine="fast")
    with pytest.raises(ValueError, match="n1 and n2 must be positive, but are 0 and None"):
        NTKKernel(lin, priors.Isotropic(lin)).plan(0)


def test_features_of_different_forms_meet(case):
    net, x = case.build()
    lin = Linearization(net, case.parameters, example=x)
    F, prior = lin.features(x), priors.Isotropic(lin, 0.5)
    J = lin.jacobian(x).flatten(0, 1)
    with torch.no_grad():
        K = gram(F, F.contracted(), prior.covariances())
    assert relative_error(K, 2 * J @ J.mT) < 1e-8


def test_one_example_has_the_form_of_many(case):
    net, x = case.build()
    lin = Linearization(net, case.parameters, example=x)
    assert lin.features(take(x, slice(1))).form == lin.features(take(x, slice(2))).form
