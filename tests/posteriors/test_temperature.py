"""A temperature belongs to the likelihood: posteriors follow it, and validation data choose it."""

import json

import pytest
import torch
from observations import Scaled
from problems import Problem
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import ntkgp
from ntkgp.likelihoods import Bernoulli, Categorical, Gaussian
from ntkgp.posteriors import Mixture
from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.prediction import Latent, predictive_of

METHODS = ["function", "full", "kron", "diag", "variational"]
LABELS = torch.tensor([0, 1, 2, 0, 1])
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


class Cooled(torch.nn.Module):
    """f / τ of a network, whose posterior under τ = 1 is the tempered one of the network, Σ / τ² under S₀."""

    def __init__(self, net, temperature):
        super().__init__()
        self.net, self.temperature = net, temperature

    def forward(self, x):
        return self.net(x) / self.temperature


@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
@pytest.mark.parametrize("method", METHODS)
def test_a_temperature_is_a_network_whose_logits_are_divided(method, link, float64):
    problem = Problem("mlp", "categorical", "isotropic")
    sparse = {"num_inducing": 12, "objective": "nystrom", "inducing": "random"}
    options = sparse if method == "variational" else {}
    post = problem.fit(method, **options)
    post.likelihood.temperature = 1.7
    cooled = ntkgp.Linearization(Cooled(problem.net, 1.7), example=problem.x)
    prior = ntkgp.priors.Isotropic(cooled, 0.8)
    truth = ntkgp.fit(cooled, (problem.x, problem.y), "categorical", method, prior, **options)
    a, b = post.latent(problem.x_new), truth.latent(problem.x_new)
    assert_close(a.mean / 1.7, b.mean, **TIGHT)
    assert_close(a.covariance_matrix / 1.7**2, b.covariance_matrix, **TIGHT)
    p, q = (each.predict(problem.x_new, link=link) for each in (post, truth))
    assert_close(p.probs, q.probs, **TIGHT)
    assert_close(p.log_prob(LABELS), q.log_prob(LABELS), **TIGHT)
    if method != "variational":  # whose bound is drawn
        assert_close(post.log_evidence(), truth.log_evidence(), **TIGHT)


