"""Figures show the numbers they say they show."""

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.distributions import Normal
from torch.testing import assert_close

from ntkgp.inverse import RayTransform, UNet, reconstruct
from ntkgp.report import metrics
from ntkgp.report.figures import (
    calibration_figure,
    convergence_figure,
    error_against_std,
    error_quantiles,
    loss_curve,
    pixel_image,
    reconstruction_figure,
)

SIZE = 8


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(1)
    A = RayTransform.parallel(SIZE, 4, dtype=torch.float64)
    x = torch.zeros(1, 1, SIZE, SIZE, dtype=torch.float64)
    x[..., 2:6, 3:6] = 0.7
    y = A(x)
    y = y + 0.05 * torch.randn_like(y)
    return A, x, y, UNet(channels=3, scales=2, skip=2).double()


@pytest.fixture(scope="module")
def rec(problem):
    A, _, y, net = problem
    return reconstruct(A, y, net, prior="iid", steps=400, rate=1e-2, tuning_steps=3)


def panels(figure):
    return {ax.get_title(): ax for ax in figure.axes if ax.images}


def shown(figure):
    return {name: torch.as_tensor(np.asarray(ax.images[0].get_array())) for name, ax in panels(figure).items()}


def curve(ax, i=0):
    return [np.asarray(part, dtype=float) for part in ax.lines[i].get_data()]


def test_every_panel_shows_its_own_array(rec, problem):
    A, x, y, _ = problem
    samples, fbp = rec.sample(3), A.fbp(y)
    found = shown(reconstruction_figure(rec, x, fbp, samples))
    expected = {
        "truth": x[0, 0],
        "filtered back-projection": fbp[0, 0],
        "mean": rec.mean[0],
        **{f"sample {i + 1}": samples[i, 0] for i in range(3)},
        "|error|": (rec.mean - x[0])[0].abs(),
        "standard deviation": rec.std[0],
    }
    assert list(found) == list(expected)
    for name, image in expected.items():
        assert_close(found[name], image, msg=name)


def test_what_means_the_same_has_one_scale(rec, problem):
    A, x, y, _ = problem
    figure = reconstruction_figure(rec, x, A.fbp(y))
    found = panels(figure)
    scales = {name: ax.images[0].get_clim() for name, ax in found.items()}
    assert {scales[name] for name in found if name not in ("|error|", "standard deviation")} == {(0.0, 0.7)}
    assert scales["|error|"] == scales["standard deviation"]
    assert scales["|error|"][1] >= rec.std.max()
    assert len(figure.axes) == len(found) + 2  # a colour bar for each scale
    assert all(len(ax.get_xticks()) == len(ax.get_yticks()) == 0 for ax in found.values())
    assert found["mean"].get_xlabel() == f"PSNR {metrics.psnr(rec.mean, x[0]):.1f} dB"


@pytest.mark.parametrize(
    ("given", "titles"),
    [
        ((), ["mean", "sample 1", "sample 2", "sample 3", "standard deviation"]),
        (("fbp",), ["filtered back-projection", "mean", "sample 1", "sample 2", "standard deviation"]),
        (("truth",), ["truth", "mean", "sample 1", "sample 2", "|error|", "standard deviation"]),
    ],
)
def test_what_is_not_known_has_no_panel(rec, problem, given, titles):
    A, x, y, _ = problem
    known = {"truth": x, "fbp": A.fbp(y)}
    figure = reconstruction_figure(rec, **{name: known[name] for name in given})
    assert list(panels(figure)) == titles
    scale = x if "truth" in given else rec.mean
    assert panels(figure)["mean"].images[0].get_clim() == (scale.min().item(), scale.max().item())


def gaussian(size, factor=1.0):
    """Return a stand-in for a reconstruction with known errors, and the truth that it errs about."""
    std = torch.rand(1, size, size, dtype=torch.float64) + 0.1
    mean = torch.rand(1, size, size, dtype=torch.float64)
    truth = mean + factor * std * torch.randn(1, size, size, dtype=torch.float64)
    return SimpleNamespace(shape=std.shape, mean=mean, std=std), truth


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_calibrated_errors_lie_on_the_lines_and_others_do_not(factor):
    fake, truth = gaussian(100, factor)
    binned, quantiles = calibration_figure(fake, truth).axes
    guide, means = binned.lines[0], curve(binned, 1)
    assert guide.get_slope() == pytest.approx(math.sqrt(2 / math.pi))
    assert len(means[0]) == 10
    assert means[1] / means[0] == pytest.approx(np.full(10, factor * math.sqrt(2 / math.pi)), rel=0.1)
    normal, z = curve(quantiles, 1)
    assert quantiles.lines[0].get_slope() == 1
    middle = slice(500, -500)
    assert z[middle] == pytest.approx(factor * normal[middle], abs=0.1)
    within = float(quantiles.get_title().removesuffix("% of pixels within two std"))
    assert within == pytest.approx(100 * math.erf(math.sqrt(2) / factor), abs=1)


