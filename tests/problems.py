"""Small problems for posteriors: a network, a likelihood, data, and priors over the same weights."""

import torch
from observations import BY_NAME
from torch import nn

import ntkgp
from ntkgp import priors

FOUR = [BY_NAME[name] for name in ("gaussian", "bernoulli", "categorical", "poisson")]
NETWORKS = {
    "mlp": lambda C: (
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)),
        lambda n: torch.randn(n, 3),
    ),
    "cnn": lambda C: (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, C)),
        lambda n: torch.randn(n, 1, 5, 5),
    ),
}
PRIORS = {
    "isotropic": lambda lin: priors.Isotropic(lin, 0.8),
    "grouped": lambda lin: priors.Grouped(lin, precision=torch.linspace(0.5, 2.0, len(lin.groups)), mean=0.1),
    "around the map": lambda lin: priors.Isotropic(lin, 0.8, mean="map"),
    "diagonal": lambda lin: priors.Diagonal(lin, torch.linspace(0.5, 3.0, lin.num_params)),
}


class Problem:
    """N training points and a few others, for one network, likelihood and prior."""

    def __init__(self, network="mlp", observation="categorical", prior="grouped", n=8):
        torch.manual_seed(3)
        observation = BY_NAME[observation]
        net, draw = NETWORKS[network](observation.outputs)
        self.net = net.to(torch.get_default_dtype())
        self.x, self.y, self.x_new = draw(n), observation.targets(n, observation.outputs), draw(5)
        self.lin = ntkgp.Linearization(self.net, example=self.x)
        self.make_prior = lambda: PRIORS[prior](self.lin)
        self.make_likelihood = lambda: observation.make().to(torch.get_default_dtype())

    def informed(self, spread=1.0):
        """The same problem with targets drawn from the linear model itself, so that they tell of its weights."""
        generator = torch.Generator().manual_seed(5)
        theta = spread * torch.randn(self.lin.num_params, generator=generator)
        f = self.lin(self.x) + self.lin.jvp(self.x, theta - self.lin.theta)
        self.y = self.make_likelihood().sample(f.detach(), generator)
        return self

    def fit(self, method, **options):
        return ntkgp.fit(self.lin, (self.x, self.y), self.make_likelihood(), method, self.make_prior(), **options)

    def dense(self):
        """J and f at the training points and at the others, without the library's fast paths."""
        J, J_new = self.lin.jacobian(self.x), self.lin.jacobian(self.x_new)
        return J, self.lin(self.x), J_new, self.lin(self.x_new)


def learnt(post):
    """The hyperparameters that tuning may change."""
    return [p for p in post.parameters() if p.requires_grad]


__all__ = ["FOUR", "NETWORKS", "PRIORS", "Problem", "learnt"]
