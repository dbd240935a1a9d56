"""The page in a real browser: it fits a phone and a desk, in light and dark, and asks for nothing.

``make screenshots`` has this test write what it saw into docs/results/report/.
"""

import os
from pathlib import Path

import pages
import pytest
from browser import CHROMIUM, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)")
SCREENSHOTS = os.environ.get("NTKGP_SCREENSHOTS")
SHOWN = {("desk", "light"): "light", ("desk", "dark"): "dark", ("phone", "light"): "phone"}
WIDTHS = {"desk": 1280, "phone": 390}
OVERFLOW = """
(() => {
  const wide = [...document.querySelectorAll('body *:not(.table *):not(svg *)')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName);
  return [document.documentElement.scrollWidth - innerWidth, wide];
})()
"""
LUMINANCE = """
(() => {
  const of = rgb => rgb.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const style = (e, name) => of(getComputedStyle(e)[name]);
  const paper = style(document.body, 'backgroundColor');
  const inks = ['h1', 'td', 'th', 'figcaption', 'svg'].map(name => style(document.querySelector(name), 'color'))
    .concat([...document.querySelectorAll('svg text')].map(e => style(e, 'fill')));
  const contrast = ink => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  return [paper, Math.min(...inks.map(contrast))];
})()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    pages.digits(**({} if SCREENSHOTS else pages.QUICK)).save(folder / "digits.html")
    pages.curve(steps=60).save(folder / "curve.html")
    return folder


@pytest.fixture(scope="module")
def tab():
    with browser() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("name", ["digits", "curve"])
def test_a_report_fits_and_can_be_read(name, device, scheme, reports, tab):
    tab.show(reports / f"{name}.html", WIDTHS[device], scheme=scheme)
    assert tab.complaints == []
    assert tab.run(OVERFLOW) == [0, []]
    paper, contrast = tab.run(LUMINANCE)
    assert (paper > 0.5) == (scheme == "light")
    assert contrast >= 4.5  # what WCAG 2 asks of text
    assert tab.run("[...document.querySelectorAll('figure svg')].every(e => e.getBoundingClientRect().height > 50)")
    if SCREENSHOTS and name == "digits" and (device, scheme) in SHOWN:
        folder = Path(SCREENSHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        tab.screenshot(folder / f"{SHOWN[device, scheme]}.png", None if device == "desk" else 1700)


def test_the_browser_notices_what_is_wrong(tmp_path, tab):
    (tmp_path / "wrong.html").write_text(
        "<!DOCTYPE html><body style='margin:0'><div style='width:2000px'>wide</div>"
        "<img src='http://127.0.0.1:9/x.png'><script>console.error('no')</script></body>"
    )
    tab.show(tmp_path / "wrong.html", 390)
    assert tab.run(OVERFLOW)[0] > 0
    assert "http://127.0.0.1:9/x.png" in tab.complaints
    assert len(tab.complaints) >= 2
