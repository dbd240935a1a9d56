"""Sparse variational processes against the dense formulas and the exact posteriors."""

import pytest
import torch
from cases import BY_NAME
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp import priors
from ntkgp.posteriors import Inducing
from ntkgp.posteriors.bound import Averages
from ntkgp.posteriors.sparse_steps import Steps
from ntkgp.posteriors.whitened import Natural

CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # the nugget is 2e-13 of the largest variance
CONVERGED = {"batch_size": None, "epochs": 80}


def everything(p):
    """All values at the training points: nothing is left out."""
    return Inducing(p.x)


def dense_prior(p, prior, inducing, x, nugget):
    """L, W, k(x, x) and J at x from the dense Jacobian."""
    S0 = prior.covariance().to_dense().detach()
    J_Z = p.lin.jacobian(inducing.x)
    C = J_Z.shape[1]
    J_Z = J_Z.flatten(0, 1) if inducing.outputs is None else J_Z[torch.arange(len(J_Z)), inducing.outputs]
    K = J_Z @ S0 @ J_Z.mT
    L = torch.linalg.cholesky(K + nugget * K.diagonal().max() * torch.eye(len(K)))
    J = p.lin.jacobian(x).flatten(0, 1)
    W = torch.linalg.solve_triangular(L, J_Z @ S0 @ J.mT, upper=False).mT
    return L, W, J @ S0 @ J.mT, C


def random_q(M, spread=0.5, free=True):
    A = torch.randn(M, M)
    return Natural(torch.eye(M) + spread * A @ A.mT / M, torch.randn(M) if free else torch.zeros(M))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("prior", ["isotropic", "grouped", "around the map", "diagonal"])
