"""Targets that do not fit are named."""

import pytest
import torch

from ntkgp.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson


@pytest.mark.parametrize(
    ("likelihood", "y", "error", "match"),
    [
        (Categorical(), torch.tensor([0, 3]), ValueError, "classes from 0 to 2, but has values from 0 to 3"),
        (Categorical(), torch.tensor([-1, 0]), ValueError, "from 0 to 2"),
        (Categorical(), torch.tensor([0.0, 1.0]), TypeError, "integer class indices, but has dtype torch.float32"),
        (Categorical(), torch.zeros(2, 3).long(), ValueError, r"1 value for each point, but has shape \(2, 3\)"),
        (Categorical(2), torch.zeros(2).long(), ValueError, "has 3 outputs, but Categorical needs a multiple of 2"),
        (Gaussian(), torch.zeros(2, 3).long(), TypeError, "floating-point numbers"),
        (Gaussian(), torch.full((2, 3), torch.nan), ValueError, "y holds NaN or infinity"),
        (Gaussian(), torch.zeros(2, 2), ValueError, "3 values for each point"),
        (Gaussian(torch.ones(2)), torch.zeros(2, 3), ValueError, "noise must be a number or 3 of them, but has 2"),
        (Bernoulli(), torch.full((2, 3), 2), ValueError, "labels 0 and 1, but has values from 2 to 2"),
        (Poisson(), torch.full((2, 3), -1), ValueError, "non-negative counts"),
        (Poisson(), torch.full((2, 3), 0.5), ValueError, "whole"),
        (HeteroscedasticGaussian(), torch.zeros(2, 1), ValueError, "needs a multiple of 2"),
        (Bernoulli(), [0, 1], TypeError, "y must be a tensor, but is a list"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, y, error, match):
    with pytest.raises(error, match=match):
        likelihood.validate(y, 3)


def test_one_logit_is_not_a_softmax():
    with pytest.raises(ValueError, match="use bernoulli"):
        Categorical().validate(torch.tensor([0]), 1)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_must_be_positive(noise):
    with pytest.raises(ValueError, match="noise must be positive and finite"):
        Gaussian(noise)


def test_noise_is_live_and_checked():
    likelihood = Gaussian(0.5)
    likelihood.noise = 2.0
    assert likelihood.noise.item() == pytest.approx(2.0)
    with pytest.raises(ValueError, match="noise must be positive"):
        likelihood.noise = -1.0
    assert likelihood.noise.item() == pytest.approx(2.0)
