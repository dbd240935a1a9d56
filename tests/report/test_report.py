"""The page: all numbers with their errors, nothing from outside, one colour for ink."""

import re
from html.parser import HTMLParser

import pages
import pytest
import torch
from problems import Problem

from ntkgp.report import report
from ntkgp.report.page import Plate, Section, Table, page
from ntkgp.report.scores import auc, compared

VOID = {"meta", "img", "use", "path", "image", "br"}


class Page(HTMLParser):
    """What a page refers to, says and names."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.words, self.names, self.open = [], [], [], [], []
        self.feed(text)
        self.said = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.references += [v for name, v in attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.names += [v for name, v in attributes if name == "id"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def digits():
    return pages.digits(**pages.QUICK)


def test_a_page_is_whole_and_needs_nothing(digits):
    found = Page(digits.html)
    assert found.open == []
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in found.references)
    assert not re.search(r"https?://|@import|url\((?!#)", digits.html)
    assert len(found.names) == len(set(found.names)) > 100  # several figures on one page
    assert all(reference[1:] in found.names for reference in found.references if reference.startswith("#"))
    assert set(re.findall(r"url\(#([^)]*)\)", digits.html)) <= set(found.names)


def test_ink_follows_the_reader(digits):
    assert "prefers-color-scheme: dark" in digits.html
    svgs = re.findall(r"<svg.*?</svg>", digits.html, re.DOTALL)
    assert len(svgs) == 9
    assert not any("#000000" in svg or "#ffffff" in svg for svg in svgs)  # no black ink, no white paper
    assert sum("currentColor" in svg for svg in svgs) == 7  # images have no axes


def test_every_score_is_there_before_and_after_with_its_error(digits):
    said = Page(digits.html).said
    assert list(digits.scores) == ["NLL", "accuracy", "ECE", "Brier score"]
    for score in digits.scores.values():
        assert f"{score.name} {score.before} {score.after} {score.difference}" in said
    assert list(digits.detection) == ["network's entropy", "entropy", "epistemic variance"]
    for name, score in digits.detection.items():
        assert f"{name} {score}" in said
        assert f"{name}: AUC {score}" in said  # in the figure
    for words in (
        "reliability",
        "Least certain",
        "Most certain",
        "effective parameters",
        "log evidence",
        "steps of tuning",
    ):
        assert words in said
    assert "is the cheapest exact method within" in said
    assert re.search(r"fitting and tuning took \d+\.\d s", said)


def test_scores_are_those_of_the_predictions(float64):
    problem = Problem("cnn", "categorical", "grouped", n=20)
    post = problem.fit("function")
    found = report(post, (problem.x, problem.y), problem.x_new)
    before, after = post.predict(problem.x, predictive="map"), post.predict(problem.x)
    assert found.scores == {s.name: s for s in compared(before, after, problem.y)}
    outside = post.predict(problem.x_new)
    assert found.detection["entropy"] == auc(after.entropy, outside.entropy)
    assert found.detection["epistemic variance"] == auc(after.epistemic.sum(1), outside.epistemic.sum(1))


def test_regression_has_bands_coverage_and_a_certificate():
    found = pages.curve(steps=60)
    said = Page(found.html).said
    assert list(found.scores) == ["NLL", "RMSE", "90% interval holds"]
    assert found.detection == {}
    for words in (
        "± 2 std of f",
        "level of the interval",
        "converged after",
        "noise variance",
        "No data from elsewhere",
    ):
        assert words in said
    assert "Examples" not in said


@pytest.mark.parametrize("method", ["kron", "variational", "sampled", "last_layer"])
def test_every_method_has_a_page(method, float64):
    problem = Problem("mlp", "categorical", "grouped", n=20)
    options = {"variational": {"num_inducing": 5, "epochs": 1}, "sampled": {"tolerance": 1e-6}}.get(method, {})
    post = problem.fit(method, **options) if method != "last_layer" else problem.fit("full")
    said = Page(report(post, (problem.x, problem.y)).html).said
    assert f"method {post.method}" in said
    assert ("relative residual" in said) == (method == "sampled")


def test_counts_have_what_is_left(float64):
    problem = Problem("mlp", "poisson", "diagonal")
    found = report(problem.fit("function"), (problem.x, problem.y), problem.x_new)
    assert list(found.scores) == ["NLL"]
    assert list(found.detection) == ["epistemic variance"]


def test_what_is_written_is_escaped():
    text = page("<T>", "a & b", [Section("<h>", "x < y", Table([("<n>", "<v>")], ("<c>", "")), [Plate(b"png", "<q>")])])
    assert "<T>" not in text
    found = Page(text)
    assert {"<T>", "a & b", "<h>", "x < y", "<n>", "<v>", "<c>", "<q>"} <= {word.strip() for word in found.words}


def test_a_page_is_the_same_again(float64):
    problem = Problem("mlp", "gaussian", "grouped")
    post = problem.fit("function")
    one, two = (report(post, (problem.x, problem.y)).html for _ in range(2))
    assert one == two


def test_the_seed_reaches_the_samples(float64):
    problem = Problem("mlp", "categorical", "isotropic")
    post = problem.fit("function")
    nll = [report(post, (problem.x, problem.y), seed=seed).scores["NLL"].after.value for seed in (0, 0, 1)]
    assert nll[0] == nll[1] != nll[2]
    assert nll[2] == pytest.approx(nll[0], abs=0.1)


def test_test_data_that_do_not_fit_are_refused(float64):
    problem = Problem("mlp", "gaussian", "grouped")
    with pytest.raises(ValueError, match="y has 7 points, but 8 were predicted"):
        report(problem.fit("function"), (problem.x, problem.y[1:]))
    with pytest.raises((ValueError, RuntimeError)):
        report(problem.fit("function"), (torch.zeros(8, 2), problem.y))
