"""The base of data modules whose batches may read rows that other ranks computed at the last meeting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lightning_gnn_dist.batches.placement import device_of
from lightning_gnn_dist.boundary.boundary import History
from lightning_gnn_dist.boundary.exchange_refusals import check_history
from lightning_gnn_dist.boundary.historic_rows import PLACE, HistoricRows, MeetingChannel
from lightning_gnn_dist.boundary.part_nodes import PartNodes
from lightning_gnn_dist.checks import check_at_least
from lightning_gnn_dist.data.part_datamodule import PartDataModule
from lightning_gnn_dist.data.plan import PartPlan
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.evaluation.layer_pass import LayerPass
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.layerwise.layers import HasLayers, layers_in, with_arrays
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import open_channel

if TYPE_CHECKING:
    from lightning_gnn_dist.joint import KeepsRows


class HistoryDataModule(PartDataModule):
    """Parts of a graph; with ``boundary=History()`` ranks know the rows of the last meeting of nodes around theirs."""

    def __init__(self, plan: PartPlan, settings: BatchSettings) -> None:
        super().__init__(plan, settings)
        self._history: tuple[Graph, HistoricRows] | None = None
        self._channel: MeetingChannel | None = None

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self._keeps_history():
            assert self.trainer is not None
            check_history(self.trainer, self.trainer.lightning_module)

    # What strategies ask for.

    def keeps_rows(self) -> bool:
        """Return whether ranks compute rows of inner layers for each other at meetings."""
        return isinstance(self.boundary, History)

    def batches_of_part(self) -> int | None:
        """Return after how many batches a rank's part changes, or None if it never does."""
        every = self._every()
        return None if every is None else every * self._num_batches()

    def refresh_rows(self, start: int) -> None:
        """Compute what batches from number ``start`` on read of nodes outside the part. Collective."""
        if not self._keeps_history():
            return
        assert self._train_loader is not None and self.trainer is not None
        check_at_least(0, start=start)
        self._train_loader.move_to(start)
        super_epoch = self._train_loader.super_epoch(start)
        part = self._own_parts().at(super_epoch)
        rows = self._historic(part)
        if not rows.is_planned:
            rows.plan(self._pass_of(part, super_epoch))
        with self.trainer.precision_plugin.forward_context():
            rows.refresh(self.trainer.lightning_module)

    # What it is made of.

    def _close(self) -> None:
        super()._close()
        if self._channel is not None:
            self._channel.close()

    def _at_rest(self) -> dict[str, Any]:
        return super()._at_rest() | {"_history": None, "_channel": None}

    def _keeps_history(self) -> bool:
        """Return whether this rank has rows of the last meeting."""
        return self.keeps_rows() and self._is_cut()

    def _historic(self, part: Graph) -> HistoricRows:
        """Return the rows of nodes outside the running part; those of the part before are forgotten."""
        if self._history is None or self._history[0] is not part:
            self._history = part, HistoricRows(part, self._own_parts().num_residents, self.sampler.num_hops)
        return self._history[1]

    def _shown(self, part: Graph) -> Graph:
        shown = super()._shown(part)
        if not self._keeps_history():
            return shown

        def with_places() -> Graph:
            whole = isinstance(self.sampler, WholePartSampler)
            return with_arrays(
                shown, (self._whole_arrays_of(part) if whole else {}) | {PLACE: self._historic(part).places}
            )

        return remembered(part, "with places of rows", with_places)

    def _whole_arrays_of(self, part: Graph) -> dict[str, Tensor]:
        assert self.trainer is not None
        layers = layers_in(cast(HasLayers, self.trainer.lightning_module))
        return self._of_whole_graph(layers, part.node_arrays["n_id"])

    def _pass_of(self, part: Graph, super_epoch: int) -> LayerPass:
        """Return what computes rows of own nodes, and sends them to other ranks. Collective."""
        num_ranks, device = self._world_size(), device_of(self.trainer)
        if self._channel is None:
            self._channel = MeetingChannel(open_channel(num_ranks))
        nodes = PartNodes(
            with_arrays(part, self._whole_arrays_of(part)),
            self._rank(),
            self.partition(num_ranks).assignment,
            self._cut.owner(super_epoch, num_ranks),
            num_ranks,
            widen=self._widening(),
        )
        return LayerPass(nodes, self._channel, device, self._eval_bytes, self._folder(), None, self._dtype())


if TYPE_CHECKING:

    def _offers(data: HistoryDataModule) -> KeepsRows:
        """Let mypy check that this has what a Protocol of ``joint`` asks for."""
        return data
