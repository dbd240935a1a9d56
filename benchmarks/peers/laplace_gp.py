"""Time laplace-torch's GP fit, ``Laplace(..., hessian_structure="gp")``: Gram matrix, curvature, Cholesky factor.

The settings are the fastest of those tried (README.md has the numbers): for the MLP the curvlinops backend in batches
of 50; for LeNet batches of 100, with ASDL if the release that laplace-torch pins is installed, else with BackPACK.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version

import torch
from laplace import Laplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from protocol import INPUT_SHAPE, NUM_OUTPUTS, NUM_PARAMS, SEED, parser, report, stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKENDS = {"asdl": AsdlGGN, "backpack": BackPackGGN, "curvlinops": CurvlinopsGGN}
ASDL_WORKS = version("asdfghjkl") == "0.1a4"  # later ones lack the argument `batch_size` that laplace-torch 0.3 passes
FASTEST = {"mlp": ("curvlinops", 50), "lenet": ("asdl" if ASDL_WORKS else "backpack", 100)}  # backend, batch size


def network(case: str) -> nn.Sequential:
    """The MLP 784-200-200-10 or LeNet, ReLU, PyTorch's own initialisation."""
    torch.manual_seed(SEED)
    if case == "mlp":
        layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, NUM_OUTPUTS)]
        return nn.Sequential(*layers)
    convolutions = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, NUM_OUTPUTS)]
    return nn.Sequential(*convolutions, nn.Flatten(), *head)


def fits(case: str, n: int, batch_size: int, backend: str, repeats: int) -> Iterator[Callable[[], None]]:
    """Yield fits of fresh posteriors to the same n random inputs and labels, all of them in the subset."""
    generator = torch.Generator().manual_seed(SEED)
    X = torch.randn(n, *INPUT_SHAPE[case], generator=generator)
    y = torch.randint(NUM_OUTPUTS, (n,), generator=generator)
    loader = DataLoader(TensorDataset(X, y), batch_size=batch_size)
    for _ in range(repeats):
        net = network(case)
        assert sum(p.numel() for p in net.parameters()) == NUM_PARAMS[case]
        options = {"n_subset": n, "prior_precision": 1.0, "backend": BACKENDS[backend]}
        la = Laplace(net, "classification", subset_of_weights="all", hessian_structure="gp", **options)
        yield lambda la=la: la.fit(loader)


def main() -> None:
    """Warm up, then time; arguments come from the command line."""
    options = parser(__doc__)
    options.add_argument("--backend", choices=sorted(BACKENDS), help="default: the fastest for the case")
    options.add_argument("--batch-size", type=int, help="default: the fastest for the case")
    args = options.parse_args()
    backend, batch_size = FASTEST[args.case]
    backend, batch_size = args.backend or backend, args.batch_size or batch_size
    print(f"{backend}, batches of {batch_size}", file=sys.stderr)

    torch.set_num_threads(args.threads)
    stopwatch(fits(args.case, 8, 8, backend, 1))  # imports and thread pools
    seconds = stopwatch(fits(args.case, args.n, batch_size, backend, args.repeats))
    report("laplace-torch", args.case, args.n, seconds)


if __name__ == "__main__":
    main()
