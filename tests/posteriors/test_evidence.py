"""Gradients of the evidence, tuning, and what live hyperparameters mean."""

import pkgutil
from copy import deepcopy

import gpytorch
import pytest
import torch
from problems import Problem, learnt
from torch.testing import assert_close

import ntkgp

METHODS = {"function": {}, "full": {}, "diag": {}, "kron": {}, "low_rank": {"rank": 12}}


@pytest.mark.parametrize("at", ["map", "linear_mode"])
@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output", "categorical", "poisson"])
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_the_evidence_passes_gradcheck(method, likelihood, at, float64):
    problem = Problem("mlp", likelihood, "grouped", n=4)
    post = problem.fit(method, **METHODS[method])
    parameters = learnt(post)

    def evidence(*values):
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return post.log_evidence(at)

    start = [p.detach().clone() for p in parameters]
    grads = torch.autograd.grad(post.log_evidence(at), parameters)
    for i, parameter in enumerate(start):
        for j in range(parameter.numel()):
            differences = []
            for sign in (1, -1):
                moved = [p.clone() for p in start]
                moved[i].view(-1)[j] += sign * 1e-5
                differences.append(sign * evidence(*moved).item())
            assert grads[i].view(-1)[j].item() == pytest.approx(sum(differences) / 2e-5, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_hyperparameters_are_live(method, float64):
    problem = Problem("mlp", "gaussian")
    post = problem.fit(method, **METHODS[method])
    post.latent(problem.x_new), post.log_evidence()
    post.prior.precision, post.likelihood.noise = 3.0, 2.0
    again = problem.fit(method, **METHODS[method])
    again.prior.precision, again.likelihood.noise = 3.0, 2.0
    assert_close(
        post.latent(problem.x_new).covariance_matrix, again.latent(problem.x_new).covariance_matrix, rtol=1e-9, atol=0
    )
    assert_close(post.log_evidence(), again.log_evidence(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_tuning_climbs_to_a_stationary_point_without_the_network(method, likelihood, float64, monkeypatch):
    problem = Problem("mlp", likelihood, n=12)
    post = problem.fit(method, **METHODS[method])
    before = post.log_evidence().item()

    def refuse(*args, **kwargs):
        raise AssertionError("the network was differentiated again")

    monkeypatch.setattr(ntkgp.Linearization, "features", refuse)
    monkeypatch.setattr(ntkgp.Linearization, "factors", refuse)
    monkeypatch.setattr(ntkgp.Linearization, "jvp", refuse)
    monkeypatch.setattr(ntkgp.Linearization, "vjp", refuse)
    assert post.tune() is post
    assert post.log_evidence().item() > before
    assert post.history[-1]["log_evidence"] == pytest.approx(post.log_evidence().item(), abs=1e-9)
    assert post.history[-1]["gradient_norm"] < 1e-3


def test_a_named_prior_is_tuned_and_an_object_is_left_alone(float64):
    problem = Problem()
    data = problem.x, problem.y
    assert ntkgp.fit(problem.net, data, prior="isotropic").history
    prior = problem.make_prior()
    before = prior.precision.detach().clone()
    assert not ntkgp.fit(problem.lin, data, prior=prior).history
    assert_close(prior.precision, before)
    assert ntkgp.fit(problem.lin, data, prior=prior, tune=True).history


FITS = [("function", {}), ("variational", {"num_inducing": 6}), ("variational", {"num_inducing": 6, "mean": "linear"})]


@pytest.mark.parametrize(("method", "options"), FITS, ids=["function", "variational", "free mean"])
def test_a_validation_score_chooses_from_the_grid(method, options, float64):
    problem = Problem("mlp", "categorical")
    post = problem.fit(method, **options)
    start, grid = post.prior.precision.detach().clone(), torch.tensor([0.01, 1.0, 100.0])
    validation = problem.x_new, torch.tensor([0, 1, 2, 0, 1])
    post.tune(validation=validation, grid=grid)
    scores = []
    for factor in grid:
        other = problem.fit(method, **options)
        other.prior.precision = start * factor
        scores.append(other.predict(problem.x_new).log_prob(validation[1]).mean().item())
    assert_close(post.prior.precision, start * grid[torch.tensor(scores).argmax()])
    told = [step["validation_log_prob"] for step in post.history if "validation_log_prob" in step]
    assert told == pytest.approx(scores)


@pytest.mark.parametrize("asked", ["features", "__call__"])
@pytest.mark.parametrize(("method", "options"), [*FITS[:2], ("full", {})])
def test_a_grid_asks_the_network_once_for_each_validation_point(method, options, asked, float64, monkeypatch):
    problem = Problem("mlp", "categorical")
    post, seen, real = problem.fit(method, **options), [], getattr(ntkgp.Linearization, asked)
    post.predict(problem.x_new)  # whatever it prepares is there then

    def counted(lin, x, *more):
        seen.append(len(x))
        return real(lin, x, *more)

    monkeypatch.setattr(ntkgp.Linearization, asked, counted)
    post.tune(validation=(problem.x_new, torch.tensor([0, 1, 2, 0, 1])), grid=torch.tensor([0.01, 1.0, 100.0]))
    assert seen == [5]


@pytest.mark.parametrize("method", ["diag", "kron"])
@pytest.mark.parametrize("temperatures", [None, [1.0, 2.0]])
def test_validation_points_past_the_memory_are_asked_for_part_by_part(method, temperatures, float64, monkeypatch):
    problem = Problem("mlp", "categorical")
    x, y = torch.randn(9, *problem.x.shape[1:]), torch.arange(9) % 3
    whole, post = problem.fit(method), problem.fit(method)
    post.predict(x)
    post.model.memory_budget = 4 * post.model._bytes_each + 1
    monkeypatch.setattr(type(post), "_batch", lambda self, x: 2)
    seen, real = [], ntkgp.Linearization.features

    def counted(lin, points):
        seen.extend(point for point in points if (point == x).flatten(1).all(1).any())  # not those of training
        return real(lin, points)

    monkeypatch.setattr(ntkgp.Linearization, "features", counted)
    grid = torch.tensor([0.01, 1.0, 100.0])
    post.tune(validation=(x, y), grid=grid, temperatures=temperatures)
    assert len(seen) == 9 * (1 if temperatures is None else 2)
    scores = []
    for heat in temperatures or [1.0]:
        for factor in grid:
            other = problem.fit(method)
            other.prior.precision, other.likelihood.temperature = whole.prior.precision.detach() * factor, heat
            parts = [other.predict(x[i : i + 4]).log_prob(y[i : i + 4]) for i in (0, 4, 8)]
            scores.append(torch.cat(parts).mean().item())
    told = [step["validation_log_prob"] for step in post.history if "validation_log_prob" in step]
    assert told == pytest.approx(scores)


def test_a_grid_in_function_space_multiplies_features_once_for_each_group(float64, monkeypatch):
    from ntkgp.posteriors import capacitance, function_space

    post, formed = Problem("mlp", "categorical", "grouped").fit("function").refine(), []
    validation, fresh = (Problem().x_new, torch.tensor([0, 1, 2, 0, 1])), deepcopy(post)
    for module in (function_space, capacitance):
        real = module.gram
        monkeypatch.setattr(module, "gram", lambda *args, real=real: formed.append(args) or real(*args))
    post.tune(validation=validation, grid=torch.tensor([0.01, 1.0, 100.0, 10.0]))
    groups = len(post.prior.atoms)
    assert groups > 1
    assert len(formed) == 2 * groups  # among training points, and with the others
    fresh.prior.precision = post.prior.precision.detach()
    best = fresh.predict(validation[0]).log_prob(validation[1]).mean().item()
    assert max(step["validation_log_prob"] for step in post.history[-4:]) == pytest.approx(best)


@pytest.mark.parametrize("fits", [False, True])
def test_a_grid_keeps_the_kernel_only_where_it_and_its_factor_fit_the_memory(fits, float64):
    problem = Problem("mlp", "categorical", "isotropic")
    post, points = problem.fit("function"), len(problem.x) * problem.lin.num_outputs
    post.model.memory_budget = 2 * 8 * points**2 - (0 if fits else 1)
    post.tune(validation=(problem.x_new, torch.tensor([0, 1, 2, 0, 1])), grid=torch.tensor([0.01, 1.0, 100.0]))
    assert (post._atoms is not None) == fits
    other = problem.fit("function")
    other.prior.precision = post.prior.precision.detach()
    assert_close(post.predict(problem.x_new).probs, other.predict(problem.x_new).probs)


def test_failed_tuning_changes_nothing(float64, monkeypatch):
    post = Problem("mlp", "gaussian").fit("function")
    before = [p.detach().clone() for p in post.parameters()]
    calls = []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("broken")
        return type(post)._log_joint(post, *args, **kwargs)

    monkeypatch.setattr(post, "_log_joint", fail)
    with pytest.raises(RuntimeError, match="broken"):
        post.tune()
    for parameter, value in zip(post.parameters(), before, strict=True):
        assert_close(parameter.detach(), value)


@pytest.mark.parametrize(
    ("method", "options", "where"),
    [
        ("sampled", {}, "ntkgp.posteriors.em._step"),
        ("variational", {"num_inducing": 6}, "ntkgp.posteriors.sparse.VariationalPosterior.collapsed_bound"),
    ],
)
def test_hyperparameters_go_back_wherever_tuning_fails(method, options, where, float64, monkeypatch):
    post = Problem("mlp", "gaussian").fit(method, **options)
    before, moved = [p.detach().clone() for p in post.parameters()], []
    module, name = where.rsplit(".", 1)
    owner = pkgutil.resolve_name(module)
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        if any(not torch.equal(p, value) for p, value in zip(post.parameters(), before, strict=True)):
            moved.append(1)
            raise RuntimeError("broken")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="broken"):
        post.tune(progress=False)
    assert moved
    assert all(torch.equal(p, value) for p, value in zip(post.parameters(), before, strict=True))


def test_unknown_places_are_named(float64):
    post = Problem().fit("function")
    with pytest.raises(ValueError, match='at must be "linear_mode" or "map", but is \'mode\''):
        post.log_evidence(at="mode")
    with pytest.raises(ValueError, match="curvature_at must be"):
        post.log_evidence(curvature_at="mode")


def test_there_may_be_nothing_to_tune(float64):
    post = Problem().fit("function")
    post.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to tune"):
        post.tune()


def test_a_network_far_from_its_mode_is_told(float64):
    x = torch.linspace(-1, 1, 40)[:, None]
    y = torch.sin(3 * x)
    net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    with pytest.warns(UserWarning, match=r"nats a target over the network itself.*refine"):
        post = ntkgp.fit(net, (x, y), ntkgp.likelihoods.Gaussian(0.1).double())
    assert post.refine().predict(x).log_prob(y).mean() > post.predict(x).log_prob(y).mean() + 1


@pytest.mark.parametrize("prior", ["isotropic", "grouped", "diagonal"])
@pytest.mark.parametrize("method", ["function", "full"])
def test_effective_parameters_are_counted_by_the_trace(method, prior, float64):
    problem = Problem("mlp", "categorical", prior)
    post = problem.fit(method)
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    Sigma = torch.linalg.inv(
        torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J) + torch.linalg.inv(post.prior.covariance().to_dense())
    )
    shares = 1 - Sigma.diagonal() / post.prior.covariance().to_dense().diagonal()  # 1 − α_i Σ_ii
    if prior != "diagonal":
        sizes = [
            sum(problem.lin.layout.sizes[problem.lin.layout.names.index(n)] for n in names)
            for names in post.prior.groups.values()
        ]
        shares = torch.stack([part.sum() for part in shares.split(sizes)])
    assert_close(post.effective_parameters(), shares, rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
@pytest.mark.parametrize("at", ["linear_mode", "map"])
@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output", "categorical"])
@pytest.mark.parametrize("method", METHODS)
def test_the_fixed_point_is_where_the_gradient_vanishes(method, likelihood, at, float64):
    problem = Problem("mlp", likelihood, "isotropic", n=40).informed()
    post = problem.fit(method, **METHODS[method])
    post.tune(at=at, method="fixed_point", steps=200)
    grads = torch.autograd.grad(post.log_evidence(at), learnt(post))
    assert max(g.abs().max() for g in grads) < 1e-4
    counted = sum(post.history[-1]["effective_parameters"])
    assert counted == pytest.approx(post.effective_parameters().sum().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
def test_curvature_and_hyperparameters_settle_together(float64):
    problem = Problem("mlp", "categorical", "isotropic", n=40).informed()
    post = problem.fit("function").tune(curvature_at="linear_mode")
    there = post._at(post.linear_mode().delta)
    value = post._log_joint(post.linear_mode().delta) - there._log_det() / 2
    (gradient,) = torch.autograd.grad(value, learnt(post))
    assert gradient.abs().max() < 1e-4
    assert value.item() == pytest.approx(post.log_evidence(curvature_at="linear_mode").item(), rel=1e-10)
    elsewhere = problem.fit("function").tune()
    assert (elsewhere.prior.precision - post.prior.precision).abs().max() > 1e-3


def test_the_fixed_point_says_what_it_cannot_tune(float64):
    problem = Problem("mlp", "gaussian")
    prior = ntkgp.priors.Isotropic(problem.lin, precision_prior=gpytorch.priors.GammaPrior(2.0, 1.0))
    post = ntkgp.fit(problem.lin, (problem.x, problem.y), problem.make_likelihood(), "function", prior)
    with pytest.raises(ValueError, match="without hyperpriors"):
        post.tune(method="fixed_point")
    with pytest.raises(ValueError, match='method must be "gradient" or "fixed_point"'):
        post.tune(method="mackay")


def test_a_hyperprior_moves_the_optimum(float64):
    problem = Problem("mlp", "gaussian")
    found = []
    for hyperprior in (None, gpytorch.priors.LogNormalPrior(5.0, 0.1)):
        prior = ntkgp.priors.Isotropic(problem.lin, precision_prior=hyperprior)
        post = ntkgp.fit(problem.lin, (problem.x, problem.y), problem.make_likelihood(), "function", prior, tune=True)
        found.append(post.prior.precision.item())
    assert 100 < found[1] < 200 < abs(found[0] - found[1]) + 200


EVERY_PRIOR = {
    "isotropic": lambda lin: ntkgp.priors.Isotropic(lin, 0.8),
    "diagonal": lambda lin: ntkgp.priors.Diagonal(lin, torch.linspace(0.5, 3.0, lin.num_params)),
    "kronecker": lambda lin: ntkgp.priors.Kronecker(lin, 1.3),
    "conv filter": lambda lin: ntkgp.priors.ConvFilterGP(lin, 0.7, 1.5),
    "g-prior": lambda lin: ntkgp.priors.GPrior(lin, torch.linspace(0.1, 4.0, lin.num_params), by="layer"),
}


@pytest.mark.parametrize("at", ["map", "linear_mode"])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("method", ["function", "full"])
@pytest.mark.parametrize("prior", EVERY_PRIOR)
def test_the_gradient_holds_for_every_prior(prior, method, likelihood, at, float64):
    """Along random directions through all hyperparameters, against central differences."""
    problem = Problem("cnn", likelihood, n=5)
    problem.make_prior = lambda: EVERY_PRIOR[prior](problem.lin)
    post = problem.fit(method)
    parameters = learnt(post)
    grads = torch.autograd.grad(post.log_evidence(at), parameters)
    start = [p.detach().clone() for p in parameters]
    for _ in range(3):
        direction = [torch.randn_like(p) for p in parameters]
        direction = [d.tril() if d.ndim == 2 else d for d in direction]  # roots are triangular
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, p0, d in zip(parameters, start, direction, strict=True):
                    p.copy_(p0 + sign * 1e-5 * d)
            values.append(sign * post.log_evidence(at).item())
        slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True)).item()
        assert slope == pytest.approx(sum(values) / 2e-5, rel=1e-5, abs=1e-6)
