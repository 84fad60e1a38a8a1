"""Edges as what is learned and judged: which of them batches ask for, and how, wherever the graph lives.

graph -> positions of the edges that are learned -> the graph as batches show it -> a sampler around these edges

Of tasks that recommend right answers are edges that nobody sees, which are learned as events are:

    question q at t_q, receivers r:   rank of r = place of <h_q(t_q), h_r(t_q)> among those of all receivers

Judged are rows: of each question at its time, and of each receiver at the time of each question, computed once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.batches import Deal, Learning
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import check_at_least_if_given, shown
from lightning_gnn_dist.data.task import Task
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.edges import Edges, ends_of
from lightning_gnn_dist.extensions.links.link_sampler import (
    LABEL,
    HeldLinks,
    LinkSampler,
    OwnLinks,
    edges_at,
    name_of_targets,
    positions_of_links,
)
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.extensions.links.ranking import NONE
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, check_event_samplers, sample_at
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import times_of_receivers
from lightning_gnn_dist.graph.graph import Graph, with_arrays_of_types
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.typed.tables import ANSWERED, ASKED, TIME, TableTask
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.graph.user_ids import Columns, Ids, ids_for, named
from lightning_gnn_dist.graph.value_check import check_arrays
from lightning_gnn_dist.homes.access import GraphAccess, graph_of
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.layers.choice import Judged, Targets, is_limited
from lightning_gnn_dist.sampling.base import Sampler


def sampler_of_events(sampler: Sampler | None, time: str | None) -> Sampler | None:
    """Return the sampler of a data module of edges, where none was named one that knows their times.

    Refuse one that shows later events, and one that draws by times where edges are not split by them.
    """
    if time is None:
        if isinstance(sampler, TemporalSampler):
            raise ValueError(
                "TemporalSampler draws around edges at their times, and this split holds them back at random: split "
                f"them by time, split_edges(graph, time={shown(sampler.time)}), or take NeighborSampler."
            )
        return sampler
    if sampler is None:
        return TemporalSampler([15, 10], time)
    if not isinstance(sampler, TemporalSampler) or sampler.time != time:
        raise ValueError(
            f"The graph of this split has the edges of all times ({time}), and {shown(sampler)} does not draw by "
            f"these: take TemporalSampler([15, 10], time={shown(time)})."
        )
    return sampler


def negatives_of(links: LinkBounds, num_negatives: int | None) -> int:
    """Return how many false receivers each edge that is learned has: by default 1, and none beside labels."""
    check_at_least_if_given(1, num_negatives=num_negatives)
    if links.labels is not None and num_negatives is not None:
        raise ValueError("num_negatives is for splits without labels: leave it out.")
    return num_negatives or int(links.labels is None)


def check_settings_of_edges(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse boundaries that do not go with edges, and samplers that repeat nodes, or whose weights are for seeds."""
    if not isinstance(boundary, Boundary) or not boundary.takes_edges:
        raise ValueError(f"boundary must be Isolated(), Halo() or Fetch() for edges, got {shown(boundary)}.")
    for sampler in (settings.sampler, settings.global_batching.sampler):
        if getattr(sampler, "is_for_nodes", False):
            raise ValueError(
                "The ends of edges are sampled around by NeighborSampler or WholePartSampler, got "
                f"{type(sampler).__name__}: its batches or weights are for single nodes."
            )


def check_held_back(name: str, held: Mapping[str, object], way_out: str) -> None:
    """Refuse to evaluate on edges that were not held back."""
    if name not in held:
        without = " Trainer(limit_val_batches=0) fits without them." if name == "val" else ""
        raise ValueError(f"The split holds no {name} edges back (it has: {list(held)}): {way_out}{without}")


def without_labels(links: LinkBounds, part: Graph) -> Graph:
    """Return a part as batches show it: without the labels of its edges, also those turned round."""
    edges, name = Edges(part, links.edge_type or part.types.edge_types[0], links.reverse), links.labels
    both = dict.fromkeys([edges.kind, edges.reverse or edges.kind])
    holding = [kind for kind in both if name in part.types.edge_arrays[kind]]
    if name is None or not holding:
        return part
    made = partial(reduce, lambda graph, kind: Edges(graph, kind).without(name), holding, part)
    found: Graph = remembered(part, "without labels", made)
    return found


