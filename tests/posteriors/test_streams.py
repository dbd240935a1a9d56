"""Data that come in other ways: loaders, data sets, updates, subsets, weights."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp.posteriors import subsets

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("method", ["function", "full", "kron", "diag", "low_rank"])
def test_a_loader_gives_what_memory_gives(method, likelihood, float64):
    problem = Problem("cnn", likelihood)
    options = {"rank": 6} if method == "low_rank" else {}
    dataset = TensorDataset(problem.x, problem.y)
    memory = problem.fit(method, **options)
    for data in (dataset, DataLoader(dataset, batch_size=3)):
        post = ntkgp.fit(problem.lin, data, problem.make_likelihood(), method, problem.make_prior(), **options)
        assert_close(
            post.latent(problem.x_new).covariance_matrix, memory.latent(problem.x_new).covariance_matrix, **TIGHT
        )
        for at in ("map", "linear_mode"):
            assert_close(post.log_evidence(at), memory.log_evidence(at), **TIGHT)


def test_a_loader_is_not_kept_in_memory(float64):
    problem = Problem("mlp", "categorical")
    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=3)
    post = ntkgp.fit(problem.lin, loader, method="diag", prior=problem.make_prior())
    post.latent(problem.x_new)
    assert not post.model.kept
    assert post.model._chunk is None
    with pytest.raises(ValueError, match="needs data in memory"):
        _ = post.model.data


@pytest.mark.parametrize("budget", [1, 20_000])
@pytest.mark.parametrize("method", ["function", "full", "diag"])
def test_a_small_budget_costs_time_not_accuracy(method, budget, float64):
    problem = Problem("cnn", "categorical")
    truth = problem.fit(method)
    post = problem.fit(method, memory_budget=budget)
    assert_close(post.latent(problem.x_new).covariance_matrix, truth.latent(problem.x_new).covariance_matrix, **TIGHT)
    assert_close(post.log_evidence(), truth.log_evidence(), **TIGHT)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "poisson"])
def test_an_update_is_a_refit(likelihood, weighted, float64):
    problem = Problem("cnn", likelihood)
    weights = torch.rand(8) + 0.5 if weighted else None
    part = lambda index: None if weights is None else weights[index]  # noqa: E731
    first, rest = slice(0, 5), slice(5, 8)
    post = ntkgp.fit(
        problem.lin,
        (problem.x[first], problem.y[first]),
        problem.make_likelihood(),
        "function",
        problem.make_prior(),
        weights=part(first),
    )
    before = post.latent(problem.x_new).covariance_matrix
    updated = post.update(problem.x[rest], problem.y[rest], part(rest))
    refitted = problem.fit("function", weights=weights)
    assert_close(
        updated.latent(problem.x_new).covariance_matrix, refitted.latent(problem.x_new).covariance_matrix, **TIGHT
    )
    assert_close(updated.log_evidence(), refitted.log_evidence(), **TIGHT)
    assert_close(updated.refine().latent(problem.x_new).mean, refitted.refine().latent(problem.x_new).mean, **TIGHT)
    assert_close(post.latent(problem.x_new).covariance_matrix, before)
    with pytest.raises(ValueError, match="refined posterior cannot be updated"):
        post.refine().update(problem.x[rest], problem.y[rest])


@pytest.mark.parametrize("method", ["function", "full", "diag", "kron"])
def test_a_weight_of_two_is_a_point_twice(method, float64):
    problem = Problem("mlp", "gaussian")
    twice = ntkgp.fit(
        problem.lin,
        (torch.cat([problem.x, problem.x[:3]]), torch.cat([problem.y, problem.y[:3]])),
        problem.make_likelihood(),
        method,
        problem.make_prior(),
    )
    weighted = problem.fit(method, weights=torch.tensor([2.0] * 3 + [1.0] * 5))
    if method == "kron":  # the inputs' factor is an average over points, not over what they stand for
        H = lambda post: post._statistics()["0.weight"].G  # noqa: E731
        assert_close(H(weighted), H(twice), **TIGHT)
        return
    assert_close(
        weighted.latent(problem.x_new).covariance_matrix, twice.latent(problem.x_new).covariance_matrix, **TIGHT
    )
    assert_close(weighted.log_evidence(), twice.log_evidence(), **TIGHT)


def test_a_mask_leaves_single_outputs_out(float64):
    problem = Problem("mlp", "gaussian")
    mask = torch.ones(8, 3)
    mask[:, 1] = 0
    masked = problem.fit("function", weights=mask)
    J, _f, J_new, _ = problem.dense()
    S0 = problem.make_prior().covariance().to_dense()
    kept = J[:, [0, 2]].flatten(0, 1)
    precision = kept.mT @ kept / 0.5 + torch.linalg.inv(S0)
    assert_close(
        masked.latent(problem.x_new).covariance_matrix, J_new @ torch.linalg.inv(precision) @ J_new.mT, **TIGHT
    )


SELECTORS = [subsets.Random, subsets.Stratified, subsets.KMeans, subsets.Leverage, subsets.Greedy]


@pytest.mark.parametrize("selector", [s for s in SELECTORS if s is not subsets.Leverage])  # draws with replacement
def test_all_points_as_a_subset_are_all_points(selector, float64):
    problem = Problem("mlp", "categorical")
    whole, post = problem.fit("function"), problem.fit("function", subset=selector(8))
    assert_close(post.latent(problem.x_new).covariance_matrix, whole.latent(problem.x_new).covariance_matrix, **TIGHT)


@pytest.mark.parametrize("selector", SELECTORS)
def test_weights_stand_for_all_points(selector, float64):
    problem = Problem("mlp", "categorical", n=60)
    post = problem.fit("function", subset=selector(20, seed=2))
    weights = post.model.data.weights
    if selector is subsets.Greedy:
        assert_close(weights, torch.ones(20))
    elif selector is subsets.Leverage:  # unbiased, not exact
        totals = [problem.fit("function", subset=selector(20, seed=s)).model.data.weights.sum() for s in range(40)]
        totals = torch.stack(totals)
        assert abs(totals.mean() - 60) <= 5 * totals.std() / 40**0.5
    else:
        assert weights.sum().item() == pytest.approx(60)
    if selector is subsets.Stratified:
        counts = torch.bincount(post.model.data.y[:, 0], minlength=3)
        assert counts.max() - counts.min() <= 1


def test_the_prior_variance_does_not_shrink_with_the_subset(float64):
    problem = Problem("mlp", "categorical", n=60)
    prior = problem.make_prior()
    far = 100 * torch.randn(4, 3)
    K = ntkgp.NTKKernel(problem.lin, prior).blocks(far)
    for M in (5, 30):
        post = problem.fit("function", subset=M)
        L, R = post._factor()
        cross = ntkgp.NTKKernel(problem.lin, prior).gram(post.model.data.x, far)
        explained = torch.linalg.solve_triangular(L, R.mT @ cross, upper=False).view(-1, 4, 3).movedim(0, -1)
        assert_close(post.latent(far).covariance_matrix, K.detach() - explained @ explained.mT, rtol=1e-7, atol=1e-8)


def test_greedy_takes_the_point_of_largest_remaining_variance(float64):
    problem = Problem("mlp", "categorical", n=15)
    post = problem.fit("function", subset=subsets.Greedy(3))
    K = ntkgp.NTKKernel(problem.lin, problem.make_prior()).gram(problem.x).detach()
    chosen, remaining = [], K.clone()
    for _ in range(3):
        trace = remaining.view(15, 3, 15, 3).diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum(-1).clone()
        trace[chosen] = -1
        chosen.append(int(trace.argmax()))
        at = torch.cat([torch.arange(3) + 3 * n for n in chosen])
        remaining = K - K[:, at] @ torch.linalg.solve(K[at][:, at], K[at])
    assert_close(post.model.data.x, problem.x[chosen])


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "poisson"])
@pytest.mark.parametrize("method", ["kron", "diag", "sampled"])
def test_a_stream_is_refined_within_a_tolerance(method, likelihood, float64):
    problem = Problem("cnn", likelihood, n=20)
    truth = problem.fit("full").linear_mode().delta
    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=7, shuffle=True)
    post = ntkgp.fit(problem.lin, loader, problem.make_likelihood(), method, problem.make_prior())
    refined = post.refine(tolerance=1e-3)
    distance = problem.lin.theta + truth - post.prior.mean
    error = (refined.shift - truth) @ post.prior.precision_times(refined.shift - truth)
    assert error.sqrt() <= 3e-3 * (distance @ post.prior.precision_times(distance)).sqrt()
    assert refined.certificate.converged
    assert not post.refine(tolerance=1e-12, steps=1).certificate.converged


def test_a_search_that_was_cut_goes_on(float64, tmp_path):
    problem = Problem("cnn", "categorical", n=20)
    post = problem.fit("kron")
    one = post.refine(tolerance=1e-6, steps=2, checkpoint=tmp_path / "state")
    assert not one.certificate.converged
    rest = post.refine(tolerance=1e-6, checkpoint=tmp_path / "state")
    whole = post.refine(tolerance=1e-6)
    assert rest.certificate.steps == whole.certificate.steps - 2
    assert_close(rest.shift, whole.shift, **TIGHT)
    other = Problem("cnn", "gaussian").fit("kron")
    other.model.lin._net.parameters["0.weight"].data += 1
    with pytest.raises(ValueError, match="belongs to another run"):
        other.refine(tolerance=1e-6, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match="tolerance must be positive, but is 0"):
        post.refine(tolerance=0)
    with pytest.raises(ValueError, match="finds the mode exactly and takes no tolerance"):
        problem.fit("function").refine(tolerance=1e-3)
