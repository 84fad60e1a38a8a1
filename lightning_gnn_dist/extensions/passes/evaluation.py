"""A pass of an evaluation whose rows may lie on a device or in files; each rank keeps those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lightning_gnn_dist.extensions.passes.layer_pass import LayerPass, NodesOfRank
from lightning_gnn_dist.extensions.passes.nodes import WholeNodes, folder_beside
from lightning_gnn_dist.extensions.passes.row_table import RowTables
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.layer_pass import HasInputs, Progress, Work
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.through_layers import Layer
from lightning_gnn_dist.wire.channel import Channel


class NodesWithInputs(NodesOfRank, HasInputs, Protocol):
    """Nodes of a rank that can also give the input rows of its seeds."""


class EvaluationPass:
    """The layers of a model for the nodes that lead to the seeds of this rank, and to those of others. Collective.

    Args:
        nodes: The nodes of this rank.
        seeds: Its seeds, in increasing order.
        model: The layers.
        channel: The ranks that share the work.
        work: How rows are computed.
        folder: Where rows go that take too much memory.
    """

    def __init__(
        self,
        nodes: NodesWithInputs,
        seeds: Tensor,
        model: ModelLayers,
        channel: Channel,
        work: Work,
        folder: Path | None,
    ) -> None:
        self.nodes = nodes
        self._pass = LayerPass(nodes, channel, work, folder, model.norm)
        self._planned = self._pass.plan(seeds, len(model.layers))
        self.num_rows = sum(len(of_layer.nodes) for of_layer in self._planned)

    def try_one(self, layer: Layer) -> None:
        self._pass.try_one(layer, self._planned[0])

    def rows(self, layers: Sequence[Layer], progress: Progress) -> RowTables:
        return self._pass.rows(layers, self._planned, progress)


def beyond_memory(
    graph: Graph, seeds: Tensor, own: Callable[[], Tensor], model: ModelLayers, channel: Channel, work: Work
) -> EvaluationPass:
    """Return the pass over a graph that every rank has; the arguments are those of ``pass_over``."""
    nodes = WholeNodes(graph, seeds, model.layers, channel.size, work.budget_bytes, widen=work.widen)
    return EvaluationPass(nodes, own(), model, channel, work, folder_beside(graph))
