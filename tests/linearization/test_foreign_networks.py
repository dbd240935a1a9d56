"""Networks that other tools made or expect: mappings in, objects out, exported, compiled, scripted, safetensors."""

import warnings
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import ntkgp


@dataclass
class Output:
    """What text models return: several things, of which the logits count."""

    logits: Tensor
    hidden: Tensor
    loss: None = None


class Encoding(UserDict):
    """What tokenizers return: a mapping that is no dict."""


class TextClassifier(nn.Module):
    """Attention over tokens, some of them padding, called by keywords only."""

    def __init__(self, d=6, wrapped=True):
        super().__init__()
        self.embedding, self.query, self.head = nn.Embedding(11, d), nn.Linear(d, d), nn.Linear(d, 3)
        self.wrapped = wrapped

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        h = self.embedding(input_ids)
        scores = (self.query(h) @ h.mT).masked_fill(attention_mask[:, None] == 0, -torch.inf)
        h = scores.softmax(-1) @ h
        mask = attention_mask.unsqueeze(-1).to(h)
        logits = self.head((h * mask).sum(1) / mask.sum(1))
        return Output(logits, h) if self.wrapped else logits


class Adapter(nn.Module):
    """A wrapper that passes on whatever it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def text(n=6, kind=Encoding):
    lengths = torch.arange(n) % 4 + 1
    mask = (torch.arange(5) < lengths.unsqueeze(1)).long()
    return kind(input_ids=torch.randint(0, 11, (n, 5)), attention_mask=mask), torch.arange(n) % 3


@pytest.mark.parametrize("wrap", [lambda net: net, Adapter], ids=["plain", "adapter"])
@pytest.mark.parametrize("kind", [Encoding, dict])
def test_mappings_in_and_logits_out_are_the_same_network(kind, wrap, float64):
    net = TextClassifier()
    bare = TextClassifier(wrapped=False)
    bare.load_state_dict(net.state_dict())
    x, _ = text(kind=kind)
    found, truth = ntkgp.Linearization(wrap(net), example=x), ntkgp.Linearization(bare, example=dict(x))
    assert_close(found(x), truth(dict(x)), rtol=0, atol=0)
    assert_close(found.jacobian(x), truth.jacobian(dict(x)), rtol=1e-12, atol=0)
    v = torch.randn(found.num_params)
    assert_close(found.jvp(x, v), found.jacobian(x) @ v, rtol=1e-8, atol=1e-12)


def test_padding_beyond_the_mask_changes_nothing(float64):
    x, _ = text()
    other = Encoding(x)
    other["input_ids"] = torch.where(x["attention_mask"] == 1, x["input_ids"], 10 - x["input_ids"])
    lin = ntkgp.Linearization(TextClassifier(), example=x)
    assert not torch.equal(x["input_ids"], other["input_ids"])
    assert_close(lin.jacobian(x), lin.jacobian(other), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["function", "full"])
def test_posteriors_of_text_are_fitted_saved_and_loaded(method, tmp_path, float64):
    net, (x, y) = TextClassifier(), text(9)
    post = ntkgp.fit(net, (x, y), method=method, tune=False)
    J, p = post.lin.jacobian(x), post.lin(x).softmax(-1)
    H = torch.einsum("ncp,ncd,ndq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None], J)
    covariance = J @ (H + torch.eye(len(H))).inverse() @ J.mT
    assert_close(post.latent(x).covariance_matrix, covariance, rtol=1e-8, atol=1e-10)
    post.save(tmp_path / "post")
    again = ntkgp.load(tmp_path / "post", net)
    assert_close(again.latent(x).covariance_matrix, covariance, rtol=1e-8, atol=1e-10)


def test_loaders_of_text_are_streamed(float64):
    net, (x, y) = TextClassifier(), text(8, dict)
    points = [({name: t[i] for name, t in x.items()}, y[i]) for i in range(8)]
    streamed = ntkgp.fit(net, DataLoader(points, batch_size=3), method="full", tune=False)
    at_once = ntkgp.fit(net, (x, y), method="full", tune=False)
    assert_close(streamed.latent(x).covariance_matrix, at_once.latent(x).covariance_matrix, rtol=1e-10, atol=1e-12)


def test_targets_among_the_inputs_are_refused_by_name():
    x, y = text(4, dict)
    points = [{name: t[i] for name, t in (x | {"labels": y}).items()} for i in range(4)]
    with pytest.raises(TypeError, match=r"yields a dict with keys \['input_ids', 'attention_mask', 'labels'\]: take"):
        ntkgp.fit(TextClassifier(), DataLoader(points, batch_size=2))


def test_training_takes_them_too():
    x, y = text(12, dict)
    net = TextClassifier()
    before = net.head.weight.detach().clone()
    objective = ntkgp.training.MaximumAPosteriori(net, "categorical")
    objective.fit((x, y), epochs=2, lr=1e-2, progress=False)
    assert (net.head.weight - before).abs().max() > 1e-3


# Exported, compiled and scripted


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(18, 3)
    ).eval()


def exported(net, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        return torch.export.export(net, (x,), **options)


torchs_own = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # when an exported graph is copied


@torchs_own
@pytest.mark.parametrize("kind", ["exported", "compiled", "compiled in place", "part compiled"])
def test_exported_and_compiled_networks_are_the_same_network(kind, tmp_path, float64):
    net, x, y = convolutional(), torch.randn(6, 1, 5, 5), torch.arange(6) % 3
    plain = ntkgp.fit(net, (x, y), tune=False)
    if kind == "exported":
        other = exported(net, x, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    elif kind == "compiled":
        other = torch.compile(net)
    elif kind == "compiled in place":
        other = nn.Sequential(*net)
        other.compile()
    else:
        other = nn.Sequential(torch.compile(net[0]), *net[1:])
    post = ntkgp.fit(other, (x, y), tune=False)
    assert_close(post.lin.jacobian(x), plain.lin.jacobian(x), rtol=1e-12, atol=1e-14)
    assert_close(post.latent(x).covariance_matrix, plain.latent(x).covariance_matrix, rtol=1e-10, atol=1e-14)
    assert list(post.lin.groups) == ["0", "1", "5"]
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", net if kind != "exported" else other)
    assert_close(loaded.latent(x).covariance_matrix, plain.latent(x).covariance_matrix, rtol=1e-10, atol=1e-14)


@torchs_own
def test_what_cannot_be_used_says_what_to_do(float64):
    net, x = convolutional(), torch.randn(6, 1, 5, 5)
    with pytest.raises(TypeError, match=r"is a ExportedProgram: pass its module\(\)"):
        ntkgp.Linearization(exported(net, x))
    with pytest.raises(TypeError, match=r"is a ExportedProgram: pass its module\(\)"):
        ntkgp.fit(exported(net, x), (x, torch.arange(6) % 3))
    with pytest.raises(ValueError, match=r"exported for other shapes than 7 examples .*: pass dynamic_shapes"):
        ntkgp.Linearization(exported(net, x).module(), example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(net, x)
    for holder in (scripted, nn.Sequential(scripted)):
        with pytest.raises(TypeError, match="TorchScript module, which cannot be taken apart: pass the Python module"):
            ntkgp.Linearization(holder, example=x)
    training = exported(convolutional().train(), x, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    with pytest.raises(ValueError, match=r"exported in training mode\?"):
        ntkgp.Linearization(training, example=x)


def test_weights_from_safetensors_are_the_same_network(tmp_path, float64):
    net, x, y = convolutional(), torch.randn(6, 1, 5, 5), torch.arange(6) % 3
    post = ntkgp.fit(net, (x, y), tune=False)
    post.save(tmp_path / "post")
    save_model(net, tmp_path / "weights.safetensors")
    fresh = convolutional()
    with pytest.raises(ValueError, match="network"):
        ntkgp.load(tmp_path / "post", fresh)  # with other weights
    load_model(fresh, tmp_path / "weights.safetensors")
    again = ntkgp.load(tmp_path / "post", fresh)
    assert_close(again.latent(x).covariance_matrix, post.latent(x).covariance_matrix, rtol=0, atol=0)
