"""The front door: a network and data in, a posterior out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ntkgp.likelihoods import LIKELIHOODS, Likelihood
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import map_leaves
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.data import Data, as_source, gather
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.function_space import FunctionSpacePosterior
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.low_rank import LowRankPosterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.sampled import SampledPosterior
from ntkgp.posteriors.sparse import VariationalPosterior
from ntkgp.posteriors.subnetworks import LargestVariance, Subnetwork
from ntkgp.posteriors.subsets import Random, Selector
from ntkgp.priors import Diagonal, GPrior, Grouped, Isotropic, Prior

__all__ = ["fit"]

STRUCTURES: dict[str, type[Posterior]] = {
    "full": FullPosterior,
    "kron": KroneckerPosterior,
    "diag": DiagonalPosterior,
    "low_rank": LowRankPosterior,
    "sampled": SampledPosterior,
}
METHODS = ("auto", "function", "variational", *STRUCTURES, "last_layer", "subnetwork")
PRIORS = {
    "isotropic": Isotropic,
    "layerwise": lambda lin: Grouped(lin, by="layer"),
    "normalized": lambda lin: Grouped(lin, by="normalized"),
    "diagonal": Diagonal,
}


def fit(
    net: nn.Module | Linearization,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    method: str = "auto",
    prior: str | Prior = "isotropic",
    tune: bool | str = "auto",
    *,
    weights: Tensor | None = None,
    subset: int | Selector | None = None,
    structure: str = "full",
    subnetwork: int | Subnetwork | Sequence[str] | None = None,
    outputs: int | Sequence[int] | Tensor | None = None,
    memory_budget: int = 4 << 30,
    progress: bool | None = None,
    **options: Any,
) -> Posterior:
    """Return the Laplace posterior of a trained network, linearised at its weights.

    Args:
        net: the network, or its linearisation.
        data: (X, y), a Dataset or a DataLoader; a loader is streamed by "variational" and the weight-space methods.
        likelihood: "gaussian", "heteroscedastic", "bernoulli", "categorical", "poisson", or an object.
        method: "function" for the Gaussian process; "variational" for a sparse one, through ``num_inducing`` of its
            values, see :class:`VariationalPosterior`; "full", "kron", "diag", "low_rank" over the weights; "last_layer"
            and "subnetwork" over some of them; "auto" for the cheapest exact one that fits the memory, and a subset of
            the data where none does: ``posterior.reason`` says which and why.
        prior: "isotropic", "layerwise", "normalized", "diagonal", "g_prior" (in the units of the data: one more pass
            over them), or an object.
        tune: whether to maximise the evidence; "auto" does so for a prior given by name, and leaves an object alone.
        weights: how many points each stands for, (N,), or by site, (N, T); a mask is a weight of 0.
        subset: for the function space, how many training points to use, or a selector that says which.
        structure: of the covariance for "last_layer" and "subnetwork": "full", "kron", "diag" or "low_rank".
        subnetwork: how many weights are random, those of largest marginal variance; a selector; or names.
        outputs: which outputs, or combinations of outputs, to model, for networks with very many.
        memory_budget: bytes that features and matrices may take.
        progress: whether to show bars; by default in a terminal.
        options: of the posterior's structure: ``damped`` for "kron", ``rank`` for "low_rank"; ``num_inducing``,
            ``inducing``, ``mean``, ``objective``, ``epochs``, ``seed`` ... for "variational".

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if names are not known, or data, network, likelihood and prior do not fit together.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, but is {method!r}")
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, but is {structure!r}")
    if tune not in (True, False, "auto"):
        raise ValueError(f'tune must be True, False or "auto", but is {tune!r}')
    if subset is not None and method not in ("auto", "function"):
        raise ValueError(f'subset is for method="function", but method is {method!r}')
    lin, likelihood = linearization(net, data, outputs), as_likelihood(likelihood)
    likelihood.to(device=lin.device, dtype=lin.dtype)
    if method == "last_layer":
        lin = last_layer(lin)
    if method == "subnetwork" and isinstance(subnetwork, list | tuple):
        lin = lin.restrict(subnetwork)
    source = as_source(data, lin, likelihood, weights)
    named = isinstance(prior, str)
    model = LinearModel(lin, source, likelihood, memory_budget)
    prior = _g_prior(model, likelihood) if prior == "g_prior" else as_prior(prior, lin)
    choice = choose(model, subset) if method == "auto" else Choice(method, f"method={method!r} was asked for", subset)
    posterior = _build(model, prior, likelihood, choice, structure, subnetwork, options)
    posterior.reason = choice.reason
    if isinstance(posterior, VariationalPosterior):
        posterior.progress = progress
    if tune is True or (tune == "auto" and named):
        posterior.tune(progress=progress)
    posterior._prepare()
    return posterior


@dataclass(frozen=True)
class Choice:
    """Which method, why, and with which subset."""

    method: str
    reason: str
    subset: int | Selector | None = None