@pytest.mark.parametrize("link", ["mc", "probit"])
def test_labels_are_divided_alike(link, float64):
    torch.manual_seed(0)
    mean, root = torch.randn(4, 3), torch.randn(4, 3, 3)
    y = torch.randint(0, 2, (4, 3))
    draw = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    warm = predictive_of(Bernoulli(2.5).double(), [Latent(mean, root @ root.mT)], link, 50, draw())
    cool = predictive_of(Bernoulli(), [Latent(mean / 2.5, root @ root.mT / 2.5**2)], link, 50, draw())
    assert_close(warm.probs, cool.probs, rtol=1e-10, atol=0)
    assert_close(warm.log_prob(y), cool.log_prob(y), rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_validation_data_choose_precision_and_temperature(method, float64):
    problem = Problem("mlp", "categorical")
    options = {"num_inducing": 6, "epochs": 2} if method == "variational" else {}
    post = problem.fit(method, **options)
    start, grid, temperatures = post.prior.precision.detach().clone(), [0.01, 1.0, 100.0], [0.5, 1.0, 3.0]
    post.tune(validation=(problem.x_new, LABELS), grid=torch.tensor(grid), temperatures=torch.tensor(temperatures))
    scores = {}
    for temperature in temperatures:
        for factor in grid:
            other = problem.fit(method, **options)
            other.prior.precision, other.likelihood.temperature = start * factor, temperature
            scores[temperature, factor] = other.predict(problem.x_new).log_prob(LABELS).mean().item()
    told = [step["validation_log_prob"] for step in post.history if "validation_log_prob" in step]
    assert told == pytest.approx(list(scores.values()))
    temperature, factor = max(scores, key=scores.__getitem__)
    assert_close(post.likelihood.temperature, torch.tensor(temperature))
    assert_close(post.prior.precision, start * factor)
    assert post.history[-1]["temperature"] == pytest.approx(3.0)


def test_statistics_are_collected_once_a_temperature_and_not_for_precisions(float64, monkeypatch):
    post, passes, real = Problem("mlp", "categorical").fit("full"), [], FullPosterior._collect
    monkeypatch.setattr(FullPosterior, "_collect", lambda self: passes.append(1) or real(self))
    validation = Problem().x_new, LABELS
    post.tune(validation=validation, grid=torch.tensor([0.1, 1.0, 10.0]))
    assert not passes
    post.tune(validation=validation, grid=torch.tensor([0.1, 1.0, 10.0]), temperatures=[1.5, 2.0])
    assert len(passes) == 2


def test_weight_space_refuses_a_gradient_that_it_would_lose(float64):
    problem = Problem("mlp", "categorical")
    function, full = problem.fit("function"), problem.fit("full")
    for post in (function, full):
        post.likelihood.raw_temperature.requires_grad_(True)

    def evidence(raw):
        with torch.no_grad():
            function.likelihood.raw_temperature.copy_(raw)
        return function.log_evidence("map")

    value = evidence(torch.tensor(0.3))
    slope = torch.autograd.grad(value, function.likelihood.raw_temperature)[0]
    step = 1e-5
    truth = (evidence(torch.tensor(0.3 + step)) - evidence(torch.tensor(0.3 - step))).detach() / (2 * step)
    assert_close(slope, truth, rtol=1e-6, atol=0)
    with pytest.raises(NotImplementedError, match=r"hyperparameters of Categorical: use method=.function."):
        full.log_evidence("map")


@pytest.mark.parametrize("method", ["function", "full", "kron"])
def test_a_temperature_is_stored(method, tmp_path, float64):
    problem = Problem("mlp", "categorical")
    post = problem.fit(method)
    post.likelihood.temperature = 1.3
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    assert_close(loaded.likelihood.temperature, torch.tensor(1.3))
    assert_close(loaded.predict(problem.x_new).probs, post.predict(problem.x_new).probs)
    for each in (post, loaded):
        each.likelihood.temperature = 0.7
    assert_close(loaded.predict(problem.x_new).probs, post.predict(problem.x_new).probs)


def test_files_from_before_there_were_temperatures_are_read(tmp_path, float64):
    problem = Problem("mlp", "categorical")
    post = problem.fit("full")
    post.save(tmp_path / "post")
    (file,), (told,) = (tmp_path / "post").glob("*.safetensors"), (tmp_path / "post").glob("*.json")
    tensors = {name: t for name, t in load_file(file).items() if "temperature" not in name}
    meta = json.loads(told.read_text())
    assert len(tensors) < len(meta["tensors"])
    told.write_text(json.dumps(meta | {"tensors": list(tensors)}))
    save_file(tensors, file)
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    assert_close(loaded.predict(problem.x_new).probs, post.predict(problem.x_new).probs)


def test_float32_follows_float64():
    problem = Problem("mlp", "tempered classes")
    single = problem.fit("full").predict(problem.x_new, link="probit")
    double = problem.fit("full").double()
    assert single.probs.dtype == torch.float32
    assert_close(
        single.probs.double(), double.predict(problem.x_new.double(), link="probit").probs, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_temperatures_are_positive_numbers(value):
    with pytest.raises(ValueError, match="temperature must be one positive, finite number"):
        Categorical(temperature=value)


def test_temperatures_need_validation_data_and_a_likelihood_that_has_one(float64):
    problem, gaussian = Problem("mlp", "categorical"), Problem("mlp", "gaussian")
    with pytest.raises(ValueError, match="temperatures: for validation data"):
        problem.fit("full").tune(temperatures=[1.0, 2.0])
    with pytest.raises(ValueError, match="but Gaussian has none"):
        gaussian.fit("full").tune(validation=(gaussian.x, gaussian.y), temperatures=[1.0, 2.0])
    post = problem.fit("full")
    with pytest.raises(ValueError, match="temperature must be one positive"):
        post.tune(validation=(problem.x, problem.y), temperatures=[2.0, -1.0])
    assert post.likelihood.temperature == 1


def test_double_precision_keeps_the_temperature(tmp_path):
    """Under a default of single precision, which temperatures must not go through."""
    problem = Problem("mlp", "categorical", "isotropic")
    lin = ntkgp.Linearization(problem.net.double(), example=problem.x.double())
    post = ntkgp.fit(lin, (problem.x.double(), problem.y), "categorical", "full", "isotropic", tune=False)
    post.likelihood.temperature = 1.3
    assert post.likelihood.temperature.item() == pytest.approx(1.3, rel=1e-14)
    post.save(tmp_path / "post")
    assert ntkgp.load(tmp_path / "post", problem.net).likelihood.temperature.item() == pytest.approx(1.3, rel=1e-14)
    post.tune(validation=(problem.x.double(), problem.y), temperatures=[1.1])
    assert post.likelihood.temperature.item() == pytest.approx(1.1, rel=1e-14)


def test_a_likelihood_that_is_given_takes_over_what_was_saved(tmp_path, float64):
    problem = Problem("mlp", "categorical")
    post = problem.fit("full")
    post.likelihood.temperature = 1.7
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net, Categorical())
    assert_close(loaded.predict(problem.x_new).probs, post.predict(problem.x_new).probs)


def test_ones_own_hyperparameters_are_no_hindrance_where_no_gradient_is_asked(tmp_path, float64):
    problem = Problem("mlp", "gaussian", "isotropic")
    post = ntkgp.fit(problem.lin, (problem.x, problem.y), Scaled(), "full", problem.make_prior())
    truth = ntkgp.fit(problem.lin, (problem.x, problem.y), Gaussian(0.5), "full", problem.make_prior())
    a, b = (each.latent(problem.x_new).covariance_matrix for each in (post, truth))
    assert_close(a, b, **TIGHT)
    assert_close(post.effective_parameters(), truth.effective_parameters(), **TIGHT)
    assert post.likelihood.scale.requires_grad
    post.save(tmp_path / "post")
    with torch.no_grad():
        post.likelihood.scale.fill_(5.0)
    loaded = ntkgp.load(tmp_path / "post", problem.net, post.likelihood)
    assert_close(loaded.latent(problem.x_new).covariance_matrix, b, **TIGHT)


def test_loaded_samples_belong_to_the_hyperparameters_they_were_saved_under(tmp_path, float64):
    problem = Problem("mlp", "categorical", "isotropic")
    post = problem.fit("sampled", num_samples=4)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    loaded.prior.precision = post.prior.precision = 100.0
    a, b = (each.latent(problem.x_new).covariance_matrix for each in (loaded, post))
    assert_close(a, b, rtol=1e-2, atol=1e-6)  # samples are solved for to a tolerance


OTHER_WAY = [{"at": "map"}, {"at": "linear_mode"}, {"steps": 3}, {"method": "fixed_point"}, {"search": {}}]


@pytest.mark.parametrize("method", ["sampled", "variational", "function"])
@pytest.mark.parametrize("options", OTHER_WAY, ids=lambda options: next(iter(options)))
def test_options_of_the_evidence_are_refused_beside_validation_data(method, options, float64):
    post = Problem("mlp", "categorical").fit(method, **({"num_inducing": 6} if method == "variational" else {}))
    ((name, value),) = options.items()
    for tuned in (post, Mixture([post])):
        with pytest.raises(ValueError, match=f"{name}={value!r} is for tuning by evidence, but validation is given"):
            tuned.tune(validation=(Problem().x_new, LABELS), **options)
    with pytest.raises(ValueError, match="grid: for validation data to choose from, but validation is None"):
        post.tune(grid=torch.ones(3))


@pytest.mark.parametrize("method", ["sampled", "variational", "function"])
def test_every_posterior_says_that_temperatures_need_validation_data(method, float64):
    options = {"num_inducing": 6} if method == "variational" else {}
    with pytest.raises(ValueError, match="temperatures: for validation data"):
        Problem("mlp", "categorical").fit(method, **options).tune(temperatures=[1.0])
    with pytest.raises(ValueError, match="temperatures must be one number or more, but is empty"):
        Problem("mlp", "categorical").fit(method, **options).tune(validation=(Problem().x_new, LABELS), temperatures=[])
