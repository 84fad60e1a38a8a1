"""The home of a graph that every host has, in RAM or in files: each rank trains on a part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import Run
from lightning_gnn_dist.batches.source import BatchSource, Crossing
from lightning_gnn_dist.boundary.auto import Auto, kept, short_name
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.graph.with_arrays import with_arrays
from lightning_gnn_dist.homes.costs import WholeCosts
from lightning_gnn_dist.homes.home import Home, MakesSources, Owners, Shown
from lightning_gnn_dist.homes.parts import PartReader, PartSwitcher, SharesParts
from lightning_gnn_dist.homes.plan import PartPlan
from lightning_gnn_dist.homes.residency import bytes_held, default_period
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layers.budget import Host
from lightning_gnn_dist.layers.ready_made import whole_graph_arrays
from lightning_gnn_dist.layers.through_layers import Layer
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.advice import against_averaging
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.whole import WholePartSampler

_BESIDE = 1 << 28  # bytes of a rank beside what it holds of a graph and of batches, at most


class WholeHome(Home):
    """A graph that every host has. Ranks cut it into parts, which may change with every super-epoch.

    Args:
        plan: How the graph is cut.
        running: The run, and how its batches are made.
        fingerprint: A hash of what ranks must have alike. Default: the graph's.
        shown: Returns a part of a split as batches show it, without the labels that are asked for. Default: of nodes.
    """

    def __init__(
        self, plan: PartPlan, running: Running, fingerprint: str | None = None, shown: Shown | None = None
    ) -> None:
        if plan.graph.path is None:  # arrays in RAM may have been changed since the graph was built
            plan.graph.check_edges()
        super().__init__(running, plan.boundary, plan.coverage)
        elsewhere = running.settings.loading.elsewhere
        self._sources: MakesSources | None = None
        if elsewhere is not None:
            self._sources = extension(elsewhere).of(running.settings, plan.graph)
        self._evaluation: MakesSources | None = None  # where the graph is larger than what is free
        self.whole, self.holding, self._per = plan.graph, plan.holding, plan.holding.per
        self._fingerprint, self._shown_edges = fingerprint, shown
        self._plan = plan
        self._suited: dict[tuple[bool, bool], PartPlan] = {}
        self._take(plan.boundary)
        self._parts: PartSwitcher | None = None
        self._period: int | None = None
        self._shelf: SharesParts | None = None  # of the ranks of a host
        self.crossing = Crossing()

    # The graph.

    @property
    def graph(self) -> Graph:
        """The graph, as batches show it."""
        return self.shown(self.whole)

    @cached_property
    def costs(self) -> WholeCosts:
        return WholeCosts(self.graph, self.running)

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint if self._fingerprint is None else self._fingerprint

    @property
    def types(self) -> GraphTypes:
        return self.whole.types

    @property
    def about(self) -> str:
        return f"{self.graph}, {self.partitioner}"

    @property
    def digests(self) -> dict[str, Any]:
        return self.cut.digests(self.holder.num_parts)

    def features(self) -> Tensor | None:
        return None if have_names(self.types) else self.whole.node_arrays.get("x")

    def split(self, name: str) -> Tensor:
        return self.whole.split(name)

    def check_labels(self, values: ValueCheck, nodes: Tensor, mask: str) -> None:
        values.of_labels(self.whole, nodes, mask)

    @property
    def cut(self) -> PartPlan:
        """How the graph is cut in this run: where no partitioner was named, it depends on the strategy."""
        trainer = self.running.trainer
        to_averages = trainer is not None and isinstance(trainer.strategy, TrainsReplicasApart)
        run = to_averages, self.holder.num_parts > 1
        if run not in self._suited:
            self._suited[run] = self._plan.suited(to_averages=to_averages, is_told=run[1])
        return self._suited[run]

    @property
    def partitioner(self) -> Partitioner | Partition | None:
        return self.cut.partitioner

    # The run.

    def prepare(self) -> None:
        if self.running.stage == TrainerFn.FITTING and self._has_parts:
            # An error here would stop this rank alone. In setup() all ranks meet it, and stop together.
            with suppress(ValueError, TypeError):
                self.partition(self.holder.num_parts)

    def begin_fit(self) -> None:
        asked, holder = self.cut.boundary, self.holder
        if self._per == "host":
            self._shelf = extension("parts of hosts").of(holder, self.running.num_ranks)
        if not self._has_parts:
            return
        if self._plan.partitioner is None:
            rank_zero_info(f"{self.partitioner} cuts the graph, as no partitioner was named.")
        if isinstance(asked, Auto):
            self._take(*self.cut.chosen(asked, holder, self.running, offered=self._offered()))

    def open(self, check: Callable[[Graph], None], *, is_fit: bool) -> None:
        """Compare what a fit takes with the memory that is there: the graph is open, and was looked at."""
        if is_fit and self._may_lack_memory():
            how = {"is_cut": self.is_cut, "sweeps": self._shown_edges is None}
            extension("memory of a fit").check(self.cut, self.holder.num_parts, self.running, **how)

    def begin_nodes(self, *, is_fit: bool) -> None:
        if is_fit and self.is_cut:
            num_batches = self.batches_of_pass(self.most_seeds)
            super_epochs = self.running.num_super_epochs(num_batches, self.every(), self.turns())
            self.cut.check_run(self.holder.num_parts, super_epochs)

    def close(self) -> None:
        super().close()
        for each in (self._parts, self._shelf):
            if each is not None:
                each.close()
        for sources in (self._sources, self._evaluation):
            if sources is not None:
                sources.close(self.graph)

    def at_rest(self) -> dict[str, Any]:
        mine = {"_parts": None, "_evaluation": None, "_shelf": None, "crossing": Crossing()}
        return super().at_rest() | mine

    def state(self) -> dict[str, Any]:
        """Return what a resumed fit keeps: passes in a super-epoch, and what "auto" has chosen."""
        state: dict[str, Any] = {} if self.every() is None else {"repartition_every": self.every()}
        return state | ({"boundary": short_name(self.boundary)} if self._has_chosen() else {})

    def restore(self, state: dict[str, Any]) -> None:
        if self.holding.every is None:
            self._period = state.get("repartition_every")
        name = state.get("boundary")
        if self._has_chosen() and name not in (None, short_name(self.boundary)):
            num_hops = self.running.settings.of_parts().num_hops
            self._take(*kept(name, num_hops, offered=self._offered()))

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: the bus, rows that are read from files, what switching parts cost, the part's coverage."""
        figures = self.crossing.figures
        for each in (self._evaluation, self._sources, self._parts):
            figures |= {} if each is None else each.figures
        return figures

    def _may_lack_memory(self) -> bool:
        """Return whether a fit might take more memory than some host has, if all is counted as large as it can be."""
        most, bulk_size = bytes_held(self.whole), self.running.settings.loading.bulk_size
        of_rank = (4 * bulk_size + 3) * most + _BESIDE
        return any(host.ranks * of_rank + 2 * most > host.free for host in self.running.hosts)

    # The boundary.

    def _take(self, boundary: Boundary, reason: str = "") -> None:
        """Treat the edges that leave the part in this way from now on, and say why."""
        if reason:
            rank_zero_info(reason)
        loses_nothing = boundary.exchanges or boundary.keeps_rows
        self.boundary, self.coverage = boundary, None if loses_nothing else self.cut.coverage

    def _has_chosen(self) -> bool:
        return isinstance(self.cut.boundary, Auto) and not isinstance(self.boundary, Auto)

    def _offered(self) -> Boundary | None:
        """Return what ``boundary="auto"`` may be before a halo in this fit, if a user allows it and it can be."""
        asked, trainer = self.cut.boundary, self.running.trainer
        if not isinstance(asked, Auto) or trainer is None or self._per == "host" or not self.holding.is_one_chunk:
            return None
        offered = asked.offered()
        return offered if offered is not None and offered.suits(self.running.settings, trainer) else None

    # The part.

    def partition(self, num_parts: int) -> Partition:
        return self.cut.partition(num_parts)

    def every(self) -> int | None:
        sweep, trainer = self.cut.residency.sweep(self.holder.num_parts), self.running.trainer
        if sweep == 1 or self.turns() > 1:
            return None if sweep == 1 else 1
        return self.holding.every or self._period or default_period(trainer.max_epochs if trainer else None, sweep)

    def turns(self) -> int:
        return self.cut.residency.turns(self.holder.num_parts)

    @property
    def _has_parts(self) -> bool:
        return self.holder.num_parts > 1 or self.turns() > 1

    @property
    def is_cut(self) -> bool:
        return self._has_parts and not self.boundary.sees_whole_graph

    def parts(self) -> Callable[[int], Graph]:
        return self.own_parts().at if self.is_cut else lambda _: self.graph

    def running_part(self) -> Graph:
        return self.own_parts().current() if self.is_cut else self.graph

    def part(self, rank: int, num_parts: int, super_epoch: int) -> Graph:
        """Return what a rank trains on in a super-epoch."""
        is_whole = num_parts == 1 and self.cut.residency.turns(1) == 1
        return self.whole if is_whole else self._reader(rank, num_parts).read(super_epoch).graph

    def _reader(self, number: int, num_parts: int) -> PartReader:
        """Return the reader of a rank's parts. Before a fit ``"auto"`` is what it would be on ranks of this host."""
        boundary = self.boundary
        if isinstance(boundary, Auto):
            boundary = self.cut.chosen_here(boundary, num_parts, self.running)
        return self.cut.reader(number, num_parts, boundary, self.coverage)

    def own_parts(self) -> PartSwitcher:
        """Return the parts of this rank."""
        if self._parts is None:
            reader = self._reader(self.holder.part, self.holder.num_parts)
            reader = reader if self._shelf is None else self._shelf.shared(reader)
            self._parts = PartSwitcher(reader, in_background=self.running.settings.loading.num_threads > 0)
        return self._parts

    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: its own mask marks the rank's seeds, theirs all training nodes."""
        if self._shown_edges is not None:
            return self._shown_edges(part)
        if part is self.whole or have_names(self.types):  # of a typed part the types have the masks
            return part
        known = self.whole.node_arrays
        if not (names := [name for name in ("train_mask", "n_id") if name in known]):
            return part

        def shown() -> Graph:
            return with_arrays(part, {name: take_rows(known[name], part.node_arrays["n_id"]) for name in names})

        return remembered(part, "as batches show it", shown)

    @property
    def uncovered(self) -> tuple[int, int]:
        if self._parts is None or self.coverage is None or self.coverage.level == "batch":
            return 0, 0
        coverage = (part := self._parts.current()).node_arrays["coverage"][part.split("train")]
        return int((coverage == 0).sum()), coverage.numel()

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little.

        Of lost neighbours this rank's part is the sample. Parts that change are not judged.
        """
        num_parts = self.holder.num_parts
        if num_parts == 1 or self.every() is not None:
            return None
        self.running_part()  # whose nodes ``uncovered`` counts
        uncovered, seeds = self.uncovered
        return against_averaging(self.graph, self.cut.by_rank(num_parts), uncovered / max(seeds, 1))

    # Training nodes of the part.

    def most_seeds(self) -> int:
        return self.cut.most_seeds(self.holder.num_parts)

    def own_seeds(self, part: Graph) -> Tensor:
        seeds = part.split("train")
        if part is not self.whole or self.holder.num_parts == 1:
            return seeds
        return seeds[self._is_own(seeds)]

    def own_nodes(self, part: Graph) -> Tensor:
        nodes = part.node_arrays["n_id"]
        return self._is_own(nodes).nonzero().view(-1)

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        rows = seeds if part is self.whole else part.node_arrays["n_id"][seeds]
        return torch.searchsorted(self.split("train"), rows)

    def own_training(self) -> tuple[Tensor, Tensor, int]:
        seeds, holder = self.split("train"), self.holder
        own = self._is_own(seeds).nonzero().view(-1)[holder.member :: holder.num_members]
        return seeds[own], own, seeds.numel()

    def _is_own(self, nodes: Tensor) -> Tensor:
        """Return which nodes of the whole graph are learned from where this rank's part is, in super-epoch 0."""
        return self.cut.by_rank(self.holder.num_parts).assignment[nodes] == self.holder.part

    # Batches.

    def training_source(self, part: Graph, seeds: Tensor, sampler: Sampler) -> tuple[Tensor, BatchSource]:
        if self.turns() > 1:
            self.running.warn_of_drift()
        graph, run = self.outside.of_batches(part, are_whole=isinstance(sampler, WholePartSampler))
        return seeds, self.source(graph, sampler, run=run)

    def whole_source(self, sampler: Sampler, num_ids: int | None = None) -> BatchSource:
        return self.source(self.graph, sampler, num_ids)

    def evaluation_source(self, sampler: Sampler, num_ids: int | None = None) -> BatchSource:
        """Return the same, which reads rows of files ahead where the graph is larger than what is free.

        Through a map each row would bring many pages, which drive out others that are needed.
        """
        if self._sources is None and self._evaluation is None:
            host = Host.here(self.running.num_ranks)
            if self.graph.num_bytes > host.free:
                self._evaluation = extension("rows in files").beyond_memory(self.graph, host)
        return self._source(self._sources or self._evaluation, self.graph, sampler, num_ids)

    def source(self, graph: Graph, sampler: Sampler, num_ids: int | None = None, run: Run | None = None) -> BatchSource:
        """Return the source of batches of a part or of the whole graph, made where ``loading`` says."""
        return self._source(self._sources, graph, sampler, num_ids, run)

    def _source(
        self,
        sources: MakesSources | None,
        graph: Graph,
        sampler: Sampler,
        num_ids: int | None,
        run: Run | None = None,
    ) -> BatchSource:
        made = None if sources is None else sources.source(self, graph, sampler, num_ids, run)
        return self.source_in_ram(graph, sampler, num_ids, run=run, crossing=self.crossing) if made is None else made

    # Rows of nodes outside the part.

    def with_senders(self, part: Graph) -> tuple[Graph, Tensor, Owners]:
        ids = part.node_arrays["n_id"]
        owners = Owners(ids, self.cut.by_rank(self.running.num_ranks).assignment[ids])
        return self.shown(part), part.split("train"), owners

    def whole_arrays(self, layers: list[Layer], ids: Tensor) -> dict[str, Tensor]:
        return {name: array[ids] for name, array in whole_graph_arrays(layers, self.graph).items()}