@pytest.mark.parametrize(("network", "likelihood"), [("mlp", "gaussian"), ("cnn", "noise by output")])
def test_with_all_values_and_a_free_mean_it_is_the_exact_process(network, likelihood, prior, weighted, float64):
    p = Problem(network, likelihood, prior)
    w = torch.rand(8) + 0.5 if weighted else None
    post = p.fit("variational", inducing=everything(p), mean="linear", weights=w)
    exact = p.fit("function", weights=w).refine()
    for joint in (False, True):
        found, truth = post.latent(p.x_new, joint), exact.latent(p.x_new, joint)
        assert_close(found.mean, truth.mean, **CLOSE)
        assert_close(found.covariance_matrix, truth.covariance_matrix, **CLOSE)
    assert_close(post.log_evidence(), exact.log_evidence(), **CLOSE)
    assert_close(post.collapsed_bound(), exact.log_evidence(), **CLOSE)
    assert_close(post.shift, exact.shift, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    M=st.integers(1, 24),
    seed=st.integers(0, 1000),
    noise=st.floats(0.05, 5.0),
    how=st.sampled_from(["kmeans", "random", "greedy"]),
    objective=st.sampled_from(["elbo", "predictive"]),
)
def test_the_bound_never_exceeds_the_evidence(M, seed, noise, how, objective):
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        p = Problem("mlp", "gaussian", "grouped")
        p.make_likelihood = lambda: ntkgp.likelihoods.Gaussian(noise)
        options = {"num_inducing": M, "inducing": how, "seed": seed, "objective": objective, "epochs": 4}
        exact = p.fit("function")
        free = p.fit("variational", mean="linear", **options)
        assert free.log_evidence() <= exact.log_evidence() + 1e-8
        assert free.log_evidence() <= free.collapsed_bound() + 1e-8
        _, _, K, _ = dense_prior(p, p.make_prior(), Inducing(p.x), p.x, 1e-12)
        y, f = p.y.flatten(), p.lin(p.x).flatten().detach()
        fixed_mean = torch.distributions.MultivariateNormal(f, K + noise * torch.eye(24)).log_prob(y)
        fixed = p.fit("variational", mean="network", **options)
        assert fixed.log_evidence() <= fixed_mean + 1e-8
        assert fixed.log_evidence("map") <= exact.log_evidence() + 1e-8
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output"])
def test_a_natural_step_over_all_data_reaches_the_collapsed_bound(likelihood, mean, float64):
    p = Problem("mlp", likelihood, n=12)
    post = p.fit("variational", num_inducing=7, mean=mean)
    start = random_q(7, free=mean == "linear")
    assert post._bound_at(start).value < post.collapsed_bound() - 0.1
    measure = Steps(post, post.process.feed(False), False).on(next(post.process.feed(False).in_order()))
    averages = Averages()
    new = measure.natural_step(start, measure.under(start, averages, 0), 1.0, averages, 0)
    assert_close(post._bound_at(new).value, post.collapsed_bound(), rtol=1e-8, atol=1e-8)
    assert_close(post.log_evidence(), post.collapsed_bound(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("prior", ["isotropic", "grouped"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "categorical", "pixels", "heteroscedastic"])
def test_with_all_values_and_a_free_mean_it_is_the_variational_refinement(likelihood, prior, float64):
    p = Problem("mlp", likelihood, prior)
    slowly = {"epochs": 160} if likelihood == "heteroscedastic" else {}  # Λ is not the Hessian itself
    options = CONVERGED | slowly | {"num_samples": 512}
    post = p.fit("variational", inducing=everything(p), mean="linear", **options)
    exact = p.fit("function").refine("variational")
    found, truth = post.latent(p.x_new, joint=True), exact.latent(p.x_new, joint=True)
    assert_close(found.mean, truth.mean, rtol=1e-6, atol=1e-6)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical", "poisson", "pixels"])
def test_the_nystrom_posterior_of_all_values_is_the_laplace_posterior(likelihood, float64):
    p = Problem("cnn", likelihood)
    post, exact = p.fit("variational", inducing=everything(p), objective="nystrom"), p.fit("function")
    found, truth = post.latent(p.x_new, joint=True), exact.latent(p.x_new, joint=True)
    assert_close(found.mean, truth.mean, rtol=1e-12, atol=0)
    assert_close(found.covariance_matrix, truth.covariance_matrix, **CLOSE)
    assert_close(post.effective_parameters(), exact.effective_parameters(), rtol=1e-6, atol=1e-8)
    assert_close(post._log_det(), exact._log_det().detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["lenet", "lstm", "tied", "keywords", "cross attention", "transformer", "one output"])
def test_networks_of_all_kinds_will_do(name, float64):
    net, x = BY_NAME[name].build()
    lin = ntkgp.Linearization(net, example=x)
    n, C = lin(x).shape
    y, prior = torch.randn(n, C), priors.Grouped(lin, mean="map")
    exact = ntkgp.fit(lin, (x, y), "gaussian", "function", prior).latent(x)
    post = ntkgp.fit(lin, (x, y), "gaussian", "variational", prior, inducing=Inducing(x))
    assert_close(post.latent(x).covariance_matrix, exact.covariance_matrix, rtol=1e-5, atol=1e-7)
    some = ntkgp.fit(lin, (x, y), "gaussian", "variational", prior, num_inducing=2, mean="linear")
    assert torch.isfinite(some.predict(x).log_prob(y)).all()
    assert (some.latent(x).variance > 0).all()


@pytest.mark.parametrize("objective", ["elbo", "alpha", "predictive", "nystrom"])
def test_a_fixed_mean_keeps_the_networks_prediction(objective, float64):
    p = Problem("mlp", "categorical", n=20)
    post = p.fit("variational", num_inducing=9, objective=objective, epochs=3)
    assert torch.equal(post.latent(p.x_new).mean, p.lin(p.x_new))
    assert post.shift is None
    refined = post.refine(epochs=20)
    assert (refined.latent(p.x_new).mean - p.lin(p.x_new)).abs().max() > 0.01
    assert refined.prior is not post.prior
    assert refined.bound().value > post.bound().value


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize("pairs", [False, True], ids=["all outputs", "pairs"])
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical"])
def test_q_and_bound_are_the_dense_formulas(likelihood, pairs, mean, float64):
    p = Problem("cnn", likelihood, "grouped", n=6)
    inducing = Inducing(p.x[:4], torch.tensor([2, 1, 0, 2])) if pairs else Inducing(p.x[:3])
    post = p.fit("variational", inducing=inducing, mean=mean, epochs=2)
    q, prior, nugget = post.q, p.make_prior(), post.process.nugget
    S = torch.linalg.inv(q.P)
    for x, joint in ((p.x_new, True), (p.x_new, False), (p.x, False)):
        _, W, K, C = dense_prior(p, prior, inducing, x, nugget)
        covariance = K - W @ W.mT + W @ S @ W.mT
        m = p.lin(x)
        if mean == "linear":
            m = m + p.lin.jvp(x, prior.mean - p.lin.theta) + (W @ S @ q.h).view_as(m)
        else:
            assert not q.h.any()
        found = post.latent(x, joint)
        assert_close(found.mean, m, **CLOSE)
        blocks = covariance.view(len(x), C, len(x), C).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        assert_close(found.covariance_matrix, covariance if joint else blocks, **CLOSE)
    std = torch.linalg.cholesky(blocks)
    draws = m + (std @ torch.randn(100_000, len(m), C, 1)).squeeze(-1)
    log_prob = post.likelihood.log_prob(post.model.data.y, draws).sum(1)
    kl = (S.diagonal().sum() + (S @ q.h).square().sum() - len(S) - torch.logdet(S)) / 2
    error = log_prob.std() / 100_000**0.5
    bound = post.bound()
    assert (bound.value - (log_prob.mean() - kl)).abs() < 5 * (error + bound.standard_error)
    assert (bound.standard_error > 0) == (likelihood == "categorical")


@pytest.mark.parametrize("prior", ["grouped", "diagonal"])
@pytest.mark.parametrize("mean", ["network", "linear"])
def test_weights_and_functions_are_one_posterior(mean, prior, float64):
    p = Problem("mlp", "categorical", prior, n=12)
    post = p.fit("variational", num_inducing=10, mean=mean, epochs=3)
    J = p.lin.jacobian(p.x_new).flatten(0, 1)
    joint = post.latent(p.x_new, joint=True)
    assert_close(J @ post._covariance_times(J).mT, joint.covariance_matrix, **CLOSE)
    Sigma = post._covariance_times(torch.eye(p.lin.num_params))
    alpha, index = post.prior.precision.detach(), post.prior.precision_index
    sizes = torch.zeros_like(alpha).index_add(0, index, torch.ones(p.lin.num_params))
    determined = sizes - alpha * torch.zeros_like(alpha).index_add(0, index, Sigma.diagonal())
    assert_close(post.effective_parameters(), determined, rtol=1e-6, atol=1e-8)
    n = 20_000
    theta = post.sample_weights(n, torch.Generator().manual_seed(0))
    centre = p.lin.theta if post.shift is None else p.lin.theta + post.shift
    assert ((theta.mean(0) - centre) / (Sigma.diagonal() / n).sqrt()).abs().max() < 5
    found, variance = theta.mT.cov(), Sigma.diagonal()
    error = ((variance[:, None] * variance + Sigma.square()) / n).sqrt()
    assert ((found - Sigma) / error).abs().max() < 5.5
    f = post.sample_functions(n, torch.Generator().manual_seed(0))(p.x_new)
    error = (joint.variance / n).sqrt()
    assert ((f.mean(0) - joint.mean) / error).abs().max() < 5


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize("prior", ["isotropic", "grouped", "diagonal"])
@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output", "bernoulli"])
def test_gradients_of_the_bound_are_its_differences(likelihood, prior, mean, float64):
    p = Problem("mlp", likelihood, prior, n=10)
    inducing = Inducing(p.x[:6], torch.arange(6) % 3)
    post = p.fit("variational", inducing=inducing, mean=mean, learn_inducing=True, epochs=1)
    q = random_q(6, free=mean == "linear")
    parameters = [parameter for parameter in post.parameters() if parameter.requires_grad]
    assert len(parameters) == 2 + (likelihood != "bernoulli")
    gradients = torch.autograd.grad(post._bound_at(q).value, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction, values = torch.randn_like(parameter), []
        with torch.no_grad():
            for h in (1e-5, -1e-5):
                parameter.add_(h * direction)
                values.append(post._bound_at(q).value)
                parameter.sub_(h * direction)
        assert_close((gradient * direction).sum(), (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=1e-7)


def test_at_its_best_q_the_bound_has_the_gradients_of_the_collapsed_one(float64):
    p = Problem("mlp", "noise by output", "grouped", n=10)
    post = p.fit("variational", num_inducing=6, mean="linear")
    parameters = [post.prior.raw_precision, post.likelihood.raw_noise]
    found = torch.autograd.grad(post.log_evidence(), parameters)
    truth = torch.autograd.grad(post.collapsed_bound(), parameters)
    for a, b in zip(found, truth, strict=True):
        assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("pairs", [False, True], ids=["all outputs", "pairs"])
def test_gradients_to_inducing_points_pass_through_a_cnn(pairs, float64):
    p = Problem("cnn", "gaussian", n=4)
    inducing = Inducing(p.x[:2] + 0.1, torch.tensor([0, 2])) if pairs else Inducing(p.x[:1] + 0.1)
    post = p.fit("variational", inducing=inducing, learn_inducing=True, mean="linear", epochs=1, nugget=1e-6)
    q, (leaf,) = random_q(post.num_inducing), post.points

    def bound(x):
        with torch.no_grad():
            leaf[:1].copy_(x)
        value = post._bound_at(q).value
        return _Given.apply(x, value.detach(), torch.autograd.grad(value, leaf)[0][:1])

    assert torch.autograd.gradcheck(bound, (inducing.x[:1].clone().requires_grad_(),), atol=1e-6)


class _Given(torch.autograd.Function):
    """A value with the gradient it is said to have."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("observation", ["gaussian", "categorical"])
def test_float32_stays_close_to_float64(observation):
    default, found = torch.get_default_dtype(), []
    try:
        torch.set_default_dtype(torch.float64)
        p = Problem("cnn", observation, n=12)
        for lin in (p.lin, p.lin.float()):
            torch.set_default_dtype(lin.dtype)
            prior = ntkgp.priors.Grouped(lin, precision=torch.linspace(0.5, 2.0, len(lin.groups)), mean=0.1)
            x, x_new = p.x.to(lin.dtype), p.x_new.to(lin.dtype)
            y = p.y.to(lin.dtype) if p.y.is_floating_point() else p.y
            inducing = Inducing(x[:5], torch.arange(5) % 3)
            post = ntkgp.fit(
                lin, (x, y), observation, "variational", prior, inducing=inducing, mean="linear", batch_size=None
            )
            assert post.latent(x_new).mean.dtype == lin.dtype
            assert post.q.P.dtype == torch.float64
            assert post.log_evidence().dtype == lin.dtype
            found.append((post.latent(x_new), post.log_evidence(), post.effective_parameters()))
    finally:
        torch.set_default_dtype(default)
    truth, single = found
    assert_close(single[0].mean.double(), truth[0].mean, rtol=1e-3, atol=1e-3)
    assert_close(single[0].covariance_matrix.double(), truth[0].covariance_matrix, rtol=1e-3, atol=1e-3)
    assert_close(single[1].double(), truth[1], rtol=1e-3, atol=0)
    assert_close(single[2].double(), truth[2], rtol=1e-3, atol=1e-3)


def test_it_can_be_moved_to_another_dtype(float64):
    p = Problem("cnn", "categorical", n=12)
    post = p.fit("variational", num_inducing=8, mean="linear")
    truth, q = post.latent(p.x_new), post.q
    post.float()
    found = post.latent(p.x_new.float())
    assert torch.equal(post.q.P, q.P)  # it was not trained again
    assert_close(found.mean.double(), truth.mean, rtol=1e-3, atol=1e-3)
    assert_close(found.covariance_matrix.double(), truth.covariance_matrix, rtol=1e-3, atol=1e-3)


def test_inducing_values_that_say_the_same_are_no_matter_with_a_nugget_and_an_error_without(float64):
    p = Problem("mlp", "gaussian")
    twice = Inducing(torch.cat([p.x[:3], p.x[:3]]))
    post, once = p.fit("variational", inducing=twice, mean="linear"), p.fit("variational", inducing=Inducing(p.x[:3]))
    assert_close(post.log_evidence(), once.refine().log_evidence(), rtol=1e-6, atol=0)
    with pytest.raises(torch.linalg.LinAlgError, match="K_ZZ of 18 inducing values is not positive definite"):
        p.fit("variational", inducing=twice, nugget=0.0)


def test_far_from_inducing_values_the_priors_variance_stays(float64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    x = torch.linspace(-1, 0, 30).unsqueeze(-1)
    post = ntkgp.fit(net, (x, x.sin()), ntkgp.likelihoods.Gaussian(0.01), "variational", num_inducing=5, tune=False)
    far = torch.tensor([[8.0]])
    own = ntkgp.NTKKernel(post.lin, post.prior).blocks(far)
    assert post.latent(far).variance.item() > 0.3 * own.item()
    assert post.latent(x).variance.max() < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": "zero"}, 'mean must be "network" or "linear", but is \'zero\''),
        ({"objective": "magic"}, "objective must be one of elbo, alpha, predictive, nystrom, but is 'magic'"),
        ({"alpha": 0.0}, "alpha must be above 0 and at most 1, but is 0.0"),
        ({"alpha": 1.5}, "alpha must be above 0 and at most 1, but is 1.5"),
        ({"epochs": 0}, "epochs must be at least 1, but is 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"num_samples": 0}, "num_samples must be at least 1, but is 0"),
        ({"nugget": -1.0}, "nugget must not be negative, but is -1.0"),
    ],
)
def test_options_that_cannot_be_are_named(options, message, float64):
    with pytest.raises(ValueError, match=message):
        Problem().fit("variational", **({"num_inducing": 4} | options))


def test_what_a_sparse_process_has_not_is_named(float64):
    post = Problem().fit("variational", num_inducing=4, epochs=1)
    with pytest.raises(ValueError, match='at must be "bound" or "map" for a sparse process, but is \'linear_mode\''):
        post.log_evidence("linear_mode")
    with pytest.raises(ValueError, match="at must be \"bound\" for a sparse process, but is 'map'"):
        post.refine().log_evidence("map")
    with pytest.raises(ValueError, match="only Gaussian noise collapses, but the likelihood is Categorical"):
        post.collapsed_bound()
    with pytest.raises(ValueError, match="method must be \"variational\" for a sparse process, but is 'laplace'"):
        post.refine("laplace")
    with pytest.raises(ValueError, match="it cannot be set"):
        post.shift = post.lin.theta
    with pytest.raises(TypeError, match="method 'variational' does not take 'points'"):
        Problem().fit("variational", points=3)
