"""Answers requests with the best links of nodes: the receivers that a model scores highest among all of the graph.

Rows of all nodes are computed once, and requests are ranked as :func:`best_links` ranks. A new node that sends has the
row of the graph with its own features and edges; receivers have those of the graph as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_gnn_dist.extensions.links.best_links import check_ranks, links_of
from lightning_gnn_dist.extensions.links.link_datamodule import LinkDataModule
from lightning_gnn_dist.extensions.links.ranking import Best, KnownBySender, LeftOut, Nodes
from lightning_gnn_dist.extensions.links.scoring import Score
from lightning_gnn_dist.extensions.links.search import Links, LinkSearch, layers_that_rank
from lightning_gnn_dist.extensions.serving.answering import NODES_AT_ONCE, NodeRows, check_norms, computing, limited
from lightning_gnn_dist.extensions.serving.question import Form, Limits, Question, shards_are_not_served
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.user_ids import known_ids, named
from lightning_gnn_dist.homes.run import type_of_model
from lightning_gnn_dist.layers.through_layers import Layer, needs_whole_graph, through_layers
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import open_channel

MOST_LINKS = 10  # of a node, where a request does not say


class Ranked(NamedTuple):
    """How links are ranked.

    Attributes:
        score: How pairs are scored, as for :func:`best_links`.
        leave_out: Which pairs are not proposed.
        budget_bytes: Bytes that the rows of all nodes, and scores, may take.
    """

    score: Score
    leave_out: Sequence[LeftOut]
    budget_bytes: int


class LinkAnswerer:
    """Answers requests about the links that a data module learns.

    Args:
        trainer: Says with which precision the model computes.
        model: The model, with its weights, on the device that computes.
        data: The data module.
        limits: What a request may ask for.
        neighbors: How many neighbours are drawn of a new node, and of those around it; with fewer, its row is exact.
        how: How links are ranked.
        ids_of: The prepared graph by whose tables' ids nodes are named. Default: they are named by numbers.

    Attributes:
        form: Reads requests.
        nodes_at_once: How many nodes are ranked at once, at most.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule,
        data: LinkDataModule,
        limits: Limits,
        neighbors: int,
        how: Ranked,
        ids_of: Path | None = None,
    ) -> None:
        if data.task is not None:
            raise ValueError(
                f"A server answers the best links of a split, and task {data.task!r} recommends at the time of each "
                "question: write its answers by predict --output=best.parquet."
            )
        check_ranks(model)
        check_norms(model)
        if data.split is None:
            raise shards_are_not_served(data.shards_path, "split")
        self._links, self._trainer, self._owner = links_of(data.split, how.leave_out), trainer, model.eval()
        self._graph, num_senders, budget = data.split.graph, len(self._links.ends.senders), how.budget_bytes
        self._model = layers_that_rank(model, self._graph.types)
        of_all = torch.arange(num_senders), limits.links, how.score, None, budget, type_of_model(trainer), budget, None
        search = LinkSearch(model, self._links, *of_all)
        self._model.let_answer()
        with computing(trainer):
            self._ranking, *_ = search.ranking(self._model, open_channel(1, model.device))
        self._known = KnownBySender(self._ranking.known, self._graph)
        sending, num_layers = self._graph.types.node_types[self._links.kinds[0]], len(self._model.layers)
        sampler = NeighborSampler([-1] * (num_layers + needs_whole_graph(self._model.layers)))
        of_graph = self._graph, sending, limited(sampler, neighbors), num_layers, data.loading, limits
        self._rows = NodeRows(trainer, self._rows_of_batch, *of_graph)
        self.nodes_at_once, self._chunk = search.sizes(self._ranking, NODES_AT_ONCE)
        self.form = Form(self._graph, sending, limits, MOST_LINKS, ids_of)
        receiving = self._graph.types.node_types[self._links.kinds[1]]
        self._ids = None if ids_of is None else known_ids(ids_of, receiving)

    @property
    def about(self) -> dict[str, Any]:
        """What is answered: the model, and of how many nodes how many are ranked."""
        ends = self._links.ends
        return {"model": type(self._owner).__name__, "nodes": len(ends.senders), "receivers": len(ends.receivers)}

    def warm_up(self) -> None:
        """Answer for a node of the graph, so that what cannot be served is refused now, and all loops are compiled."""
        question = self.form.of_first()
        self._rows([question])
        self.answers([question])

    def answers(self, asked: Sequence[Question]) -> list[dict[str, Any]]:
        """Return the best links of the nodes of each request."""
        senders = Senders.of(self._links, self._graph, asked)
        best = self._best(senders, asked)
        found = list[dict[str, Any]]()
        for question, places in zip(asked, senders.places, strict=True):
            ids, scores = best.ids[places, : question.best_links], best.scores[places, : question.best_links]
            counts = (ids >= 0).sum(1).tolist()  # those that are there come first
            rows = list(zip(named(ids.clamp(min=0).numpy(), self._ids).tolist(), scores.tolist(), counts, strict=True))
            found.append({"receivers": [r[:n] for r, _, n in rows], "scores": [s[:n] for _, s, n in rows]})
        return found

    def _best(self, senders: Senders, asked: Sequence[Question]) -> Best:
        k = min(max(question.best_links for question in asked), len(self._links.ends.receivers))
        known = self._known.of(senders.nodes[senders.nodes < self._graph.num_nodes], senders.pairs)
        ranking = replace(self._ranking, known=known, k=k)
        with computing(self._trainer):
            rows = self._rows_of(senders, asked)
            parts = [
                ranking.ranked(Nodes(senders.nodes[some], senders.ids[some]), rows[some.to(rows.device)], self._chunk)
                for some in torch.arange(len(senders.nodes)).split(self.nodes_at_once)
            ]
        return Best(*(torch.cat(arrays).cpu() for arrays in zip(*parts, strict=True)))

    def _rows_of(self, senders: Senders, asked: Sequence[Question]) -> Tensor:
        """Return the rows of the senders: those of the graph's nodes are there, and those of new nodes are computed."""
        table, is_new = self._ranking.senders, senders.nodes >= self._graph.num_nodes
        found = table.take(senders.nodes[~is_new]).to(self._owner.device)
        brought = [of._replace(nodes=of.nodes[of.nodes >= self._graph.num_nodes].unique()) for of in asked]
        brought = [of for of in brought if len(of.nodes)]
        if not brought:
            return found
        rows = torch.cat([torch.from_numpy(rows) for rows in self._rows(brought)])
        return torch.cat([found, rows.to(found)])

    def _rows_of_batch(self, batch: Any) -> Tensor:
        rows: Tensor = through_layers(_Layered(self._model.layers), batch.to(self._owner.device))
        return rows


