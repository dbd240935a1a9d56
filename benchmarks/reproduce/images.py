"""Table 2 of the local-linearisation paper: a CNN on FashionMNIST (out: MNIST), and the other way round.

    python benchmarks/reproduce/images.py --data DIR [--inside fashion_mnist] [--subsets 50,200,800] [--report]

Weight decay, prior precisions and the temperature are chosen by the negative log likelihood on 5,000 validation images,
never on test data. Networks are kept under ``--cache``, the scores of each method under ``--out``; what is
there is not run again.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cached_property
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

import ntkgp
from ntkgp.report import metrics

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import kept, machine
from kernel import lenet

mpl.use("Agg")
OTHER = {"fashion_mnist": "mnist", "mnist": "fashion_mnist"}
PAPER = {  # FashionMNIST: accuracy, NLL, ECE, OOD-AUC
    "MAP": (0.9139, 0.258, 0.017, 0.864),
    "BNN": (0.8442, 0.942, 0.411, 0.945),
    "BNN damped": (0.9120, 0.265, 0.024, 0.947),
    "GLM": (0.9225, 0.244, 0.012, 0.955),
    "GP 3200": (0.9136, 0.250, 0.007, 0.918),
}
DECAYS = (1e-4, 3e-4, 1e-3)
EPOCHS = {"fashion_mnist": 12, "mnist": 6}
BATCH, ENSEMBLE, SAMPLES, DRAWS = 128, 3, 100, 20
FACTORS = tuple(10 ** (k / 4) for k in range(-4, 17))  # of the precision that the weight decay means, 0.1 to 10,000
VALIDATED = 1000  # validation images on which a precision is chosen
TEMPERATURES = tuple(k / 10 for k in range(4, 13))  # that a GP chooses among together with its precision
Predict = Callable[[Tensor], Tensor]


def images(data: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], (N, channels, H, W), and labels."""
    with np.load(data / f"images/{name}.npz") as raw:
        x, y = (torch.as_tensor(raw[f"{what}_{part}"]) for what in "xy")
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return x.float().div(255), y.long()


# Training


