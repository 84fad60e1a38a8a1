"""Rows of nodes that came after training are those of one forward over the graph that has them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, NeighborSampler, PartitionedDataModule, PredictionWriter
from tests.data_fitting import trainer
from tests.extensions.inductive.test_inductive import STRATEGIES, Net, by_hand, whole
from tests.extensions.temporal.test_fits import SAMPLER, Watcher, temporal_graph
from tests.extensions.temporal.test_fits import by_hand as by_hand_in_time
from tests.ranks import run_ranks
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

NUM_NEW = 5


class InTime(Watcher):
    """Returns the rows of its seeds alone."""

    def predict_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        rows: Tensor = self(batch)
        return rows


def without_new(whole: Graph) -> Graph:
    """The graph without its last nodes."""
    return whole.induced(torch.arange(whole.num_nodes - NUM_NEW))


def without_new_of_types(data: HeteroData) -> Graph:
    """The graph without the last papers and the last author."""
    new = {"paper": NUM_NEW, "author": 1}
    old = {kind: torch.arange(data[kind].num_nodes - new.get(kind, 0)) for kind in data.node_types}
    return Graph.from_pyg(data.subgraph(old), time="time")


def check(
    world_size: int,
    name: str,
    module: pl.LightningModule,
    sampler: Any,
    before: Graph,
    later: Graph,
    rows: Tensor,
    out: Path,
) -> None:
    """Predict the new nodes, the last of their type, with a data module of the graph before them."""
    data = PartitionedDataModule(before, sampler=sampler, batch_size=16).on(later)
    new = torch.arange(len(rows) - NUM_NEW, len(rows))
    callbacks = [PredictionWriter(out)]
    running = trainer(world_size, STRATEGIES["plain" if world_size == 1 else "grappa"](), callbacks=callbacks)
    running.predict(module, data.only(new), return_predictions=False)
    np.testing.assert_allclose(np.load(out), rows[new].detach().numpy(), rtol=0, atol=1e-12, err_msg=name)


def predicted(rank: int, world_size: int, folder: Path) -> None:
    sampler = NeighborSampler([4, 4])
    for name in ("SAGE", "GCN", "GAT"):
        module, later = Net(name), whole()
        of = without_new(later), later, by_hand(module, later)
        check(world_size, name, module, sampler, *of, folder / f"{name}.npy")
    timed, later = InTime(), temporal_graph()
    of = without_new(later), later, by_hand_in_time(timed, later)
    check(world_size, "time", timed, SAMPLER, *of, folder / "time.npy")
    data = typed_graph_of_papers(200).to_pyg()
    for kind in data.node_types:
        data[kind].x = data[kind].x.double()
    torch.manual_seed(0)
    typed = HeteroSAGE(data.edge_types).double()
    of = without_new_of_types(data), Graph.from_pyg(data, time="time"), typed(data)
    check(world_size, "types", typed, sampler, *of, folder / "types.npy")


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_of_new_nodes_are_those_of_one_forward(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(predicted, num_ranks, tmp_path)
