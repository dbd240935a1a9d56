"""The paper's one-dimensional example: a network 5 tanh(w x + b), its posterior by quadrature, and two predictives.

Sampling weights from the Laplace posterior and pushing them through the network (BNN) underfits; predicting with the
linear model, whose posterior it is (GLM), does not.
"""

import torch
from torch import nn

import ntkgp

NOISE, PRECISION = 0.3**2, 1.0


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return 5 * torch.tanh(self.w * x + self.b)


def trained(x, y):
    net = Step()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        penalty = PRECISION * (net.w**2 + net.b**2)
        value = (y - net(x)).square().sum() / NOISE + penalty
        value.backward()
        return value

    optimizer.step(loss)
    return net


def true_predictive(x, y, x_new, grid=801):
    """Mean and variance of f at new points under the exact posterior, on a grid of (w, b)."""
    w, b = torch.meshgrid(torch.linspace(-1, 6, grid), torch.linspace(-4, 4, grid), indexing="ij")
    log_p = -PRECISION * (w**2 + b**2) / 2
    for xn, yn in zip(x.flatten(), y.flatten(), strict=True):
        log_p = log_p - (yn - 5 * torch.tanh(w * xn + b)).square() / (2 * NOISE)
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    f = [5 * torch.tanh(w * xn + b) for xn in x_new.flatten()]
    mean = torch.stack([(p * v).sum() for v in f])
    return mean, torch.stack([(p * (v - m) ** 2).sum() for v, m in zip(f, mean, strict=True)])


def test_the_linear_predictive_is_close_to_the_truth_and_the_bnn_predictive_is_not(float64):
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-1.2, -0.7, 3), torch.linspace(0.7, 1.2, 3)])[:, None]
    y = 5 * torch.sign(x) * torch.tanh(2.5 * x.abs()) + NOISE**0.5 * torch.randn(6, 1)
    net = trained(x, y)
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Isotropic(lin, PRECISION)
    post = ntkgp.fit(lin, (x, y), ntkgp.likelihoods.Gaussian(NOISE), "full", prior)
    x_new = torch.linspace(-3, 3, 61)[:, None]
    mean, variance = true_predictive(x, y, x_new)
    glm = post.predict(x_new)
    bnn = post.predict(x_new, predictive="bnn", num_samples=4000)
    error = {name: (p.mean.squeeze() - mean).square().mean().sqrt().item() for name, p in (("glm", glm), ("bnn", bnn))}
    assert error["glm"] < 0.3
    assert error["bnn"] > 2 * error["glm"]
    away = x_new.squeeze().abs() > 1.5  # where the function is flat and certain
    assert glm.epistemic.squeeze()[away].max() < 2 * variance[away].max() + 0.2
    assert bnn.epistemic.squeeze()[away].max() > 4 * variance[away].max()
