"""The advice to those who come from elsewhere, and the configurations of the pages, run as they stand."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.cli.main import main
from tests.pages import ROOT, Block, blocks, public
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers


def after(diff: Block) -> str:
    """The lines that a diff leads to."""
    return "\n".join(line[1:] for line in diff.code.splitlines() if line[0] in " +")


def names(**more: Any) -> dict[str, Any]:
    return public() | {"pl": pl, "torch": torch, "numpy": numpy, "data": as_pyg(), "model": SAGE(8, 4)} | more


def as_pyg(num_nodes: int = 300, num_classes: int = 4, num_features: int = 8) -> Data:
    graph = communities(num_nodes, num_classes, num_features=num_features)
    receiver = torch.arange(num_nodes).repeat_interleave(graph.degrees())
    return Data(edge_index=torch.stack([graph.indices.long(), receiver]), **graph.node_arrays)


def quiet_trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    return pl.Trainer(**(options | quiet), enable_model_summary=False)


@pytest.mark.parametrize("at", [0, 1])
def test_the_loaders_of_pyg_are_replaced(at: int) -> None:
    code = after(blocks("diff", "migration", "NeighborLoader or LightningNodeData")[at])
    trainer = quiet_trainer(accelerator="cpu", devices=1)
    exec(code, names(trainer=trainer))
    assert "accuracy" in trainer.callback_metrics


def test_the_loader_of_types_is_replaced() -> None:
    (block,), graph = blocks("diff", "migration", "Loaders of a HeteroData"), typed_graph_of_papers(200)
    model = HeteroSAGE(list(graph.types.edge_types) if graph.types else [])
    trainer = quiet_trainer(accelerator="cpu", devices=1)
    exec(after(block), names(data=graph.to_pyg(), model=model, trainer=trainer))
    assert "val_acc" in trainer.callback_metrics


def fit_as_written(rank: int, world_size: int, code: str) -> float:
    scope = names(pl=SimpleNamespace(Trainer=quiet_trainer))
    exec(code, scope)
    return float(scope["trainer"].callback_metrics["accuracy"])


def test_the_distributed_package_of_pyg_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, train = map(after, blocks("diff", "migration", "torch_geometric.distributed"))
    exec(prepare, names())
    first, second = run_ranks(fit_as_written, 2, train)
    assert first == second > 0


def test_a_graph_of_dgl_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = as_pyg()
    masks = {name: data[name].byte() for name in ("train_mask", "val_mask", "test_mask")}  # DGL's masks are bytes
    ndata = {"feat": data.x, "label": data.y, **masks}
    (block,) = blocks("python", "migration", "DistDGL")
    exec(block.code, names(g=SimpleNamespace(edges=lambda: tuple(data.edge_index), ndata=ndata)))
    main(["prepare", "arrays.npz", "my_graph"])
    assert Graph.open("my_graph").fingerprint == Graph.from_pyg(data).fingerprint


def test_every_diff_is_run() -> None:
    assert len(blocks("diff")) == 6


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: f"{block.page}: {block.heading}")
def test_a_configuration_is_accepted(block, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "my.yaml").write_text(block.code.replace("my_modules", "node_classification"))
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "fit", f"--config={tmp_path}/my.yaml", "--print_config"])
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = capsys.readouterr().out
    assert "MetisPartitioner" in printed and "GrappaStrategy" in printed and "max_epochs: 30" in printed
