"""Samples of the exact posterior, and what is estimated from them, against the posterior itself."""

import pytest
import torch
from problems import Problem, learnt
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp import priors
from ntkgp.posteriors.sketch import Sketch

TIGHT = {"rtol": 1e-8, "atol": 1e-10}
EXACT = {"tolerance": 1e-11, "preconditioner": 3}


@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output", "categorical", "poisson"])
@pytest.mark.parametrize("prior", ["isotropic", "grouped", "diagonal"])
def test_samples_solve_their_equation(likelihood, prior, float64):
    problem = Problem("mlp", likelihood, prior)
    post = problem.fit("sampled", num_samples=3, **EXACT)
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    S0 = post.prior.covariance().to_dense()
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J) + torch.linalg.inv(S0)
    b = torch.linalg.solve(S0, post._prior_draws().mT).mT + post._pulled()[:-1]
    zeta = post.sample_weights(3, torch.Generator().manual_seed(0)) - problem.lin.theta
    found = torch.linalg.solve(H, b.mT).mT
    assert_close(zeta.sort(0).values, found.sort(0).values, rtol=1e-6, atol=1e-8)
    assert post.solution.residual <= 1e-11


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_their_noise_has_the_covariance_of_the_gradient(likelihood, float64):
    problem = Problem("mlp", likelihood)
    post = problem.fit("sampled", num_samples=4000, **EXACT)
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    truth = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J)
    d = post._pulled()[:-1]
    errors = ((truth.diagonal()[:, None] * truth.diagonal() + truth**2) / 4000).sqrt()
    assert ((d.mT @ d / 4000 - truth).abs() <= 5 * errors + 1e-12).all()


@pytest.mark.parametrize(("network", "likelihood"), [("mlp", "gaussian"), ("cnn", "categorical"), ("mlp", "poisson")])
def test_covariances_are_those_of_the_exact_posterior_within_their_error(network, likelihood, float64):
    problem = Problem(network, likelihood)
    truth, post = problem.fit("full"), problem.fit("sampled", num_samples=3000, tolerance=1e-8)
    exact, found = (p.latent(problem.x_new).covariance_matrix for p in (truth, post))
    assert ((found - exact).abs() <= 5 * post.covariance_error(problem.x_new)).all()
    joint = post.latent(problem.x_new, joint=True).covariance_matrix
    exact = truth.latent(problem.x_new, joint=True).covariance_matrix
    variance = exact.diagonal()
    assert ((joint - exact).abs() <= 5 * ((variance[:, None] * variance + exact**2) / 3000).sqrt()).all()


def test_single_precision_draws_the_same_samples():
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(torch.float64)
        problem = Problem("cnn", "categorical")
        torch.set_default_dtype(torch.float32)
        lin = problem.lin.to(dtype)
        post = ntkgp.fit(
            lin, (problem.x.to(dtype), problem.y), method="sampled", prior=ntkgp.priors.Isotropic(lin), tolerance=1e-5
        )
        found.append(post.latent(problem.x_new.to(dtype)).covariance_matrix)
        assert found[-1].dtype == dtype
    assert_close(found[1].double(), found[0], rtol=1e-3, atol=1e-3 * found[0].abs().max().item())


def test_equal_layers_get_different_draws(float64):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(10, 4), torch.randn(10, 2)
    lin = ntkgp.Linearization(net, example=x)
    post = ntkgp.fit(lin, (x, y), "gaussian", "sampled", ntkgp.priors.Isotropic(lin), num_samples=500)
    theta = lin.layout.split(post._prior_draws()[0]), post._prior_draws()
    assert not torch.isclose(theta[0]["0.weight"], theta[0]["2.weight"]).any()
    correlation = torch.corrcoef(theta[1].mT) - torch.eye(lin.num_params)
    assert correlation.abs().max() < 6 / 500**0.5


def test_gamma_by_group_is_the_dense_trace_within_its_error_and_unbiased(float64):
    problem = Problem("mlp", "categorical", "grouped", n=20)
    truth = problem.fit("full").effective_parameters()
    by_sample = problem.fit("sampled", num_samples=200, tolerance=1e-9).effective_parameters_by_sample()
    errors = by_sample.std(0) / 200**0.5
    assert ((by_sample.mean(0) - truth).abs() <= 3 * errors).all()
    assert (errors < 0.1 * truth).all()


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_the_evidence_and_its_gradient_are_estimates_of_the_exact_ones(likelihood, float64):
    problem = Problem("mlp", likelihood, "grouped", n=20)
    truth, post = problem.fit("full"), problem.fit("sampled", num_samples=200, tolerance=1e-9)
    exact, found = truth.log_evidence(), post.log_evidence()
    estimate = post.log_det()
    assert abs(estimate.value - truth._log_det()) <= 3 * estimate.standard_error
    assert abs(found - exact) <= 2 * estimate.standard_error
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(v, learnt(p))]) for p, v in ((truth, exact), (post, found))
    ]
    error = post.effective_parameters_by_sample().sum(1).std() / 200**0.5
    assert ((gradients[0] - gradients[1]).abs() <= 3 * error).all()


