"""Rows of nodes that came after training are those of one forward over the graph that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, NeighborSampler, PartitionedDataModule, PredictionWriter
from tests.data.test_inductive import STRATEGIES, Net, by_hand, whole
from tests.data.test_temporal import SAMPLER, Watcher, temporal_graph
from tests.data.test_temporal import by_hand as by_hand_in_time
from tests.data_fitting import trainer
from tests.ranks import run_ranks
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

NUM_NEW = 5


class InTime(Watcher):
    """Returns the rows of its seeds alone."""

    def predict_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        rows: Tensor = self(batch)
        return rows


def grown(whole: Graph, path: Path) -> tuple[Graph, Graph]:
    """The graph without the last nodes, saved by whoever comes first, and with them, by a change of each rank."""
    data, known = whole.to_pyg(), whole.num_nodes - NUM_NEW
    of_edges = {name: data[name] for name in whole.edge_arrays}
    inside = (data.edge_index < known).all(0)
    nodes = {name: array[known:] for name, array in whole.node_arrays.items()}
    edges = {"edge_index": data.edge_index[:, ~inside]} | {name: array[~inside] for name, array in of_edges.items()}
    if not path.exists():
        first = {name: array[:known] for name, array in whole.node_arrays.items()}
        carried = {name: array[inside] for name, array in of_edges.items()}
        Graph.from_edge_index(data.edge_index[:, inside], known, first, carried).save(path)
    graph = Graph.open(path, version=0)
    return graph, graph.extended(nodes, edges)


def grown_with_types(data: HeteroData) -> tuple[Graph, Graph]:
    """The graph without the last papers and the last author, and with them."""
    known = {kind: data[kind].num_nodes - {"paper": NUM_NEW, "author": 1}.get(kind, 0) for kind in data.node_types}
    old, nodes, edges = HeteroData(), dict[str, Any](), dict[Any, Any]()
    for kind, count in known.items():
        old[kind].update({name: array[:count] for name, array in data[kind].items() if name != "num_nodes"})
        if count < data[kind].num_nodes:
            nodes[kind] = {name: array[count:] for name, array in data[kind].items() if name != "num_nodes"}
    for kind in data.edge_types:
        source, target = data[kind].edge_index
        inside = (source < known[kind[0]]) & (target < known[kind[2]])
        old[kind].update({name: array[..., inside] for name, array in data[kind].items()})
        edges[kind] = {name: array[..., ~inside] for name, array in data[kind].items()}
    graph = Graph.from_pyg(old, time="time")
    return graph, graph.extended(nodes, edges)


def check(
    world_size: int,
    name: str,
    module: pl.LightningModule,
    sampler: Any,
    of: tuple[Graph, Graph],
    rows: Tensor,
    out: Path,
) -> None:
    """Predict the new nodes with a data module of the graph before them."""
    data = PartitionedDataModule(of[0], sampler=sampler, batch_size=16).on(of[1])
    new = of[1].nodes_since(0)
    assert len(new) == NUM_NEW
    callbacks = [PredictionWriter(out)]
    running = trainer(world_size, STRATEGIES["plain" if world_size == 1 else "grappa"](), callbacks=callbacks)
    running.predict(module, data.only(new), return_predictions=False)
    np.testing.assert_allclose(np.load(out), rows[new].detach().numpy(), rtol=0, atol=1e-12, err_msg=name)


def predicted(rank: int, world_size: int, path: Path, folder: Path) -> None:
    sampler = NeighborSampler([4, 4])
    for name in ("SAGE", "GCN", "GAT"):
        module, of = Net(name), grown(whole(), path / "plain")
        check(world_size, name, module, sampler, of, by_hand(module, whole()), folder / f"{name}.npy")
    timed = InTime()
    of = grown(temporal_graph(), path / "timed")
    check(world_size, "time", timed, SAMPLER, of, by_hand_in_time(timed, temporal_graph()), folder / "time.npy")
    data = typed_graph_of_papers(200).to_pyg()
    for kind in data.node_types:
        data[kind].x = data[kind].x.double()
    torch.manual_seed(0)
    typed = HeteroSAGE(data.edge_types).double()
    check(world_size, "types", typed, sampler, grown_with_types(data), typed(data), folder / "types.npy")


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_of_new_nodes_are_those_of_one_forward(num_ranks: int, tmp_path: Path) -> None:
    graphs = {"plain": whole(), "timed": temporal_graph()}
    for name, graph in graphs.items():
        grown(graph, tmp_path / name)
    run_ranks(predicted, num_ranks, tmp_path, tmp_path)
    assert all(Graph.open(tmp_path / name).fingerprint == graph.fingerprint for name, graph in graphs.items())