def train(net: nn.Module, x: Tensor, y: Tensor, decay: float, seed: int, epochs: int) -> None:
    """Minimise the mean loss plus ½ λ ‖θ‖² by Adam with a cosine schedule."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    steps = epochs * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    net.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            penalty = decay / 2 * sum(p.square().sum() for p in net.parameters())
            (nn.functional.cross_entropy(net(x[index]), y[index]) + penalty).backward()
            optimizer.step()
            schedule.step()
    net.eval()


def dropout_net() -> nn.Module:
    """The same network with dropout before its dense layers."""
    layers = list(lenet())
    at = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    for i in reversed(at):
        layers.insert(i, nn.Dropout(0.2))
    return nn.Sequential(*layers)


class Networks:
    """Trained networks, kept on disk."""

    def __init__(self, cache: Path, x: Tensor, y: Tensor, epochs: int) -> None:
        self.cache, self.x, self.y, self.epochs = cache, x, y, epochs
        cache.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], nn.Module], decay: float, seed: int) -> nn.Module:
        """Return a network, trained now if it is not there."""
        torch.manual_seed(seed)
        net, path = make(), self.cache / f"{name}.pt"
        if path.exists():
            net.load_state_dict(torch.load(path, weights_only=True))
            return net.eval()
        start = time.perf_counter()
        train(net, self.x, self.y, decay, seed, self.epochs)
        torch.save(net.state_dict(), path)
        print(f"trained {name}: {time.perf_counter() - start:.0f} s", flush=True)
        return net


# Scores


def probabilities(net: nn.Module, x: Tensor) -> Tensor:
    """Return class probabilities of a network, in batches."""
    with torch.no_grad():
        return torch.cat([net(part).softmax(-1) for part in x.split(1000)])


def scores(inside: Tensor, y: Tensor, outside: Tensor) -> dict[str, float]:
    """Return accuracy, NLL, ECE and how well entropy tells the outside."""
    entropy = [torch.special.entr(p).sum(-1) for p in (inside, outside)]
    return {
        "accuracy": metrics.accuracy(inside, y),
        "nll": -inside[torch.arange(len(y)), y].clamp(min=1e-12).log().mean().item(),
        "ece": metrics.expected_calibration_error(inside, y),
        "ood_auc": metrics.ood_auc(*entropy),
        "entropy": [torch.histc(e, 40, 0, math.log(10)).tolist() for e in entropy],
    }


def nll(p: Tensor, y: Tensor) -> float:
    return -p[torch.arange(len(y)), y].clamp(min=1e-12).log().mean().item()


# Averages over networks, masks and weights: each returns how to predict


def over_networks(nets: list[nn.Module]) -> Predict:
    return lambda x: torch.stack([probabilities(net, x) for net in nets]).mean(0)


def over_masks(net: nn.Module) -> Predict:
    """Average over masks of dropout; all else stays in evaluation mode."""
    layers = [module for module in net.modules() if isinstance(module, nn.Dropout)]

    def predict(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        for layer in layers:
            layer.train()
        mean = torch.stack([probabilities(net, x) for _ in range(DRAWS)]).mean(0)
        net.eval()
        return mean

    return predict


def along_sgd(net: nn.Module, x: Tensor, y: Tensor, rate: float, decay: float) -> tuple[Tensor, Tensor]:  # (P,), (P,)
    """Return mean and standard deviation of weights along constant-rate SGD (Maddox et al. 2019).

    Normalisations keep their statistics, so that all weights of the path belong to one network.
    """
    net = deepcopy(net).eval()
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    moments = [0.0, 0.0, 0]
    for _ in range(3):
        for i, index in enumerate(torch.randperm(len(x), generator=generator).split(BATCH)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
            if i % 40 == 0:
                theta = nn.utils.parameters_to_vector(net.parameters()).detach()
                moments = [moments[0] + theta, moments[1] + theta**2, moments[2] + 1]
    mean = moments[0] / moments[2]
    return mean, (moments[1] / moments[2] - mean**2).clamp(min=0).sqrt()


def over_weights(net: nn.Module, mean: Tensor, std: Tensor) -> Predict:  # (P,), (P,)
    """Average over weights from N(mean, std²)."""
    net = deepcopy(net)

    def predict(x: Tensor) -> Tensor:
        draws, total = torch.Generator().manual_seed(0), 0.0
        for _ in range(DRAWS):
            theta = mean + std * torch.randn(len(mean), generator=draws)
            nn.utils.vector_to_parameters(theta, net.parameters())
            total = total + probabilities(net, x)
        return total / DRAWS

    return predict


class Trained:
    """One pair of data sets, networks trained on the first, and methods that need no posterior.

    A method returns how to predict, and what was chosen.
    """

    def __init__(self, data: Path, cache: Path, inside: str) -> None:
        x, y = images(data, inside, "train")
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.train, self.valid = ((x[i], y[i]) for i in (order[5000:], order[:5000]))
        self.test, self.outside = images(data, inside, "test"), images(data, OTHER[inside], "test")[0]
        self.networks = Networks(cache / inside, *self.train, EPOCHS[inside])

    @cached_property
    def decay(self) -> float:
        """The weight decay with the best validation NLL."""
        x, y = self.valid
        found = {d: nll(probabilities(self.networks.get(f"map-{d:g}", lenet, d, seed=0), x), y) for d in DECAYS}
        return min(found, key=found.__getitem__)

    @property
    def net(self) -> nn.Module:
        """The network whose posterior is studied."""
        return self.networks.get(f"map-{self.decay:g}", lenet, self.decay, seed=0)

    @property
    def precision(self) -> float:
        """What the weight decay means."""
        return self.decay * len(self.train[0])

    def temperature(self) -> tuple:
        """Scale the logits by one number."""
        x, y = self.valid
        with torch.no_grad():
            f = torch.cat([self.net(part) for part in x.split(1000)])
        grid = torch.logspace(-0.5, 0.7, 121)
        best = min(grid, key=lambda t: nn.functional.cross_entropy(f / t, y).item()).item()
        return lambda x: (probabilities(self.net, x).log() / best).softmax(-1), {"temperature": best}

    def dropout(self) -> tuple:
        """Average over dropout masks."""
        net = self.networks.get("dropout", dropout_net, self.decay, seed=0)
        return over_masks(net), {"samples": DRAWS}

    @cached_property
    def path(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of weights along the path that training on takes."""
        return along_sgd(self.net, *self.train, rate=0.02, decay=self.decay)

    def swag(self) -> tuple:
        """Average over weights from the Gaussian with the mean and the diagonal variance of the path."""
        return over_weights(self.net, *self.path), {"samples": DRAWS}

    def ensemble(self) -> tuple:
        """Average over networks from other seeds."""
        return over_networks(self.members), {"members": ENSEMBLE}

    @property
    def members(self) -> list[nn.Module]:
        """The network, and others from other seeds."""
        others = range(1, ENSEMBLE)
        return [self.net, *(self.networks.get(f"member-{seed}", lenet, self.decay, seed=seed) for seed in others)]


