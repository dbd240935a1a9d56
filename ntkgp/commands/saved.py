"""A posterior on disk with all that makes it again: beside what ``Posterior.save`` writes, its network.

``network.json`` names the function that makes the network, ``weights.safetensors`` holds its weights. Reading a folder
imports and calls that function, and nothing else; so look into the ``network.json`` of a folder from somewhere else.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

import ntkgp
from ntkgp.commands.folder import whole_folder
from ntkgp.commands.network import make_network
from ntkgp.linearization.inputs import take
from ntkgp.posteriors import Posterior

__all__ = ["SavedPosterior", "read_posterior", "write_posterior"]

NETWORK, WEIGHTS = "network.json", "weights.safetensors"
FILES = ("posterior.json", "tensors.safetensors", NETWORK, WEIGHTS)
_SAME = 1e-3  # relative: what another machine, or number of threads, may change in float32


@dataclass(frozen=True)
class SavedPosterior:
    """A posterior, its network, and how that is made: ``package.module:make_net``."""

    posterior: Posterior
    net: nn.Module
    maker: str
    seconds: float  # that fitting and tuning took


def write_posterior(saved: SavedPosterior, path: Path, overwrite: bool) -> None:
    """Write a folder, whole or not at all.

    Raises:
        ValueError: if something is at ``path`` that must stay.
    """
    with whole_folder(path, FILES, overwrite) as folder:
        saved.posterior.save(folder, overwrite=True)
        save_model(saved.net, str(folder / WEIGHTS))
        meta = {
            "network": saved.maker,
            "dtype": str(saved.posterior.lin.dtype).removeprefix("torch."),
            "sha256": _digest(folder / WEIGHTS),
            "outputs": _outputs(saved.posterior).tolist(),
            "seconds": saved.seconds,
        }
        (folder / NETWORK).write_text(json.dumps(meta, indent=2))


def read_posterior(path: Path) -> SavedPosterior:
    """Make the network again and load its posterior.

    Raises:
        ImportError: if the network's function cannot be imported from here.
        ValueError: if the folder is not one of these, was changed or cut short, or the function makes another network.
    """
    if not path.is_dir():
        raise ValueError(f"folder {path} does not exist")
    meta = _meta(path)
    if _digest(path / WEIGHTS) != meta["sha256"]:
        raise ValueError(f"{path / WEIGHTS} is not the file that was written with the posterior: fit it again")
    net = make_network(meta["network"], path / WEIGHTS, getattr(torch, meta["dtype"]))
    posterior = ntkgp.load(path, net)
    then, now = torch.tensor(meta["outputs"], dtype=torch.float64), _outputs(posterior)
    if then.shape != now.shape or not torch.allclose(now, then, rtol=_SAME, atol=_SAME * then.abs().max().item()):
        raise ValueError(
            f"{meta['network']} makes another network than it did when {path} was written: with the same weights its "
            "outputs differ"
        )
    return SavedPosterior(posterior, net, meta["network"], meta["seconds"])


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / NETWORK).read_text())
        missing = {"network", "dtype", "sha256", "outputs", "seconds"} - set(meta)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a folder that ntkgp fit wrote, or was cut short: {error}") from error
    if missing:
        raise ValueError(f"{path / NETWORK} was cut short: it lacks {', '.join(sorted(missing))}")
    return meta


def _digest(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, which ntkgp fit wrote with the posterior")
    return sha256(path.read_bytes()).hexdigest()


def _outputs(posterior: Posterior) -> Tensor:  # (1, C), double
    """Return f at an example, by which a change of the network's code shows that its weights do not."""
    with torch.no_grad():
        return posterior.lin(take(posterior.lin.example, slice(0, 1))).double().cpu()