def choose(model: LinearModel, subset: int | Selector | None) -> Choice:
    """Compare the two spaces by operations and bytes; both are exact, so the cheaper one that fits is right.

    Function space: one Gram matrix, (N C)² times the depth of its terms, and (N C)³/3. Weight space: N C P² and P³/3.
    """
    if subset is not None:
        return Choice("function", "a subset was asked for, which is a matter of the function space", subset)
    lin, P, C = model.lin, model.lin.num_params, model.lin.num_outputs
    size = lin.dtype.itemsize
    if not isinstance(model.source, Data):
        if 3 * P * P * size <= model.memory_budget:
            return Choice("full", f"data come from a loader, and a {P} x {P} matrix fits the memory budget")
        return Choice("kron", f"data come from a loader, and a {P} x {P} matrix does not fit the memory budget")
    N = len(model.source)
    n = N * C
    depth = model.features_bytes / (N * C * size)  # numbers per row of the factored Jacobian: what a Gram entry costs
    flops = {"function": n * n * depth + n**3 / 3, "full": n * P * P + P**3 / 3}
    bytes_ = {"function": 2 * n * n * size + model.features_bytes, "full": 3 * P * P * size}
    fitting = [name for name in flops if bytes_[name] <= model.memory_budget]
    told = ", ".join(f"{name}: {flops[name]:.1e} operations, {bytes_[name] / 1e9:.2g} GB" for name in flops)
    if fitting:
        best = min(fitting, key=flops.__getitem__)
        return Choice(best, f"{best} is the cheapest exact method within {model.memory_budget / 1e9:.2g} GB ({told})")
    M = max(1, min(N, int((model.memory_budget / (4 * size)) ** 0.5 / C)))
    return Choice(
        "function", f"no exact method fits {model.memory_budget / 1e9:.2g} GB ({told}); {M} of {N} points do", Random(M)
    )


def _build(
    model: LinearModel,
    prior: Prior,
    likelihood: Likelihood,
    choice: Choice,
    structure: str,
    subnetwork: Any,
    options: dict[str, Any],
) -> Posterior:
    if choice.method == "function":
        model = model.with_source(gather(model.source, model.lin, likelihood))
        if choice.subset is not None:
            points = Random(choice.subset) if isinstance(choice.subset, int) else choice.subset
            model = model.with_source(points(model, prior))
        return _made(FunctionSpacePosterior, model, prior, likelihood, options)
    if choice.method == "variational":
        return _made(VariationalPosterior, model, prior, likelihood, options)
    if choice.method == "subnetwork" and not isinstance(subnetwork, list | tuple):
        if subnetwork is None:
            raise ValueError("subnetwork must say how many or which weights are random, but is None")
        if structure != "full":
            raise ValueError(f'single weights need structure="full", but structure is {structure!r}')
        weights = LargestVariance(subnetwork) if isinstance(subnetwork, int) else subnetwork
        index = weights(model, prior, likelihood)
        return _made(FullPosterior, model, prior, likelihood, {"index": index} | options)
    name = choice.method if choice.method in STRUCTURES else structure
    return _made(STRUCTURES[name], model, prior, likelihood, options)


def _made(
    kind: type[Posterior], model: LinearModel, prior: Prior, likelihood: Likelihood, options: dict[str, Any]
) -> Posterior:
    try:
        return kind(model, prior, likelihood, **options)
    except TypeError as error:
        raise TypeError(f"method {kind.method!r} does not take {', '.join(map(repr, options))}") from error


def linearization(net: Any, data: Any, outputs: Any) -> Linearization:
    """Return the network linearised, with shapes learnt from the data, and some of its outputs if asked for."""
    lin = net if isinstance(net, Linearization) else Linearization(net)
    lin.learn(first_input(data))
    return lin if outputs is None else lin.select(outputs)


def first_input(data: Any) -> Any:
    """Return an example input, to learn shapes from."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0]
    if isinstance(data, DataLoader):
        batch = next(iter(data), None)
        if batch is None:
            raise ValueError("data is an empty loader: at least one batch is expected")
        return _pair(batch)[0]
    if isinstance(data, Dataset):
        if not len(data):  # type: ignore[arg-type]
            raise ValueError("data is an empty dataset: at least one point is expected")
        return map_leaves(lambda leaf: leaf.unsqueeze(0), _pair(data[0])[0])
    raise TypeError(f"data must be (X, y), a Dataset or a DataLoader, but is a {type(data).__name__}")


def _pair(point: Any) -> Any:
    if isinstance(point, Mapping):
        raise TypeError(
            f"data must yield (X, y), but yields a {type(point).__name__} with keys {list(point)}: take the targets "
            "out, in a Dataset or collate_fn that returns ({the inputs}, targets)"
        )
    return point


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood, or the one of this name."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str):
        raise TypeError(f"likelihood must be a name or an ntkgp likelihood, but is a {type(likelihood).__name__}")
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, but is {likelihood!r}")
    return LIKELIHOODS[likelihood]()


def as_prior(prior: str | Prior, lin: Linearization) -> Prior:
    """Return the prior, or the one of this name."""
    if isinstance(prior, Prior):
        if prior.layout != lin.layout:
            raise ValueError("prior is over other parameters than the linearization: make it from the same one")
        return prior
    if not isinstance(prior, str):
        raise TypeError(f"prior must be a name or an ntkgp prior, but is a {type(prior).__name__}")
    if prior not in PRIORS:
        raise ValueError(f"prior must be one of {', '.join(PRIORS)}, g_prior, but is {prior!r}")
    return PRIORS[prior](lin)


def _g_prior(model: LinearModel, likelihood: Likelihood) -> GPrior:
    with torch.no_grad():
        return GPrior(model.lin, DiagonalPosterior(model, Isotropic(model.lin), likelihood)._diagonal())


def last_layer(lin: Linearization) -> Linearization:
    """Return the linearisation in the parameters of the last layer alone."""
    shared = [block.weight for block in lin.pilot().blocks if block.outer.shared]
    layers = [layer for layer, names in lin.groups.items() if shared and shared[-1] in names]
    return lin.restrict(layers or list(lin.groups)[-1:])
