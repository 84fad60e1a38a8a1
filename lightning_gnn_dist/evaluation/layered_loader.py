"""Batches of an evaluation whose rows are ready: every layer is computed for all seeds before the first batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.loader import Batches, BatchLoader
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedBatch
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.evaluation.layer_pass import LayerPass, NodesOfRank, Step
from lightning_gnn_dist.evaluation.model_layers import ModelLayers, answered, layers_of_model
from lightning_gnn_dist.evaluation.pass_progress import progress_of
from lightning_gnn_dist.evaluation.row_table import RowTable
from lightning_gnn_dist.wire.collectives import Channel, open_channel

log = logging.getLogger(__name__)


class Targets(NamedTuple):
    """What a batch evaluates.

    Attributes:
        nodes: Its seeds.
        others: What else the batch has, by name.
    """

    nodes: Tensor
    others: Mapping[str, Any] = {}


class HasInputs(NodesOfRank, Protocol):
    """Nodes of a rank that can also give the input rows of its seeds."""

    def input_names(self) -> list[str]:
        """The names of a batch's arrays."""
        ...

    def inputs(self, name: str, nodes: Tensor) -> Tensor | None:
        """The rows of a node array, or None if there is none of that name."""
        ...


class ReadyRows:
    """Computes the rows of all seeds of a rank, once for each evaluation. All ranks do so together.

    Args:
        trainer: Holds the model, and says with which precision it computes.
        nodes: Returns the part of the graph that this rank computes rows for, for some layers. Collective.
        num_ranks: How many ranks share the work.
        budget_bytes: Bytes that the work may take on this rank.
        folder: Where rows go that take more, or None for the system's folder of temporary files.
    """

    def __init__(
        self,
        trainer: Trainer,
        nodes: Callable[[ModelLayers, Channel], HasInputs],
        num_ranks: int,
        budget_bytes: int,
        folder: Path | None,
    ) -> None:
        self._trainer, self._nodes_of_rank, self._num_ranks = trainer, nodes, num_ranks
        self._budget_bytes, self._folder = budget_bytes, folder
        self._nodes: HasInputs | None = None
        self._channel: Channel | None = None
        self._pass: LayerPass | None = None
        self._steps: list[Step] = []
        self._was_asked, self._is_off = True, False
        self._table: RowTable | None = None
        self._owner: nn.Module | None = None
        self._mode = False

    @property
    def nodes(self) -> HasInputs:
        assert self._nodes is not None
        return self._nodes

    @contextmanager
    def computed(self, seeds: Callable[[], Tensor]) -> Iterator[bool]:
        """Compute the rows of some seeds, and answer with them in the block; or yield False, and do neither."""
        if self._is_off or not self._agree():
            yield False
            return
        model = layers_of_model(self._module)
        assert model is not None
        self._compute(model, seeds)
        self._was_asked = False
        try:
            with answered(model.owner, lambda neighbourhood: neighbourhood.rows_of(model.owner)):
                yield True
        finally:
            self._table = None

    def rows_of(self, module: object, nodes: Tensor) -> Tensor | None:
        """Return the last layer's rows of some seeds; None where another module asks, or this one in training."""
        owner = self._owner
        if self._table is None or owner is None or module is not owner or owner.training is not self._mode:
            return None
        self._was_asked = True
        return self._table.take(nodes)

    def close(self) -> None:
        """End the connections. Not collective."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._pass = self._nodes = self._table = None

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    def _agree(self) -> bool:
        """Return whether any rank has asked for the rows of the evaluation before. Collective."""
        if self._channel is None:
            self._channel = open_channel(self._num_ranks)
        asked = torch.tensor([int(self._was_asked)])
        self._is_off = not bool(torch.cat(self._channel.exchange([asked] * self._channel.size)).any())
        if self._is_off:
            log.info(
                "The layers of %s were computed for all nodes, and nobody asked for them: from now on it is evaluated "
                "on full neighbourhoods. Let forward() return through_layers(self, batch).",
                type(self._module).__name__,
            )
        return not self._is_off

    def _compute(self, model: ModelLayers, seeds: Callable[[], Tensor]) -> None:
        assert self._channel is not None
        self._owner, self._mode = model.owner, model.owner.training
        if self._pass is None:
            self._nodes = self._nodes_of_rank(model, self._channel)
            device = self._trainer.strategy.root_device
            self._pass = LayerPass(self._nodes, self._channel, device, self._budget_bytes, self._folder, model.norm)
            own = seeds() if model.norm is None else torch.arange(self._nodes.most_rows)
            self._steps = self._pass.plan(own, len(model.layers))
        total = sum(len(step.nodes) for step in self._steps)
        with self._trainer.precision_plugin.forward_context(), progress_of(self._trainer, total) as progress:
            self._table = self._pass.rows(model.layers, self._steps, progress)


class LayeredLoader(BatchLoader):
    """A loader whose batches know the rows that layers compute for their seeds.

    Args:
        rows: Computes them, before the first batch of a pass.
        targets: Returns what a batch of some seeds evaluates.
        options: What a :class:`BatchLoader` takes.
    """

    def __init__(self, rows: ReadyRows, targets: Callable[[Tensor], Targets], *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._rows, self._targets = rows, targets

    def __iter__(self) -> Batches:
        with self._rows.computed(lambda: self._targets(self._seeds).nodes.unique()) as is_computed:
            if not is_computed:
                yield from super().__iter__()
                return
            first = self._next_pass * len(self)
            self._next_pass += 1
            for number in range(first, first + len(self)):
                yield self._batch(BatchKey(self._seed, *divmod(number, len(self))))

    def close(self) -> None:
        super().close()
        self._rows.close()

    def _batch(self, key: BatchKey) -> SeedBatch:
        seeds = self._seeds_of(key)
        nodes, others = self._targets(seeds)

        def made() -> SampledData:
            (batch,) = self._source.make([seeds], [key])
            return batch

        neighbourhood = Neighbourhood(
            len(nodes),
            made,
            lambda name: self._rows.nodes.inputs(name, nodes),
            lambda module: self._rows.rows_of(module, nodes),
        )
        return SeedBatch.around(neighbourhood, self._rows.nodes.input_names(), **others)