GROUPS = {"isotropic": {"all": ["0", "2", "4"]}, "grouped": {"hidden": ["0", "2"], "last": ["4"]}}


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("likelihood", "spread"), [("gaussian", 3.0), ("categorical", 6.0)])
def test_em_settles_where_the_exact_evidence_does(likelihood, spread, groups, float64):
    problem = Problem("mlp", likelihood, n=60).informed(spread)
    problem.make_prior = lambda: ntkgp.priors.Grouped(problem.lin, GROUPS[groups])
    truth = problem.fit("full").tune(method="fixed_point", steps=300)
    post = problem.fit("sampled", num_samples=4000, tolerance=1e-3).tune(steps=60, tolerance=1e-3)
    assert_close(post.prior.precision, truth.prior.precision, rtol=0.02, atol=0)
    if likelihood == "gaussian":
        assert_close(post.likelihood.noise, truth.likelihood.noise, rtol=0.02, atol=0)
    last = post.history[-1]
    assert last["residual"] <= 1e-3
    assert sum(last["effective_parameters"]) == pytest.approx(truth.effective_parameters().sum().item(), rel=0.02)


@pytest.mark.parametrize("data", ["loader", "shuffled loader", "small budget"])
def test_streams_give_what_memory_gives(data, float64):
    problem = Problem("cnn", "categorical")
    options = {"num_samples": 3, "tolerance": 1e-10}
    memory = problem.fit("sampled", **options)
    if data == "small budget":
        post = problem.fit("sampled", memory_budget=1, **options)
    else:
        loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=3, shuffle=data == "shuffled loader")
        post = ntkgp.fit(
            problem.lin, loader, problem.make_likelihood(), "sampled", problem.make_prior(), **options, preconditioner=8
        )
    assert not post.model.kept
    assert_close(post.latent(problem.x_new).covariance_matrix, memory.latent(problem.x_new).covariance_matrix, **TIGHT)
    assert_close(
        post.refine().latent(problem.x_new).mean, memory.refine().latent(problem.x_new).mean, rtol=1e-4, atol=1e-6
    )


def test_the_mode_of_the_linear_model_carries_the_samples(float64):
    problem = Problem("cnn", "categorical")
    post = problem.fit("sampled", num_samples=4, tolerance=1e-9)
    truth = problem.fit("full").refine()
    moved, kept = post.refine(), post.refine(curvature_at="map")
    for refined in (moved, kept):
        assert_close(refined.latent(problem.x_new).mean, truth.latent(problem.x_new).mean, rtol=1e-5, atol=1e-7)
        assert refined.certificate.converged
    before = post.latent(problem.x_new).covariance_matrix
    assert torch.equal(kept.latent(problem.x_new).covariance_matrix, before)
    assert not torch.allclose(moved.latent(problem.x_new).covariance_matrix, before, rtol=1e-3)


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(float64, tmp_path, monkeypatch):
    problem = Problem("mlp", "gaussian", "grouped", n=20)
    options = {"num_samples": 5, "tolerance": 1e-3, "preconditioner": 4}
    whole = problem.fit("sampled", **options).tune(steps=6, tolerance=0, checkpoint=tmp_path / "whole")
    killed = problem.fit("sampled", **options)
    before = killed.prior.precision.detach().clone()
    search, calls = type(killed)._find_mode, []

    def die(self, start):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return search(self, start)

    monkeypatch.setattr(type(killed), "_find_mode", die)
    with pytest.raises(KeyboardInterrupt):
        killed.tune(steps=6, tolerance=0, checkpoint=tmp_path / "state")
    assert_close(killed.prior.precision, before)
    monkeypatch.undo()
    resumed = problem.fit("sampled", **options).tune(steps=6, tolerance=0, checkpoint=tmp_path / "state")
    assert torch.equal(resumed.prior.precision, whole.prior.precision)
    assert torch.equal(resumed.likelihood.noise, whole.likelihood.noise)
    assert torch.equal(resumed.latent(problem.x_new).covariance_matrix, whole.latent(problem.x_new).covariance_matrix)
    assert len(resumed.history) == 6


