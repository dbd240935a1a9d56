"""Diagonals of the GGN by pulling M back, against the dense GGN and against 'keep the diagonal after each layer'."""

import networks as zoo
import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from observations import BY_NAME
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import functional_call
from torch.testing import assert_close

import ntkgp
from ntkgp import curvature
from ntkgp.curvature import LayerwiseCurvature, hutchinson_diagonal

IMAGE, LINE, ROW = (2, 6, 6), (2, 9), (5,)


def _between(layer, shape, channels=2):
    """A layer with others before and behind it: curvature comes in that is not diagonal, and meets parameters below."""
    if len(shape) == 1:
        before, behind = nn.Linear(shape[0], 6), nn.LazyLinear(3)
    else:
        conv = nn.Conv2d if len(shape) == 3 else nn.Conv1d
        before, behind = conv(shape[0], channels, 2, padding=1), nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    return nn.Sequential(before, nn.Tanh(), layer, nn.Tanh(), behind)


ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink),
    *(nn.Hardshrink, nn.PReLU, nn.Dropout, nn.Identity),
)
LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), ROW),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), ROW),
    "linear with positions": (lambda: nn.Linear(7, 3), IMAGE),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), LINE),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), IMAGE),
    "conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2), IMAGE),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"), IMAGE),
    "conv transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "conv transpose grouped": (lambda: nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2), IMAGE),
    "average pool": (lambda: nn.AvgPool2d(3, 2, padding=1), IMAGE),
    "average pool of what is there": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "average pool 1d": (lambda: nn.AvgPool1d(3, 2, padding=1), LINE),
    "max pool": (lambda: nn.MaxPool2d(3, 2, padding=1), IMAGE),
    "max pool 1d": (lambda: nn.MaxPool1d(2), LINE),
    "adaptive average pool to one": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive average pool": (lambda: nn.AdaptiveAvgPool2d((3, 4)), IMAGE),
    "upsample nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsample bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "upsample to corners": (lambda: nn.Upsample(size=(11, 9), mode="bilinear", align_corners=True), IMAGE),
    "upsample linear": (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), LINE),
    "shrink bilinear": (lambda: nn.Upsample(size=(3, 5), mode="bilinear"), IMAGE),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "reflection": (lambda: nn.ReflectionPad2d(1), IMAGE),
    "batch norm": (lambda: nn.BatchNorm2d(2), IMAGE),
    "batch norm without weights": (lambda: nn.BatchNorm1d(6, affine=False), ROW),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "group norm without weights": (lambda: nn.GroupNorm(2, 4, affine=False), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(6), ROW),
    "layer norm of images": (lambda: nn.LayerNorm((7, 7)), IMAGE),
    "rms norm": (lambda: nn.RMSNorm(6), ROW),
    "prelu by channel": (lambda: nn.PReLU(2), IMAGE),
    **{kind.__name__: (kind, ROW) for kind in ACTIVATIONS},
}


def build(name):
    torch.manual_seed(2)
    make, shape = LAYERS[name]
    net = _between(make(), shape, channels=4 if "group" in name or name == "pixel shuffle" else 2)
    return _ready(net, torch.randn(3, *shape))


def _ready(net, x):
    net = net.double().eval()
    net(x := x.double())
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.running_mean.normal_(generator=generator)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return net, x


class Residual(nn.Module):
    """Additions, concatenation, slices, functions, methods, a strided shortcut and a scalar of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c, self.scale = nn.Conv2d(6, 2, 1), nn.Parameter(torch.tensor(0.7))
        self.bias, self.head = nn.Parameter(torch.randn(4, 1, 1)), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x)
        h = h + self.scale * torch.relu(self.b(F.softplus(h))) - self.bias
        h = torch.cat([h, x], 1)
        h = self.c(h)[:, :, ::3, ::3].sigmoid() / 2
        return self.head(h.flatten(1)) + h.mean((2, 3)).sum(1, keepdim=True)


class Gated(nn.Module):
    """Data multiplied by data, a matrix product with a parameter, and a layer used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.w = nn.Linear(5, 5), nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        return (h * self.inner(h)) @ self.w


