"""The command draws what runs left behind, and says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.report import names_of
from tests.pictures.records import record


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name in ("llcg", "tma"):
        (tmp_path / name / "version_0").mkdir(parents=True)
        record().save(tmp_path / name / "version_0")
    return [str(tmp_path / name / "version_0") for name in ("llcg", "tma")]


def test_runs_are_drawn_on_one_page(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "there" / "page.html"
    main(["report", *runs, "--out", str(out), "--metric", "val_loss"])
    page = out.read_text()
    assert "<h2>llcg</h2>" in page and "<h2>tma</h2>" in page and "val_loss over time" in page
    assert capsys.readouterr().out.split() == [str(out)]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/llcg/version_0", "runs/grappa/version_0"], ["llcg", "grappa"]),
        (["runs/llcg/version_0", "runs/llcg/version_1"], ["version_0", "version_1"]),
        (["a/llcg/x/version_0", "a/tma/y/version_0"], ["llcg/x", "tma/y"]),
        (["/there/runs/llcg/version_3"], ["llcg/version_3"]),
        (["runs", "runs/llcg"], ["runs", "runs/llcg"]),
        (["llcg", "tma"], ["llcg", "tma"]),
        (["a/b/c", "a/c"], ["b/c", "c"]),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(folders: list[str], names: list[str]) -> None:
    assert names_of([Path(folder) for folder in folders]) == names


def test_what_is_missing_is_said(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"llcg has no report\.json\. Did you mean .*version_0\?"):
        main(["report", "llcg"])
    with pytest.raises(SystemExit, match=r"None of these runs has measured 'f1': they have \['accuracy', 'val_loss'\]"):
        main(["report", runs[0], "--metric", "f1"])
    assert not (tmp_path / "report.html").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="PNGs are drawn by matplotlib"):
        main(["report", runs[0], "--png", "pngs"])
