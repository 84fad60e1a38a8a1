"""Peers side by side: what needs no peer. The table is read, the picture is what was measured, our own side runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_gnn_dist import communities
from tests.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "peers.txt"
PICTURE = ROOT / "docs" / "assets" / "peers.svg"
PAGE = ROOT / "benchmarks" / "peers.md"
PEERS = ROOT / "benchmarks" / "peers"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"peers_{name}"] = module
    spec.loader.exec_module(module)
    return module


run, drawing = load("run"), load("picture")

PRINTED = """A processor, 4 cores, 16 GB; load 1.0
torch==2.13.0, dgl==2.1.0

batches

Left out: PyG.
| | nodes | edges | sampling alone, ms | ours is faster | whole batch, ms | ours is faster |
| --- | --- | --- | --- | --- | --- | --- |
| ours | 1,200 | 3,400 | 8.5 | 1.0 times | 20.0 | 1.0 times |
| DGL 2.1.0, ids of 64 bits | 1,200 | 3,400 | 30.0 | 3.5 times | 1,080.5 | 54.0 times |

hosts

| | limit | seconds of a pass | CPU-s of rank 0 | MB of host 1, both ways, whole run |
| --- | --- | --- | --- | --- |
| llcg | none | 5.4 (5.0 to 6.0) | 2.7 | 4 |
| llcg | 1gbit | 6.4 (6.0 to 7.0) | 2.7 | 4 |

1.0 minutes, at a load of 1.0 before and 2.0 after
"""


def test_tables_are_read_by_part_and_column() -> None:
    tables = drawing.tables_of(PRINTED)
    assert list(tables) == ["batches", "hosts"]
    assert [row[""] for row in tables["batches"]] == ["ours", "DGL 2.1.0, ids of 64 bits"]
    assert tables["hosts"][1]["limit"] == "1gbit"
    assert [drawing.number(cell) for cell in ("5.4 (5.0 to 6.0)", "1,080.5", "4")] == [5.4, 1080.5, 4.0]


def test_a_chart_has_a_bar_for_each_way_and_parts_that_were_left_out_have_none() -> None:
    batches, hosts = drawing.charts_of(drawing.tables_of(PRINTED))
    assert (batches.rows, batches.lengths) == (["ours", "DGL, 64 bits"], [[8.5, 11.5], [30.0, 1050.5]])
    assert (hosts.rows, hosts.lengths, hosts.pieces) == (["llcg"], [[4.0]], ["MB of a host, both ways"])
    with pytest.raises(SystemExit, match=r"no table of run\.py"):
        drawing.picture("batches\n\nLeft out.\n")


def test_the_picture_is_drawn_from_what_the_command_has_printed() -> None:
    printed = RESULTS.read_text()
    assert list(drawing.tables_of(printed)) == list(drawing.PARTS) == list(run.PARTS), "one run of all parts"
    assert PICTURE.read_text() == drawing.picture(printed)
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_the_page_and_the_readme_say_what_was_measured() -> None:
    printed, page = RESULTS.read_text(), PAGE.read_text()
    assert [line for line in printed.splitlines() if line.startswith("|") and line not in page] == []
    of_command = re.sub(r"\n## Exact sampling across shards\n.*?(?=\n## )", "", page, flags=re.DOTALL)  # another one's
    assert [line for line in of_command.splitlines() if line.startswith("|") and line not in printed] == []
    (versions,) = (line for line in printed.splitlines() if "torch==" in line)
    assert versions in page
    ((said,),) = [re.findall(r"^!\[(.*)\]\(docs/assets/peers.svg\)", (ROOT / "README.md").read_text(), re.MULTILINE)]
    tables = drawing.tables_of(printed)
    for part, column in (
        ("batches", "whole batch, ms"),
        ("partitions", "CPU-s"),
        ("hosts", "MB of host 1, both ways, whole run"),
    ):
        for row in (tables[part][0], tables[part][-1]):
            assert re.search(rf"\b{re.escape(row[column])}\b", said), (part, row)


class Pip:
    """Stands for processes: notes what pip is told to install, and fails for what its index lacks."""

    def __init__(self, *missing: str) -> None:
        self.missing, self.told = missing, list[list[str]]()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
        else:
            self.told.append(command)
        lacks = any(word.startswith(self.missing) for word in command) if self.missing else False
        return subprocess.CompletedProcess(command, int(lacks))


def test_a_peer_that_cannot_be_installed_is_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip("dgl", "pyg-lib", "torch-sparse")
    monkeypatch.setattr(subprocess, "run", pip)
    run.Environment(tmp_path / "new")
    assert (tmp_path / "new" / "ready").exists()
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("pip could not install ").split(":")[0] for line in said] == [
        "torchdata==0.7.1",
        "pyg-lib",
        "torch-sparse",
    ]
    assert not any("networkx" in command for command in pip.told), "what DGL alone needs"
    asked = len(pip.told)
    run.Environment(tmp_path / "new")
    assert len(pip.told) == asked, "it is used again"


def test_without_this_package_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pip("torch=="))
    with pytest.raises(SystemExit, match=r"could not be installed: see .*installed\.log"):
        run.Environment(tmp_path / "new")
    assert not (tmp_path / "new" / "ready").exists(), "the next call tries again"


def made(folder: Path) -> Path:
    """An environment as run.py leaves it, in which this Python stands, without a peer."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "ready").touch()
    return folder


def test_what_fails_ends_the_run_with_what_it_said(tmp_path: Path) -> None:
    environment = run.Environment(made(tmp_path / "made"))
    assert environment.has("torch") and not environment.has("no_such_module")
    assert environment.run([environment.python, "-c", "print(7)"]) == "7\n"
    with pytest.raises(SystemExit, match=r"(?s)failed:.*no way out"):
        environment.run([environment.python, "-c", "raise ValueError('no way out')"])
    assert "torch==" in run.versions(environment) and "cores" in run.machine()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "0.5"], "graph is no graph that lightning-gnn-dist prepare has saved"),
        (["--target", "72"], r"--target is a share of the test nodes between 0 and 1, got 72\.0"),
        (["--target", "0.5", "--repeats", "0"], "--repeats and --runs must be at least 1"),
        (["--target", "0.5", "--passes", "1"], r"--passes 2 \(the first is not counted\)"),
        (["--target", "0.5", "--only", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_installed(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "no graph" not in said:
        (tmp_path / "graph").mkdir()
        (tmp_path / "graph" / "meta.json").touch()
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "new"), str(tmp_path / "graph"), *words])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_our_own_side_runs_without_any_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert drawing.picture(printed).count("<rect") > 3
