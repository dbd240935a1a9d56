"""Posteriors on disk: a folder with tensors (safetensors) and what they mean (JSON). Nothing in it is executed."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ntkgp import priors as prior_kinds
from ntkgp.curvature.kronecker import KroneckerBlock
from ntkgp.likelihoods import LIKELIHOODS, Categorical, Gaussian, Likelihood, SiteBlocks
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import leaves, map_leaves
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.data import Data, Gone
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.function_space import FunctionSpacePosterior
from ntkgp.posteriors.given import GivenDiagonalPosterior, GivenKroneckerPosterior
from ntkgp.posteriors.inducing import Inducing
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.low_rank import LowRankPosterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.sampled import SampledPosterior
from ntkgp.posteriors.sparse import VariationalPosterior
from ntkgp.posteriors.weight_space import WeightSpacePosterior
from ntkgp.posteriors.whitened import Natural
from ntkgp.priors import ConvFilterGP, GPrior, Grouped, Prior

__all__ = ["load", "save"]

FORMAT, VERSION = "ntkgp posterior", 3  # 2: temperatures; 3: a curvature that was given follows the noise
_POSTERIORS: dict[str, type[Posterior]] = {
    kind.method: kind
    for kind in (
        *(FunctionSpacePosterior, FullPosterior, KroneckerPosterior, DiagonalPosterior),
        *(LowRankPosterior, SampledPosterior, VariationalPosterior, GivenDiagonalPosterior, GivenKroneckerPosterior),
    )
}
_PRIORS = ("Isotropic", "Grouped", "Diagonal", "Kronecker", "ConvFilterGP", "GPrior")


def save(posterior: Posterior, path: str | Path, overwrite: bool = False) -> None:
    """Write a posterior into a new folder; it appears there whole or not at all.

    The network itself is not stored, only what tells whether another is the same. Training data in memory are stored:
    the function space needs them to predict, all need them to tune.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False.
        TypeError: if prior or likelihood is not one of the library's: those could not be built again.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"path {path} exists: choose another, or pass overwrite=True")
    meta, tensors = _described(posterior)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / "tensors.safetensors"
        )
        (folder / "posterior.json").write_text(json.dumps(meta, indent=2))
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.replace(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def load(path: str | Path, net: nn.Module | Linearization, likelihood: Likelihood | None = None) -> Posterior:
    """Read a posterior of this network.

    Args:
        path: the folder that :func:`save` wrote.
        net: the network it belongs to, with the same weights, or its linearisation.
        likelihood: needed if it was one of your own; its hyperparameters become those that were saved.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if it is not ours, was cut short, or belongs to another network.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path {path} does not exist")
    try:
        meta = json.loads((path / "posterior.json").read_text())
        tensors = load_file(path / "tensors.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"path {path} is not a saved posterior, or was cut short: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"path {path} is not a saved posterior")
    if meta["version"] > VERSION:
        raise ValueError(f"path {path} was written by a later version of ntkgp (format {meta['version']})")
    missing = sorted(set(meta["tensors"]) - set(tensors))
    if missing:
        raise ValueError(f"path {path} was cut short: it lacks {', '.join(missing)}")
    lin = _matching(net, meta, tensors)
    tensors = {name: t.to(lin.device) for name, t in tensors.items()}
    return _rebuilt(meta, tensors, lin, likelihood)


def _described(posterior: Posterior) -> tuple[dict[str, Any], dict[str, Tensor]]:
    lin, source = posterior.lin, posterior.model.source
    tensors = {f"prior.{name}": t for name, t in posterior.prior.state_dict().items()}
    tensors |= {f"likelihood.{name}": t for name, t in posterior.likelihood.state_dict().items()}
    meta: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "method": posterior.method,
        "reason": posterior.reason,
        "parameters": list(lin.layout.names),
        "shapes": [list(shape) for shape in lin.layout.shapes],
        "dtype": str(lin.dtype),
        "fingerprint": lin.fingerprint(),
        "memory_budget": posterior.model.memory_budget,
        "prior": _describe_prior(posterior.prior),
        "likelihood": _describe_likelihood(posterior.likelihood),
        "options": {k: v for k, v in posterior._options.items() if not isinstance(v, Tensor) and v is not None},
        "history": posterior.history,
        "inputs": None,
    }
    example = map_leaves(lambda leaf: leaf[:1], posterior.lin.example)
    meta["example"] = _put_input(tensors, "example", example)
    if lin.outputs is not None:
        tensors["outputs"] = lin.outputs
    if isinstance(posterior, VariationalPosterior):
        meta |= _put_process(tensors, posterior)
    shift = None if isinstance(posterior, VariationalPosterior) else posterior.shift
    for name, value in (("shift", shift), *posterior._options.items()):
        if isinstance(value, Tensor):
            tensors[name] = value
    if posterior.sites is not None:
        tensors["sites"] = posterior.sites.values
    if isinstance(source, Data):
        meta["inputs"] = _put_input(tensors, "x", source.x)
        tensors["y"] = source.y
        if source.weights is not None:
            tensors["weights"] = source.weights
    if isinstance(posterior, WeightSpacePosterior):
        tensors |= _statistics(posterior)
    meta["tensors"] = list(tensors)
    return meta, tensors


def _put_input(tensors: dict[str, Tensor], prefix: str, x: Any) -> Any:
    """Store the tensors of an input; return its structure."""
    tensors |= {f"{prefix}.{i}": leaf for i, leaf in enumerate(leaves(x))}
    return list(x) if isinstance(x, Mapping) else len(x) if isinstance(x, tuple | list) else "tensor"


def _put_process(tensors: dict[str, Tensor], posterior: VariationalPosterior) -> dict[str, Any]:
    """Store inducing values and q; return what tells of them."""
    q, inducing = posterior._q(), posterior.inducing
    tensors |= {"q.P": q.P, "q.h": q.h}
    if inducing.outputs is not None:
        tensors["inducing_outputs"] = inducing.outputs
    return {"inducing": _put_input(tensors, "inducing", inducing.x), "num_data": posterior.process.N}


def _get_process(
    meta: dict[str, Any], tensors: dict[str, Tensor], model: LinearModel, prior: Prior, likelihood: Likelihood
) -> VariationalPosterior:
    inducing = Inducing(_get_input(tensors, "inducing", meta["inducing"]), tensors.get("inducing_outputs"))
    options = {"batch_size": None} | meta["options"]  # what is None is not written
    posterior = VariationalPosterior(model, prior, likelihood, inducing=inducing, **options)
    posterior.settle(Natural(tensors["q.P"], tensors["q.h"]))
    return posterior


def _get_input(tensors: dict[str, Tensor], prefix: str, structure: Any) -> Any:
    if structure == "tensor":
        return tensors[f"{prefix}.0"]
    if isinstance(structure, int):
        return tuple(tensors[f"{prefix}.{i}"] for i in range(structure))
    return {key: tensors[f"{prefix}.{i}"] for i, key in enumerate(structure)}


def _statistics(posterior: WeightSpacePosterior) -> dict[str, Tensor]:
    with torch.no_grad():
        found = posterior._statistics()
    if isinstance(found, Tensor):
        return {"statistics": found}
    tensors = {f"kron.G.{name}": block.G for name, block in found.items()}
    tensors |= {f"kron.A.{name}": block.A for name, block in found.items() if block.A is not None}
    return tensors | {
        f"kron.transposed.{name}": torch.tensor(block.transposed) for name, block in found.items() if block.transposed
    }


def _describe_prior(prior: Prior) -> dict[str, Any]:
    kind = type(prior).__name__
    if kind not in _PRIORS or type(prior).__module__.split(".")[0] != "ntkgp":
        raise TypeError(f"a posterior with a prior of your own ({kind}) cannot be saved")
    if isinstance(prior, ConvFilterGP):
        return {"kind": kind, "blocks": prior.blocks}
    return {"kind": kind} | ({"groups": prior.groups} if isinstance(prior, Grouped) else {})


def _describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    kind = type(likelihood).__name__
    settings: dict[str, Any] = {}
    if isinstance(likelihood, Gaussian):
        settings = {"learn_noise": likelihood.raw_noise.requires_grad}
    if isinstance(likelihood, Categorical):
        settings = {"num_classes": likelihood.num_classes}
    return {"kind": kind, "settings": settings}


def _matching(net: nn.Module | Linearization, meta: dict[str, Any], tensors: dict[str, Tensor]) -> Linearization:
    lin = net if isinstance(net, Linearization) else Linearization(net)
    has = dict(lin._net.module.named_parameters())
    for name, shape in zip(meta["parameters"], meta["shapes"], strict=True):
        if name not in has:
            raise ValueError(f"the posterior belongs to another network: this one has no parameter {name!r}")
        if list(has[name].shape) != shape:
            raise ValueError(
                f"the posterior belongs to another network: its {name} has shape {tuple(shape)}, "
                f"not {tuple(has[name].shape)}"
            )
    if str(lin.dtype) != meta["dtype"]:
        raise ValueError(f"the posterior has dtype {meta['dtype']}, but the network has {lin.dtype}")
    if lin.fingerprint() != meta["fingerprint"]:
        raise ValueError("the posterior belongs to another network: shapes agree, but weights or buffers do not")
    lin = Linearization(lin._net.module, meta["parameters"])
    lin.learn(_get_input({k: t.to(lin.device) for k, t in tensors.items()}, "example", meta["example"]))
    return lin.select(tensors["outputs"]) if "outputs" in tensors else lin


def _rebuilt(
    meta: dict[str, Any], tensors: dict[str, Tensor], lin: Linearization, likelihood: Likelihood | None
) -> Posterior:
    prior = _load_prior(meta["prior"], _under("prior.", tensors), lin)
    likelihood = _made_likelihood(meta["likelihood"], _under("likelihood.", tensors), likelihood)
    likelihood.to(device=lin.device, dtype=lin.dtype)
    # Files from before there were temperatures have none.
    likelihood.load_state_dict(likelihood.state_dict() | _under("likelihood.", tensors))
    source: Any = Gone(meta.get("num_data", 0))
    if meta["inputs"] is not None:
        source = Data(_get_input(tensors, "x", meta["inputs"]), tensors["y"], tensors.get("weights"))
    model = LinearModel(lin, source, likelihood, meta["memory_budget"])
    options = meta["options"] | ({"index": tensors["index"]} if "index" in tensors else {})
    sites = SiteBlocks(tensors["sites"]) if "sites" in tensors else None
    posterior: Posterior
    if meta["method"] == VariationalPosterior.method:
        posterior = _get_process(meta, tensors, model, prior, likelihood)
    else:
        posterior = _POSTERIORS[meta["method"]](model, prior, likelihood, tensors.get("shift"), sites, **options)
    posterior.reason, posterior.history = meta["reason"], meta["history"]
    if isinstance(posterior, KroneckerPosterior):
        names = [name.removeprefix("kron.G.") for name in tensors if name.startswith("kron.G.")]
        blocks = {
            name: KroneckerBlock(
                tensors[f"kron.G.{name}"], tensors.get(f"kron.A.{name}"), f"kron.transposed.{name}" in tensors
            )
            for name in names
        }
        posterior._keep(blocks)
    elif isinstance(posterior, WeightSpacePosterior):
        posterior._keep(tensors["statistics"])
        if isinstance(posterior, GivenDiagonalPosterior) and meta["version"] < 3:  # it belonged to the noise
            posterior._kept = posterior._kept / posterior._coefficients().detach()
    return posterior


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _load_prior(meta: dict[str, Any], state: dict[str, Tensor], lin: Linearization) -> Prior:
    if meta["kind"] == "Grouped":
        prior: Prior = Grouped(lin, by=meta["groups"])
    elif meta["kind"] == "GPrior":
        prior = GPrior(lin, torch.ones_like(lin.theta), by=meta["groups"])
    elif meta["kind"] == "ConvFilterGP":
        prior = ConvFilterGP(lin, blocks=meta.get("blocks"))
    else:
        prior = getattr(prior_kinds, meta["kind"])(lin)
    prior.load_state_dict(state)
    return prior


def _made_likelihood(meta: dict[str, Any], state: dict[str, Tensor], given: Likelihood | None) -> Likelihood:
    known = {kind.__name__: kind for kind in LIKELIHOODS.values()}
    if given is not None:
        if type(given).__name__ != meta["kind"]:
            raise ValueError(f"likelihood must be a {meta['kind']}, but is a {type(given).__name__}")
        return given
    if meta["kind"] not in known:
        raise ValueError(f"the posterior has a likelihood of your own: pass likelihood={meta['kind']}(...) to load")
    settings = dict(meta["settings"])
    if meta["kind"] == "Gaussian":
        settings["noise"] = state["raw_noise"].exp()
    return known[meta["kind"]](**settings)
