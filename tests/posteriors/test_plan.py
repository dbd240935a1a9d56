"""Costs told beforehand, against the tensors that methods really keep. No test looks at a clock."""

import sys

import pytest
import torch
from problems import Problem

import ntkgp
from ntkgp.posteriors import LowRankPosterior, SampledPosterior

RANK, INDUCING, SAMPLES = 5, 6, 4


def planned(problem, **options):
    numbers = {"rank": RANK, "num_inducing": INDUCING, "num_samples": SAMPLES} | options
    return ntkgp.plan(problem.lin, (problem.x, problem.y), problem.make_likelihood(), problem.make_prior(), **numbers)


def fitted(problem, method, **options):
    data, likelihood = (problem.x, problem.y), problem.make_likelihood()
    post = ntkgp.fit(problem.lin, data, likelihood, method, "isotropic", tune=False, **options)
    post.predict(problem.x_new)
    return post


def features(post):
    return next(iter(post.model)).F.nbytes


@pytest.fixture(params=["gaussian", "categorical", "poisson"])
def problem(request, float64):
    return Problem("mlp", request.param, "isotropic", n=9)


def test_the_function_space_keeps_a_factor_and_two_sets_of_features(problem):
    post = fitted(problem, "function")
    L, _ = post._factor()
    (weighted,) = post._weighted()
    assert planned(problem)["function"].kept == L.nbytes + features(post) + weighted.nbytes


@pytest.mark.parametrize("method", ["full", "last_layer"])
def test_full_structures_keep_statistics_and_a_factor(problem, method):
    post = fitted(problem, method)
    kept = post._statistics().nbytes + post._factor().nbytes + features(post)
    assert planned(problem)[method].kept == kept


def test_kronecker_factors_keep_their_blocks(problem):
    post = fitted(problem, "kron")
    blocks = post._statistics().values()
    kept = sum(block.G.nbytes + (0 if block.A is None else block.A.nbytes) for block in blocks)
    assert planned(problem)["kron"].kept == kept


def test_the_diagonal_keeps_a_number_for_each_weight(problem):
    post = fitted(problem, "diag")
    assert planned(problem)["diag"].kept == post._statistics().nbytes + features(post)


def test_low_rank_keeps_its_columns(problem):
    post = fitted(problem, "low_rank", rank=RANK)
    assert isinstance(post, LowRankPosterior)
    kept = post._statistics().nbytes + post._factor().nbytes + features(post)
    assert planned(problem)["low_rank"].kept == kept


def test_samples_and_where_the_next_start_are_kept(problem):
    post = fitted(problem, "sampled", num_samples=SAMPLES, tolerance=1e-6)
    assert isinstance(post, SampledPosterior)
    L, _ = post._subset()._factor()
    kept = post._statistics().nbytes + post._last.nbytes + features(post) + L.nbytes
    assert planned(problem)["sampled"].kept == kept


def test_inducing_values_keep_rows_of_all_points(problem):
    post = fitted(problem, "variational", num_inducing=INDUCING, epochs=1)
    table = post.process._keep(False).table
    rows = sum(t.nbytes for t in table._rows.tensors())
    assert planned(problem)["variational"].kept - 24 * INDUCING**2 == rows


def test_groups_cost_a_gram_matrix_each_while_they_are_tuned(float64):
    one, many = (Problem("mlp", "gaussian", prior, n=9) for prior in ("isotropic", "grouped"))
    groups = len(one.lin.groups)
    matrix = (9 * one.lin.num_outputs) ** 2 * 8
    assert planned(many)["function"].peak - planned(one)["function"].peak == (groups - 1) * matrix


def test_features_that_do_not_fit_are_not_counted_as_kept(float64):
    problem = Problem("mlp", "gaussian", "isotropic", n=9)
    small = planned(problem, memory_budget=2000)
    assert small["diag"].kept == problem.lin.num_params * 8 * len(problem.make_likelihood().curvature_atoms(2))
    assert small["full"].peak > small.memory_budget
    assert "beyond the budget" in str(small)


def test_passes_grow_with_the_data_and_algebra_does_not_in_weight_space(float64, monkeypatch):
    module = sys.modules["ntkgp.posteriors.plan"]
    monkeypatch.setattr(module, "_over_all", lambda data, work: float(len(data)))
    monkeypatch.setattr(module, "_factor_rate", lambda dtype, device: 1.0)
    few, many = (Problem("mlp", "categorical", "isotropic", n=n) for n in (40, 80))
    one, two = planned(few), planned(many)
    for method in ("full", "kron", "diag", "last_layer", "sampled"):
        assert two[method].passes == pytest.approx(2 * one[method].passes, rel=1e-3)
    for method in ("full", "kron", "last_layer", "low_rank"):
        assert two[method].algebra == one[method].algebra
    assert two["function"].algebra == pytest.approx(8 * one["function"].algebra)


@pytest.mark.parametrize(("fixed", "each"), [(0.01, 1e-2), (0.001, 1e-5), (0.0, 1e-4)])
@pytest.mark.parametrize("n", [3, 40, 3000])
def test_what_some_points_take_is_prolonged_by_what_a_point_more_takes(fixed, each, n, monkeypatch):
    module = sys.modules["ntkgp.posteriors.plan"]
    monkeypatch.setattr(module, "shortest", lambda function: function())
    looked = []

    def work(part):
        looked.append(len(part))
        return fixed + each * len(part)

    assert module._over_all(range(n), work) == pytest.approx(fixed + each * n, rel=1e-9)
    assert looked[0] == min(n, 4)
    assert all(size <= 32 or fixed + each * size / 8 < 0.02 for size in looked)  # no longer than it has to


def test_the_table_names_what_auto_takes(problem):
    plan = planned(problem)
    post = problem.fit("auto", tune=False)
    assert plan.chosen == post.method
    assert plan.reason == post.reason
    lines = str(plan).splitlines()
    assert "estimates" in lines[0]
    (marked,) = [line for line in lines if line.endswith("  auto")]
    assert marked.split()[0] == post.method
    assumed = [line.split()[0] for line in lines if "iterations assumed" in line]
    exact = problem.make_likelihood().curvature_atoms(problem.lin.num_outputs) is not None
    assert assumed == ["low_rank", *([] if exact else ["variational"]), "sampled"]
    assert (plan.num_data, plan.num_outputs, plan.num_params) == (9, problem.lin.num_outputs, problem.lin.num_params)


def test_a_plan_leaves_the_callers_state_alone(float64):
    problem = Problem("mlp", "gaussian", "isotropic", n=9)
    theta, state = problem.lin.theta.clone(), torch.get_rng_state()
    planned(problem)
    assert torch.equal(problem.lin.theta, theta)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_input_is_named(float64):
    problem = Problem("mlp", "gaussian", "isotropic", n=9)
    with pytest.raises(KeyError, match="method must be one of function, full, kron"):
        planned(problem)["fast"]
    with pytest.raises(ValueError, match="likelihood must be one of"):
        ntkgp.plan(problem.net, (problem.x, problem.y), "normal")
    with pytest.raises(TypeError, match="data must be"):
        ntkgp.plan(problem.net, problem.x)