def test_a_checkpoint_of_another_run_is_refused(float64, tmp_path):
    problem = Problem("mlp", "gaussian", n=10)
    problem.fit("sampled", num_samples=2).tune(steps=1, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match="belongs to another run: its seed is 0"):
        problem.fit("sampled", num_samples=2, seed=1).tune(steps=1, checkpoint=tmp_path / "state")
    (tmp_path / "state").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not one, or was cut short"):
        problem.fit("sampled", num_samples=2).tune(steps=1, checkpoint=tmp_path / "state")


def test_samples_are_saved(float64, tmp_path):
    problem = Problem("mlp", "categorical")
    post = problem.fit("sampled", num_samples=4)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    assert torch.equal(loaded.latent(problem.x_new).covariance_matrix, post.latent(problem.x_new).covariance_matrix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, but is 0"),
        ({"tolerance": 2.0}, "tolerance must be between 0 and 1, but is 2.0"),
    ],
)
def test_options_that_cannot_be_are_named(options, message, float64):
    with pytest.raises(ValueError, match=message):
        Problem().fit("sampled", **options)


def test_samples_that_did_not_converge_are_told(float64):
    with pytest.warns(UserWarning, match="residuals of up to .* after 1 iterations, not 1e-09"):
        Problem().fit("sampled", tolerance=1e-9, max_iterations=1, preconditioner=2)


def test_what_samples_cannot_do_is_said(float64):
    problem = Problem("mlp", "noise by output")
    post = problem.fit("sampled", num_samples=2)
    with pytest.raises(ValueError, match="there are 2 samples, but 3 are wanted"):
        post.sample_weights(3)
    with pytest.raises(ValueError, match=r"tunes precisions and one Gaussian noise.*raw_noise"):
        post.tune()
    with pytest.raises(ValueError, match="one Gaussian noise"):
        post.log_evidence()


@pytest.mark.parametrize(("solver", "passes", "bound"), [("descent", 100, 0.05), ("dual", 300, 1e-5)])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("data", ["memory", "loader"])
def test_minibatches_find_the_same_samples(solver, passes, bound, likelihood, data, float64):
    problem = Problem("mlp", likelihood, n=24)
    problem.make_prior = lambda: ntkgp.priors.Isotropic(problem.lin, 10.0)  # the dual's rate goes with the prior's
    options = {"num_samples": 3, "max_iterations": passes, "tolerance": 0.1, "batch_size": 8, "solver": solver}
    truth = problem.fit("sampled", num_samples=3, tolerance=1e-11)._statistics()
    source = problem.x, problem.y
    if data == "loader":
        source = DataLoader(TensorDataset(*source), batch_size=8)
    post = ntkgp.fit(problem.lin, source, problem.make_likelihood(), "sampled", problem.make_prior(), **options)
    assert (post._statistics() - truth).norm() <= bound * truth.norm()
    assert post.solution.residual <= bound
    assert post.solution.iterations == passes


def test_an_unknown_solver_is_named(float64):
    with pytest.raises(ValueError, match="solver must be one of cg, descent, dual, but is 'magic'"):
        Problem().fit("sampled", solver="magic")


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("prior", ["isotropic", "grouped"])
def test_a_sketch_preconditions_as_a_subset_does(likelihood, prior, float64):
    problem = Problem("mlp", likelihood, prior)
    plain = problem.fit("sampled", num_samples=3, **EXACT)
    post = problem.fit("sampled", num_samples=3, tolerance=1e-11, sketch=4)
    assert_close(post._statistics(), plain._statistics(), rtol=1e-6, atol=1e-8)
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J) + torch.linalg.inv(post.prior.covariance().to_dense())
    rank = problem.lin.num_params
    whole = problem.fit("sampled", num_samples=3, tolerance=1e-11, sketch=rank)  # of full rank it is the inverse
    v = torch.randn(2, rank)
    assert_close(whole._precondition(v), torch.linalg.solve(H, v.mT).mT, rtol=1e-5, atol=1e-7)
    assert whole.solution.iterations <= 4
    assert whole.solution.iterations < post.solution.iterations


def test_a_sketch_stays_when_the_prior_changes_and_scales_with_the_noise(float64, monkeypatch):
    problem = Problem("mlp", "gaussian")
    rank = problem.lin.num_params
    post = problem.fit("sampled", num_samples=3, tolerance=1e-8, sketch=rank)
    monkeypatch.setattr(post, "_new_sketch", lambda: pytest.fail("another sketch was made"))
    post.prior.precision = 3.0
    post.likelihood.noise = 0.3
    plain = problem.fit("sampled", num_samples=3, **EXACT)
    plain.prior.precision = 3.0
    plain.likelihood.noise = 0.3
    assert_close(post._statistics(), plain._statistics(), rtol=1e-5, atol=1e-6)
    assert post.solution.iterations <= 4  # of full rank, and rightly scaled, it is the inverse