NETWORKS = {
    "mlp": (zoo.mlp, (5,)),
    "lenet": (zoo.lenet, (1, 16, 16)),
    "unet": (zoo.UNet, (1, 8, 8)),
    "residual": (Residual, IMAGE),
    "gated": (Gated, ROW),
    "called twice": (zoo.CalledTwice, (5,)),
    "resnet20": (lambda: zoo.ResNet20(width=2, classes=3), (3, 8, 8)),
}
ALL = [*LAYERS, *NETWORKS]


def network(name):
    if name in LAYERS:
        return build(name)
    torch.manual_seed(1)
    make, shape = NETWORKS[name]
    return _ready(make(), torch.randn(3, *shape))


def observed(net, x, observation="categorical"):
    """The linearised network, what makes R of its outputs, and the dense GGN."""
    lin = ntkgp.Linearization(net, example=x)
    likelihood = BY_NAME[observation].make().double()
    C = lin.num_outputs
    y = likelihood.validate(BY_NAME[observation].targets(len(x), C), C)
    J = lin.jacobian(x)
    H = torch.einsum("ncp,ncd,ndq->pq", J, likelihood.curvature(y, lin(x)), J)
    return lin, lambda f: likelihood.expand(y, f).R, H


def by_name(lin, v):
    return {name: part.flatten() for name, part in lin.layout.split(v).items()}


def agree(found, truth, tolerance=1e-8):
    assert list(found) == list(truth)
    scale = max(part.abs().max() for part in truth.values())
    for name, part in truth.items():
        assert found[name].shape == part.shape
        assert ((found[name] - part).abs().max() / scale).item() < tolerance, name


@pytest.mark.parametrize("name", ALL)
def test_the_exact_diagonal_is_that_of_the_dense_ggn(name, float64):
    net, x = network(name)
    lin, root, H = observed(net, x)
    agree(LayerwiseCurvature(lin).diagonal(x, root, "exact"), by_name(lin, H.diagonal()))


@pytest.mark.parametrize("name", ALL)
def test_exact_blocks_are_those_of_the_dense_ggn(name, float64):
    net, x = network(name)
    lin, root, H = observed(net, x)
    truth = {name: H[at, at] for name, at in lin.layout.slices.items()}
    agree(LayerwiseCurvature(lin).blocks(x, root), truth)


@pytest.mark.parametrize("observation", BY_NAME)
def test_any_likelihood_has_its_curvature_at_the_output(observation, float64):
    torch.manual_seed(0)
    net, x = zoo.mlp(d_out=BY_NAME[observation].outputs), torch.randn(4, 5)
    lin, root, H = observed(net, x, observation)
    curve = LayerwiseCurvature(lin)
    agree(curve.diagonal(x, root, "exact"), by_name(lin, H.diagonal()))
    last = [name for name in lin.layout.names if name.startswith("4.")]
    found = curve.diagonal(x, root)
    for name in last:
        assert_close(found[name], H.diagonal()[lin.layout.slices[name]], rtol=1e-9, atol=1e-12)


def kept_diagonals(net, x, m):
    """diag(M) layer by layer with dense Jacobians: the reference of the approximation, for a sequence of layers."""
    layers = [layer for part in net for layer in (part if isinstance(part, nn.Sequential) else [part])]
    values = [x]
    for layer in layers:
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            raise NotImplementedError
        values.append(layer(values[-1]))
    found = {}
    for layer, value in zip(reversed(layers), reversed(values[:-1]), strict=True):
        names, theta = list(dict(layer.named_parameters())), tuple(layer.parameters())
        new = torch.zeros(len(value), value[0].numel())
        for n in range(len(value)):

            def one(v, *theta, layer=layer, names=names):
                return functional_call(layer, dict(zip(names, theta, strict=True)), v.unsqueeze(0)).flatten()

            J, *by_theta = jacobian(one, (value[n], *theta))
            new[n] = m[n] @ J.flatten(1).square()
            for name, J in zip(names, by_theta, strict=True):
                found[name, layer] = found.get((name, layer), 0) + m[n] @ J.reshape(len(J), -1).square()
        m = new
    names = {id(p): name for name, p in net.named_parameters()}
    owned = {(name, layer): names[id(p)] for layer in layers for name, p in layer.named_parameters()}
    return {owned[key]: value for key, value in found.items()}


IN_SEQUENCE = [name for name in LAYERS if "circular" not in name] + ["mlp", "lenet"]


