"""The tangent kernel beside laplace-torch and neural-tangents: one table, every row measured in this run.

    python benchmarks/kernel.py --peers DIR

``DIR`` holds the peers' environments. Each measurement runs in a process of its own, one after the other; all times are
medians over repeats. The table goes to benchmarks/results/kernel.md, the numbers to kernel.json beside it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from harness import Table, median, peak_mb, run_json, write
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))  # the shared table of networks

import networks as zoo  # noqa: E402
from cases import CASES, dense_jacobian, relative_error  # noqa: E402

import ntkgp  # noqa: E402

REPEATS = 7
LENET_INNER = (416, 12832, 120, 84)  # inner sizes of the products a Gram of the LeNet cannot avoid
MLP_INNER = (200, 200)


def mlp(width: int = 200) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class ImagePrior(nn.Module):
    """The U-Net of the deep image prior's recipe: three scales, skips 0/4/4."""

    def __init__(self, width: int = 32, skip: int = 4) -> None:
        super().__init__()
        self.enter = self._block(1, width)
        self.down = nn.ModuleList(self._block(width, width, stride=2) for _ in range(2))
        self.skip = nn.ModuleList(nn.Conv2d(width, skip, 1) for _ in range(2))
        self.up = nn.ModuleList(self._block(width + skip, width) for _ in range(2))
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inside: int, outside: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, stride, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(outside, outside, 3, padding=1), nn.LeakyReLU(0.2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the size of x."""
        scales = [self.enter(x)]
        for down in self.down:
            scales.append(down(scales[-1]))
        h = scales.pop()
        for skip, up, scale in zip(self.skip, self.up, reversed(scales), strict=True):
            h = nn.functional.interpolate(h, size=scale.shape[2:], mode="nearest")
            h = up(torch.cat([h, skip(scale)], 1))
        return torch.sigmoid(self.out(h))


NETWORKS = {"mlp": (mlp, (784,)), "lenet": (lenet, (1, 28, 28)), "resnet20": (zoo.ResNet20, (3, 32, 32))}


def kernel_of(case: str, n: int) -> tuple[ntkgp.NTKKernel, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[case]
    x = torch.randn(n, *shape)
    lin = ntkgp.Linearization(make(), example=x)
    return ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin)), x


def seconds(function, repeats: int = REPEATS) -> list[float]:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def interleaved(functions: dict, repeats: int = REPEATS, warm: bool = True) -> dict[str, list[float]]:
    """Time several functions in turn, so that slow phases hit all; ``warm``: each right after an untimed run."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            if warm:
                function()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


# What each child process measures; every function returns something JSON can hold


def measure_gram(case: str, n: int) -> dict:
    kernel, x = kernel_of(case, n)
    with torch.no_grad():
        return {"seconds": seconds(lambda: kernel.gram(x))}


def measure_contraction(n: int) -> dict:
    """vmap(jacrev) and a contraction, as people write it by hand: for all points at once, and in batches of ten."""
    kernel, x = kernel_of("resnet20", n)
    net = kernel.lin._net.module
    theta = {name: p.detach() for name, p in net.named_parameters()}

    def f(theta: dict, point: Tensor) -> Tensor:
        return torch.func.functional_call(net, theta, point.unsqueeze(0)).squeeze(0)

    jacobian = torch.func.vmap(torch.func.jacrev(f), (None, 0))

    def contraction(batch: int) -> Tensor:
        parts = [jacobian(theta, part) for part in x.split(batch)]
        K = 0
        for name in theta:
            J = torch.cat([part[name] for part in parts]).flatten(2).flatten(0, 1)
            K = K + J @ J.mT
        return K

    def published() -> Tensor:
        """As in PyTorch's tutorial on tangent kernels: a Jacobian for each of the two arguments."""
        first, second = jacobian(theta, x), jacobian(theta, x)
        parts = (torch.einsum("Naf,Mbf->NMab", first[name].flatten(2), second[name].flatten(2)) for name in theta)
        return torch.stack(list(parts)).sum(0)

    factors = [torch.randn(10 * n, p.numel()) for p in theta.values()]

    def cotangents() -> None:
        """Go back once for each output, to the inputs alone: no parameter has a gradient, no example one of its own."""
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            f = torch.func.functional_call(net, theta, leaf)
            for c in range(f.shape[1]):
                torch.autograd.grad(f[:, c].sum(), leaf, retain_graph=True)

    with torch.no_grad():
        error = relative_error(kernel.gram(x), contraction(10))
        functions = {
            "ours": lambda: kernel.gram(x),
            "at once": lambda: contraction(n),
            "by ten": lambda: contraction(10),
            "published": published,
            "products": lambda: [factor @ factor.mT for factor in factors],
            "cotangents": cotangents,
        }
        return interleaved(functions, 2) | {"error": error}


def measure_limit(case: str) -> dict:
    """Our Gram and the bare products, in turn; results in fresh memory and in memory that is there already."""
    kernel, x = kernel_of(case, 400)
    factors = [torch.randn(4000, d) for d in (MLP_INNER if case == "mlp" else LENET_INNER)]
    out, place = torch.zeros(4000, 4000), torch.zeros(4000, 4000)

    def products(out: Tensor | None) -> None:
        for factor in factors:
            torch.mm(factor, factor.mT, out=out)

    functions = {
        "products": lambda: products(out),
        "products, fresh memory": lambda: products(None),
        "gram": lambda: kernel.gram(x),
        "gram, memory given": lambda: kernel.gram(x, out=place),
    }
    repeats = 15 if case == "mlp" else REPEATS
    with torch.no_grad():
        return interleaved(functions, repeats) | {"cold": interleaved(functions, repeats, warm=False)}


def measure_growth() -> dict:
    sizes = [100, 200, 400, 800, 1600]
    times = []
    for n in sizes:
        kernel, x = kernel_of("mlp", n)
        with torch.no_grad():
            times.append(statistics.median(seconds(lambda k=kernel, z=x: k.gram(z), 3)))
    log_n, log_t = torch.tensor(sizes).double().log(), torch.tensor(times).double().log()
    slope = ((log_n - log_n.mean()) * (log_t - log_t.mean())).sum() / (log_n - log_n.mean()).square().sum()
    return {"n": sizes, "seconds": times, "exponent": slope.item()}


def measure_memory_mlp() -> dict:
    torch.manual_seed(0)
    x = torch.randn(1000, 784)
    lin = ntkgp.Linearization(mlp(512), example=x)
    with torch.no_grad():
        K = ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin)).gram(x)
    return {"shape": list(K.shape)}


