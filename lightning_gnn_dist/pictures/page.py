"""One HTML page about several runs, without other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.pictures.charts import of_all, of_run, unit_of
from lightning_gnn_dist.pictures.svg import drawn

_AT_BOUNDARY, _FETCHED = "MB at boundary", "MB fetched"
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16191d; --line: #444; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
       max-width: 1440px; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-top: 1px solid var(--line); padding-top: 1em; }
h2, p { overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { padding: .25em .8em; text-align: left;
border-bottom: 1px solid var(--line); } td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; } @media (min-width: 1000px) { td { white-space: normal; } th, td { padding: .25em .5em; } }
.charts { display: flex; flex-wrap: wrap; gap: 1.5em; align-items: flex-start; } .charts > div { max-width: 100%; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg text[fill="#ffffff"] { fill: #fff; } svg text[fill="#000000"] { fill: #000; }
svg text.title { font-weight: 600; font-size: 13px; } svg .grid { stroke: var(--line); stroke-width: 1; }
@media (prefers-color-scheme: dark) { svg [fill="#eeeeee"] { fill: #333; }
svg [fill="#2f4b7c"] { fill: #7d9bd0; } svg [stroke="#2f4b7c"] { stroke: #7d9bd0; } }
"""
_SCREEN = '<meta name="viewport" content="width=device-width, initial-scale=1"/>'  # a phone shows it at its own width


def page_of(records: Mapping[str, RunRecord], metric: str) -> str:
    """The page as HTML: the runs side by side, then each run."""
    body = [
        f"<h1>{len(records)} {'run' if len(records) == 1 else 'runs'}</h1>",
        _table(table_of(records, metric)),
        _charts([drawn(chart) for chart in of_all(records, metric)]),
    ]
    for name, record in records.items():
        body.append(f"<h2>{escape(name)}</h2>\n<p>{escape(_about(record))}</p>")
        body.append(_charts([drawn(chart) for chart in of_run(record)]))
    head = f'<meta charset="utf-8"/>\n{_SCREEN}\n<title>{escape(", ".join(records))}</title>\n<style>{_STYLE}</style>'
    return "\n".join(
        ["<!DOCTYPE html>", '<html lang="en">', f"<head>\n{head}\n</head>", "<body>", *body, "</body>", "</html>\n"]
    )


def _about(record: RunRecord) -> str:
    sentences = [f"{record.strategy}; {record.partitioner}; {record.num_ranks} ranks."]
    known = [share for share in record.coverage if share is not None]
    if known:
        sentences.append(
            f"Mean coverage of the training nodes by rank: {', '.join(f'{share:.2f}' for share in known)}."
        )
    sentences += record.estimates
    if not record.finished:
        sentences.append("The run did not come to its end; what is shown is rank 0's.")
    return " ".join(sentences)


def _table(rows: list[list[str]]) -> str:
    titles, *lines = rows
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _charts(charts: list[str]) -> str:
    return '<div class="charts">\n' + "\n".join(f"<div>{chart}</div>" for chart in charts) + "\n</div>"


def table_of(records: Mapping[str, RunRecord], metric: str) -> list[list[str]]:
    """A table with a line of titles and a line for each run."""
    unit = unit_of(records)
    lines = [_line_of(name, record, metric, unit) for name, record in records.items()]
    if not any(record.boundary_bytes for record in records.values()):
        for line in lines:
            del line[_AT_BOUNDARY]
    if not any(record.fetched_bytes for record in records.values()):
        for line in lines:
            del line[_FETCHED]
    return [list(lines[0]), *(list(line.values()) for line in lines)]


def _line_of(name: str, record: RunRecord, metric: str, unit: str) -> dict[str, str]:
    """What stands under each title. A new column is a new line here."""
    values = [value for *_, value in record.of_metric(metric)]
    sent = record.bytes_sent
    return {
        "run": name if record.finished else f"{name} (did not end)",
        "strategy": record.strategy,
        "partitioner": record.partitioner,
        "ranks": str(record.num_ranks),
        f"{unit}s".replace(" or", "s or"): str(max((len(rows) for rows in record.ranks), default=0)),
        "seconds": f"{record.rounds[-1].elapsed:.1f}" if record.rounds else "-",
        "MB sent": f"{sent[-1] / 1e6:.2f}" if sent else "-",
        _AT_BOUNDARY: f"{record.boundary_bytes / 1e6:.2f}",
        _FETCHED: f"{record.fetched_bytes / 1e6:.2f}",
        "cut": f"{record.parts.cut_ratio:.1%}" if record.parts else "-",
        f"last {metric}": f"{values[-1]:.4f}" if values else "-",
        "best": f"{_best(values, metric):.4f}" if values else "-",
    }


def _best(values: Sequence[float], metric: str) -> float:
    """The best value of a metric: the smallest of losses and errors, otherwise the largest."""
    return min(values) if any(word in metric.lower() for word in ("loss", "err")) else max(values)