@pytest.mark.parametrize("name", IN_SEQUENCE)
def test_the_approximation_keeps_the_diagonal_after_each_layer(name, float64):
    net, x = network(name)
    lin, root, _ = observed(net, x)
    Lambda = root(lin(x)).values.square().sum(-1).mT.flatten(1)
    with torch.no_grad():
        truth = kept_diagonals(net, x, Lambda)
    agree(LayerwiseCurvature(lin).diagonal(x, root), {name: truth[name] for name in lin.layout.names})


def test_two_uses_of_a_tensor_add_their_diagonals(float64):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x)
            return h + torch.tanh(self.inner(h))

    net, x = _ready(Skip(), torch.randn(3, 3))
    lin, root, _ = observed(net, x, "gaussian")
    found = LayerwiseCurvature(lin).diagonal(x, root)
    h = net.first(x)
    slope = 1 - torch.tanh(net.inner(h)).square()
    m = torch.full_like(h, 2.0)  # noise of 0.5
    inner = m * slope.square()
    m = m + inner @ net.inner.weight.square()
    assert_close(found["inner.bias"], inner.sum(0))
    assert_close(found["inner.weight"], (inner.mT @ h.square()).flatten())
    assert_close(found["first.weight"], (m.mT @ x.square()).flatten())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 3), (4,)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Softplus(), nn.Flatten()), (2, 5, 5)),
        (lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Tanh(), nn.PReLU(2), nn.Upsample(scale_factor=2)), (2, 3, 3)),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh(), nn.Conv2d(1, 1, 1), nn.ELU(), nn.MaxPool2d(2)),
            (1, 4, 4),
        ),
    ],
    ids=["single layer", "single convolution", "elementwise", "1 x 1"],
)
def test_the_approximation_is_exact_where_m_is_diagonal(make, shape, float64):
    net, x = _ready(make(), torch.randn(3, *shape))
    lin, root, H = observed(net, x, "gaussian")
    agree(LayerwiseCurvature(lin).diagonal(x, root), by_name(lin, H.diagonal()))


@pytest.mark.parametrize("name", ["lenet", "unet", "residual", "gated", "upsample bilinear"])
def test_the_mixture_lies_between_its_ends(name, float64):
    net, x = network(name)
    lin, root, H = observed(net, x, "gaussian")
    curve = LayerwiseCurvature(lin)
    agree(curve.diagonal(x, root, "mixed", bound=0), curve.diagonal(x, root, "approximate"), 1e-14)
    agree(curve.diagonal(x, root, "mixed", bound=torch.inf), by_name(lin, H.diagonal()))
    truth = H.diagonal()
    errors = [
        (lin.layout.join(curve.diagonal(x, root, "mixed", bound=bound)) - truth).abs().sum()
        for bound in (0, 40, 10_000)
    ]
    assert errors[2] < 1e-8 * truth.abs().sum()
    assert errors[0] > errors[2]


def test_a_bottleneck_has_no_more_columns_than_numbers(float64):
    net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2), nn.Tanh(), nn.Linear(2, 25), nn.Tanh())
    net, x = _ready(net, torch.randn(3, 30))
    lin, root, H = observed(net, x, "gaussian")
    widths, pull = [], curvature.Call.pull
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            curvature.Call,
            "pull",
            lambda self, v, *a, **k: (widths.append(len(v)) if k.get("columns") else None, pull(self, v, *a, **k))[1],
        )
        agree(LayerwiseCurvature(lin).diagonal(x, root, "exact"), by_name(lin, H.diagonal()))
    assert widths == [25, 25, 2, 2, 2]  # nothing is pulled back to the input


def test_the_mixture_keeps_the_few_columns_of_a_bottleneck_through_wide_layers(float64):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2), nn.Tanh(), nn.Linear(2, 9))
    net, x = _ready(net, torch.randn(3, 1, 5, 5))
    lin, root, H = observed(net, x, "gaussian")
    truth = by_name(lin, H.diagonal())
    agree(LayerwiseCurvature(lin).diagonal(x, root, "mixed", bound=9), truth)
    found = LayerwiseCurvature(lin).diagonal(x, root, "mixed", bound=1)  # codes have two columns
    assert (found["0.weight"] - truth["0.weight"]).abs().max() > 1e-2 * truth["0.weight"].max()


