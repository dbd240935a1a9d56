"""laplace-torch's posteriors: predictive covariances to compare with, and the time of its GP's fit and prediction.

python laplace_posteriors.py covariances problem.npz     # weights, data and test inputs; prints covariances
python laplace_posteriors.py gp --case lenet --n 400     # seconds to fit, and to predict 50 points
"""

import json
import sys
import time

import numpy as np
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from laplace_gp import BACKENDS, FASTEST, fits, network
from protocol import INPUT_SHAPE, NUM_OUTPUTS, SEED, parser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def small_network(case: str) -> nn.Sequential:
    """The networks of which covariances are compared."""
    if case == "mlp":
        return nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
    convolutions = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Tanh()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 3))


def covariances(path: str) -> dict:
    """Covariances of the outputs at test points, structure by structure."""
    problem = np.load(path)
    net = small_network(str(problem["case"]))
    state = net.state_dict()
    net.load_state_dict({name: torch.as_tensor(problem[name]) for name in state})
    X, y, X_new = (torch.as_tensor(problem[name]) for name in ("X", "y", "X_new"))
    kind = "classification" if y.dtype == torch.int64 else "regression"
    loader = DataLoader(TensorDataset(X, y), batch_size=len(X))
    found = {}
    for structure in ("full", "kron", "diag"):
        options = {"sigma_noise": float(problem["noise"]) ** 0.5} if kind == "regression" else {}
        la = Laplace(
            net, kind, "all", structure, prior_precision=float(problem["precision"]), backend=CurvlinopsGGN, **options
        )
        la.fit(loader)
        found[structure] = la._glm_predictive_distribution(X_new)[1].tolist()
    return found


def gp(case: str, n: int, repeats: int) -> dict:
    """Seconds to fit and to predict."""
    backend, batch_size = FASTEST[case]
    generator = torch.Generator().manual_seed(SEED + 1)
    X_new = torch.randn(50, *INPUT_SHAPE[case], generator=generator)
    fit_seconds, predict_seconds = [], []
    for job in fits(case, n, batch_size, backend, repeats):
        start = time.perf_counter()
        job()
        fit_seconds.append(time.perf_counter() - start)
        la = job.__defaults__[0]
        start = time.perf_counter()
        la._glm_predictive_distribution(X_new)
        predict_seconds.append(time.perf_counter() - start)
    return {"fit": fit_seconds, "predict": predict_seconds, "outputs": NUM_OUTPUTS, "backends": sorted(BACKENDS)}


def main() -> None:
    """Do what the command line says, and print one line of JSON."""
    what = sys.argv.pop(1)
    if what == "covariances":
        print(json.dumps(covariances(sys.argv[1])))
        return
    args = parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    network(args.case)
    print(json.dumps(gp(args.case, args.n, args.repeats)))


if __name__ == "__main__":
    main()
