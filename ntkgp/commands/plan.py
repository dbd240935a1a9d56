"""What each method would cost here, seconds and memory, before it runs: estimates from a few points of the data.

The arguments are those of ntkgp fit. Nothing is written.
"""

import argparse
from dataclasses import asdict

import torch

import ntkgp
from ntkgp.commands.answer import Answer, warnings_told
from ntkgp.commands.arguments import add_model_arguments, positive
from ntkgp.commands.network import make_network
from ntkgp.commands.points import read_points
from ntkgp.posteriors.fit import PRIORS, as_likelihood

NAME, HELP = "plan", "what each method would cost, before it runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prior", choices=(*PRIORS, "g_prior"), default="isotropic", help="that would be tuned (default: %(default)s)")
    add(
        "--memory",
        type=positive(float),
        default=4.0,
        metavar="GIB",
        help="that methods may take (default: %(default)s)",
    )
    add("--rank", type=positive(int), default=100, help="of low_rank (default: %(default)s)")
    add("--inducing", type=positive(int), default=100, help="values of variational (default: %(default)s)")
    add("--samples", type=positive(int), default=16, help="of sampled (default: %(default)s)")


def run(args: argparse.Namespace) -> Answer:
    """Measure and count."""
    torch.manual_seed(0)
    net = make_network(args.network, args.weights, None if args.dtype is None else getattr(torch, args.dtype))
    likelihood = as_likelihood(args.likelihood)
    data = read_points(args.data, net, likelihood)
    with warnings_told(args.parser.prog) as told:
        found = ntkgp.plan(
            net, data, likelihood, args.prior, rank=args.rank, num_inducing=args.inducing, num_samples=args.samples,
            memory_budget=int(args.memory * (1 << 30)),
        )  # fmt: skip
    methods = {cost.method: asdict(cost) | {"seconds": cost.seconds} for cost in found.costs}
    sizes = {name: getattr(found, name) for name in ("num_data", "num_outputs", "num_params", "memory_budget")}
    values = {**sizes, "auto": found.chosen, "reason": found.reason, "methods": methods, "warnings": told}
    return Answer(str(found), values)
