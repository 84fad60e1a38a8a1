"""Rows of nodes outside the running part, which the ranks compute for each other at meetings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from lightning_gnn_dist.boundary.historic_rows import HistoricRows, MeetingChannel
from lightning_gnn_dist.boundary.part_nodes import PartNodes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.layers.layer_pass import LayerPass
from lightning_gnn_dist.wire.channel import open_channel


class MeetingRows:
    """Knows the rows of nodes outside the running part; those of the part before are forgotten.

    Args:
        running: The run, and how its batches are made.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._rows: tuple[Graph, HistoricRows] | None = None
        self._channel: MeetingChannel | None = None

    def rows_of(self, part: Graph, is_inside: Tensor, offsets: Sequence[int]) -> HistoricRows:
        """Return the rows of nodes outside a part.

        Args:
            part: The part.
            is_inside: Which of its nodes are inside.
            offsets: The first id of each node type in the whole graph, and at the end the number of its nodes.
        """
        if self._rows is None or self._rows[0] is not part:
            num_hops = self._running.settings.of_parts().num_hops
            self._rows = part, HistoricRows(part, is_inside, num_hops, offsets)
        return self._rows[1]

    def refresh(self, rows: HistoricRows, own_nodes: Callable[[], PartNodes], folder: Path | None) -> None:
        """Compute the rows anew. Collective.

        Args:
            rows: The rows of the running part.
            own_nodes: Returns the nodes that this rank computes.
            folder: Where rows go that take too much memory.
        """
        run = self._running
        assert run.trainer is not None
        if not rows.is_planned:
            if self._channel is None:
                self._channel = MeetingChannel(open_channel(run.num_ranks))
            limits = run.device, run.bytes_of_evaluation, folder
            rows.plan(LayerPass(own_nodes(), self._channel, *limits, None, run.dtype))
        with run.trainer.precision_plugin.forward_context():
            rows.refresh(run.trainer.lightning_module)

    def close(self) -> None:
        """End the connections. Not collective."""
        if self._channel is not None:
            self._channel.close()
