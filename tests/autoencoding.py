"""A small Laplacian autoencoder, its images, and its state."""

import torch
from torch import nn

import ntkgp
from ntkgp.training import LaplacianAutoencoder

N, NOISE = 12, 0.3


def parts(seed=1):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2))
    decoder = nn.Sequential(
        *(nn.Linear(2, 8), nn.Tanh(), nn.Unflatten(1, (2, 2, 2)), nn.Upsample(scale_factor=2)),
        nn.Conv2d(2, 1, 3, padding=1),
    )
    dtype = torch.get_default_dtype()
    return encoder.to(dtype), decoder.to(dtype)


def images(n=N):
    return torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.get_default_dtype())


def lae(seed=0, **options):
    noise = ntkgp.likelihoods.Gaussian(NOISE, learn_noise=False)
    return LaplacianAutoencoder(*parts(), noise, seed=seed, **({"num_data": N, "method": "exact"} | options))


def states(objective):
    return {name: t.clone() for name, t in objective.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
