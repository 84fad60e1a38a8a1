"""Tables of nodes that came after training name them by the ids that the user gave, and have the rows of a forward."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    NeighborSampler,
    PartitionedDataModule,
    PredictionWriter,
    predict_by_layer,
    prepare_graph,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.train import nodes_asked
from lightning_gnn_dist.graph.user_ids import nodes_with_ids
from tests.callbacks.test_tables import COUNT, NAMES, Rows, prepared
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

NEW = ["brand-new", "z"]
EDGES = torch.tensor([[COUNT, 3, COUNT + 1], [3, COUNT, 5]])
WRITES = ("author", "writes", "paper")
CONFIG = """\
seed_everything: 0
model: tests.callbacks.test_tables.Rows
data: {graph: graph, sampler: {class_path: lightning_gnn_dist.NeighborSampler, init_args: {num_neighbors: [5]}}}
trainer: {accelerator: cpu, devices: 2, logger: false, enable_progress_bar: false, enable_checkpointing: false,
  enable_model_summary: false, strategy: {class_path: lightning_gnn_dist.GrappaStrategy}}
"""


class OfPapers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = SAGEConv(2, 3)

    def forward(self, batch: Any) -> Tensor:
        ends = batch["author"].x, batch["paper"].x
        rows: Tensor = self.conv(ends, batch[WRITES].edge_index)[: batch["paper"].batch_size]
        return rows


def by_hand(conv: SAGEConv, senders: Tensor, receivers: Tensor, edges: Tensor) -> Tensor:
    """The rows of all receivers, one after the other, in float64."""
    to, own = conv.lin_l.weight.double(), conv.lin_r.weight.double()
    of_each = [edges[0][edges[1] == node] for node in range(len(receivers))]
    means = [senders[some].double().mean(0) if len(some) else torch.zeros(2).double() for some in of_each]
    return (torch.stack(means) @ to.T + conv.lin_l.bias.double() + receivers.double() @ own.T).detach()


def extended(folder: Path) -> Graph:
    """The graph with two new nodes, which have ids of the user's; each rank makes the change, and one is first."""
    first = Graph.open(folder / "graph", version=0)
    x = {name: array[:2] for name, array in first.node_arrays.items()}
    return first.extended(x | {"id": NEW}, EDGES)


def prepared_with_types(folder: Path) -> None:
    """Papers with words for ids, and authors with numbers, in a graph of two new papers and a new author."""
    for name in ("nodes", "edges"):
        (folder / "tables" / name).mkdir(parents=True)
    papers = [f"P{7 * n % 11},{n % 3},train,{n},{-n}" for n in range(11)]
    (folder / "tables" / "nodes" / "paper.csv").write_text("\n".join(["id,label,split,a,b", *papers]))
    authors = [f"{1000 - n},{n},1" for n in range(5)]
    (folder / "tables" / "nodes" / "author.csv").write_text("\n".join(["id,a,b", *authors]))
    pairs = [f"{1000 - n % 5},P{n % 11}" for n in range(30)]
    (folder / "tables" / "edges" / "author__writes__paper.csv").write_text("\n".join(["source,target", *pairs]))
    prepare_graph(folder / "tables", folder / "typed")
    Graph.open(folder / "typed").extended(
        {"paper": {"x": torch.ones(2, 2), "id": ["P99", "P77"]}, "author": {"x": torch.ones(1, 2), "id": [5]}},
        {WRITES: torch.tensor([[5, 0, 5], [11, 12, 12]])},
    )


def start(*callbacks: Any) -> pl.Trainer:
    return trainer(2, GrappaStrategy(**PATIENCE), callbacks=list(callbacks))


def write(rank: int, world_size: int, folder: Path) -> None:
    later, out, sampler = extended(folder), folder / "out", NeighborSampler([5])
    data = PartitionedDataModule(Graph.open(folder / "graph", version=0), sampler=sampler)
    path = folder / "graph"
    typed = PartitionedDataModule(Graph.open(folder / "typed", version=0), sampler=sampler).on(folder / "typed")
    questions = {
        "before": data,
        "all": data.on(later),
        "new": data.on(later).only(later.nodes_since(0)),
        "some": data.on(path).only(nodes_with_ids(path, ["z", NAMES[3], "brand-new"])),
        "papers": typed.only([12, 3, 11]),
    }
    for name, asked in questions.items():
        writer = PredictionWriter(out / f"{name}.parquet")
        module = OfPapers() if name == "papers" else Rows()
        start(writer).predict(module, asked, return_predictions=False)
    predict_by_layer(start(), Rows(), later, out / "layers.parquet")
    with pytest.raises(ValueError, match="has ids of 41 nodes, and the graph that is predicted has 43: nodes that"):
        start(PredictionWriter(out / "no.parquet", ids_of=folder / "old")).predict(Rows(), questions["new"])


