"""With types too, local steps read the rows of the last meeting at the boundary."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from tests.boundary.models import Weights
from tests.boundary.typed_parts import CLOSE, DATA, OPTIONS, owners
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.typed_model import ByLayers
from tests.ranks import run_ranks


def part_loss(module: ByLayers, data: HeteroData, inside: dict[str, Tensor], known: list[dict[str, Tensor]]) -> Tensor:
    """The loss of a part: of nodes outside of it, layers read the rows of the last meeting."""
    x = data.x_dict
    for index in range(len(module.convs)):
        x = module.rows(index, x, data.edge_index_dict)
        if index < len(known):
            x = {kind: torch.where(inside[kind][:, None], x[kind], known[index][kind]) for kind in x}
    seeds = inside["paper"] & data["paper"].train_mask
    return F.cross_entropy(x["paper"][seeds], data["paper"].y[seeds])


def history_by_hand(num_layers: int, rounds: int, steps: int, owner: Tensor, graph: lgd.Graph) -> Weights:
    module = ByLayers(DATA.edge_types, num_layers)
    for _ in range(rounds):
        known, x = list[dict[str, Tensor]](), DATA.x_dict
        with torch.no_grad():
            for index in range(num_layers - 1):
                known.append(x := module.rows(index, x, DATA.edge_index_dict))
        replicas = []
        for rank in range(2):
            replica = ByLayers(DATA.edge_types, num_layers)
            replica.load_state_dict(module.state_dict())
            of_types = {kind: graph.types.nodes_of(kind) for kind in DATA.node_types}
            inside = {kind: owner[nodes.start : nodes.stop] == rank for kind, nodes in of_types.items()}
            for _ in range(steps):
                weights, loss = list(replica.parameters()), part_loss(replica, DATA, inside, known)
                for p, g in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                    p.data -= 0.1 * (0 if g is None else g)
            replicas.append(replica)
        pairs = zip(*(replica.parameters() for replica in replicas), strict=True)
        for p, values in zip(module.parameters(), pairs, strict=True):
            p.data = torch.stack([value.detach() for value in values]).mean(0)
    return {name: p.detach() for name, p in module.named_parameters()}


def remembered(rank: int, world_size: int, num_layers: int, sampler: Any, folder: Path) -> Weights:
    graph = lgd.Graph.from_pyg(DATA)

    def fit(epochs: int, **resumed: Any) -> ByLayers:
        how: dict[str, Any] = {"sampler": sampler, "boundary": lgd.History(), "batch_size": 1000, "seed": 0}
        data = lgd.PartitionedDataModule(graph, partitioner=owners(graph, 2), **how)
        strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), weights="uniform", **PATIENCE)
        module = ByLayers(DATA.edge_types, num_layers)
        run = trainer(world_size, strategy, max_epochs=epochs, **OPTIONS)
        run.fit(module, data, **resumed)
        run.save_checkpoint(folder / "half.ckpt")
        return module

    fit(1)
    return {name: p.detach() for name, p in fit(3, ckpt_path=folder / "half.ckpt").named_parameters()}


@pytest.mark.parametrize(
    ("num_layers", "sampler"),
    [(2, lgd.WholePartSampler(2)), (3, lgd.WholePartSampler(3)), (2, lgd.NeighborSampler([-1, -1]))],
)
def test_local_steps_with_rows_of_the_last_meeting_are_those_by_hand(
    num_layers: int, sampler: Any, tmp_path: Path
) -> None:
    graph = lgd.Graph.from_pyg(DATA)
    expected = history_by_hand(num_layers, 3, 2, owners(graph, 2).assignment, graph)
    for found in run_ranks(remembered, 2, num_layers, sampler, tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)
