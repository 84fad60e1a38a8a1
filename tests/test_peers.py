"""Peers side by side: what needs no peer. The table is read, the picture is what was measured, our own side runs."""

import io
import itertools
import re
import sys
from pathlib import Path

import pytest

from lightning_gnn_dist import communities
from tests.conftest import module_of
from tests.pages import ROOT, words_of

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install lightning-gnn-dist[plots]")
RESULTS = ROOT / "benchmarks" / "results" / "peers.txt"
PICTURE = ROOT / "docs" / "assets" / "peers.svg"
PAGE = ROOT / "benchmarks" / "peers.md"
SHOWN_IN = ROOT / "docs" / "install.md"
PEERS = ROOT / "benchmarks" / "peers"


run, drawing = module_of(PEERS / "run.py"), module_of(PEERS / "picture.py")


def drawn(printed: str) -> str:
    file = io.StringIO()
    drawing.picture(printed).savefig(file, format="svg")
    return file.getvalue()


def test_the_picture_is_drawn_from_what_the_command_has_printed() -> None:
    printed = RESULTS.read_text()
    assert list(drawing.tables_of(printed)) == list(drawing.PARTS) == list(run.PARTS), "one run of all parts"
    assert words_of(drawn(printed)) == words_of(PICTURE.read_text())
    assert f"]({PICTURE.relative_to(ROOT / 'docs')})" in SHOWN_IN.read_text()


def test_the_pages_say_what_was_measured() -> None:
    printed, page = RESULTS.read_text(), PAGE.read_text()
    assert [line for line in printed.splitlines() if line.startswith("|") and line not in page] == []
    of_command = re.sub(r"\n## Exact sampling across shards\n.*?(?=\n## |\Z)", "", page, flags=re.S)  # another one's
    assert [line for line in of_command.splitlines() if line.startswith("|") and line not in printed] == []
    (versions,) = (line for line in printed.splitlines() if "torch==" in line)
    assert versions in page
    ((said,),) = [re.findall(r"^!\[(.*)\]\(assets/peers.svg\)", SHOWN_IN.read_text(), re.MULTILINE)]
    tables = drawing.tables_of(printed)
    for part, column in (
        ("batches", "whole batch, ms"),
        ("partitions", "CPU-s"),
        ("hosts", "MB of host 1, both ways, whole run"),
    ):
        for row in (tables[part][0], tables[part][-1]):
            assert re.search(rf"\b{re.escape(row[column])}\b", said), (part, row)


def made(folder: Path) -> Path:
    """An environment as run.py leaves it, in which this Python stands, without a peer."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "ready").touch()
    return folder


@pytest.mark.slow
def test_our_own_side_runs_without_any_peer(tmp_path, monkeypatch, capsys) -> None:
    communities(600, 3, num_features=8).save(tmp_path / "graph")
    words = ["--target", "0.5", "--num-nodes", "2000", "--num-edges", "20000", "--repeats", "1"]
    words += ["--only", "batches", "partitions", "accuracy"]
    monkeypatch.setattr(sys, "argv", ["run.py", str(made(tmp_path / "made")), str(tmp_path / "graph"), *words])
    run.main()
    printed = capsys.readouterr().out
    tables = drawing.tables_of(printed)
    assert list(tables) == ["batches", "partitions", "accuracy"] and printed.count("minutes, at a load of") == 3
    assert all(rows[0][""] == "ours" for rows in tables.values())
    assert float(tables["accuracy"][0]["best accuracy"]) >= 0.5
    assert {"ours", "Until a model has learned"} <= {*words_of(drawn(printed))}


# The picture of README.md is what was measured.


CURVES = ROOT / "benchmarks" / "results" / "frontier.jsonl"
CURVES_DRAWN = ROOT / "docs" / "assets" / "accuracy-over-bytes.svg"


drawing_of_curves = module_of(ROOT / "benchmarks" / "readme_picture.py")


def test_it_is_drawn_from_the_measurements() -> None:
    drawn = io.StringIO()
    drawing_of_curves.picture(CURVES).savefig(drawn, format="svg")
    assert words_of(CURVES_DRAWN.read_text()) == words_of(drawn.getvalue()) and len(words_of(drawn.getvalue())) > 15
    assert f"]({CURVES_DRAWN.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_what_the_readme_says_of_it_is_what_was_measured() -> None:
    (said,) = re.findall(r"^!\[(.*)\]\(docs/assets/accuracy", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = drawing_of_curves.rows_of(CURVES)
    names = ("one process", "Grappa", "LLCG", "averaging", "averaging, METIS")
    found = {name: drawing_of_curves.measured(rows, name) for name in names}
    found["fifty"] = drawing_of_curves.measured(rows, "LLCG", 50)
    assert {f"{accuracy:.0f}" for _, accuracy in found.values()} == set(re.findall(r"(6\d|5\d) %", said))
    assert f"with {found['fifty'][0]:.0%}, every 50".replace("%", " %") in said
    assert f"{found['LLCG'][0]:.0%} of".replace("%", " %") in said and found["Grappa"][0] == 1.0


def test_no_label_leaves_the_picture_or_lies_on_another() -> None:
    figure = drawing_of_curves.picture(CURVES)
    figure.draw_without_rendering()
    (axes,), whole = figure.axes, figure.bbox
    texts = [*axes.texts, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(axes.texts) == 8 and all(whole.contains(*corner) for box in boxes for corner in box.corners())
    assert not [(one, other) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