def test_selected_outputs_and_some_of_the_parameters(float64):
    net, x = network("mlp")
    lin = ntkgp.Linearization(net, ["0", "4.bias"], example=x).select(torch.randn(2, 3))
    noise = ntkgp.likelihoods.Gaussian(0.3).double()
    root = lambda f: noise.expand(torch.zeros_like(f), f).R  # noqa: E731
    J = lin.jacobian(x)
    truth = J.square().sum((0, 1)) / 0.3
    agree(LayerwiseCurvature(lin).diagonal(x, root, "exact"), by_name(lin, truth))
    assert list(LayerwiseCurvature(lin).diagonal(x, root)) == list(lin.layout.names)


def test_weights_are_read_anew(float64):
    net, x = network("mlp")
    curve = LayerwiseCurvature(net)
    noise = ntkgp.likelihoods.Gaussian(0.3).double()
    root = lambda f: noise.expand(torch.zeros_like(f), f).R  # noqa: E731
    before = curve.diagonal(x, root)
    with torch.no_grad():
        net[4].weight.mul_(2)
    after = curve.diagonal(x, root)
    assert_close(after["4.weight"], before["4.weight"])
    assert_close(after["2.weight"], 4 * before["2.weight"])


@pytest.mark.parametrize("name", ["lenet", "unet"])
@pytest.mark.parametrize("method", ["exact", "approximate"])
def test_float32_is_close_to_float64(name, method, float64):
    net, x = network(name)
    lin, root, _ = observed(net, x)
    truth = lin.layout.join(LayerwiseCurvature(lin).diagonal(x, root, method))
    single = ntkgp.Linearization(net.float(), example=x.float())
    likelihood = ntkgp.likelihoods.Categorical()
    y = torch.zeros(len(x), 1, dtype=torch.long)
    found = LayerwiseCurvature(single).diagonal(x.float(), lambda f: likelihood.expand(y, f).R, method)
    assert relative_error(lin.layout.join(found), truth) < 1e-3


def test_probes_are_unbiased_within_their_standard_errors(float64):
    net, x = network("lenet")
    lin, root, H = observed(net, x)
    found = hutchinson_diagonal(lin, x, root, 400, torch.Generator().manual_seed(1))
    truth = by_name(lin, H.diagonal())
    for name, mean in found.mean.items():
        error = found.standard_error[name]
        assert ((mean - truth[name]).abs() <= 5 * error + 1e-12).all()
    z = torch.cat([(found.mean[n] - truth[n]) / found.standard_error[n] for n in truth])
    assert 0.4 < z[z.isfinite()].square().mean().sqrt() < 1.8
    again = hutchinson_diagonal(lin, x, root, 400, torch.Generator().manual_seed(1))
    assert all(torch.equal(found.mean[name], again.mean[name]) for name in truth)


def test_standard_errors_are_those_of_all_probes_together(float64):
    net, x = network("mlp")
    lin, root, _ = observed(net, x)
    found = hutchinson_diagonal(lin, x, root, 21, torch.Generator().manual_seed(1))
    generator, R, each = torch.Generator().manual_seed(1), root(lin(x)), []
    for S in (16, 5):
        signs = 2 * torch.randint(2, (S, *R.values.shape[:2], R.values.shape[3]), generator=generator) - 1
        each.append(lin.vjp(x, R.apply(signs.to(R.values).mT.flatten(-2))).square())
    each = torch.cat(each)
    assert_close(lin.layout.join(found.mean), each.mean(0))
    assert_close(lin.layout.join(found.standard_error), each.std(0) / 21**0.5)


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x) if x.sum() > -1e9 else x


def test_a_layer_of_ones_own_joins_the_table(float64, monkeypatch):
    net, x = _ready(nn.Sequential(nn.Linear(4, 5), Swish(), nn.Linear(5, 3)), torch.randn(3, 4))
    lin, root, H = observed(net, x)
    with pytest.raises(ValueError, match=r"layer '1' \(Swish\) cannot be followed.*RULES\[.*Swish\]"):
        LayerwiseCurvature(lin)
    monkeypatch.setitem(curvature.RULES, Swish, curvature.elementwise)
    agree(LayerwiseCurvature(lin).diagonal(x, root, "exact"), by_name(lin, H.diagonal()))
    found = LayerwiseCurvature(lin).diagonal(x, root)
    truth = kept_diagonals(net, x, root(lin(x)).values.square().sum(-1).mT.flatten(1))
    agree(found, {name: truth[name] for name in lin.layout.names})


