"""The table of likelihoods that feeds the tests, each with targets for N points of C outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp import likelihoods as zoo


class StudentT(zoo.Likelihood):
    """A likelihood of a user's own; its Hessian is indefinite away from the mode."""

    def log_prob(self, y, f):
        return torch.distributions.StudentT(4.0, f).log_prob(y).sum(-1)

    def sample(self, f, generator=None):
        noise = torch.randn(5, *f.shape, generator=generator, dtype=f.dtype)
        return f + noise[0] / noise[1:].square().mean(0).sqrt()

    def moments(self, f):
        return f, torch.full_like(f, 2.0)


class SoftplusPoisson(zoo.Likelihood):
    """A user's own with a Hessian that is always positive definite."""

    def log_prob(self, y, f):
        rate = torch.nn.functional.softplus(f)
        return (y * rate.log() - rate).sum(-1)


class Scaled(zoo.Likelihood):
    """A user's own with a hyperparameter to learn."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def log_prob(self, y, f):
        return -(self.scale * (y - f).square()).sum(-1) / 2


@dataclass(frozen=True)
class Observation:
    name: str
    make: Callable[[], zoo.Likelihood]
    targets: Callable[[int, int], Tensor]
    outputs: int = 3


OBSERVATIONS = [
    Observation("gaussian", lambda: zoo.Gaussian(0.5), lambda n, c: torch.randn(n, c)),
    Observation("noise by output", lambda: zoo.Gaussian(torch.tensor([0.5, 1.0, 2.0])), lambda n, c: torch.randn(n, c)),
    Observation("heteroscedastic", zoo.HeteroscedasticGaussian, lambda n, c: torch.randn(n, c // 2), outputs=4),
    Observation("bernoulli", zoo.Bernoulli, lambda n, c: torch.randint(0, 2, (n, c))),
    Observation("categorical", zoo.Categorical, lambda n, c: torch.randint(0, c, (n,))),
    Observation("pixels", lambda: zoo.Categorical(3), lambda n, c: torch.randint(0, 3, (n, c // 3)), outputs=6),
    Observation("tempered labels", lambda: zoo.Bernoulli(1.6), lambda n, c: torch.randint(0, 2, (n, c))),
    Observation("tempered classes", lambda: zoo.Categorical(temperature=0.6), lambda n, c: torch.randint(0, c, (n,))),
    Observation("tempered pixels", lambda: zoo.Categorical(3, 1.6), lambda n, c: torch.randint(0, 3, (n, c // 3)), 6),
    Observation("poisson", zoo.Poisson, lambda n, c: torch.randint(0, 4, (n, c))),
    Observation("own", SoftplusPoisson, lambda n, c: torch.randint(0, 4, (n, c)).to(torch.get_default_dtype())),
]
BY_NAME = {observation.name: observation for observation in OBSERVATIONS}
EXACT = [o for o in OBSERVATIONS if o.name not in ("heteroscedastic",)]  # whose Λ is the Hessian itself
