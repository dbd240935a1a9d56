"""Train a network on one measurement: the deep image prior (Ulyanov et al. 2018) with total variation."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ntkgp.inverse.operators import Measurement
from ntkgp.inverse.total_variation import total_variation

__all__ = ["DeepImagePrior", "train"]


@dataclass(frozen=True)
class DeepImagePrior:
    """A trained network, its input, and how it got there."""

    net: nn.Module  # with the best weights seen, in evaluation mode
    z: Tensor  # its input, (1, ...)
    losses: list[float]  # by step
    step: int  # where the best weights were found

    @property
    def image(self) -> Tensor:  # (1, *image_shape)
        """What the network returns."""
        with torch.no_grad():
            return self.net(self.z)


def train(
    A: Measurement,
    y: Tensor,
    net: nn.Module,
    z: Tensor,
    penalty: float = 0.0,
    steps: int = 5000,
    rate: float = 1e-4,
    clip: float = 1.0,
    patience: int | None = None,
    progress: bool | None = None,
) -> DeepImagePrior:
    r"""Minimise ‖A f(z; θ) − y‖² / d_y + ``penalty`` TV(f(z; θ)) over a copy of the network, by Adam.

    Args:
        A: the operator.
        y: one measurement, (1, *measured_shape).
        net: f; its weights are where the search starts, and stay as they are.
        z: the network's input, often a filtered back-projection.
        penalty: γ.
        steps: of Adam, at most.
        rate: of Adam.
        clip: gradients are scaled down to this norm.
        patience: stop after so many steps without a better loss; None to take all steps.
        progress: whether to show a bar; by default in a terminal.

    Returns:
        The network with the weights of the least loss.

    Raises:
        ValueError: if shapes do not fit, or the loss is not a number.
    """
    if y.shape != (1, *A.measured_shape):
        expected = ", ".join(map(str, (1, *A.measured_shape)))
        raise ValueError(f"y must be one measurement of shape ({expected}), but has {tuple(y.shape)}")
    if penalty < 0 or steps < 1:
        raise ValueError(f"penalty must not be negative and steps at least 1, but they are {penalty} and {steps}")
    net = deepcopy(net).train()
    if (shape := net(z).shape[1:]) != A.image_shape:
        raise ValueError(f"net must return images of shape {tuple(A.image_shape)}, but they have {tuple(shape)}")
    optimizer = torch.optim.Adam(net.parameters(), rate)
    losses: list[float] = []
    best, best_step = deepcopy(net.state_dict()), 0
    hidden = None if progress is None else not progress
    with tqdm(total=steps, desc="deep image prior", disable=hidden) as bar:
        for step in range(steps):
            optimizer.zero_grad()
            x = net(z)
            loss = (A(x) - y).square().mean() + penalty * total_variation(x).sum()
            if not loss.isfinite():
                raise ValueError(f"the loss is {loss.item()} at step {step}: check y, or lower the rate of {rate:g}")
            losses.append(loss.item())
            if losses[-1] <= losses[best_step]:
                best, best_step = deepcopy(net.state_dict()), step
            elif patience is not None and step - best_step >= patience:
                break
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            bar.update()
            bar.set_postfix_str(f"loss {losses[-1]:.3g}")
    net.load_state_dict(best)
    return DeepImagePrior(net.eval().requires_grad_(False), z, losses, best_step)