def measure_memory_unet() -> dict:
    torch.manual_seed(0)
    x = torch.randn(16, 1, 28, 28)
    lin = ntkgp.Linearization(ImagePrior(), example=x)
    with torch.no_grad():
        K = ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin)).operator(x)
        v = K @ torch.randn(K.shape[1])
    return {"shape": list(v.shape), "outputs": lin.num_outputs, "parameters": lin.num_params}


def measure_products() -> dict:
    kernel, x = kernel_of("lenet", 400)
    K = kernel.operator(x)
    v, V = torch.randn(4000, 1), torch.randn(4000, 8)
    with torch.no_grad():
        return interleaved(
            {"forward": lambda: kernel.lin(x), "one vector": lambda: K @ v, "eight vectors": lambda: K @ V}
        )


def measure_accuracy() -> dict:
    errors = {}
    for case in CASES:
        net, x = case.build()
        lin = ntkgp.Linearization(net, case.parameters, example=x)
        J = dense_jacobian(net, x, lin.layout.names).flatten(0, 1)
        found = []
        for dtype in (torch.float64, torch.float32):
            net, x = case.build(dtype)
            lin = ntkgp.Linearization(net, case.parameters, example=x)
            with torch.no_grad():
                found.append(relative_error(ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin)).gram(x), J @ J.mT))
        errors[case.name] = found
    return {"errors": errors}


