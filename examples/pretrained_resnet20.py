"""A network from a file: a pretrained ResNet-20 for CIFAR-10 gets error bars in its last layer, nothing is trained.

The weights are those of a public checkpoint. Features of 2,000 training images are enough for the posterior of 650
weights, each image standing for 25; blurred test images should make it less sure.

    python examples/pretrained_resnet20.py --weights W.th --data ../shared/data/images/cifar10_part.npz --output demo
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad, relu
from workbench import BLUE, RED, arguments, plt, train

import ntkgp
from ntkgp.report import metrics

CHANNELS = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)  # means and deviations


class Block(nn.Module):
    """Two convolutions and a shortcut without weights: strided, new channels zero."""

    def __init__(self, d_in: int, d_out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False), nn.BatchNorm2d(d_out)
        self.conv2, self.bn2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        self.stride, self.extra = stride, (d_out - d_in) // 2

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(h + pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra)))


class ResNet20(nn.Module):
    """The CIFAR ResNet, with the parameter names of the checkpoint."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = (width, width), (width, 2 * width), (2 * width, 4 * width)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(a, b, 1 + (a != b)), Block(b, b, 1), Block(b, b, 1)) for a, b in sizes
        )
        self.linear = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def made_up(n: int) -> tuple[Tensor, Tensor]:
    """Return images of ten colours, with noise."""
    y = torch.arange(n) % 10
    hue = torch.stack([torch.cos(y * 0.63), torch.sin(y * 0.63), torch.cos(y * 1.26)], 1)
    return 0.5 + 0.2 * hue[:, :, None, None] + 0.1 * torch.randn(n, 3, 16, 16), y


def main() -> None:
    args = arguments(__doc__, weights="the checkpoint of the network", data="the file of CIFAR-10 images")
    torch.manual_seed(0)
    if args.small:
        (x, y), (inside, labels), trained_on = made_up(40), made_up(20), 40
        net = train(ResNet20(width=4), x, y, cross_entropy, steps=20)
    else:
        net, trained_on = ResNet20().eval(), 50_000
        state = torch.load(args.weights, map_location="cpu", weights_only=True)["state_dict"]
        net.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        with np.load(args.data) as raw:
            parts = [torch.as_tensor(raw[name][:2000]) for name in ("x_train", "y_train", "x_test", "y_test")]
        x, inside = (part.permute(0, 3, 1, 2).float() / 255 for part in parts[::2])
        y, labels = (part.long() for part in parts[1::2])
    blurred = pad(avg_pool2d(inside, 7, 1), (3, 3, 3, 3), mode="replicate")
    x, inside, blurred = ((part - CHANNELS[0]) / CHANNELS[1] for part in (x, inside, blurred))

    weights = torch.full((len(x),), trained_on / len(x))  # how many each image stands for
    post = ntkgp.fit(net, (x, y), method="last_layer", weights=weights)
    print(f"{post.lin.num_params} weights, prior precision {post.prior.precision.item():.3g} by evidence")
    print(f"{'':11}{'images':10}{'NLL':>8}{'accuracy':>10}{'ECE':>8}{'entropy':>9}")
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.5), sharex=True, sharey=True, layout="constrained")
    for ax, (kind, part) in zip(axes, {"as they are": inside, "blurred": blurred}.items(), strict=True):
        for (name, predictive), color in zip({"network": "map", "posterior": "glm"}.items(), (RED, BLUE), strict=True):
            p = post.predict(part, predictive=predictive)
            scores = metrics.accuracy(p.probs, labels), metrics.expected_calibration_error(p.probs, labels)
            nll = -p.log_prob(labels).mean()
            print(f"{name:11}{kind:12}{nll:6.3f}{scores[0]:10.3f}{scores[1]:8.3f}{p.entropy.mean():9.3f}")
            ax.hist(p.entropy.numpy(), bins=30, range=(0, 2.4), color=color, alpha=0.5, label=name)
        ax.set(title=f"test images, {kind}", xlabel="entropy of the label, nats", yscale="log")
    axes[1].legend()
    figure.savefig(args.output / "pretrained_resnet20.png", dpi=150)
    print(f"figure: {args.output}/pretrained_resnet20.png")


if __name__ == "__main__":
    main()
