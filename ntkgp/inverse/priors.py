"""Priors over the weights of a network that returns measurements."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ntkgp.inverse.unet import UNet
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import take
from ntkgp.priors import ConvFilterGP, GPrior, Grouped, Isotropic, Prior

__all__ = ["PRIORS", "squared_columns"]

_ROWS = 64  # outputs that are differentiated together
_EXACT = 2048  # outputs up to which all are
_PROBES = 256  # random signs beyond: squared columns then have a relative error of √(2 / 256)


def squared_columns(lin: Linearization, generator: torch.Generator | None = None) -> Tensor:  # (P,)
    """Return diag(Jᵀ J) at the input seen last: row by row, or of very many outputs by random signs s, E[(Jᵀ s)²]."""
    z, C = take(lin.example, slice(0, 1)), lin.num_outputs
    if C <= _EXACT:
        rows, share = torch.eye(C, dtype=lin.dtype, device=lin.device), 1.0
    else:
        generator = generator or torch.Generator(lin.device).manual_seed(0)
        rows = torch.randint(2, (_PROBES, C), generator=generator, device=lin.device).to(lin.dtype) * 2 - 1
        share = 1 / _PROBES
    return torch.stack([lin.vjp(z, part.unsqueeze(1)).square().sum(0) for part in rows.split(_ROWS)]).sum(0) * share


def conv_filter(lin: Linearization, net: nn.Module) -> ConvFilterGP:
    """Return the prior over filters, which share σ² and ℓ within a block of a U-Net."""
    blocks = net.blocks if isinstance(net, UNet) else {}
    return ConvFilterGP(lin, blocks={block: [f"net.{name}" for name in names] for block, names in blocks.items()})


PRIORS: dict[str, Callable[[Linearization, nn.Module], Prior]] = {
    "conv_filter": conv_filter,
    "iid": lambda lin, net: Isotropic(lin),
    "layerwise": lambda lin, net: Grouped(lin, by="layer"),
    "g_prior": lambda lin, net: GPrior(lin, squared_columns(lin), by="layer"),
}
