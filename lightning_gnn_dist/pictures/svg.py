"""Charts as SVG that a page can contain as they are: without scripts, fonts or links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from lightning_gnn_dist.pictures.charts import Bars, Chart, HeatMap, Lines

COLOURS = (
    *("#3366cc", "#dc6900", "#2a9d4a", "#c22f4e", "#7b52ab", "#8c6239"),
    *("#17a2b8", "#d6a100", "#6f7d8c", "#e377b4", "#5b8c00", "#2f4b7c"),
)
WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 46
_LINE = 17  # height of a line of the legend, in pixels
_MAX_LABELS = 16  # along an axis
_MAX_NUMBERS = 12  # rows or columns of a heat map up to which cells show their numbers
_DARK = 0.685  # cells of more than this strength are read in white, others in black, both with a contrast above 4.5
_BAR = 20
_CHARACTER = 6  # width of a character, about
_BETWEEN = 24  # pixels between charts of one file
_STYLE = (  # what the style of a page says otherwise
    ".charts { max-width: 100%; height: auto; } .charts text { font: 11px system-ui, sans-serif; fill: #222; } "
    '.charts text[fill="#ffffff"] { fill: #fff; } .charts text[fill="#000000"] { fill: #000; } '
    ".charts text.title { font-weight: 600; font-size: 13px; } .charts .grid { stroke: #e4e4e4; stroke-width: 1; }"
)


def drawn(chart: Chart) -> str:
    """The chart as an ``<svg>`` element."""
    if isinstance(chart, Lines):
        return _lines(chart)
    return _heat_map(chart) if isinstance(chart, HeatMap) else _bars(chart)


def together(rows: Sequence[Sequence[Chart]]) -> str:
    """Rows of charts as one file of SVG, which any viewer shows as it is."""
    pictures, top, width = [], 0.0, 0.0
    for row in rows:
        drawings = [drawn(chart) for chart in row]
        for column, drawing in enumerate(drawings):
            place = f'<svg x="{column * (WIDTH + _BETWEEN)}" y="{top:.0f}" '
            pictures.append(drawing.replace("<svg ", place, 1))
        width = max(width, len(row) * (WIDTH + _BETWEEN) - _BETWEEN)
        top += max(_height(drawing) for drawing in drawings) + _BETWEEN
    size = f'viewBox="0 0 {width} {top - _BETWEEN:.0f}" width="{width}" height="{top - _BETWEEN:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="charts">'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", paper, *pictures, "</svg>"])


def _height(drawing: str) -> float:
    return float(drawing.split(' height="', 1)[1].split('"', 1)[0])


def ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, ``whole`` ones if asked."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    rough = max((high - low) / about, 1.0 if whole else 0.0)
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * index for index in range(floor(low / step), ceil(high / step) + 1)]


def _lines(chart: Lines) -> str:
    points = [point for line in chart.lines for point in line.points]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    across, up = ticks(left, right, whole=chart.counts), ticks(low, high)
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def pixels(x: float, y: float) -> tuple[float, float]:
        left = _LEFT + (x - across[0]) / (across[-1] - across[0]) * inner_width
        return left, _TOP + inner_height - (y - up[0]) / (up[-1] - up[0]) * inner_height

    parts = [*_axes(across, up, pixels), *_names_of_axes(chart.x_label, chart.y_label, HEIGHT)]
    for number, line in enumerate(chart.lines):
        colour = COLOURS[number % len(COLOURS)]
        at = [pixels(*point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (along, value) in zip(at, line.points, strict=True):
            hint = _hint(f"{line.name}: {_number(value)} at {_number(along)}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">{hint}</circle>')
    parts += _legend([line.name for line in chart.lines], HEIGHT)
    return _svg(chart.title, parts, HEIGHT + _LINE * len(chart.lines))


def _axes(across: Sequence[float], up: Sequence[float], pixels: object) -> Iterator[str]:
    assert callable(pixels)
    for x in across:
        left, bottom = pixels(x, up[0])
        _, top = pixels(x, up[-1])
        yield f'<line x1="{left:.1f}" y1="{top:.1f}" x2="{left:.1f}" y2="{bottom:.1f}" class="grid"/>'
        yield _text(left, bottom + 15, _number(x), "middle")
    for y in up:
        left, height = pixels(across[0], y)
        right, _ = pixels(across[-1], y)
        yield f'<line x1="{left:.1f}" y1="{height:.1f}" x2="{right:.1f}" y2="{height:.1f}" class="grid"/>'
        yield _text(left - 6, height + 4, _number(y), "end")


def _heat_map(chart: HeatMap) -> str:
    side = (WIDTH - _LEFT - _RIGHT) / max(1, len(chart.columns))
    tall = min(side, 34.0) if len(chart.columns) > 1 else 34.0
    tall = max(tall, 14.0) if len(chart.rows) <= _MAX_LABELS else max(tall, 4.0)
    known = [cell for row in chart.cells for cell in row if cell is not None]
    most = 1.0 if chart.as_share else max(known, default=1.0)
    parts: list[str] = []
    for down, row in enumerate(chart.cells):
        for along, cell in enumerate(row):
            where = _LEFT + along * side, _TOP + down * tall
            parts += _cell(chart, (down, along), cell, where, (side, tall), cell / most if cell and most else 0.0)
    height = _TOP + tall * len(chart.rows)
    for along in _some(len(chart.columns)):
        parts.append(_text(_LEFT + (along + 0.5) * side, height + 14, chart.columns[along], "middle"))
    for down in _some(len(chart.rows)):
        parts.append(_text(_LEFT - 6, _TOP + (down + 0.5) * tall + 4, chart.rows[down], "end"))
    total = height + _BOTTOM
    return _svg(chart.title, [*parts, *_names_of_axes(chart.x_label, chart.y_label, total)], total)


def _cell(
    chart: HeatMap,
    at: tuple[int, int],
    cell: float | None,
    where: tuple[float, float],
    size: tuple[float, float],
    strength: float,
) -> Iterator[str]:
    (down, along), (x, y), (width, height) = at, where, size
    said = "none" if cell is None else f"{cell:.1%}" if chart.as_share else _number(cell)
    hint = _hint(f"{chart.y_label} {chart.rows[down]}, {chart.x_label} {chart.columns[along]}: {said}")
    fill = "#eeeeee" if cell is None else _shade(strength)
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{hint}</rect>'
    if cell is not None and max(len(chart.rows), len(chart.columns)) <= _MAX_NUMBERS:
        short = f"{cell:.0%}" if chart.as_share else _number(cell)
        colour = "#ffffff" if strength > _DARK else "#000000"
        yield _text(x + width / 2, y + height / 2 + 4, short, "middle", colour)


def _bars(chart: Bars) -> str:
    longest = max((sum(row) for row in chart.lengths), default=0.0) or 1.0
    across = [tick for tick in ticks(0.0, longest) if tick <= longest * 1.001]
    left = max(_LEFT, 6 + (_CHARACTER + 1) * max(map(len, chart.rows), default=0))
    totals = [_number(sum(row)) if chart.totals else "" for row in chart.lengths]
    room = (_CHARACTER + 1) * max(map(len, totals), default=0)
    inner, bottom = WIDTH - left - _RIGHT - room, _TOP + _BAR * len(chart.rows)
    parts = []
    for down, (name, row) in enumerate(zip(chart.rows, chart.lengths, strict=True)):
        x, y = float(left), _TOP + down * _BAR
        for number, length in enumerate(row):
            width = length / longest * inner
            hint = _hint(f"{name}, {chart.pieces[number]}: {_number(length)}")
            box = f'x="{x:.1f}" y="{y + 2:.1f}" width="{width:.1f}" height="{_BAR - 4}"'
            parts.append(f'<rect {box} fill="{COLOURS[number % len(COLOURS)]}">{hint}</rect>')
            x += width
        parts.append(_text(left - 6, y + 14, name, "end"))
        if totals[down]:
            parts.append(_text(x + 4, y + 14, totals[down]))
    for tick in across:
        parts.append(_text(left + tick / longest * inner, bottom + 15, _number(tick), "middle"))
    total = bottom + _BOTTOM
    parts += [*_names_of_axes(chart.unit, "", total), *_legend(chart.legend, total, columns=3)]
    return _svg(chart.title, parts, total + _LINE * ceil(len(chart.legend) / 3))


def _legend(names: Sequence[str], top: float, columns: int = 1) -> Iterator[str]:
    for number, name in enumerate(names):
        x = 12 + (number % columns) * (WIDTH - 24) / columns
        y = top + _LINE * (number // columns)
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>'
        room = (WIDTH - 24) // columns // _CHARACTER - 3
        yield _text(x + 16, y + 9, name if len(name) <= room else "…" + name[1 - room :])  # paths differ at their ends


def _names_of_axes(across: str, up: str, height: float) -> Iterator[str]:
    yield _text(_LEFT + (WIDTH - _LEFT - _RIGHT) / 2, height - 12, across, "middle")
    if up:
        middle = _TOP + (height - _TOP - _BOTTOM) / 2
        yield (
            f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
            f"{escape(up)}</text>"
        )


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    heading = f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" class="title">{escape(title)}</text>'
    head = f'<svg viewBox="0 0 {WIDTH} {height + 6:.0f}" width="{WIDTH}" height="{height + 6:.0f}" role="img">'
    return "\n".join([head, heading, *parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str | None = None) -> str:
    fill = "" if colour is None else f' fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(text)}</text>'


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _shade(strength: float) -> str:
    """The colour of a number from 0 to 1: from nearly white to dark blue."""
    light, dark = (242, 246, 252), (16, 60, 130)
    mixed = [round(a + (b - a) * min(1.0, strength)) for a, b in zip(light, dark, strict=True)]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _some(count: int) -> range:
    return range(0, count, ceil(count / _MAX_LABELS) or 1)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
