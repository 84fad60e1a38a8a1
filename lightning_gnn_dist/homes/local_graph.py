"""A graph that every host has, in RAM or in files: how it is cut for any number of ranks, and who holds what of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.source import BatchSource, Finish, GraphSource
from lightning_gnn_dist.boundary.boundary import Auto, Boundary, Holds, Isolated, Pass, chosen, kept, short_name
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import brief, check_callable, check_instance
from lightning_gnn_dist.graph.graph import Graph, sampled_digest, with_arrays
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.access import GraphAccess, OnePart, Owners, Seeds, Shown
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Fixed, Holding, Plan, bytes_held, default_period
from lightning_gnn_dist.homes.run import Host, RunContext
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layers.choice import Counter, Judged, seeds_at_once
from lightning_gnn_dist.layers.layer_pass import LayerPass, pass_over
from lightning_gnn_dist.layers.layered_loader import ReadyRows
from lightning_gnn_dist.layers.through_layers import Layer, ModelLayers, has_layers, whole_graph_arrays
from lightning_gnn_dist.names import extension, offered
from lightning_gnn_dist.partition.base import Cut, Partition
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime, check_samples
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import Channel

_LONGEST = 1000  # super-epochs, at most, that are searched for ranks with nothing to learn from
_BESIDE = 1 << 28  # bytes of a rank beside what it holds of a graph and of batches, at most


class LocalGraph(GraphAccess):
    """A graph that every host has. Ranks cut it into parts, which may change with every super-epoch.

    Args:
        graph: The whole graph.
        running: The run, and how its batches are made.
        partitioner: Cuts the graph into chunks; or a ready partition. None or ``"auto"``: what suits the strategy and
            the size.
        holding: Which chunks a rank holds, and which random nodes of others.
        boundary: How edges between parts are treated.
        coverage: Weighs nodes by the share of their neighbourhood in the part. With None there are no weights.
        fingerprint: A hash of what ranks must have alike. Default: the graph's.
        shown: Returns a part of a split as batches show it, without the labels that are asked for. Default: of nodes.

    Attributes:
        graph: The graph, as batches show it.
    """

    whole: Graph
    types: GraphTypes

    def __init__(
        self,
        graph: Graph,
        running: RunContext,
        partitioner: Cut,
        holding: Holding,
        boundary: Boundary,
        coverage: Coverage | None,
        *,
        fingerprint: str | None = None,
        shown: Shown | None = None,
    ) -> None:
        self._named = None if isinstance(partitioner, str) and partitioner == "auto" else partitioner
        self.holding = _checked(graph, self._named, holding, boundary)
        if isinstance(boundary, Auto) and self.holding.residency.turns(1) > 1:
            boundary = Isolated()
        boundary.check_fits(graph)
        if graph.path is None:  # arrays in RAM may have been changed since the graph was built
            graph.check_edges()
        self.whole = graph
        self.graph, self.types = graph if shown is None else shown(graph), graph.types
        self._fingerprint, self._shown_edges = fingerprint, shown
        self._plans: dict[tuple[int, bool, bool], Plan] = {}
        self._period: int | None = None
        loading = running.settings.loading
        self._sources: Any = None  # makes the batches of a graph whose rows do not lie in RAM
        if loading.cache_bytes is not None or loading.sample_on != "cpu":
            name = "rows on devices" if loading.cache_bytes is None else "rows in files"
            self._sources = extension(name).of(running.settings, graph)
        super().__init__(running, boundary, coverage)
        for sampler in {id(each): each for each in running.settings.samplers}.values():  # mostly one
            check_samples(sampler, self.graph)

    # The graph.

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint if self._fingerprint is None else self._fingerprint

    def __str__(self) -> str:
        return f"{self.graph}, {self.plan.partitioner}"

    @property
    def digests(self) -> dict[str, Any]:
        """Digests of what ranks must have alike beside edges and masks, which the fingerprint covers.

        ``arrays`` covers labels and other integer arrays; ``values`` holds two numbers for arrays of fractions, such as
        features; ``parts`` covers every node's chunk, and which ranks hold it in the first two super-epochs.
        """
        arrays = {name: array for name, array in self.whole.arrays.items() if name not in ("indptr", "indices")}
        parts, plan = hashlib.blake2b(digest_size=16), self.plan
        if plan.num_parts > 1:
            parts.update(f"{plan.seed} {[plan.held(0), plan.held(1)]}".encode())
            parts.update(plan.partition.assignment.contiguous().numpy().data)
        digest, values = sampled_digest(arrays)
        return {"arrays": digest, "values": values, "parts": parts.hexdigest()}

    def split(self, name: str) -> Tensor:
        return self.whole.split(name)

    # The run.

    @property
    def plan(self) -> Plan:
        """How the graph is cut in this run."""
        return self.plan_for(self.running.num_ranks)

    @property
    def turns(self) -> int:
        return self.plan.turns

    def plan_for(self, num_parts: int) -> Plan:
        """Return how the graph is cut for a number of ranks, or hosts."""
        trainer = self.running.trainer
        to_averages = trainer is not None and isinstance(trainer.strategy, TrainsReplicasApart)
        key = num_parts, to_averages and isinstance(self.holding.residency, Fixed), self.running.num_ranks > 1
        if key not in self._plans:
            seed = self.running.settings.seed_of_parts
            self._plans[key] = Plan(self.whole, self._named, self.holding, num_parts, seed, *key[1:])
        return self._plans[key]

    def prepare(self) -> None:
        if self.running.stage == TrainerFn.FITTING and self.plan.has_parts:
            # An error here would stop this rank alone. In setup() all ranks meet it, and stop together.
            with suppress(ValueError, TypeError):
                _ = self.plan.partition

    def begin_fit(self) -> None:
        """Choose what ``boundary="auto"`` is, and compare what a fit takes with the memory that is there."""
        run = self.running
        if self.plan.has_parts and self._named is None:
            rank_zero_info(f"{self.plan.partitioner} cuts the graph, as no partitioner was named.")
        if self.plan.has_parts and isinstance(self.asked, Auto):
            mine = [self.plan.first_parts(run.rank)]
            self._take(self._chosen(self.plan, mine, run.device))
        most = bytes_held(self.whole)
        of_rank = (4 * run.settings.loading.bulk_size + 3) * most + _BESIDE  # if all counts as large as it can be
        is_short = any(host.ranks * of_rank + 2 * most > host.free for host in run.hosts)
        if is_short and (needs := offered("memory of a fit")):
            needs.check(self.plan, run, is_cut=self.is_cut, sweeps=self._shown_edges is None)

    def close(self) -> None:
        for sources in (self._sources, vars(self).get("_evaluation")):
            if sources is not None:
                sources.close(self.graph)
        super().close()

    def state(self) -> dict[str, Any]:
        """Return what a resumed fit keeps: passes in a super-epoch, and what "auto" has chosen."""
        state: dict[str, Any] = {} if self.every() is None else {"repartition_every": self.every()}
        return state | ({} if self.boundary is self.asked else {"boundary": short_name(self.boundary)})

    def restore(self, state: dict[str, Any]) -> None:
        if self.holding.every is None:
            self._period = state.get("repartition_every")
        name = state.get("boundary")
        if self.boundary is not self.asked and name not in (None, short_name(self.boundary)):
            self._take(kept(name, self.running.settings.training_sampler.num_hops))

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: the bus, rows that are read from files, what switching parts cost, the part's coverage."""
        figures = dict[str, float]()
        for each in (vars(self).get("_evaluation"), self._sources, vars(self).get("parts")):
            figures |= {} if each is None else each.figures
        return figures

    # What "auto" is in a fit.

    def _take(self, chosen: tuple[Boundary, str]) -> None:
        rank_zero_info(chosen[1])
        self.boundary = chosen[0]

    def _chosen(self, plan: Plan, parts: Sequence[Holds], device: torch.device | None = None) -> tuple[Boundary, str]:
        """Return what ``"auto"`` is on some parts, and a line for the log."""
        assert isinstance(self.asked, Auto)
        settings, layered = self.running.settings, has_layers(self.running.module)
        steps = Pass(settings.training_sampler, settings.batch_size, plan.learned_by_ranks(), layered)
        return chosen(self.asked, self.whole, parts, steps, on_host=plan.num_parts, device=device)

    # The part.

    def partition(self, num_parts: int) -> Partition:
        return self.plan_for(num_parts).partition

    def every(self) -> int | None:
        plan, trainer = self.plan, self.running.trainer
        if plan.sweep == 1:
            return None
        if plan.turns > 1:
            return 1
        return self.holding.every or self._period or default_period(trainer.max_epochs if trainer else None, plan.sweep)

    @cached_property
    def parts(self) -> OnePart:
        if not self.is_cut:
            return OnePart(self.graph)
        self.holding.residency.begin_training(self.running.trainer)
        ahead = self.running.settings.loading.num_threads > 0
        return self._parts_of(self.running.rank, self.running.num_ranks, in_background=ahead)

    def part(self, rank: int, num_parts: int, super_epoch: int) -> Graph:
        """Return what a rank trains on in a super-epoch. Before a fit ``"auto"`` is what it would be on this host."""
        if num_parts == 1 and self.plan_for(1).turns == 1:
            return self.whole
        return self._parts_of(rank, num_parts).read(super_epoch).graph

    def _parts_of(self, rank: int, num_parts: int, *, in_background: bool = False) -> Parts:
        plan, boundary = self.plan_for(num_parts), self.boundary
        if isinstance(boundary, Auto):
            boundary, _ = self._chosen(plan, [plan.first_parts(each) for each in range(num_parts)])
        return Parts(plan, rank, boundary, self.coverage, in_background=in_background)

    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: its own mask marks the rank's seeds, theirs all training nodes."""
        if self._shown_edges is not None:
            return self._shown_edges(part)
        if part is self.whole or self.types.have_names:  # of a typed part the types have the masks
            return part
        known = self.whole.node_arrays
        if not (names := [name for name in ("train_mask", "n_id") if name in known]):
            return part

        def shown() -> Graph:
            return with_arrays(part, {name: take_rows(known[name], part.node_arrays["n_id"]) for name in names})

        return remembered(part, "as batches show it", shown)

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little.

        Of lost neighbours this rank's part is the sample. Parts that change are not judged.
        """
        if self.running.num_ranks == 1 or self.every() is not None:
            return None
        uncovered, seeds = self.parts.uncovered
        judge = extension("report of a partition").against_averaging
        parts = self.plan.by_rank()
        reason: str | None = judge(self.graph, parts.assignment, parts.num_parts, uncovered / max(seeds, 1))
        return reason

    # The nodes that are learned.

    def settle_seeds(self) -> None:
        """Refuse a fit in which some rank has nothing to learn in some super-epoch. All raise or none.

        Each epoch counts as if it were a pass.
        """
        every = self.every() if self.is_cut else None
        if every is None:
            return
        trainer, num_super_epochs = self.running.trainer, 1.0
        if trainer is not None:
            steps = math.inf if trainer.max_steps < 0 else trainer.max_steps
            epochs = math.inf if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs
            num_batches = -(-self.most_seeds() // self.running.settings.batch_size)
            passes = min(steps * trainer.accumulate_grad_batches / num_batches, epochs * self.plan.turns)
            num_super_epochs = passes / every
        self.most_seeds(math.ceil(min(num_super_epochs, _LONGEST)))

    def most_seeds(self, num_super_epochs: int | None = None) -> int:
        """Return how many nodes the rank learns that learns most, in any of so many super-epochs.

        Refuse it if some rank has none in one of them. All ranks raise or none.
        """
        nodes, plan = train_nodes(self.whole), self.plan
        if not plan.has_parts:
            return nodes.numel()
        per_chunk = torch.bincount(plan.partition.assignment[nodes], minlength=plan.partition.num_parts)

        def count(owner: Tensor) -> Tensor:
            is_held = owner >= 0
            return torch.bincount(owner[is_held], per_chunk[is_held], plan.num_parts)

        otherwise = 'MetisPartitioner(balance="train"), RandomPartitioner() or more super-nodes'
        otherwise = otherwise if plan.turns == 1 else "hold more chunks at a time"
        return plan.most(f"{nodes.numel()} training nodes", count, otherwise, num_super_epochs)

    def owners(self, nodes: Tensor) -> Tensor:
        """Return the rank that learns from each of some nodes in super-epoch 0."""
        return self.plan.by_rank().assignment[nodes]

    def seeds_of(self, part: Graph) -> Seeds:
        own, run = part.split("train"), self.running
        ids = None if part is self.whole else part.node_arrays["n_id"]
        if ids is None and run.num_ranks > 1:
            own = own[self.owners(own) == run.rank]
        places = torch.searchsorted(self.whole.split("train"), own if ids is None else ids[own])
        return Seeds(own, own, places)

    # Batches.

    def training_source(self, part: Graph, sampler: Sampler) -> BatchSource:
        if not self.is_cut or self.outside is None:
            return self._source(self.shown(part), sampler)
        graph, finish = self.outside.of_batches(part, are_whole=isinstance(sampler, WholePartSampler))
        return self._source(graph, sampler, finish)

    def whole_source(self, sampler: Sampler, *, evaluates: bool = False) -> BatchSource:
        return self._source(self.graph, sampler, sources=self._evaluation if evaluates else None)

    @cached_property
    def _evaluation(self) -> Any:
        """Makes the batches of evaluations: where the graph is larger than what is free, rows of files are read ahead.

        Through a map each row would bring many pages, which drive out others that are needed.
        """
        host = Host.here(self.running.num_ranks)
        if self._sources is None and self.graph.num_bytes > host.free and (found := offered("rows in files")):
            return found.beyond_memory(self.graph, host)
        return self._sources

    def _source(self, graph: Graph, sampler: Sampler, finish: Finish | None = None, sources: Any = None) -> BatchSource:
        """Return the source of batches of a part or of the whole graph, made where ``loading`` says."""
        if (sources := sources or self._sources) is not None:
            made: BatchSource | None = sources.source(self, graph, sampler, finish)
            if made is not None:
                return made
        return GraphSource(graph, sampler, finish=finish, **self.running.options_of_sources)

    # What an evaluation costs. All ranks have the graph, so they find the same without a word.

    def size_of_evaluation(self, judged: Judged, sampler: Sampler, model: ModelLayers | None) -> int:
        run = self.running
        size, budget = run.settings.batch_size, run.bytes_of_evaluation
        if run.settings.evaluation.sampler is not None:
            return size
        if isinstance(run.sampler_of_evaluation(), SeesByTime):
            return seeds_at_once(self.graph, sampler, judged, self._counter(), size, budget)
        return self._counter().batch_size(judged, size, budget)

    def ready_rows(self, judged: Judged, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        if model is None or not (model.are_better or self._counter().is_cheaper_by_layer(judged, batch_size)):
            return None
        run, (seeds, num_ranks) = self.running, (judged.nodes, judged.num_ranks)
        if model.norm is not None:  # such a layer takes all rows at once, so every rank computes them
            seeds, num_ranks = torch.arange(self.graph.num_nodes), 1

        def pass_of(model: ModelLayers, channel: Channel, own: Callable[[], Tensor]) -> LayerPass:
            own_seeds = own() if model.norm is None else seeds
            return pass_over(self.graph, seeds, own_seeds, model, channel, run.work)

        assert run.trainer is not None
        return ReadyRows(run.trainer, pass_of, num_ranks)

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        counter = self._counter(1)
        return [counter.bytes_around(nodes, most) for nodes in some]

    def _counter(self, more_hops: int = 0) -> Counter:
        return Counter(self.graph, self.running.sampler_of_evaluation(more_hops).num_hops, self.running.module)

    # Rows of nodes outside the part.

    def with_senders(self, part: Graph, layers: list[Layer]) -> tuple[Graph, Tensor, Owners]:
        ids = part.node_arrays["n_id"]
        found = with_arrays(self.shown(part), self.whole_arrays(layers, ids))
        return found, part.split("train"), Owners(ids, self.owners(ids))

    def whole_arrays(self, layers: list[Layer], ids: Tensor) -> dict[str, Tensor]:
        """Return what layers read of the whole graph, with a row for each of the nodes of a part."""
        return {name: array[ids] for name, array in whole_graph_arrays(layers, self.graph).items()}


def train_nodes(graph: Graph) -> Tensor:
    """Return the nodes that are learned; refuse a graph without any."""
    seeds = graph.split("train")
    if not seeds.numel():
        raise ValueError("train_mask marks no node: there is nothing to learn from.")
    return seeds


def _checked(graph: Graph, partitioner: object, holding: Holding, boundary: Boundary) -> Holding:
    """Return what a rank holds of a graph, with a number for all that was left open; refuse what does not go with it.

    A partitioner may be a ready partition, or None.
    """
    if not isinstance(partitioner, Partition | None):
        example = "an object such as MetisPartitioner(), or a Partition"
        check_callable("partitioner", partitioner, example, "graph", 2, 0)
    check_instance("holding", holding, Holding, "an object such as Holding(Rotate())")
    if (boundary.sees_whole_graph or boundary.exchanges) and not holding.is_one_chunk:
        name = type(boundary).__name__
        raise ValueError(f"holding says what a part holds, and boundary={name}() sees the whole graph: choose one.")
    found = replace(holding, residency=holding.residency.of_graph(graph))
    if found.residency.turns(1) > 1 and not isinstance(boundary, Auto | Isolated):
        raise ValueError(
            f"{brief(found.residency)} reads each chunk once in an epoch, and boundary={brief(boundary)} would "
            "read what is around it as well, or compute it: take boundary=Isolated(), or leave it out."
        )
    return found
