"""Axes have round numbers, and nothing is drawn outside of its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from lightning_gnn_dist.pictures.charts import Bars, HeatMap, Line, Lines, of_all, of_run
from lightning_gnn_dist.pictures.svg import drawn, ticks, together
from tests.pictures.records import record


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.64, 0.79, [0.6, 0.65, 0.7, 0.75, 0.8]),
        (3.0, 3.0, [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]),
        (0.0, 8400.0, [0.0, 2000.0, 4000.0, 6000.0, 8000.0, 10000.0]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert found == pytest.approx(expected, abs=0.11 if low == high else 1e-9)


def test_rounds_and_epochs_have_whole_ticks() -> None:
    assert ticks(1.0, 3.0, whole=True) == [1.0, 2.0, 3.0] and ticks(1.0, 1.0, whole=True) == [0.0, 1.0, 2.0]
    assert ticks(1.0, 20.0, whole=True) == ticks(1.0, 20.0)
    by_round = of_all({"a": record(2, 2)}, "accuracy")[2]
    shown = [text.text for text in ElementTree.fromstring(drawn(by_round)).iter("text") if text.get("y") == "269.0"]
    assert shown == ["1", "2"]


def test_a_bar_has_its_length_behind_it_if_asked() -> None:
    chart = Bars("time", "seconds", ["a", "b"], ["rank 0", "rank 1"], [[1.5, 0.25], [20.0, 3.0]], totals=True)
    said = [text.text for text in ElementTree.fromstring(drawn(chart)).iter("text")]
    assert {"1.75", "23"} <= set(said) and "1.75" not in drawn(replace(chart, totals=False))


CHARTS = [
    *of_all({"runs/a & <b>": record(), "x" * 200: record(counted=False)}, "accuracy"),
    *of_run(record(2, 3)),
    *of_run(record(40, 500, num_classes=17)),
    Lines("one point", "x", "y", [Line("a", [(3.0, 3.0)])]),
    HeatMap("nothing", "x", "y", ["0"], ["0"], [[None]], as_share=False),
    Bars("one piece", "seconds", ["seconds"], ["rank 0"], [[2.0]]),
    Bars("with totals", "seconds", ["seconds"], ["rank 0"], [[1234.5]], totals=True),
    Bars("no length", "seconds", ["a"], ["rank 0"], [[0.0]]),
]


def width_of(element: ElementTree.Element) -> float:
    """About: no font is known here."""
    return 6.0 * len(element.text or "")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_all_of_a_chart_lies_within_it(chart: Lines | HeatMap | Bars) -> None:
    root = ElementTree.fromstring(drawn(chart))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        x, y = (float(element.get(name, 0)) for name in ("x", "y"))
        if element.tag == "rect":
            assert x >= 0 and x + float(element.attrib["width"]) <= width + 0.1
            assert y >= 0 and y + float(element.attrib["height"]) <= height
        elif element.tag == "text" and "transform" not in element.attrib:
            share = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.attrib["text-anchor"]]
            begin = x - share * width_of(element)
            assert begin >= 0 and begin + width_of(element) <= width and 0 < y <= height, element.text
        elif element.tag == "circle":
            assert 0 <= float(element.attrib["cx"]) <= width and 0 <= float(element.attrib["cy"]) <= height


def test_a_point_stands_where_its_numbers_are() -> None:
    chart = Lines("square", "x", "y", [Line("a", [(0.0, 0.0), (1.0, 1.0), (0.5, 1.0)])])
    first, second, third = list(ElementTree.fromstring(drawn(chart)).iter("circle"))
    assert float(first.attrib["cx"]) < float(third.attrib["cx"]) < float(second.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"]) == float(third.attrib["cy"])
    assert third.find("title").text == "a: 1 at 0.5"  # type: ignore[union-attr]


def test_a_bar_is_as_long_as_its_share() -> None:
    chart = Bars("labels", "share", ["a", "b"], ["part 0"], [[0.25, 0.75]])
    lengths = [float(box.attrib["width"]) for box in ElementTree.fromstring(drawn(chart)).iter("rect")][:2]
    assert lengths[1] == pytest.approx(3 * lengths[0], rel=1e-2)


def test_one_piece_that_is_named_as_the_unit_has_no_legend() -> None:
    bare, named = (Bars("time", "seconds", [piece], ["rank 0"], [[2.0]]) for piece in ("seconds", "training"))
    assert drawn(bare).count("seconds<") == 1 and drawn(named).count("training<") == 1


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_numbers_are_read_on_every_shade() -> None:
    cells: list[list[float | None]] = [[(9 * down + along) / 80 for along in range(9)] for down in range(9)]
    chart = HeatMap("shades", "x", "y", list("abcdefghi"), list("abcdefghi"), cells, as_share=True)
    root = ElementTree.fromstring(drawn(chart))
    shades = [box.attrib["fill"] for box in root.iter("rect")]
    inks = [text.attrib["fill"] for text in root.iter("text") if "fill" in text.attrib]
    for shade, ink in zip(shades, inks, strict=True):
        low, high = sorted((luminance(shade), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) > 4.5, (shade, ink)
    style = together([[chart]]).partition("</style>")[0]
    assert {*inks} == {"#ffffff", "#000000"} and all(f'text[fill="{ink}"]' in style for ink in inks)