def test_a_function_of_ones_own_joins_the_table(float64, monkeypatch):
    net, x = _ready(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1), nn.Linear(3, 3)), torch.randn(3, 4))
    lin, root, H = observed(net, x)
    curve = LayerwiseCurvature(lin)
    agree(curve.diagonal(x, root, "exact"), by_name(lin, H.diagonal()))
    with pytest.raises(ValueError, match=r"no rule for torch.nn.functional.softmax in layer '1' \(Softmax\): add one"):
        curve.diagonal(x, root)
    monkeypatch.setitem(curvature.RULES, F.softmax, curvature.by_jacobian)
    truth = kept_diagonals(net, x, root(lin(x)).values.square().sum(-1).mT.flatten(1))
    agree(curve.diagonal(x, root), {name: truth[name] for name in lin.layout.names})


@pytest.mark.parametrize("name", ["linear", "layer norm", "conv2d", "prelu by channel"])
def test_the_rule_by_jacobian_agrees_with_the_special_ones(name, float64, monkeypatch):
    net, x = network(name)
    lin, root, _ = observed(net, x)
    truth = LayerwiseCurvature(lin).diagonal(x, root)
    for kind in (F.linear, F.layer_norm, F.conv2d, F.prelu, torch.tanh):
        monkeypatch.setitem(curvature.RULES, kind, curvature.by_jacobian)
    agree(LayerwiseCurvature(lin).diagonal(x, root), truth)


def test_what_cannot_be_pulled_back_is_named(float64):
    x = torch.randn(3, 4)
    noise = ntkgp.likelihoods.Gaussian(0.3).double()
    root = lambda f: noise.expand(torch.zeros_like(f), f).R  # noqa: E731

    class Calls(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.linear, self.how = nn.Linear(4, 4), forward

        def forward(self, x):
            return self.how(self, x)

    def curve(forward, method="approximate"):
        return LayerwiseCurvature(Calls(forward).eval()).diagonal(x, root, method)

    with pytest.raises(ValueError, match=r"Tensor\.relu_ overwrites its input"):
        curve(lambda net, x: net.linear(x).relu_())
    with pytest.raises(ValueError, match="taken from several tensors at once"):
        curve(lambda net, x: net.linear(x).chunk(2, 1)[0])
    with pytest.raises(ValueError, match=r"first dimension must hold the 3 examples"):
        curve(lambda net, x: net.linear(x).T.sin().T, "exact")
    with pytest.raises(ValueError, match=r"parameter 'linear\.weight' alone"):
        curve(lambda net, x: F.linear(x, net.linear.weight.exp()))
    with pytest.raises(ValueError, match="several"):
        curve(lambda net, x: (net.linear(x), x))
    with pytest.raises(ValueError, match="mode 'bicubic'"):
        curve(lambda net, x: F.interpolate(net.linear(x)[:, None, None], size=(2, 3), mode="bicubic").flatten(1))
    with pytest.raises(ValueError, match="is random"):
        curve(lambda net, x: F.dropout(net.linear(x)))


def test_bad_input_is_named(float64):
    net, x = network("mlp")
    lin, root, _ = observed(net, x)
    curve = LayerwiseCurvature(lin)
    with pytest.raises(TypeError, match="net must be"):
        LayerwiseCurvature("net")
    with pytest.raises(ValueError, match="training mode"):
        LayerwiseCurvature(zoo.mlp())
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        LayerwiseCurvature(zoo.mlp().eval().requires_grad_(False))
    with pytest.raises(ValueError, match="method must be one of"):
        curve.diagonal(x, root, "diag")
    for method, bound in (("mixed", None), ("mixed", -1), ("exact", 3), ("mixed", torch.nan)):
        with pytest.raises(ValueError, match="bound must be"):
            curve.diagonal(x, root, method, bound)
    with pytest.raises(ValueError, match="blocks for 2 examples of 3 outputs, but has 3"):
        curve.diagonal(x[:2], lambda f: root(lin(x)))
    with pytest.raises(ValueError, match="NaN or infinity"):
        curve.diagonal(x * torch.nan, root)
    with pytest.raises(TypeError, match="dtype"):
        curve.diagonal(x.float(), root)
    with pytest.raises(ValueError, match="num_probes must be at least 2, but is 1"):
        hutchinson_diagonal(lin, x, root, 1)
