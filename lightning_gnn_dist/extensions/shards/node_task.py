"""The training nodes of shards, as what is learned and judged."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.data.task import NodeTask
from lightning_gnn_dist.extensions.shards.home import ShardHome
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.sampling.base import SeesByTime


class ShardNodeTask(NodeTask):
    """Nodes of a graph of which each rank has a shard.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
    """

    home: ShardHome

    def __init__(self, home: ShardHome, values: ValueCheck) -> None:
        super().__init__(home, values)
        self._places = torch.empty(0, dtype=torch.int64)  # of the part's training nodes among those of all ranks

    def begin(self, *, is_fit: bool) -> None:
        home = self.home
        if is_fit:
            marked = home.marked()
            counts = home.count(len(marked[home.of_copy()]), len(marked))
            if not home.exchanges and bool((counts == 0).any()):
                rank = int(counts.argmin())
                raise ValueError(
                    f"Shard {rank % home.bounds.num_shards} of {home.path} has no training nodes for rank {rank} of "
                    f"{len(counts)}, which would have nothing to learn from: divide the graph by "
                    'MetisPartitioner(balance="train"), or use fewer shards or ranks.'
                )
        if isinstance(ours := home.running.settings.training_sampler, SeesByTime):
            ours.check_shard(home.graph().shard.rows)
        if is_fit and home.boundary.seed_hops:
            own = home.graph().shard.rows
            places = {"places": home.marked_before + own.node_arrays["train_mask"].cumsum(0) - 1}
            self._places = home.graph().rows_of(places, home.part_ids)["places"]

    def most(self) -> int:
        return self.home.most

    def own_seeds(self, part: Graph) -> Tensor:
        return self.home.own_seeds(part)

    def own_nodes(self, part: Graph) -> Tensor:
        return torch.arange(self.home.graph().shard.rows.num_nodes)

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        if self.home.boundary.seed_hops:
            return self._places[seeds]
        return self.home.marked_before + torch.arange(self.home.marked().numel())[self.home.of_copy()]

    def own_training(self) -> tuple[Tensor, Tensor, int]:
        home = self.home
        own = home.marked()[home.of_copy()]
        return home.graph().ids_of_own(own), self.inputs_of(home.running_part(), own), home.num_marked