class EdgeTask(Task):
    """The edges that batches ask for: those of the graph are learned, held ones are judged.

    Args:
        home: Where the graph lives.
        links: Of which type the edges are, whether they are asked for their being there or for their labels, and when.
        num_negatives: False receivers for each that is learned.
    """

    has_inputs = False  # nobody lists the training edges
    _way_to_hold: str  # says how to hold edges of a {name} back

    def __init__(self, home: GraphAccess, links: LinkBounds, num_negatives: int) -> None:
        super().__init__(home)
        self.links, self.num_negatives = links, num_negatives
        self.ends = ends_of(home.types, links.edge_type, links.reverse)

    @abstractmethod
    def rows(self) -> Graph:
        """Return the graph, or the own shard, whose edges are learned, with their labels."""

    @abstractmethod
    def candidates(self) -> Candidates:
        """Return the nodes of the whole graph that false receivers are drawn from."""

    @abstractmethod
    def held(self, name: str) -> HeldLinks:
        """Return held edges, at least this rank's share of them. Collective, the first time."""

    def first_edge(self) -> int:
        """Return the number that asks for the edge at position 0 of these rows."""
        return 0

    def check(self, rows: Graph) -> None:
        check_event_samplers(rows, self.home.running.settings.samplers, self.links.time, self.links.edge_type)

    def check_prediction(self) -> None:
        sampler = self.home.running.settings.of_evaluation()
        if isinstance(sampler, TemporalSampler) and self.since(self.rows(), sampler.time) is None:
            raise ValueError(
                f"Of a split by time ({sampler.time}) a node has rows at the times of its events, and no row of its "
                "own to predict: score events by trainer.test(...), or give nodes the times to predict them at, and "
                f"take PartitionedDataModule(graph, sampler=TemporalSampler(..., {shown(sampler.time)}, "
                "seed_time=...))."
            )

    def since(self, graph: Graph, time: str | None) -> Tensor | None:
        """Return since when each node that may receive is there, if edges have times, and nodes have some too."""
        return None if time is None else times_of_receivers(graph, time, self.links.receiver_type)

    def across(self, sampler: Sampler) -> LinkSampler:
        return self._around_own(sampler, self.rows(), self.candidates(), self.first_edge())

    def around_part(self, part: Graph, own: Tensor) -> LinkSampler:
        """Return what samples a part around its edges, with its own nodes as false receivers."""
        receivers = part.types.nodes_of(self.links.receiver_type)
        nodes = own[receivers.start : receivers.stop].nonzero().view(-1) + receivers.start
        candidates = Candidates.of(nodes, self.since(part, self.links.time), receivers.start)
        return self._around_own(self.home.running.settings.training_sampler, part, candidates)

    def _around_own(self, sampler: Sampler, graph: Graph, candidates: Candidates, first: int = 0) -> LinkSampler:
        carried, time = self._carried(self._edges(graph).arrays), self.links.time
        if isinstance(sampler, TemporalSampler) and time != sampler.time:
            time = None  # nobody sees these edges: a question has no false receiver among its answers of any time
        own = OwnLinks(self.num_negatives, candidates, self.links.undirected, carried, first, time)
        return LinkSampler(sampler, own, self.ends.kinds)

    def held_links(
        self, edges: Tensor, negatives: Tensor | None, arrays: Mapping[str, Tensor], first: int = 0
    ) -> HeldLinks:
        """Return held edges as a table; those with labels have no negatives."""
        false = torch.empty(edges.shape[1], 0, dtype=torch.int64) if negatives is None else negatives
        nodes = self.ends.senders.start, self.ends.receivers.start
        return HeldLinks(edges, false, nodes, self._carried(arrays), first)

    def _edges(self, graph: Graph) -> Edges:
        return Edges(graph, self.links.edge_type or graph.types.edge_types[0], self.links.reverse)

    def _carried(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what batches say of edges: of those with labels all that they carry, otherwise their times alone."""
        labels, time = self.links.labels, self.links.time
        said = arrays if labels is not None else [] if time is None else [time]
        return {LABEL if name == labels else name_of_targets(name): arrays[name] for name in said}

    def positions(self, graph: Graph, owner: Tensor) -> Tensor:
        """Return where the training edges are whose ends, or whose receivers if batches see all, have one owner."""
        loops, across = self.links.labels is not None, self.home.boundary.sees_whole_graph
        kind = self.ends.kinds[0]
        found = positions_of_links(graph, owner, self.links.undirected, kind, loops=loops, across=across)
        return self.of_labels_and_times(graph, found)

    def of_labels_and_times(self, graph: Graph, found: Tensor) -> Tensor:
        """Return those of some positions whose edges have a label, and are learned by their time."""
        labels, time, until = self.links.labels, self.links.time, self.links.until
        if labels is None and time is None:
            return found
        arrays, rows = self._edges(graph).arrays, places_of(graph, self.ends.kinds[0], found)
        if labels is not None:
            is_asked = is_labelled(arrays[labels][rows])
            found, rows = found[is_asked], rows[is_asked]
        return found if time is None or until is None else found[arrays[time][rows].long() < until]

    def judged(self, name: str) -> Judged:
        check_held_back(name, self.links.held, self._way_to_hold.format(name=name))
        held, count = self.held(name), int(self.links.held[name][-1])

        def sampler(more_hops: int) -> Sampler:
            return LinkSampler(self.home.running.sampler_of_evaluation(more_hops), held, self.ends.kinds)

        def targets(ids: Tensor) -> Targets:
            asked = held.targets_of(ids)
            nodes, ends = asked.seeds()
            return Targets(nodes, asked.in_batch(ends), self.links.edge_type)

        num_ranks = self.home.running.num_ranks
        return Judged(range(count), num_ranks, f"There are {count} {name} edges", sampler, targets)


class WholeEdges(EdgeTask):
    """The edges of a split in a graph that every host has.

    Args:
        home: Where the graph lives.
        num_negatives: False receivers for each that is learned.
        known: The split, or what else says which edges are asked for, its ``links``.
    """

    home: LocalGraph
    _way_to_hold = "give split_edges() a share for them, split_edges(graph, {name}=0.1)."

    def __init__(self, home: LocalGraph, num_negatives: int, known: Any) -> None:
        super().__init__(home, known.links, num_negatives)
        self.known, self._most = known, dict[int, int]()

    def rows(self) -> Graph:
        return self.home.whole

    def candidates(self) -> Candidates:
        receivers = self.ends.receivers
        return Candidates.of(receivers, self.since(self.home.whole, self.links.time), receivers.start)

    def held(self, name: str) -> HeldLinks:
        split: LinkSplit = self.known
        return self.held_links(split.edges[name], split.negatives.get(name), split.held_arrays.get(name, {}))

    def most(self) -> int:
        num_ranks = self.home.running.num_ranks
        if num_ranks not in self._most:
            self._most[num_ranks] = self._count_most(num_ranks)
        return self._most[num_ranks]

    def _count_most(self, num_ranks: int) -> int:
        total = self.of_corrections().numel()
        if num_ranks == 1:
            return total
        assignment = self.home.plan.partition.assignment

        def count(owner: Tensor) -> Tensor:
            rank_of_node = owner[assignment]
            _, receivers = edges_at(self.home.graph, self.positions(self.home.whole, rank_of_node))
            return torch.bincount(rank_of_node[receivers], minlength=num_ranks)

        what, otherwise = f"{total} training edges", "or MetisPartitioner(), which keeps most edges inside parts"
        if self.home.boundary.sees_whole_graph:
            what, otherwise = f"nodes that the {what} lead to", "or another partition"
        return self.home.plan.most(what, count, otherwise)

    def of_corrections(self) -> Tensor:
        everyone = torch.zeros(1, dtype=torch.int64).expand(self.home.whole.num_nodes)
        seeds = self.positions(self.home.whole, everyone)
        if not seeds.numel():
            kind, labels = self.links.edge_type, self.links.labels
            which = "" if kind is None else f" of type {kind}"
            with_label = "" if labels is None else f" with labels ({labels})"
            raise ValueError(f"The graph has no edges{which}{with_label} to learn from.")
        return seeds

    def learned(self, part: Graph, num_batches: int, seed: int) -> Learning:
        is_whole = part is self.home.graph
        own = self._own(part)
        if self.checks_values:
            check_arrays(self.home.shown(part))
        seeds = self.positions(self.home.whole if is_whole else part, own.to(torch.int64) - 1)
        sampler = self.across(self.home.running.settings.training_sampler) if is_whole else self.around_part(part, own)
        return Learning(self.home.training_source(part, sampler), Deal(seeds, num_batches, seed))

    def _own(self, part: Graph) -> Tensor:
        """Return which nodes of a part are the rank's own."""
        if part is self.home.graph and self.home.running.num_ranks > 1:
            return self.home.plan.partition.assignment == self.home.running.rank
        own: Tensor | None = vars(part).get("node_arrays", {}).get("train_mask")
        return torch.ones(part.num_nodes, dtype=torch.bool) if own is None else own


ANSWERS, LEFT = "edge_label_answers", "edge_label_left"


@dataclass(frozen=True, eq=False)
class RootSampler:
    """Samples the trees of nodes at times of their own, of both ends of edges. A seed is the number of one of them.

    Args:
        sampler: Draws the trees.
        nodes: The roots.
        times: Their times.
        answers: The right pairs by the ids in their types, in the order of the first ones, shape (2, n).
        first: The id in the graph of the first of these in its type.
        target_type: The number of the edge type that these pairs are of.
        num_batches: How many batches a pass has. Each says how many are left after it.
    """

    sampler: TemporalSampler
    nodes: Tensor
    times: Tensor
    answers: Tensor
    first: int
    target_type: int
    num_batches: int = 0

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, *of) for of in zip(seeds, keys, strict=True)]

    def _sample(self, graph: Graph, ids: Tensor, batch_key: BatchKey) -> Sample:
        ids = ids[self.nodes[ids].argsort(stable=True)]  # as batches have nodes of several types
        sample = sample_at(self.sampler, graph, self.nodes[ids], self.times[ids], batch_key)
        answers = self.answers[:, torch.isin(self.answers[0], self.nodes[ids] - self.first)]
        left = torch.tensor([self.num_batches - 1 - batch_key.batch])
        extra = {**sample.extra, ANSWERS: answers, LEFT: left}
        return sample._replace(extra=extra, is_constant=False, target_type=self.target_type)