def test_a_sketch_of_other_likelihoods_stays_when_the_prior_changes(float64):
    post = Problem("mlp", "heteroscedastic").fit("sampled", num_samples=3, sketch=10)
    first = post._sketch()
    post.prior.precision = 3.0
    assert post._sketch() is first


def test_without_preconditioner_iterations_are_more_and_samples_the_same(float64):
    problem = Problem("mlp", "gaussian")
    usual = problem.fit("sampled", num_samples=3, **EXACT)
    bare = problem.fit("sampled", num_samples=3, **EXACT | {"preconditioner": 0, "max_iterations": 1000})
    assert_close(bare._statistics(), usual._statistics(), rtol=1e-6, atol=1e-8)
    assert bare.solution.iterations > usual.solution.iterations
    for name in ("sketch", "preconditioner"):
        with pytest.raises(ValueError, match=f"{name} must not be negative, but is -1"):
            problem.fit("sampled", **{name: -1})


def test_noise_of_points_with_many_outputs_is_drawn_for_few_of_them(float64, monkeypatch):
    from ntkgp.posteriors import sampled

    problem = Problem("mlp", "gaussian")
    shapes = []
    draw = sampled._noise
    monkeypatch.setattr(sampled, "_BLOCK_NUMBERS", 6)
    monkeypatch.setattr(
        sampled, "_noise", lambda seed, stream, shape: shapes.append(shape) or draw(seed, stream, shape)
    )
    post = problem.fit("sampled", num_samples=3, **EXACT)
    size = 6 // problem.lin.num_outputs
    assert {shape[0] for shape in shapes if len(shape) == 3} == {size}
    whole = post._noise_of(next(iter(post.model)), problem.lin.num_outputs)
    first, last = whole[:, :size], whole[:, -size:]
    assert (first - last).abs().min() > 0  # other points, other noise


def test_noise_stays_positive_where_data_determine_all():
    from ntkgp.posteriors.em import _noise

    now, squares, n = torch.tensor([0.5]), torch.tensor(3.0), torch.tensor(10.0)
    assert_close(_noise(now, squares, n, torch.tensor(4.0)), torch.tensor(0.5))  # 3 / (10 − 4)
    assert_close(_noise(now, squares, n, torch.tensor(12.0)), torch.tensor(0.9))  # (3 + 0.5 * 12) / 10
    fixed = torch.tensor([0.4])  # 0.4 = s / (n − γ) holds for both steps
    assert_close(_noise(fixed, 0.4 * (n - 9.5), n, torch.tensor(9.5)), fixed[0])


def test_features_too_large_to_capture_ask_for_a_sketch(float64):
    problem = Problem("mlp", "gaussian")
    post = problem.fit("sampled", num_samples=2, **EXACT)
    assert post._rank == 0
    post.preconditioner = None
    post.model.memory_budget = post.lin.capture_bytes - 1
    assert post._rank == min(500, post.lin.num_params)


def test_progress_shows_parameters_precisions_and_residuals(float64, capsys):
    Problem("mlp", "gaussian", "grouped").fit("sampled", num_samples=2, **EXACT).tune(steps=1, progress=True)
    shown = capsys.readouterr().err
    assert "EM: 100%" in shown
    assert all(part in shown for part in ("γ ", "; α ", "; residual "))


def test_a_sketch_of_large_curvature_stays_positive_in_single_precision():
    problem = Problem("mlp", "gaussian")
    n = problem.lin.num_params
    prior = priors.Isotropic(problem.lin, 0.5).float()
    W = torch.randn(10, n, generator=torch.Generator().manual_seed(0)) * torch.logspace(1, 5, 10).unsqueeze(1)
    v = torch.cat([W, torch.randn(3, n)]) / 1e3
    found = Sketch(W).preconditioner(prior)(v)
    exact = torch.linalg.inv(0.5 * torch.eye(n).double() + W.double().mT @ W.double())
    assert found.dtype == torch.float32
    size, truth = (v * found).sum(1).double(), ((v.double() @ exact) * v.double()).sum(1)
    assert_close(size, truth, rtol=0.1, atol=0)  # ε² s² = .02 where curvature is s² = 10¹² times the prior's
    assert (size > 0).all()
