"""The page in a real browser, from disk: nothing is fetched, nothing overflows, light is light and dark is dark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from lightning_videoscale.report import write_report
from tests.report.browser import CHROMIUM, Page
from tests.report.simulated import add_findings, log_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

# Elements that stick out to the right of the window, however they are cut off.
STICKING_OUT = """[...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(e).display !== "none")
    .map(e => e.tagName + "." + e.className + ": " + e.textContent.slice(0, 40)).join("; ")"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    add_findings(log_run(folder))
    return write_report(folder)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_opens_from_disk(page: Page, report: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    page.requests.clear()
    page.show(report, width, 740, scheme)
    assert page.requests == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(STICKING_OUT) == ""
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    # Every chart has marks that are drawn: their boxes have an extent.
    assert page.evaluate("""[...document.querySelectorAll(".line, .dot, .area, .bar b")].every(
        e => { const box = e.getBoundingClientRect(); return box.width > 0 || box.height > 0 })""")
    shot = np.asarray(Image.open(io.BytesIO(page.screenshot(whole=False))).convert("L"), np.float64)
    assert shot.shape == (740, width)
    assert (np.median(shot) > 200) == (scheme == "light") and (np.median(shot) < 60) == (scheme == "dark")
    assert shot.std() > 10  # something is drawn
