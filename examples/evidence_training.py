"""Training that sets its own weight decay: precisions by the evidence, no validation data.

The same network is trained with fixed precisions from far too small to far too large, and with one for each layer that
MacKay's fixed point moves. The evidence picks the weights it ends with.

    python examples/evidence_training.py --output demo
"""

import torch
from workbench import BLUE, GREY, RED, arguments, mlp, plt

import ntkgp
from ntkgp.training import EvidenceTraining, MaximumAPosteriori


def main() -> None:
    args = arguments(__doc__)
    epochs = 30 if args.small else 200
    torch.manual_seed(0)
    x, x_test = 4 * torch.rand(60, 1).double() - 2, torch.linspace(-2, 2, 400).double().unsqueeze(1)
    truth = lambda x: torch.sin(3 * x)  # noqa: E731
    y, y_test = truth(x) + 0.2 * torch.randn_like(x), truth(x_test) + 0.2 * torch.randn_like(x_test)

    def trained(kind: type, **options) -> tuple[ntkgp.Posterior, MaximumAPosteriori]:
        torch.manual_seed(1)
        objective = kind(mlp(1, 30, 30, 1).double(), ntkgp.likelihoods.Gaussian(0.1), **options)
        return objective.fit((x, y), epochs=epochs, lr=1e-2, batch_size=60, progress=False), objective

    fixed = {}
    for precision in (1e-3, 1e-1, 1e1, 1e3):
        post, _ = trained(MaximumAPosteriori, prior_std=precision**-0.5)
        fixed[precision] = -post.predict(x_test, predictive="map").log_prob(y_test).mean().item()
    post, objective = trained(EvidenceTraining, structure="full")
    nll = -post.predict(x_test).log_prob(y_test).mean().item()
    steps = [entry for entry in objective.history if "log_evidence" in entry]

    print(f"{'precision':>22}{'test NLL':>12}")
    for precision, value in fixed.items():
        print(f"{precision:22g}{value:12.3f}")
    print(f"{'by evidence, by layer':>22}{nll:12.3f}")
    print("precisions:", {g: round(a, 2) for g, a in zip(objective.groups, objective.precision.tolist(), strict=True)})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.7), layout="constrained")
    at = [entry["epoch"] for entry in steps]
    left.plot(at, [entry["log_evidence"] for entry in steps], color=BLUE)
    left.set(xlabel="epoch", ylabel="log evidence")
    twin = left.twinx()
    for group, color in zip(objective.groups, (RED, GREY, "#e09f3e"), strict=True):
        gamma = [entry["effective_parameters"][group] for entry in steps]
        twin.plot(at, gamma, color=color, lw=1, label=f"layer {group}")
    twin.set(ylabel="effective parameters")
    twin.legend(fontsize=8, loc="center right")
    twin.spines["right"].set_visible(True)
    right.semilogx(list(fixed), list(fixed.values()), "o-", color=GREY, label="fixed precision")
    right.axhline(nll, color=BLUE, label="by evidence")
    right.set(xlabel="precision", ylabel="test NLL")
    right.legend()
    figure.savefig(args.output / "evidence_training.png", dpi=150)
    print(f"figure: {args.output}/evidence_training.png")


if __name__ == "__main__":
    main()
