"""Tables of nodes that came after training name them by the ids that the user gave, and have the rows of a forward."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.user_ids import nodes_with_ids
from tests.callbacks.test_predictions import COUNT, NAMES, Rows, check, prepared, prepared_from, start
from tests.ranks import run_ranks

NEW = ["brand-new", "z"]
WRITES = ("author", "writes", "paper")


class OfPapers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = SAGEConv(2, 3)

    def forward(self, batch: Any) -> Tensor:
        ends = batch["author"].x, batch["paper"].x
        rows: Tensor = self.conv(ends, batch[WRITES].edge_index)[: batch["paper"].batch_size]
        return rows


def rows_by_hand(conv: SAGEConv, senders: Tensor, receivers: Tensor, edges: Tensor) -> Tensor:
    """The rows of all receivers, one after the other, in float64."""
    to, own = conv.lin_l.weight.double(), conv.lin_r.weight.double()
    of_each = [edges[0][edges[1] == node] for node in range(len(receivers))]
    means = [senders[some].double().mean(0) if len(some) else torch.zeros(2).double() for some in of_each]
    return (torch.stack(means) @ to.T + conv.lin_l.bias.double() + receivers.double() @ own.T).detach()


def prepared_again(folder: Path) -> lgd.Graph:
    """The graph of the same tables with two more nodes and their edges."""
    for name, lines in (
        ("nodes", [f"{name},{7 + place},1" for place, name in enumerate(NEW)]),
        ("edges", [f"{NEW[0]},{NAMES[3]}", f"{NEW[1]},{NAMES[5]}"]),
    ):
        with (folder / f"{name}.csv").open("a") as table:
            table.write("\n" + "\n".join(lines))
    return lgd.Graph.open(prepared_from(folder, "later"))


def prepared_with_types(folder: Path, name: str, new: list[str]) -> None:
    """Papers with words for ids, and authors with numbers; new papers cite nobody, and one new author writes them."""
    tables = folder / f"tables_of_{name}"
    for kind in ("nodes", "edges"):
        (tables / kind).mkdir(parents=True)
    papers = [f"P{7 * n % 11},{n % 3},train,{n},{-n}" for n in range(11)] + [f"{paper},0,train,1,1" for paper in new]
    (tables / "nodes" / "paper.csv").write_text("\n".join(["id,label,split,a,b", *papers]))
    authors = [f"{1000 - n},{n},1" for n in range(5)] + ["5,1,1"] * bool(new)
    (tables / "nodes" / "author.csv").write_text("\n".join(["id,a,b", *authors]))
    pairs = [f"{1000 - n % 5},P{n % 11}" for n in range(30)] + [f"5,{paper}" for paper in new]
    (tables / "edges" / "author__writes__paper.csv").write_text("\n".join(["source,target", *pairs]))
    lgd.prepare_graph(tables, folder / name)


def write_papers(rank: int, world_size: int, folder: Path) -> None:
    later, out, sampler = folder / "later", folder / "out", lgd.NeighborSampler([5])
    data = lgd.PartitionedDataModule(folder / "graph", sampler=sampler)
    typed = lgd.PartitionedDataModule(folder / "typed", sampler=sampler).on(folder / "typed_later")
    questions = {
        "before": data,
        "all": data.on(later),
        "new": data.on(later).only(range(COUNT, COUNT + 2)),
        "some": data.on(later).only(nodes_with_ids(later, ["z", NAMES[3], "brand-new"])),
        "papers": typed.only([12, 3, 11]),
    }
    for name, asked in questions.items():
        writer = lgd.PredictionWriter(out / f"{name}.parquet")
        module = OfPapers() if name == "papers" else Rows()
        start(writer).predict(module, asked, return_predictions=False)
    with pytest.raises(ValueError, match="has ids of 41 nodes, and the graph that is predicted has 43: nodes that"):
        start(lgd.PredictionWriter(out / "no.parquet", ids_of=folder / "graph")).predict(Rows(), questions["new"])


def test_tables_of_new_nodes_have_the_ids_they_came_with(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    before = lgd.Graph.open(prepared(tmp_path))
    later, known, out = prepared_again(tmp_path), NAMES + NEW, tmp_path / "out"
    prepared_with_types(tmp_path, "typed", [])
    prepared_with_types(tmp_path, "typed_later", ["P99", "P77"])
    run_ranks(write_papers, 2, tmp_path)
    x: Any = later.node_arrays["x"]
    rows = rows_by_hand(Rows().conv, x, x, later.to_pyg().edge_index)  # type: ignore[arg-type]
    for name, names in (("all", known), ("new", NEW), ("some", ["z", NAMES[3], "brand-new"])):
        check(out / f"{name}.parquet", names, known, rows)
    check(out / "before.parquet", NAMES, NAMES, rows_by_hand(Rows().conv, x, x[:COUNT], before.to_pyg().edge_index))  # type: ignore[arg-type]
    typed: Any = lgd.Graph.open(tmp_path / "typed_later").to_pyg()
    rows = rows_by_hand(OfPapers().conv, typed["author"].x, typed["paper"].x, typed[WRITES].edge_index)
    papers = [*(f"P{7 * n % 11}" for n in range(11)), "P99", "P77"]
    check(out / "papers.parquet", ["P77", papers[3], "P99"], papers, rows)
    assert not (out / "no.parquet").exists()