class _Layered(NamedTuple):
    """A model by its layers, whether they are its own or those of a model of PyG's in it."""

    of_model: list[Layer]

    def layers(self) -> list[Layer]:
        return self.of_model


class Senders(NamedTuple):
    """The nodes that some requests ask for, each once; the new ones of each request behind those of the one before.

    Attributes:
        nodes: Their ids in the graph, and behind these, increasing.
        ids: Their ids in their type.
        places: Where the nodes of each request stand among them.
        pairs: The links from new nodes to receivers that are nodes of the graph, shape (2, n).
    """

    nodes: Tensor
    ids: Tensor
    places: list[Tensor]
    pairs: Tensor

    @classmethod
    def of(cls, links: Links, graph: Graph, asked: Sequence[Question]) -> Senders:
        """Find them.

        Args:
            links: The links.
            graph: The graph.
            asked: The requests.
        """
        sending, number = links.kinds[0], links.ends.target_type.number
        first_new, nodes, ids, pairs = graph.num_nodes, list[Tensor](), list[Tensor](), list[Tensor]()
        for question in asked:
            is_new, shift = question.nodes >= graph.num_nodes, first_new - graph.num_nodes
            nodes.append(question.nodes + shift * is_new)
            before = graph.num_nodes + sum(question.num_new[:sending]) - len(links.ends.senders)
            ids.append(question.nodes - torch.where(is_new, before, links.ends.senders.start))
            ends = question.edges[number].ends
            pairs.append(
                ends[:, (ends[0] >= graph.num_nodes) & (ends[1] < graph.num_nodes)] + torch.tensor([[shift], [0]])
            )
            first_new += sum(question.num_new)
        distinct, places = torch.cat(nodes).unique(return_inverse=True)
        of_distinct = torch.empty_like(distinct)
        of_distinct[places] = torch.cat(ids)
        return cls(distinct, of_distinct, list(places.split(list(map(len, nodes)))), torch.cat(pairs, 1))
