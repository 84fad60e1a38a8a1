"""The page is well-formed, names every run, and needs nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lightning_gnn_dist.pictures.page import page_of
from tests.pictures.records import record

RUNS = {"runs/llcg/version_0": record(), "runs/<tma> & co": record(8, 40, num_classes=17), "ddp": record(counted=False)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "firefox")


def test_the_page_is_well_formed_and_names_every_run() -> None:
    doctype, content = page_of(RUNS, "accuracy").split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    root = ElementTree.fromstring(content)
    assert [heading.text for heading in root.iter("h2")] == list(RUNS)
    assert len(list(root.iter("svg"))) == 3 + 4 * len(RUNS)
    cells = [cell.text for cell in root.iter("td")]
    assert set(RUNS) <= set(cells) and "TMAStrategy with EverySeconds(seconds=2)" in cells


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(RUNS, "accuracy")
    assert not re.search(r"https?:|//|\burl\(|@import|<script|<link|<img|\bsrc=|\bhref=", page)


def test_the_page_is_for_small_and_for_dark_screens() -> None:
    page = page_of(RUNS, "accuracy")
    assert 'content="width=device-width, initial-scale=1"' in page and "prefers-color-scheme: dark" in page
    assert page.index('<div class="wide"><table>') and ".wide { overflow-x: auto; }" in page  # the table, not the page
    assert "(min-width: 1000px) { td { white-space: normal; }" in page  # long names break, so that it fits
    drawn = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', page))
    told = set(re.findall(r'\[fill="(#[0-9a-f]{6})"\]', page))
    assert "#eeeeee" in drawn & told and "--ink" in page


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    (tmp_path / "page.html").write_text(page_of(RUNS, "accuracy"))
    picture = tmp_path / "page.png"
    options = ["--headless", f"--screenshot={picture}", "--window-size=1500,2500"]
    sandbox = [] if "firefox" in browser else ["--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command = [browser, *options, *sandbox, f"file://{tmp_path}/page.html"]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    assert picture.stat().st_size > 20_000  # an empty page is far smaller
