"""Classifier and regressor: scikit-learn's own checks, and what their numbers mean."""

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from ntkgp.interop import NTKGPClassifier, NTKGPRegressor
from ntkgp.posteriors import KroneckerPosterior

QUICK = {"epochs": 3, "batch_size": 100, "method": "function", "random_state": 0}


@parametrize_with_checks([NTKGPClassifier(**QUICK), NTKGPRegressor(**QUICK)])  # none is expected to fail
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_checks_pass(estimator, check):
    check(estimator)


def waves(n=40):
    generator = np.random.default_rng(0)
    X = generator.uniform(-2, 2, (n, 1))
    return X, np.sin(2 * X[:, 0]) + 0.2 * generator.standard_normal(n)


def test_the_regressor_is_the_exact_gaussian_process_in_the_targets_own_units():
    X, y = waves()
    X_new = np.linspace(-4, 4, 7)[:, None]
    found = NTKGPRegressor(**QUICK).fit(3 * X + 1, 100 * y + 7)
    mean, std = found.predict(3 * X_new + 1, return_std=True)
    post = found.posterior_
    alpha, noise = post.prior.precision.item(), post.likelihood.noise.item()
    x, x_new = (torch.tensor((part - X.mean()) / X.std()) for part in (X, X_new))
    J, J_new = (post.lin.jacobian(part).squeeze(1) for part in (x, x_new))
    before, before_new = (post.lin(part).squeeze(1) - J @ post.lin.theta for part, J in ((x, J), (x_new, J_new)))
    K, cross = J @ J.mT / alpha + noise * torch.eye(len(x)), J_new @ J.mT / alpha
    target = torch.tensor((y - y.mean()) / y.std())
    expected = before_new + cross @ torch.linalg.solve(K, target - before)
    variance = noise + (J_new.square().sum(1) / alpha - (cross * torch.linalg.solve(K, cross.mT).mT).sum(1))
    np.testing.assert_allclose(mean, 100 * (expected * y.std() + y.mean()).detach() + 7, rtol=1e-6)
    np.testing.assert_allclose(std, 100 * variance.sqrt().detach() * y.std(), rtol=1e-6)


def test_several_targets_keep_their_order_and_scale():
    X, y = waves()
    both = np.stack([y, -10 * y], axis=1)
    mean, std = NTKGPRegressor(epochs=30, random_state=0).fit(X, both).predict(X, return_std=True)
    assert mean.shape == std.shape == (40, 2)
    assert np.corrcoef(mean[:, 0], y)[0, 1] > 0.9
    assert np.corrcoef(mean[:, 1], y)[0, 1] < -0.9
    np.testing.assert_allclose(std[:, 1] / std[:, 0], 10, rtol=0.5)


@pytest.mark.parametrize("labels", [["zebra", "ant", "monkey"], [30, -1, 7]])
def test_probabilities_are_in_the_order_of_the_sorted_labels(labels):
    X, y = make_blobs(60, centers=3, cluster_std=0.5, random_state=1)
    named = np.array(labels)[y]
    found = NTKGPClassifier(**QUICK).fit(X, named)
    probs = found.predict_proba(X)
    assert list(found.classes_) == sorted(labels)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    assert (probs[np.arange(60), np.searchsorted(found.classes_, named)] > 0.5).mean() > 0.95
    assert (found.predict(X) == named).mean() > 0.95


def test_far_away_the_classifier_is_less_sure_than_its_network():
    X, y = make_blobs(60, centers=2, cluster_std=1.0, random_state=1)
    found = NTKGPClassifier(epochs=100, random_state=0).fit(X, y)
    x = found._checked(far := 20 * X)
    network = found.posterior_.predict(x, predictive="map").probs.max(1).values.mean()
    assert found.predict_proba(far).max(1).mean() < network - 0.02


def test_the_seed_decides_and_the_global_generator_stays():
    X, y = waves()
    before = torch.get_rng_state()
    first, again = (NTKGPRegressor(**QUICK).fit(X, y).predict(X) for _ in range(2))
    other = NTKGPRegressor(**QUICK | {"random_state": 1}).fit(X, y).predict(X)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-3


def narrow(num_inputs, num_outputs):
    return nn.Sequential(nn.Linear(num_inputs, 3), nn.Tanh(), nn.Linear(3, num_outputs))


def test_networks_and_methods_of_ones_own_are_used():
    X, y = waves()
    found = NTKGPRegressor(narrow, **QUICK | {"method": "kron"}).fit(X, y)
    assert isinstance(found.posterior_, KroneckerPosterior)
    assert found.posterior_.lin.num_params == 3 + 3 + 3 + 1


def test_it_is_searched_over_like_any_estimator():
    X, y = waves(100)
    search = GridSearchCV(NTKGPRegressor(**QUICK), {"net": [nn.Linear, None]}, cv=2).fit(X, y)
    assert search.best_params_ == {"net": None}
    assert search.best_score_ > 0.5


def test_one_class_is_refused_by_name():
    X, _ = waves()
    with pytest.raises(ValueError, match="y must hold at least two classes, but has one class: a"):
        NTKGPClassifier().fit(X, ["a"] * len(X))