class Table2(Trained):
    """All methods on one pair of data sets."""

    def __init__(self, args: argparse.Namespace, inside: str) -> None:
        super().__init__(args.data, args.cache, inside)
        self.out = args.out / inside
        self.out.mkdir(parents=True, exist_ok=True)
        self.subsets = [int(m) for m in args.subsets.split(",") if m]
        self.validated = tuple(part[:VALIDATED] for part in self.valid)

    def run(self) -> None:
        """Score what has no score yet."""
        for name, method in self.methods():

            def work(method: Callable[[], tuple] = method) -> dict:
                predict, choice = method()
                return scores(predict(self.test[0]), self.test[1], predict(self.outside)) | choice

            found = kept(self.place(name), work)
            print(name, {k: round(v, 4) for k, v in found.items() if isinstance(v, float)}, flush=True)

    def place(self, name: str) -> Path:
        """Return where a method's scores are."""
        return self.out / f"{name.replace(' ', '_')}.json"

    def methods(self) -> Iterator[tuple[str, Callable]]:
        """Yield every method: a function that returns how to predict, and what was chosen."""
        yield "MAP", lambda: (lambda x: probabilities(self.net, x), {"decay": self.decay})
        yield "MAP temperature", self.temperature
        yield "GLM", lambda: self.kron("glm")
        yield "GLM damped", lambda: self.kron("glm", damped=True)
        yield "BNN", lambda: self.kron("bnn")
        yield "BNN damped", lambda: self.kron("bnn", damped=True)
        for M in self.subsets:
            yield f"GP {M}", lambda M=M: self.gp(M)
        if 200 in self.subsets:
            yield "GP 200 temperature", lambda: self.gp_temperature(200)
            yield "GP 200 refined", lambda: self.refined(200)
        yield "dropout", self.dropout
        yield "SWAG", self.swag
        yield "ensemble", self.ensemble
        if 200 in self.subsets:
            yield "GP 200 ensemble", lambda: self.mixture(200)

    def chosen(self, post: ntkgp.Posterior, **how: object) -> float:
        """Set the precision with the best validation NLL."""
        x, y = self.validated
        found = {}
        for factor in FACTORS:
            post.prior.precision = self.precision * factor
            found[factor] = nll(post.predict(x, **how).probs, y)
        best = min(found, key=found.__getitem__)
        post.prior.precision = self.precision * best
        return best

    def kron(self, predictive: str, damped: bool = False) -> tuple:
        """Kronecker-factored Laplace posterior of all training images."""
        lin = ntkgp.Linearization(self.net, example=self.test[0][:2])
        prior = ntkgp.priors.Isotropic(lin, self.precision)
        post = ntkgp.fit(lin, self.train, "categorical", "kron", prior, damped=damped)
        how = {"predictive": predictive, "num_samples": SAMPLES}
        return lambda x: post.predict(x, **how).probs, {"precision factor": self.chosen(post, **how)}

    def function_space(self, M: int, net: nn.Module | None = None) -> ntkgp.Posterior:
        """Function-space posterior of M class-balanced training images, under the training's own precision."""
        lin = ntkgp.Linearization(net or self.net, example=self.test[0][:2])
        prior = ntkgp.priors.Isotropic(lin, self.precision)
        subset = ntkgp.posteriors.subsets.Stratified(M)
        return ntkgp.fit(lin, self.train, "categorical", "function", prior, subset=subset)

    def gp(self, M: int) -> tuple:
        """The mean is the network's, the covariance that of M images."""
        post = self.function_space(M)
        post.tune(validation=self.validated, grid=torch.tensor(self.factors(M)), progress=True)
        factor = post.prior.precision.item() / self.precision
        return lambda x: post.predict(x, num_samples=SAMPLES, progress=True).probs, {"precision factor": factor}

    def gp_temperature(self, M: int) -> tuple:
        """Choose precision and temperature together, on as many images as MAP's temperature.

        Sharper logits leave room for wider posteriors, which differ inside and outside; one precision has to serve both
        the likelihood inside and what is to be told from it.
        """
        post = self.function_space(M)
        post.tune(validation=self.valid, grid=torch.tensor(FACTORS), temperatures=TEMPERATURES, progress=False)
        found = {"precision factor": post.prior.precision.item() / self.precision}
        found["temperature"] = post.likelihood.temperature.item()
        return lambda x: post.predict(x, num_samples=SAMPLES).probs, found

    def factors(self, M: int) -> list[float]:
        """Return what M images choose among: where each takes minutes, those beside a smaller subset's choice."""
        smaller = self.place(f"GP {M // 4}")
        if M <= 800 or not smaller.exists():
            return list(FACTORS)
        chosen = json.loads(smaller.read_text())["precision factor"]
        return [factor for factor in FACTORS if abs(math.log10(factor / chosen)) < 0.3]

    def mixture(self, M: int) -> tuple:
        """The ensemble, each member with the covariance of M images; one precision for all by the mixture's NLL."""
        mixed = ntkgp.posteriors.Mixture([self.function_space(M, net) for net in self.members])
        mixed.tune(validation=self.validated, grid=torch.tensor(FACTORS), progress=False)
        factor = mixed.posteriors[0].prior.precision.item() / self.precision
        return lambda x: mixed.predict(x, num_samples=SAMPLES).probs, {"precision factor": factor}

    def refined(self, M: int) -> tuple:
        """The mean is the linear model's, by descent over all training images; the covariance that of M images."""
        found = []
        for factor in FACTORS[::2]:  # each is a descent of its own
            post = self.function_space(M)
            post.prior.precision = self.precision * factor
            post = post.refine(solver="descent", data=self.train, progress=False)
            found.append((nll(post.predict(self.validated[0]).probs, self.validated[1]), factor, post))
        _, factor, best = min(found, key=lambda found: found[0])
        return lambda x: best.predict(x, num_samples=SAMPLES).probs, {"precision factor": factor}

    def report(self, inside: str) -> str:
        """Return the table of what has been scored, and draw the entropies."""
        found = {name: self.place(name) for name, _ in self.methods()}
        found = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
        lines = ["| method | accuracy | NLL | ECE | OOD-AUC | chosen on validation |", "|---|---|---|---|---|---|"]
        for name, s in found.items():
            paper = PAPER.get(name) if inside == "fashion_mnist" else None
            cells = [f"{s[key]:.{d}f}" for key, d in (("accuracy", 4), ("nll", 3), ("ece", 3), ("ood_auc", 3))]
            if paper:
                cells = [f"{cell} ({value:g})" for cell, value in zip(cells, paper, strict=True)]
            choice = ", ".join(f"{k} {s[k]:.3g}" for k in ("decay", "temperature", "precision factor") if k in s)
            lines.append(f"| {name} | {' | '.join(cells)} | {choice} |")
        names = ("MAP", "ensemble", "BNN", "GLM", "GLM damped", *(f"GP {M}" for M in self.subsets))
        shown = [name for name in names if name in found]
        columns = math.ceil((len(shown) + 1) / 2)  # one place for the legend
        size = (2.1 * columns, 4)
        figure, axes = plt.subplots(2, columns, figsize=size, sharex=True, sharey=True, layout="constrained")
        edges = np.linspace(0, math.log(10), 41)
        for ax, name in zip(axes.flat, shown, strict=False):
            for counts, label in zip(found[name]["entropy"], ("inside", "outside"), strict=True):
                ax.stairs(np.array(counts) / sum(counts), edges, fill=True, alpha=0.5, label=label)
            ax.set(title=name, ylim=(0, 0.15))
            ax.tick_params(labelbottom=True)
        for ax in axes.flat[len(shown) :]:
            ax.axis("off")
        axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), frameon=False, loc="center")
        figure.supxlabel("entropy", fontsize="medium")
        figure.supylabel("share of images", fontsize="medium")
        figure.savefig(self.out / "entropy.png", dpi=150)
        return "\n".join([*lines, "", f"![entropies of predictions inside and outside]({inside}/entropy.png)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--inside", choices=tuple(OTHER), nargs="*", default=list(OTHER))
    parser.add_argument("--subsets", default="50,200,800,3200")
    parser.add_argument("--report", action="store_true", help="tabulate what is there, run nothing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/images"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/images"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = [
        f"# Table 2: image classification\n\n`make reproduce-images`, seed 0, {machine()}. In brackets: the paper's.",
        "A refined GP has the mean of the linear model of all training images, and the covariance of M.",
    ]
    for inside in args.inside:
        table = Table2(args, inside)
        if not args.report:
            table.run()
        text.append(f"\n## {inside}, outside {OTHER[inside]}\n\n{table.report(inside)}")
    (args.out / "table.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
