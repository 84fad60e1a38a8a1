"""The picture of README.md is what was measured, and is read on a page in the light and in the dark."""

import io
import itertools
import re

import pytest

from tests.conftest import module_of
from tests.pages import ROOT, words_of

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install lightning-gnn-dist[plots]")

RESULTS = ROOT / "benchmarks" / "results" / "frontier.jsonl"
PICTURE = ROOT / "docs" / "assets" / "accuracy-over-bytes.svg"


drawing = module_of(ROOT / "benchmarks" / "readme_picture.py")


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_it_is_drawn_from_the_measurements() -> None:
    drawn = io.StringIO()
    drawing.picture(RESULTS).savefig(drawn, format="svg")
    assert words_of(PICTURE.read_text()) == words_of(drawn.getvalue()) and len(words_of(drawn.getvalue())) > 15
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_what_the_readme_says_of_it_is_what_was_measured() -> None:
    (said,) = re.findall(r"^!\[(.*)\]\(docs/assets/accuracy", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = drawing.rows_of(RESULTS)
    names = ("one process", "Grappa", "LLCG", "averaging", "averaging, METIS")
    found = {name: drawing.measured(rows, name) for name in names}
    found["fifty"] = drawing.measured(rows, "LLCG", 50)
    assert {f"{accuracy:.0f}" for _, accuracy in found.values()} == set(re.findall(r"(6\d|5\d) %", said))
    assert f"with {found['fifty'][0]:.0%}, every 50".replace("%", " %") in said
    assert f"{found['LLCG'][0]:.0%} of".replace("%", " %") in said and found["Grappa"][0] == 1.0


def test_words_have_contrast_on_the_paper() -> None:
    colours = {drawing.GREY, *(colour for colour, _ in drawing.CURVES)}
    assert len(colours) == 5 and min(contrast(colour, drawing.PAPER) for colour in colours) >= 4.5


def test_no_label_leaves_the_picture_or_lies_on_another() -> None:
    figure = drawing.picture(RESULTS)
    figure.draw_without_rendering()
    (axes,), whole = figure.axes, figure.bbox
    texts = [*axes.texts, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(axes.texts) == 8 and all(whole.contains(*corner) for box in boxes for corner in box.corners())
    assert not [(one, other) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
