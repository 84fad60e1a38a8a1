"""Tasks that recommend: their right answers are edges that nobody sees, which are learned as events are.

    question q at t_q, receivers r:   rank of r = place of <h_q(t_q), h_r(t_q)> among those of all receivers

Judged are rows: of each question at its time, and of each receiver at the time of each question, computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.link_sampler import edges_at
from lightning_gnn_dist.extensions.links.ranking import NONE
from lightning_gnn_dist.extensions.links.task import WholeEdges, check_held_back
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, check_event_samplers, sample_at
from lightning_gnn_dist.graph.graph import Graph, with_arrays_of_types
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.tables import ANSWERED, ASKED, TIME, TableTask
from lightning_gnn_dist.graph.user_ids import Columns, Ids, ids_for, named
from lightning_gnn_dist.homes.access import graph_of
from lightning_gnn_dist.layers.choice import Judged, Targets, is_limited
from lightning_gnn_dist.sampling.base import Sampler

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
        types = self.graph.types
        ends = edges_at(self.graph, types.edges_of(kind))
        return ends - torch.tensor([[types.nodes_of(kind[0]).start], [types.nodes_of(kind[2]).start]])

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
            mask[some - self.home.ids.start] = True
        return self._judged("prediction", mask)

    def columns(self, some: Tensor | None, ids_of: Path | None) -> Columns:
        ids = self.home.ids
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