@dataclass(frozen=True, eq=False)
class Answers:
    """The questions of a task that recommends, and the edges from them to right answers.

    Args:
        graph: The graph, without masks.
        task: The task.
        masks: Which questions train, validate and test.
        path: The folder of the graph, which knows the users' ids.
    """

    graph: Graph
    task: TableTask
    masks: dict[str, Tensor]
    path: Path | None

    @classmethod
    def of(cls, given: Graph | Data | HeteroData | str | Path, name: str) -> Answers:
        """Those of a task of a prepared database."""
        graph = graph_of(given)
        known = {} if graph.types.tables is None else graph.types.tables.tasks
        names = [each for each, task in known.items() if task.receiver is not None]
        if name not in names:
            other = " PartitionedDataModule(graph, task=...) learns that one." if name in known else ""
            raise ValueError(f"task must be a task that recommends, one of {shown(names)}, got {shown(name)}.{other}")
        graph = graph.with_seeds(name)
        arrays = {kind: dict(of) for kind, of in graph.types.node_arrays.items()}
        masks = {split: arrays[name].pop(f"{split}_mask") for split in ("train", "val", "test")}
        for of in arrays.values():
            for array in [array for array in of if array.endswith("_mask")]:
                del of[array]
        return cls(with_arrays_of_types(graph, arrays), known[name], masks, graph.path)

    @property
    def times(self) -> Tensor:
        """The time of each question."""
        return self.graph.types.node_arrays[self.task.name][TIME]

    @property
    def links(self) -> LinkBounds:
        """What is learned of edges: those of questions that are asked before all that judge."""
        later = self.times[self.masks["val"] | self.masks["test"]]
        until = int(later.min()) if later.numel() else None
        return LinkBounds(False, self.task.answers, None, None, {}, ANSWERED, until)

    @property
    def fingerprint(self) -> str:
        """A hash of the graph, by which ranks see that they have the same, and of the task."""
        return f"{self.graph.fingerprint} {self.task.name}"

    def pairs(self, mask: Tensor) -> Tensor:
        """The answers of some questions, by the ids in their types, in the order of questions, shape (2, n)."""
        assert self.task.answers is not None
        ends = self._ends(self.task.answers)
        ends = ends[:, mask[ends[0]]]
        return ends[:, ends[0].argsort(stable=True)]

    def _ends(self, kind: EdgeType) -> Tensor:
        """The ends of all edges of a type, by the ids in their types."""
        edges = Edges(self.graph, kind)
        return edges.ends.in_types(edges.links)

    def columns(self, questions: Tensor, ids_of: Path | None) -> Columns:
        """Return how a table names what is recommended to some questions, by the ids of a prepared graph.

        It has a row for each question about a row that is there, and receiver.
        """
        task, types = self.task, self.graph.types
        assert task.receiver is not None
        senders = torch.full((len(self.times),), NONE)
        about, of = self._ends((task.entity, ASKED, task.name))
        senders[of] = about
        of_ends = [ids_for(ids_of, self.path, kind, len(types.nodes_of(kind))) for kind in (task.entity, task.receiver)]
        times = self.times[questions].numpy()
        times = times.astype("datetime64[s]") if task.are_dates else times
        numbers, sent = questions.numpy(), senders[questions].numpy()

        def columns(first: int, rows: Ids) -> dict[str, Ids]:
            at, place = np.nonzero((rows["receiver"] >= 0) & (sent[first : first + len(rows)] >= 0)[:, None])
            found, at = rows[at, place], at + first
            of_questions = {"question": numbers[at], "sender": named(sent[at], of_ends[0]), "time": times[at]}
            return of_questions | {"receiver": named(found["receiver"], of_ends[1]), "score": found["score"]}

        return columns

    def roots(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Some questions at their times, and all receivers at each of these, as nodes and times, evenly mixed."""
        types, task = self.graph.types, self.task
        assert task.receiver is not None
        questions, receivers = types.nodes_of(task.name), types.nodes_of(task.receiver)
        asked = mask.nonzero().view(-1)
        at, many = self.times[asked].unique(), len(receivers)
        nodes = torch.cat([asked + questions.start, torch.arange(receivers.start, receivers.stop).repeat(len(at))])
        times = torch.cat([self.times[asked], at.repeat_interleave(many)])
        place = torch.cat([torch.linspace(0, 1, len(asked)), torch.linspace(0, 1, many * len(at))])
        order = place.argsort(stable=True)
        return nodes[order], times[order]


class AnswerEdges(WholeEdges):
    """Learns the answers of questions to train on, and judges what is recommended to others.

    Args:
        home: Where the graph lives.
        num_negatives: False receivers for each answer that is learned.
        known: The task.
    """

    probes = False  # a model says nothing of pairs where rows are judged

    known: Answers

    def check(self, rows: Graph) -> None:
        check_event_samplers(rows, self.home.running.settings.samplers, TIME, None)

    def predicted(self, some: Tensor | None) -> Judged:
        """Return questions and all receivers at their times, which a model ranks when it has the rows of all."""
        if is_limited(self.home.running.trainer):
            raise ValueError(
                "limit_predict_batches would leave out receivers, and all are ranked for each question: leave the "
                "limit out, or ask less, data.only([0, 1])."
            )
        mask = torch.full_like(self.known.masks["test"], some is None)
        if some is not None:
            mask[some - self.home.types.seed_ids.start] = True
        return self._judged("prediction", mask)

    def columns(self, some: Tensor | None, ids_of: Path | None) -> Columns:
        ids = self.home.types.seed_ids
        return self.known.columns(torch.arange(len(ids)) if some is None else some - ids.start, ids_of)

    def judged(self, name: str) -> Judged:
        asked = self.known
        held = {split: of for split, of in asked.masks.items() if bool(of.any())}
        check_held_back(name, held, f"give the task {asked.task.name!r} questions to judge.")
        return self._judged(name, asked.masks[name])

    def _judged(self, name: str, mask: Tensor) -> Judged:
        asked = self.known
        nodes, times = asked.roots(mask)
        first = asked.graph.types.nodes_of(asked.task.name).start
        roots = partial(RootSampler, nodes=nodes, times=times, answers=asked.pairs(mask), first=first)

        def sampler(more_hops: int) -> Sampler:
            of_trees = self.home.running.sampler_of_evaluation(more_hops)
            assert isinstance(of_trees, TemporalSampler)
            return roots(of_trees, target_type=self.ends.kinds[0])

        told = (
            f"{name} asks {int(mask.sum())} questions of {asked.task.name!r}, and with receivers has {len(nodes)} rows"
        )

        def targets(ids: Tensor) -> Targets:
            return Targets(nodes[ids], {}, asked.task.answers)

        def dealt(root: Sampler, num_batches: int) -> Sampler:
            assert isinstance(root, RootSampler)
            return replace(root, num_batches=num_batches)

        return Judged(range(len(nodes)), self.home.running.num_ranks, told, sampler, targets, dealt)