MEASUREMENTS = {
    "gram": measure_gram,
    "contraction": measure_contraction,
    "limit": measure_limit,
    "growth": measure_growth,
    "memory-mlp": measure_memory_mlp,
    "memory-unet": measure_memory_unet,
    "products": measure_products,
    "accuracy": measure_accuracy,
}


def child(name: str, *arguments: object) -> dict:
    """Run one measurement in a process of its own; its peak memory is its own, too."""
    command = [sys.executable, __file__, "--measure", name, *map(str, arguments)]
    return run_json(command, f"ours: {name} {' '.join(map(str, arguments))}")


def peer(python: Path, script: str, case: str, n: int, repeats: int, extra: Path | None = None) -> dict:
    """Run a peer's script in its own environment; ``extra`` packages go before those it has."""
    command = [python, HERE / "peers" / script, "--case", case, "--n", str(n), "--repeats", str(repeats)]
    environment = os.environ | ({} if extra is None else {"PYTHONPATH": str(extra)})
    return run_json([*command, "--threads", "2"], f"{script}: {case} {n}", environment)


def limit_rows(table: Table, case: str, bar: float, runs: list[dict]) -> None:
    """Add how far we are from the bare products: the process in the middle, by its ratio, and all ratios."""

    def ratio(times: dict, ours: str = "gram", theirs: str = "products") -> float:
        return median(times[ours]) / (median(times[theirs]) / 2)

    times = sorted(runs, key=ratio)[len(runs) // 2]
    value, half = median(times["gram"]), median(times["products"]) / 2
    detail = f"{1e3 * value:.0f} ms against {1e3 * half:.0f} ms of products into memory that is there"
    if len(runs) > 1:
        detail += f"; {len(runs)} processes: {', '.join(f'{ratio(t):.2f}' for t in runs)}"
    table.at_most(f"distance from the limit, {case}, N = 400", ratio(times), bar, detail)
    given, fresh = ratio(times, "gram, memory given"), ratio(times, theirs="products, fresh memory")
    text = f"{given:.2f} both in memory that is there, {fresh:.2f} both in fresh memory"
    table.note(f"the same, {case}, like with like", text)
    cold = times["cold"]
    text = f"{1e3 * median(cold['gram']):.0f} against {1e3 * median(cold['products']) / 2:.0f} ms"
    table.note(f"the same, {case}, no call before", f"{ratio(cold):.2f} ({text})")


def product_rows(table: Table, runs: list[dict]) -> None:
    """Add what products cost in forward passes: the process in the middle, and all ratios."""
    for name, many, bar in (("one vector", 1, 6), ("eight vectors", 8, 4)):
        ratios = [median(times[name]) / median(times["forward"]) / many for times in runs]
        forward = median([t for times in runs for t in times["forward"]])
        detail = f"forward pass {1e3 * forward:.0f} ms; {len(runs)} processes: {', '.join(f'{r:.2f}' for r in ratios)}"
        table.at_most(f"K @ v on LeNet, forward passes a vector, {name}", median(ratios), bar, detail)


def run(peers: Path) -> tuple[Table, dict]:
    table, raw = Table(), {}
    raw["accuracy"] = child("accuracy")
    errors = raw["accuracy"]["errors"]
    for column, (dtype, bar) in enumerate((("float64", 1e-8), ("float32", 1e-4))):
        worst = max(errors, key=lambda name: errors[name][column])
        detail = f"worst of {len(errors)} networks: {worst}"
        table.at_most(f"relative error, {dtype}", errors[worst][column], bar, detail, ".1e")
    bars = {"mlp": (150, 1.5), "lenet": (12, 2)}
    jax, laplace, asdl = peers / "jax/bin/python", peers / "laplace/bin/python", peers / "asdl"
    for case, (bar_laplace, bar_nt) in bars.items():
        for n in (200, 400):
            rounds = 1 if case == "mlp" and n == 400 else 2
            ours = raw[f"gram {case} {n}"] = [child("gram", case, n)]
            nt = raw[f"neural-tangents {case} {n}"] = peer(jax, "neural_tangents_gram.py", case, n, REPEATS)
            ours.append(child("gram", case, n))
            la = raw[f"laplace-torch {case} {n}"] = peer(laplace, "laplace_gp.py", case, n, rounds)
            ours.append(child("gram", case, n))  # before, between and after the peers: slow phases hit all
            theirs, fit = (median(m["seconds"]) for m in (nt, la))
            mine = median([t for m in ours for t in m["seconds"]])
            what = f"Gram {case}, N = {n}, against"
            table.at_least(f"{what} laplace-torch", fit / mine, bar_laplace, f"{fit:.2f} s against {mine:.4f} s")
            if case == "lenet":  # where the back-end that laplace-torch pins, and the setup lacks, is faster
                la = raw[f"laplace-torch, asdl {case} {n}"] = peer(laplace, "laplace_gp.py", case, n, 2, asdl)
                fit = median(la["seconds"])
                table.note(f"{what} laplace-torch with ASDL 0.1a4", f"{fit / mine:.1f}x ({fit:.2f} s)")
            table.at_least(f"{what} neural-tangents", theirs / mine, bar_nt, f"{theirs:.3f} s against {mine:.4f} s")
    times = raw["contraction"] = child("contraction", 100)
    mine, theirs, by_ten = (median(times[name]) for name in ("ours", "at once", "by ten"))
    detail = f"{theirs:.1f} s against {mine:.2f} s, relative difference {times['error']:.0e}"
    table.at_least("Gram ResNet-20, N = 100, against vmap(jacrev)", theirs / mine, 5, detail)
    table.note("the same, vmap(jacrev) in batches of ten", f"{by_ten / mine:.1f}x ({by_ten:.1f} s)")
    published, half = median(times["published"]), median(times["products"]) / 2
    table.note("the same, PyTorch's tutorial (two Jacobians)", f"{published / mine:.1f}x ({published:.1f} s)")
    back = median(times["cotangents"])
    text = f"{half:.2f} s, {back:.2f} s, so at most {theirs / (half + back):.1f}x for who forms J"
    table.note("the same, half of the products with J alone; a backward pass to the inputs for each output", text)
    for case, bar, processes in (("lenet", 1.6, 1), ("mlp", 2.2, 5)):  # milliseconds differ from process to process
        runs = raw[f"limit {case}"] = [child("limit", case) for _ in range(processes)]
        limit_rows(table, case, bar, runs)
    memory = raw["memory mlp"] = child("memory-mlp")
    table.at_most("peak memory, MLP 784-512-512-10, N = 1000, GB", memory["peak_mb"] / 1024, 2.5, "whole process")
    memory = raw["memory unet"] = child("memory-unet")
    detail = f"whole process; C = {memory['outputs']}, {memory['parameters']} parameters"
    table.at_most("peak memory, U-Net K @ v, N = 16, GB", memory["peak_mb"] / 1024, 2, detail)
    growth = raw["growth"] = child("growth")
    detail = ", ".join(f"{n}: {1e3 * t:.0f} ms" for n, t in zip(growth["n"], growth["seconds"], strict=True))
    table.at_most("growth exponent in N, MLP", growth["exponent"], 2.1, detail)
    raw["products"] = [child("products") for _ in range(5)]
    product_rows(table, raw["products"])
    return table, raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' environments")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, *rest = args.measure
        result = MEASUREMENTS[name](*(int(a) if a.isdigit() else a for a in rest))
        print(json.dumps(result | {"peak_mb": peak_mb()}))
        return
    if args.peers is None:
        parser.error("--peers is needed")
    start = time.perf_counter()
    table, raw = run(args.peers.absolute())
    write("kernel", "make bench-kernel", "The kernel beside its peers", table, raw, start)


if __name__ == "__main__":
    main()