def test_bins_are_of_the_standard_deviation_and_hold_equally_many_pixels():
    fake, truth = gaussian(10)
    std, error = fake.std.flatten(), (truth - fake.mean).abs().flatten()
    order = std.argsort().view(10, 10)
    x, y = curve(calibration_figure(fake, truth).axes[0], 1)
    assert x == pytest.approx(std[order].mean(1).numpy())
    assert y == pytest.approx(error[order].mean(1).numpy())


def test_quantiles_are_of_the_truth_less_the_mean():
    fake, truth = gaussian(10)
    normal, z = curve(calibration_figure(fake, truth).axes[1], 1)
    expected = ((truth - fake.mean) / fake.std).flatten().sort().values
    assert z == pytest.approx(expected.numpy())
    assert normal == pytest.approx(Normal(0.0, 1.0).icdf((torch.arange(100).double() + 0.5) / 100).numpy())


def test_pixels_far_outside_do_not_squeeze_the_others():
    fake, truth = gaussian(10)
    fake.std[0, 0, 0] = 1e-9
    quantiles = calibration_figure(fake, truth).axes[1]
    assert quantiles.get_ylim() == (-10, 10)
    assert [text.get_text() for text in quantiles.texts] == ["1 beyond ±10"]


def test_panels_are_drawn_where_they_are_asked_for(rec, problem):
    fake, truth = gaussian(10)
    panels = {
        "error against standard deviation": lambda ax: error_against_std(fake, truth, ax),
        "of pixels within two std": lambda ax: error_quantiles(fake, truth, ax),
        "deep image prior": lambda ax: loss_curve(rec.dip, ax),
        "mine": lambda ax: pixel_image(truth, ax, "mine"),
    }
    for title, draw in panels.items():
        ax = Figure().add_subplot()
        assert draw(ax) is ax
        assert title in ax.get_title()
        assert draw(None).figure is not ax.figure
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(truth[0].numpy())
    assert ax.images[0].get_clim() == (0, 1)
    with pytest.raises(ValueError, match=r"image must be one image of shape \(8, 8\), but has \(2, 8, 8\)"):
        pixel_image(torch.zeros(2, 8, 8))


def test_convergence_shows_losses_and_the_log_of_tuning(rec):
    loss, evidence, noise = convergence_figure(rec).axes
    assert curve(loss)[1] == pytest.approx(np.array(rec.dip.losses))
    assert loss.get_yscale() == "log"
    assert curve(loss, 1)[0] == rec.dip.step
    history = rec.posterior.history
    assert evidence.get_title() == "log evidence"
    assert curve(evidence)[1] == pytest.approx(np.array([found["log_evidence"] for found in history]))
    assert noise.get_title() == "noise variance σ²"
    assert curve(noise)[1] == pytest.approx(np.array([found["noise"] for found in history]))


def test_convergence_of_samples_shows_effective_parameters(problem):
    A, _, y, net = problem
    rec = reconstruct(A, y, net, steps=50, rate=1e-2, method="sampled", tuning_steps=2, num_samples=4, sketch=10)
    _, gamma, _ = convergence_figure(rec).axes
    assert gamma.get_title() == "effective parameters γ"
    totals = [sum(found["effective_parameters"]) for found in rec.posterior.history]
    assert curve(gamma)[1] == pytest.approx(np.array(totals))


def test_a_hyperprior_is_part_of_what_is_climbed(problem):
    A, _, y, net = problem
    rec = reconstruct(A, y, net, steps=400, rate=1e-2, tune="predcp", tuning_steps=1)
    assert convergence_figure(rec).axes[1].get_title() == "log evidence + log hyperprior"


def test_without_tuning_there_are_losses_only(problem):
    A, _, y, net = problem
    rec = reconstruct(A, y, net, steps=2, tune=None)
    assert [ax.get_title() for ax in convergence_figure(rec).axes] == ["deep image prior"]


def test_bad_input_is_named(rec, problem):
    A, x, y, _ = problem
    with pytest.raises(ValueError, match=r"truth must be one image of shape \(8, 8\), but has \(1, 1, 8, 7\)"):
        reconstruction_figure(rec, x[..., 1:])
    with pytest.raises(ValueError, match=r"filtered back-projection must be one image .* but has \(2, 1, 8, 8\)"):
        reconstruction_figure(rec, fbp=A.fbp(torch.cat([y, y])))
    fake, truth = gaussian(4)
    fake.shape = torch.Size((16,))
    with pytest.raises(ValueError, match=r"rec must be of images with the shape \(1, H, W\), but they have \(16,\)"):
        calibration_figure(fake, truth)


def test_the_library_is_there_without_matplotlib_and_figures_say_what_they_need():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import ntkgp, ntkgp.cli\n"
        "try: import ntkgp.report.figures\n"
        "except ImportError as error: print(error)\n"
        "ntkgp.cli.main(['reconstruct', 'scan.npz', '--geometry', 'fan', '--image-size', '8', '-o', 'out'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "figures need matplotlib: pip install 'ntkgp[report]'"
    assert result.stdout.strip() == expected
    assert (result.returncode, result.stderr) == (2, f"ntkgp reconstruct: {expected}\n")
