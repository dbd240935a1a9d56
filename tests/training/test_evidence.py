"""Evidence-driven training: MacKay's updates by hand, model selection by evidence, and resuming."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.posteriors import DiagonalPosterior, FullPosterior, KroneckerPosterior
from ntkgp.training import EvidenceTraining


def regression(n=60, noise=0.3):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator)
    return x, x @ torch.tensor([[1.5], [-0.7], [0.2]]) + noise * torch.randn(n, 1, generator=generator)


def classes(n=60):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] > 0.3 * torch.randn(n, generator=generator)).long()


def mlp(outputs=2):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(torch.get_default_dtype())


def test_an_update_is_mackays(float64):
    net, (x, y) = nn.Linear(3, 1, bias=False), regression()
    nn.init.constant_(net.weight, 0.9)  # no step is longer than a factor of ten
    likelihood = ntkgp.likelihoods.Gaussian(0.5)
    training = EvidenceTraining(net, likelihood, 60, prior_std=2.0, structure="full")
    lin = ntkgp.Linearization(net, example=x)
    source = training.posterior((x, y)).model.source
    eigenvalues = torch.linalg.eigvalsh(x.mT @ x) / 0.5
    gamma = (eigenvalues / (eigenvalues + 1 / 4)).sum()
    found = training.update(lin, source)
    w = net.weight.detach()
    assert_close(training.precision, (gamma / w.square().sum()).reshape(1))
    assert_close(training.prior_std, training.precision.rsqrt().expand(3))
    assert_close(likelihood.noise, (y - x @ w.mT).square().sum() / (60 - gamma))
    assert found["parameters"] == {"weight": 3}
    eigenvalues = torch.linalg.eigvalsh(x.mT @ x) / likelihood.noise
    after = (eigenvalues / (eigenvalues + training.precision)).sum()
    assert_close(torch.tensor(found["effective_parameters"]["weight"]), after.detach())
    assert found["noise"] == likelihood.noise.item()


def test_a_linear_model_comes_to_the_optimum_of_its_evidence(float64):
    data = regression()
    training = EvidenceTraining(
        nn.Linear(3, 1, bias=False), ntkgp.likelihoods.Gaussian(1.0), structure="full", burn_in=1, every=1
    )
    post = training.fit(data, epochs=150, batch_size=60, lr=0.05, milestones=(100,))
    exact = ntkgp.fit(post.lin, data, ntkgp.likelihoods.Gaussian(1.0), "full", tune=True)
    assert_close(post.prior.precision, exact.prior.precision, rtol=2e-2, atol=0)
    assert_close(post.likelihood.noise, exact.likelihood.noise, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("structure", "kind"), [("full", FullPosterior), ("kron", KroneckerPosterior), ("diag", DiagonalPosterior)]
)
def test_training_ends_at_the_largest_evidence_it_saw(structure, kind, float64):
    training = EvidenceTraining(mlp(), structure=structure, burn_in=4, every=3)
    data = classes()
    post = training.fit(data, epochs=25, batch_size=20, lr=0.02)
    seen = {entry["epoch"]: entry["log_evidence"] for entry in training.history if "log_evidence" in entry}
    assert list(seen) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert isinstance(post, kind)
    assert_close(post.log_evidence(at="map").item(), max(seen.values()), rtol=1e-9, atol=0)
    assert max(seen.values()) > seen[3]
    for entry in training.history:
        for group, gamma in entry.get("effective_parameters", {}).items():
            assert 0 <= gamma <= entry["parameters"][group]
    assert training.sizes().tolist() == [16, 10]
    assert post.prior.groups == {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    assert_close(post.prior.precision, training.precision)


def test_training_stops_when_the_evidence_does_not_grow(float64, monkeypatch):
    training = EvidenceTraining(mlp(), burn_in=1, every=1, patience=2)
    values = iter([-5.0, -3.0, -4.0, -3.5, -1.0])
    nets = []

    def update(lin, source):
        nets.append(training.mean().detach().clone())
        return {"log_evidence": next(values)}

    monkeypatch.setattr(training, "update", update)
    training.fit(classes(), epochs=5)
    assert len(training.history) == 4
    assert torch.equal(training.mean(), nets[1])
    assert not torch.equal(nets[1], nets[3])


def test_a_run_that_goes_on_equals_one_that_was_not_stopped(tmp_path):
    options = {"batch_size": 20, "lr": 0.02}
    make = lambda: EvidenceTraining(mlp(), burn_in=2, every=2, structure="diag", patience=3)  # noqa: E731
    whole, parts, again = make(), make(), make()
    whole.fit(classes(), epochs=9, **options)
    parts.fit(classes(), epochs=5, checkpoint=tmp_path / "run", **options)
    post = again.fit(classes(), epochs=9, checkpoint=tmp_path / "run", **options)
    a, b = whole.state_dict(), again.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert again.history == whole.history
    assert post.log_evidence(at="map").isfinite()


def test_a_subset_stands_for_all(float64):
    x, y = classes(200)
    found = {}
    for subset in (None, 200, 100):
        training = EvidenceTraining(mlp(), num_data=200, structure="full", subset=subset)
        lin = ntkgp.Linearization(training.net, example=x)
        found[subset] = training.update(lin, training.posterior((x, y)).model.source)["log_evidence"]
    assert_close(found[200], found[None])
    assert abs(found[100] - found[None]) < 0.3 * abs(found[None])


def test_groups_may_be_any_partition(float64):
    training = EvidenceTraining(
        mlp(), by={"a": ["0"], "b": ["2.weight"], "c": ["2.bias"]}, prior_std={"0": 2.0, "2": 0.5}
    )
    assert_close(training.precision, torch.tensor([0.25, 4.0, 4.0]))
    assert training.sizes().tolist() == [16, 8, 2]


def test_bad_input_is_named():
    for options, match in (
        ({"structure": "low_rank"}, "structure must be one of full, kron, diag, but is 'low_rank'"),
        ({"burn_in": -1}, "burn_in must be at least 0"),
        ({"every": 0}, "every must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"by": {"a": ["0"]}}, "by must put every parameter"),
        ({"prior_std": {"0.weight": 1.0, "0.bias": 2.0, "2": 1.0}}, "the same in all of group '0'"),
    ):
        with pytest.raises(ValueError, match=match):
            EvidenceTraining(mlp(), **options)
    training = EvidenceTraining(mlp(), burn_in=1, subset=100)
    with pytest.raises(ValueError, match="subset must be from 1 to the 60"):
        training.fit(classes(), epochs=1)