def check(file: Path, names: list[Any], known: list[Any], rows: Tensor) -> None:
    table = pytest.importorskip("pyarrow.parquet").read_table(file).to_pydict()
    assert table["node"] == names
    np.testing.assert_allclose(table["row"], rows[[known.index(name) for name in names]], atol=1e-5)


def test_tables_of_new_nodes_have_the_ids_they_came_with(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    Graph.open(prepared(tmp_path)).save(tmp_path / "old")
    prepared_with_types(tmp_path)
    run_ranks(write, 2, tmp_path)
    later, known, out = extended(tmp_path), NAMES + NEW, tmp_path / "out"
    x: Any = later.node_arrays["x"]
    rows = by_hand(Rows().conv, x, x, later.to_pyg().edge_index)  # type: ignore[arg-type]
    for name, names in (("all", known), ("layers", known), ("new", NEW), ("some", ["z", NAMES[3], "brand-new"])):
        check(out / f"{name}.parquet", names, known, rows)
    before = Graph.open(tmp_path / "graph", version=0)
    check(out / "before.parquet", NAMES, NAMES, by_hand(Rows().conv, x, x[:COUNT], before.to_pyg().edge_index))  # type: ignore[arg-type]
    typed: Any = Graph.open(tmp_path / "typed").to_pyg()
    rows = by_hand(OfPapers().conv, typed["author"].x, typed["paper"].x, typed[WRITES].edge_index)
    papers = [*(f"P{7 * n % 11}" for n in range(11)), "P99", "P77"]
    check(out / "papers.parquet", ["P77", papers[3], "P99"], papers, rows)
    assert not (out / "no.parquet").exists()


def ask(rank: int, world_size: int, folder: Path, *options: str) -> None:
    os.chdir(folder)
    other = ["--data.graph=old", "--data.evaluation.on=graph"]
    for name, more in (
        ("all", other),
        ("new", ["--nodes=since:0"]),
        ("some", [*other, "--nodes=z,W21", "--by_user_id=true"]),
    ):
        sys.argv = ["lightning-gnn-dist", "predict", "--config=my.yaml", f"--output={name}.parquet", *more]
        main()


@pytest.mark.slow
def test_the_command_names_new_nodes_by_ids_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    Graph.open(prepared(tmp_path)).save(tmp_path / "old")
    later, known = extended(tmp_path), NAMES + NEW
    tmp_path.joinpath("my.yaml").write_text(CONFIG)
    run_ranks(ask, 2, tmp_path)
    x: Any = later.node_arrays["x"]
    rows = by_hand(Rows().conv, x, x, later.to_pyg().edge_index)  # type: ignore[arg-type]
    for name, names in (("all", known), ("new", NEW), ("some", ["z", "W21"])):
        check(tmp_path / f"{name}.parquet", names, known, rows)
    data = PartitionedDataModule(tmp_path / "old").on(tmp_path / "graph")
    assert nodes_asked(data, Namespace(nodes="since:0")) == [COUNT, COUNT + 1]  # of the graph that is predicted
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    one = "--trainer={accelerator: cpu, devices: 1, logger: false, enable_checkpointing: false}"
    for options, says in (
        (["--nodes=since:1"], "at version 1, no node is newer than 1"),
        (["--nodes=W99", "--by_user_id=true"], "has the id 'W99'"),
        (["--nodes=since:0", "--ids_of=old"], "old has ids of 41 nodes, and the graph that is predicted has 43"),
        (
            ["--nodes=0", "--output=all.parquet"],
            "all.parquet exists already. Name another --output, or --overwrite true.",
        ),
    ):
        command = ["lightning-gnn-dist", "predict", "--config=my.yaml", one, "--output=no.parquet", *options]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            main()
        assert says in capsys.readouterr().err and not (tmp_path / "no.parquet").exists()
