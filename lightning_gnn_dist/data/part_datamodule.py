"""The base of data modules of a graph that every host has, cut into a part for each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.ahead.disk_rows import DiskRows, check_rows_in_files
from lightning_gnn_dist.batches.ahead.file_source import FileSource
from lightning_gnn_dist.batches.ahead.row_cache import figures_of
from lightning_gnn_dist.batches.part_batch import Run
from lightning_gnn_dist.batches.placement import Placement, device_of, release, stream_to
from lightning_gnn_dist.batches.precision import type_that_stays
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.boundary.auto import LOOKED_AT, Auto, chosen, chosen_here, kept, room_of
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, History
from lightning_gnn_dist.boundary.exchange_plan import Owners
from lightning_gnn_dist.boundary.exchange_refusals import against_exchange
from lightning_gnn_dist.boundary.prices import short_name
from lightning_gnn_dist.checks import check_at_least, check_below
from lightning_gnn_dist.data.exchanging import ExchangingDataModule
from lightning_gnn_dist.data.part_reader import PartReader
from lightning_gnn_dist.data.plan import PartPlan
from lightning_gnn_dist.data.residency import Holding, default_period
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.data.switcher import PartSwitcher
from lightning_gnn_dist.evaluation.choice import Counter, Evaluated, seeds_at_once
from lightning_gnn_dist.evaluation.layered_loader import ReadyRows
from lightning_gnn_dist.evaluation.model_layers import ModelLayers
from lightning_gnn_dist.evaluation.whole_nodes import WholeNodes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layerwise.layers import Layer, with_arrays
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.device import draws_anywhere
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import Channel

if TYPE_CHECKING:
    from lightning_gnn_dist.joint import HasDigests, HasParts


class PartDataModule(ExchangingDataModule):
    """Training batches of the rank's own part of ``graph``, which may change with every super-epoch."""

    def __init__(self, plan: PartPlan, settings: BatchSettings) -> None:
        if plan.graph.path is None:  # arrays in RAM may have been changed since the graph was built
            plan.graph.check_edges()
        super().__init__(settings, plan.coverage, plan.boundary)
        self.graph, self.holding = plan.graph, plan.holding
        check_rows_in_files(plan.graph, settings.loading.cache_bytes)
        self._plan = plan
        self._suited: dict[bool, PartPlan] = {}
        self._treat(plan.boundary)
        self._parts: PartSwitcher | None = None
        self._disk_rows: DiskRows | None = None
        self._period: int | None = None

    @property
    def partitioner(self) -> Partitioner | Partition | None:
        """What cuts the graph. Where none was named, it depends on the strategy: before a fit it is METIS."""
        return self._cut.partitioner

    @property
    def _cut(self) -> PartPlan:
        to_averages = self.trainer is not None and isinstance(self.trainer.strategy, TrainsReplicasApart)
        if to_averages not in self._suited:
            self._suited[to_averages] = self._plan.suited(to_averages=to_averages)
        return self._suited[to_averages]

    @property
    def fingerprint(self) -> str:
        """A hash of the graph, by which a strategy sees whether all ranks have the same one."""
        return self.graph.fingerprint

    @property
    def digests(self) -> dict[str, Any]:
        """Digests of what else ranks must have alike: the graph's arrays, and which rank holds what."""
        return self._cut.digests(self._world_size())

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph; of a typed one, those of the type that is learned from."""
        types = self.graph.types
        return len(types.nodes_of(types.seed_type()))

    def _nodes_to_predict(self) -> Tensor:
        types = self.graph.types
        return super()._nodes_to_predict() + types.nodes_of(types.seed_type()).start

    def _title(self) -> str:
        return f"{self.graph}, {self.partitioner}"

    def _features(self) -> Tensor | None:
        return None if have_names(self.graph.types) else self.graph.node_arrays.get("x")

    # What Lightning calls.

    def prepare_data(self) -> None:
        """One process of every host computes the partition; the others find it in the cache."""
        if self._trainer_fn() == TrainerFn.FITTING and self._world_size() > 1:
            # An error here would stop this rank alone. In setup() all ranks meet it, and stop together.
            with suppress(ValueError, TypeError):
                self.partition(self._world_size())

    def setup(self, stage: str) -> None:
        if stage == "fit":
            if self._plan.partitioner is None and self._world_size() > 1:
                rank_zero_info(f"{self.partitioner} cuts the graph, as no partitioner was named.")
            self._choose_boundary()  # first: of a fit before it may be another
        super().setup(stage)
        if stage == "fit":
            self._num_batches()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed fit keeps: its seed, passes in a super-epoch, and what "auto" has chosen."""
        state = super().state_dict() | ({} if self._every() is None else {"repartition_every": self._every()})
        if isinstance(self._cut.boundary, Auto) and not isinstance(self.boundary, Auto):
            state["boundary"] = short_name(self.boundary)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.holding.every is None:
            self._period = state_dict.get("repartition_every")
        name, is_chosen = state_dict.get("boundary"), not isinstance(self.boundary, Auto)
        if isinstance(self._cut.boundary, Auto) and is_chosen and name not in (None, short_name(self.boundary)):
            self._treat(*kept(name, self.sampler.num_hops, exchanges=self._can_exchange()))

    # What it is made of.

    def _close(self) -> None:
        super()._close()
        if self._parts is not None:
            self._parts.close()
        if self._disk_rows is not None:
            self._disk_rows.close()
        release(self.graph)

    def _at_rest(self) -> dict[str, Any]:
        return super()._at_rest() | {"_parts": None, "_disk_rows": None}

    def partition(self, num_parts: int) -> Partition:
        """Return the partition for ``num_parts`` ranks, from the cache or computed and put there."""
        check_at_least(1, num_parts=num_parts)
        return self._cut.partition(num_parts)

    def parts_of_ranks(self, num_ranks: int) -> Partition:
        """Return the partition that maps each node to the rank that learns from it in super-epoch 0."""
        check_at_least(1, num_ranks=num_ranks)
        return self._cut.by_rank(num_ranks)

    def part(self, rank: int, num_parts: int, super_epoch: int = 0) -> Graph:
        """Return what rank ``rank`` trains on: the nodes of its part and the edges among them, in RAM."""
        check_at_least(1, num_parts=num_parts)
        check_below(num_parts, "parts", rank=rank)
        check_at_least(0, super_epoch=super_epoch)
        if num_parts == 1:
            return self.graph
        return self._reader(rank, num_parts).read(super_epoch).graph

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: waiting for data, what switching parts cost, the coverage of the running part."""
        figures = super().figures
        if self._disk_rows is not None:
            cache = self._disk_rows.cache
            figures |= figures_of(cache.asked, cache.hits, self._disk_rows.bytes_read)
        if self._parts is not None:
            figures |= {
                "data/switches": float(self._parts.switches),
                "data/switch_bytes": float(self._parts.bytes_read),
                "data/switch_waited_seconds": self._parts.waited_seconds,
            }
            figures |= {} if self._parts.coverage is None else {"data/coverage": self._parts.coverage}
        return figures

    def counts_of_nodes(self) -> frozenset[int]:
        """Return how many nodes the graph has, and how many there are of each type."""
        return frozenset({self.graph.num_nodes, *self.graph.types.num_nodes.values()})

    @property
    def uncovered(self) -> tuple[int, int]:
        """The counts of seeds of weight 0 and of all seeds in the running part; (0, 0) where no node has its own."""
        if self._parts is None or self.coverage is None or self.coverage.level == "batch":
            return 0, 0
        part = self._parts.current()
        coverage = part.node_arrays["coverage"][part.split("train")]
        return int((coverage == 0).sum()), coverage.numel()

    def _parts_of_rank(self) -> Callable[[int], Graph]:
        return self._own_parts().at if self._is_cut() else lambda _: self.graph

    def _running_part(self) -> Graph:
        return self._own_parts().current() if self._is_cut() else self.graph

    def _treat(self, boundary: Boundary, reason: str = "") -> None:
        """Treat the edges that leave the part in this way from now on, and say why."""
        if reason:
            rank_zero_info(reason)
        self.boundary = boundary
        self.coverage = None if isinstance(boundary, Exchange | History) else self._cut.coverage  # nothing is lost

    def _choose_boundary(self) -> None:
        """Find out what ``boundary="auto"`` is in this fit. Collective."""
        asked, num_ranks = self._cut.boundary, self._world_size()
        if isinstance(asked, Auto) and num_ranks > 1:
            parts, room = self._residents([self._rank()], num_ranks), room_of(asked, num_ranks)
            num_hops, device = self.sampler.num_hops, device_of(self.trainer)
            self._treat(*chosen(room, self.graph, parts, num_hops, device, exchanges=self._can_exchange()))

    def _reader(self, rank: int, num_ranks: int) -> PartReader:
        """Return the reader of a rank's parts. Before a fit ``"auto"`` is what it would be on ranks of this host."""
        boundary = self.boundary
        if isinstance(boundary, Auto):
            parts = self._residents(range(num_ranks), num_ranks)
            boundary = chosen_here(room_of(boundary, num_ranks), self.graph, parts, self.sampler.num_hops)
        return self._cut.reader(rank, num_ranks, boundary, self.coverage)

    def _residents(self, ranks: Iterable[int], num_ranks: int) -> Iterator[Tensor]:
        """Yield what ranks hold without a halo, in the first super-epochs."""
        for rank in ranks:
            reader = self._cut.reader(rank, num_ranks, self._cut.boundary, None)
            for super_epoch in range(min(self._cut.residency.sweep(num_ranks), LOOKED_AT)):
                yield reader.residents(super_epoch)[0]

    def _can_exchange(self) -> bool:
        """Return whether ``boundary="auto"`` may be ``Exchange()`` in this fit."""
        if not isinstance(self._cut.boundary, Auto) or not self._cut.boundary.exchange or self.trainer is None:
            return False
        if not isinstance(self.sampler, WholePartSampler) or self.holding != Holding():
            return False
        return against_exchange(self.trainer, self.trainer.lightning_module) is None

    def _around(self, part: Graph, num_ranks: int) -> tuple[Graph, Owners]:
        ids = part.node_arrays["n_id"]
        return self._shown(part), Owners(ids, self._cut.by_rank(num_ranks).assignment[ids])

    def _whole_arrays(self, layers: list[Layer], owners: Owners) -> dict[str, Tensor]:
        return self._of_whole_graph(layers, owners.ids)

    def _of_whole_graph(self, layers: list[Layer], ids: Tensor) -> dict[str, Tensor]:
        """Return what layers read of the whole graph, with a row for each of some nodes: degrees, for GCN."""
        return {name: array[ids] for name, array in whole_graph_arrays(layers, self.graph).items()}

    def _shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: its own mask marks the rank's seeds, theirs all training nodes."""
        if have_names(self.graph.types):
            return part  # the masks of its types are those of the whole graph
        mask = self.graph.node_arrays.get("train_mask")
        if part is self.graph or mask is None:
            return part

        def shown() -> Graph:
            return with_arrays(part, {"train_mask": take_rows(mask, part.node_arrays["n_id"])})

        return remembered(part, "as batches show it", shown)

    def _own_parts(self) -> PartSwitcher:
        if self._parts is None:
            reader = self._reader(self._rank(), self._world_size())
            self._parts = PartSwitcher(reader, in_background=self.loading.num_threads > 0)
        return self._parts

    def _every(self) -> int | None:
        """Return the passes in a super-epoch, or None if a rank's part never changes."""
        sweep = self._cut.residency.sweep(self._world_size())
        if sweep == 1:
            return None
        max_epochs = self.trainer.max_epochs if self.trainer is not None else None
        return self.holding.every or self._period or default_period(max_epochs, sweep)

    def _num_super_epochs(self) -> float:
        """Return the super-epochs of this run, as if each epoch were a pass; a clock may change that."""
        every, trainer = self._every(), self.trainer
        if every is None or trainer is None:
            return 1
        steps = math.inf if trainer.max_steps < 0 else trainer.max_steps
        passes = steps * trainer.accumulate_grad_batches / self._num_batches()
        epochs = trainer.max_epochs
        return min(passes, math.inf if epochs is None or epochs < 0 else epochs) / every

    def _eval_batch_size(self, evaluated: Evaluated, sampler: Sampler) -> int:
        if self.evaluation.sampler is not None:
            return self.batch_size
        if isinstance(self._eval_sampler(), TemporalSampler):
            limits = self.batch_size, self._eval_bytes
            return seeds_at_once(self.graph, sampler, evaluated, self._counter(), *limits)
        return self._counter().batch_size(evaluated, self.batch_size, self._eval_bytes)

    def _ready_rows(self, evaluated: Evaluated, batch_size: int) -> ReadyRows | None:
        model = None if have_names(self.graph.types) else self._model_layers()
        if model is None or not (model.are_better or self._counter().is_cheaper_by_layer(evaluated, batch_size)):
            return None
        seeds, num_ranks = evaluated.nodes, evaluated.num_ranks
        if model.norm is not None:  # such a layer takes all rows at once, so every rank computes them
            seeds, num_ranks = torch.arange(self.num_nodes), 1

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> WholeNodes:
            sizes = channel.size, self._eval_bytes
            return WholeNodes(self.graph, seeds, model.layers, *sizes, widen=self._widening())

        assert self.trainer is not None
        return ReadyRows(self.trainer, nodes_of_rank, num_ranks, self._eval_bytes, self._folder(), self._dtype())

    def _folder(self) -> Path | None:
        """Return where rows go that take too much memory, or None for the system's folder of temporary files."""
        return None if self.graph.path is None else self.graph.path.parent

    def _bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        counter = self._counter(1)
        return [counter.bytes_around(nodes, most) for nodes in some]

    def _is_whole_graph(self, seeds: Tensor) -> bool:
        return self._counter().is_whole_graph(seeds)

    def _counter(self, more_hops: int = 0) -> Counter:
        return Counter(self.graph, self._eval_sampler(more_hops).num_hops, self._module())

    def _whole_source(self, sampler: Sampler, num_ids: int | None = None) -> GraphSource | FileSource:
        return self._source(self.graph, sampler, num_ids)

    def _rows_in_files(self, graph: Graph) -> DiskRows | None:
        """Return what reads a graph's rows from files, if ``cache_bytes`` says so and does not hold all of them."""
        if self.loading.cache_bytes is None or have_names(graph.types):
            return None
        if self._disk_rows is None:
            self._disk_rows = DiskRows.of(self.graph, self.loading.cache_bytes)
        return self._disk_rows if self._disk_rows is not None and self._disk_rows.are_rows_of(graph) else None

    def _source(
        self, graph: Graph, sampler: Sampler, num_ids: int | None = None, run: Run | None = None
    ) -> GraphSource | FileSource:
        """Return the source of batches of a part or of the whole graph, made where ``loading.sample_on`` says."""
        device, is_fit = device_of(self.trainer), self._trainer_fn() == TrainerFn.FITTING
        if run is None and (rows := self._rows_in_files(graph)) is not None:
            stays = type_that_stays(self.trainer)
            return FileSource(
                graph, rows, sampler, self.loading, num_ids=num_ids, stream=stream_to(device), stays=stays
            )
        # The part takes device memory first, though it may be loaded later; it is no larger than the whole graph.
        waits = graph is self.graph and is_fit and self._is_cut() and draws_anywhere(self.sampler)
        sample_on = "cpu" if have_names(graph.types) else self.loading.sample_on
        placement = Placement(device, sample_on, expected_bytes=graph.num_bytes if waits else 0)
        return GraphSource(
            graph,
            sampler,
            widen=self._widening(),
            all_labels=self.loading.all_labels,
            num_ids=num_ids,
            placement=placement,
            stream=stream_to(device),
            run=run,
        )


if TYPE_CHECKING:

    def _offers(data: PartDataModule) -> tuple[HasDigests, HasParts]:
        """Let mypy check that this has what two more Protocols of ``joint`` ask for."""
        return data, data
