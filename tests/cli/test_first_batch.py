"""What `prepare` compiles before the first training."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn_dist import citations, communities
from lightning_gnn_dist.cli import first_batch, prepare
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.engine import compiling, kernels


def files(folder: Path) -> Path:
    folder.mkdir()
    np.save(folder / "edge_index.npy", np.array([[0, 1, 2], [1, 2, 0]]))
    np.save(folder / "y.npy", np.array([0, 1, 0]))
    return folder


def test_prepare_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(prepare, "compile_for", made.append)
    source = files(tmp_path / "arrays")
    for number, is_there in enumerate([False, True]):
        monkeypatch.setattr(prepare, "is_compiled", lambda is_there=is_there: is_there)
        main(["prepare", str(source), str(tmp_path / f"graph{number}")])
    assert made == [tmp_path / "graph0"]


@pytest.mark.parametrize("graph", [communities(50, 3), citations(300, 3)], ids=["plain", "typed"])
def test_a_batch_is_made_of_any_saved_graph(graph: object, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph")  # type: ignore[attr-defined]
    first_batch.make_batch(tmp_path / "graph")
    assert first_batch.is_compiled() == compiling.is_kept(kernels.sample) is True


@pytest.mark.slow  # a process of its own, which imports torch
def test_a_graph_that_gives_no_batch_is_prepared_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_batch.compile_for(tmp_path / "nowhere")
    said = capsys.readouterr().out
    assert said.startswith("The first training will compile the loops that make batches: ")
    assert f"{tmp_path / 'nowhere'} is not a saved graph" in said
