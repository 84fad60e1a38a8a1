"""The best new links of some nodes: the receivers that a model scores highest among all, which a recommender shows.

    rows of all nodes, one layer after the other, each rank those of its own
    -> senders in blocks: their rows are sent to all ranks
    -> each rank scores its own receivers, chunk by chunk, without links, and keeps the best of each sender
    -> ranks put these together, each for its share of the block

No rank holds more scores than those of a block with a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist import checks
from lightning_gnn_dist.batches.batch import ENDS
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.callbacks.shared_rows import SharedRows
from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.extensions.links.edges import LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.ranking import BestLinks
from lightning_gnn_dist.extensions.passes.layer_pass import bytes_there
from lightning_gnn_dist.extensions.passes.prediction import check_pass, pass_over_all, predict_once
from lightning_gnn_dist.extensions.passes.row_table import RowTable
from lightning_gnn_dist.graph.convert import distinct_ids
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, degrees_of, row_pieces
from lightning_gnn_dist.graph.storage.parquet_rows import TABLES
from lightning_gnn_dist.graph.storage.store import holds_shards
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.graph.user_ids import Columns, Ids, ids_for, named
from lightning_gnn_dist.homes.run import BUDGET_BYTES, type_of_model
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.layers.layer_pass import LayerNodes, Work, by_type, ids_of
from lightning_gnn_dist.layers.through_layers import COPIES, ModelLayers, has_layers, layers_in, layers_of_model
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel, open_channel

Score = Literal["model", "dot"]
LeftOut = Literal["edges", "val", "test", "self"]
_OF_THE_BUDGET = 0.4  # scores of a block with a chunk; rows of all nodes take a part of the rest
_AT_ONCE = 4096  # senders of a block at most, and receivers of a chunk if blocks of fewer senders leave room for them
_WORK = 24  # bytes of a pair beside its score: what is sorted, and where it stands


def best_links(
    trainer: Trainer,
    model: LightningModule,
    split: LinkSplit | str | Path,
    path: str | Path | None = None,
    *,
    senders: Sequence[int] | Tensor | None = None,
    k: int = 10,
    score: Score = "model",
    leave_out: Sequence[LeftOut] = ("edges", "self"),
    budget_bytes: int | None = None,
    overwrite: bool = False,
    ids_of: str | Path | None = None,
    **options: Any,
) -> BestLinks | None:
    """Find the receivers with the highest scores for each of some senders among all; all ranks share the work.

        best_links(trainer, model, split, "links.npy", senders=[3, 141], k=10, ckpt_path="best.ckpt")

    It is exact: each sender is scored with each receiver, by rows that the layers of the model compute once for all
    nodes. Of equal scores the receiver with the lower id comes first; a score of minus infinity proposes nothing. The
    file has records ``sender``, ``receiver`` and ``score``, ``k`` for each sender in their order, ids being those in
    their types. A rank holds the rows of its own nodes, in a file where they take more than a fifth of the budget, and
    the scores of a block of senders with a chunk of its receivers.

    Args:
        trainer: Starts the ranks, places the model and sets the precision.
        model: A module with a method ``layers``, see :class:`HasLayers`, or with one of PyG's models in it.
        split: The links, or the path of a saved split, or of shards of one. Of a graph without held edges it is
            ``LinkSplit(graph, {})``.
        path: The file, ``.npy``, or a table, ``.parquet`` or ``.csv``, which has no rows for receivers that are not
            there. It appears when it is complete. With None, each rank returns its share of the senders.
        senders: Ids of nodes of the type that sends. Default: all of them.
        k: How many receivers to find for each; no more than there are nodes that may receive.
        score: ``"model"`` calls ``forward()`` of the module with batches of pairs, as a step does; ``"dot"`` takes dot
            products of the rows of both ends, at far less cost.
        leave_out: Which pairs are not proposed: ``"edges"`` of the graph, held edges (``"val"``, ``"test"``), and a
            node for itself, ``"self"``.
        budget_bytes: Bytes that the work may take on each rank, as for :func:`predict_by_layer`. Default: 1 GiB of RAM,
            and half of what is free on a GPU.
        overwrite: Replace an existing file.
        ids_of: For a table, the prepared graph whose ids nodes have: the one that was split. Default: the graph.
        options: Passed to ``trainer.predict``: ``ckpt_path``, ``weights_only``.
    """
    file, named_by = check_pass(best_links, trainer, model, path, budget_bytes, ids_of, options, overwrite)
    checks.check_at_least(1, k=k)
    checks.check_choice("score", score, Score)
    links = _links_of(split, leave_out)
    _check_run(model, links.types)
    count = len(links.ends.senders)
    ids = torch.arange(count) if senders is None else distinct_ids("senders", senders, count)
    search = LinkSearch(model, links, ids, int(k), score, file, budget_bytes, type_of_model(trainer), named_by)
    predict_once(trainer, model, search.step, options)
    return search.found


def _check_run(model: LightningModule, types: TypeNames) -> None:
    """Refuse a model whose rows of all nodes cannot be computed."""
    if has_layers(model):
        layers_in(model)  # refuses those that cannot be computed one by one
    elif layers_of_model(model) is None:
        raise TypeError(
            f"model: {type(model).__name__} has no method layers(), nor one of PyG's models in it: rows of all nodes "
            "are computed layer by layer. Let layers() return one function for each layer, and forward() score the "
            "rows of through_layers(self, batch)."
        )
    elif types.have_names:
        raise TypeError(
            f"model: {type(model).__name__} has no method layers(), and a model of PyG's in it takes no types: let "
            "layers() return one function for each layer."
        )


class Links(NamedTuple):
    """Links between nodes of given types.

    Attributes:
        where: The graph, or the folder of its shards.
        split: The split, if every host has it.
        types: The types of the graph.
        edge_type: The type of the links, if the graph has types.
        leave_out: Which pairs are not proposed.
    """

    where: Graph | Path
    split: LinkSplit | None
    types: TypeNames
    edge_type: EdgeType | None
    leave_out: Sequence[LeftOut]

    @property
    def ends(self) -> LinkEnds:
        """The nodes that they may be between."""
        return ends_of(self.types, self.edge_type)

    @property
    def kinds(self) -> tuple[int, int]:
        """The numbers of the types of senders and receivers."""
        names, kind = self.types.node_types, self.edge_type or self.types.edge_types[0]
        return names.index(kind[0]), names.index(kind[2])


def _links_of(split: LinkSplit | str | Path, leave_out: Sequence[LeftOut]) -> Links:
    """Return between which nodes links are. Events are refused, which nodes have no rows of their own for."""
    checks.check_list("leave_out", leave_out, '["edges", "self"]')
    for name in leave_out:
        checks.check_choice("leave_out", name, LeftOut)
    check_instance("split", split, LinkSplit | str | Path, "split_edges(graph), or the path of a saved split or shards")
    if isinstance(split, str | Path) and holds_shards(path := checks.check_path("split", split)):
        bounds = extension("index of shards").Bounds.read(path)
        if bounds.links is None:
            raise ValueError(f"split: {path} holds shards of a graph whose edges are not split: divide a split.")
        if held := [name for name in leave_out if name in ("val", "test")]:
            raise ValueError(
                f"leave_out: of shards no rank has all {held[0]} edges: leave {held[0]!r} out, or give the whole split."
            )
        time, found = bounds.links.time, Links(path, None, bounds.types, bounds.links.edge_type, leave_out)
    else:
        whole = split if isinstance(split, LinkSplit) else LinkSplit.open(split)
        time, found = whole.time, Links(whole.graph, whole, whole.graph.types, whole.edge_type, leave_out)
    if time is not None:
        raise ValueError(
            f"split: of a split by time ({time}) a node has rows at the times of its events, and none of its own that "
            "could be ranked: score events by trainer.test(...)."
        )
    return found


class Ends(NamedTuple):
    """Some nodes of one type: their ids in it, and the rows that the last layer has computed for them."""

    ids: Tensor
    rows: Tensor


@dataclass
class LinkSearch:
    """The work of one rank. All ranks do it together.

    Attributes:
        module: The module that the user has written.
        links: The links.
        asked: The ids of senders in their type, each once.
        k: How many receivers to find for each.
        score: How pairs are scored.
        path: The file that all ranks share, or None.
        budget_bytes: Bytes that the work may take. Default: 1 GiB of RAM, and half of what is free on a GPU.
        dtype: The type of the model's numbers, if batches are brought to it.
        ids_of: The prepared graph whose ids nodes have in a table. Default: the graph.
        found: What this rank has found, if there is no file.
    """

    module: LightningModule
    links: Links
    asked: Tensor
    k: int
    score: Score
    path: Path | None
    budget_bytes: int | None
    dtype: torch.dtype | None
    ids_of: Path | None
    found: BestLinks | None = None

    def step(self, batch: Tensor) -> Tensor:
        """Take the place of the module's ``predict_step``."""
        model = layers_of_model(self.module)
        assert model is not None
        channel, undo = open_channel(collectives.world_size(), self.module.device), model.let_answer()
        try:
            ranking = Ranking(self, model, channel)
            if self.path is None:
                self._keep(ranking)
            else:
                self._write(ranking, self.path)
        finally:
            undo()
            channel.close()
        return batch

    def _keep(self, ranking: Ranking) -> None:
        """Put what this rank has found in the order that was asked for."""
        parts = [ranking.none(self.asked[:0]), *ranking.blocks()]
        found = [torch.cat(arrays).cpu() for arrays in zip(*parts, strict=True)]
        order = Lookup(self.asked)(found[0])[0].argsort()
        self.found = BestLinks(*(array[order] for array in found))

    def _write(self, ranking: Ranking, path: Path) -> None:
        """Write ``k`` rows for each sender, of -1 where it has fewer. Collective."""
        columns = [self._columns()] if path.suffix in TABLES else []
        row = np.dtype([("sender", np.int64), *ranking.none(self.asked[:0]).records.dtype.descr])
        lookup = Lookup(self.asked)
        file = SharedRows(path, len(self.asked) * ranking.k, self.module.device, "best_links", *columns)
        try:
            file.open(np.empty(0, row))
            for best in ranking.blocks():
                rows, found = np.empty(best.receivers.shape, row), best.records
                rows["sender"] = best.senders.numpy()[:, None]
                rows["receiver"], rows["score"] = found["receiver"], found["score"]
                places = lookup(best.senders)[0].numpy()
                file.write((places[:, None] * ranking.k + np.arange(ranking.k)).reshape(-1), rows.reshape(-1))
            file.publish()
        finally:
            file.discard()

    def _columns(self) -> Columns:
        """Return the columns of a table, which has no receivers that are not there, by the users' ids of nodes."""
        links, graph = self.links, self.links.where.path if isinstance(self.links.where, Graph) else None
        of_ends = [
            ids_for(self.ids_of, graph, links.types.node_types[kind], len(nodes))
            for kind, nodes in zip(links.kinds, links.ends[:2], strict=True)
        ]

        def columns(first: int, rows: Ids) -> dict[str, Ids]:
            rows = rows[rows["receiver"] >= 0]
            found = {name: named(rows[name], ids) for name, ids in zip(("sender", "receiver"), of_ends, strict=True)}
            return found | {"score": rows["score"]}

        return columns


class Ranking:
    """What a rank ranks: the rows of its senders and of its receivers. To construct it is collective.

    Args:
        search: What is looked for.
        model: The layers that compute rows.
        channel: The ranks.

    Attributes:
        k: How many receivers to find for each sender.
    """

    def __init__(self, search: LinkSearch, model: ModelLayers, channel: Channel) -> None:
        links, self._search, self._channel, self._owner = search.links, search, channel, model.owner
        sending, receiving = links.kinds
        types, self._device = links.types.node_types, search.module.device
        self.k = min(search.k, len(links.ends.receivers))
        self._budget = BUDGET_BYTES if search.budget_bytes is None else search.budget_bytes
        how = Work(self._device, search.dtype, True, self._budget, search.budget_bytes)
        work, of_rank = pass_over_all(links.where, model, channel, how, types[receiving])
        self._nodes = work.nodes
        own = [ids_of(ids) for ids in by_type(of_rank, self._nodes.offsets)]

        ids = self._nodes.ids_in_type(sending, own[sending])
        is_asked = torch.isin(ids, search.asked)
        asked = torch.cat(channel.exchange([torch.stack([own[sending][is_asked], ids[is_asked]], 1)] * channel.size))
        self._asked = asked[asked[:, 0].argsort()]  # nodes, and their ids, of all ranks in the graph's order

        work.plan_of_own(of_rank, len(model.layers), receiving)
        last, none = work.planned.pop().nodes, torch.empty(0, dtype=torch.int64)
        if sending != receiving:
            senders = self._nodes.by_owner(self._asked[:, 0].contiguous())[channel.rank]
            last = torch.cat([senders, ids_of(last)]).sort().values
        work.planned.append(LayerNodes(last, none, [none] * channel.size, last))  # no rank needs rows of another
        tables = work.rows(model.layers).of_types
        self._senders, self._receivers = (_with_rows(tables[kind], types[kind]) for kind in links.kinds)

        ids = self._nodes.ids_in_type(receiving, own[receiving])
        self._own, self._ids = own[receiving][ids.argsort()], ids.sort().values.to(self._device)
        follow = bool((self._own.diff() == 1).all())  # then they are scored where they lie
        self._take = self._receivers.take_run if follow else self._receivers.take
        self._held = self._held_links()

    def none(self, senders: Tensor) -> BestLinks:
        """Return no receivers of some senders."""
        dtype = torch.float64 if self._receivers.like.dtype == torch.float64 else torch.float32
        return BestLinks.none(senders, self.k, torch.empty(0, dtype=dtype, device=self._device))

    def blocks(self) -> Iterator[BestLinks]:
        """Yield the best of this rank's share of each block. Collective."""
        at_once, chunk = self._sizes()
        channel, size = self._channel, self._channel.size
        for start in range(0, len(self._asked), at_once):
            asked, ids = self._asked[start : start + at_once].T.contiguous()
            pieces = self._nodes.by_owner(asked)
            own = self._senders.take(pieces[channel.rank]).to(channel.device)
            rows = torch.cat(channel.exchange([own] * size, [len(piece) for piece in pieces]))
            nodes = torch.cat(pieces)
            best = self._ranked(nodes, ids[torch.searchsorted(asked, nodes)], rows.to(self._device), chunk)
            shares = [slice((of := share_of(len(nodes), size, rank)).start, of.stop) for rank in range(size)]
            share = best.senders[shares[channel.rank]]
            found = [
                channel.exchange([array[of].to(channel.device) for of in shares], [len(share)] * size)
                for array in best[1:]
            ]
            yield BestLinks.joined([BestLinks(share, *of_rank) for of_rank in zip(*found, strict=True)])

    def _ranked(self, nodes: Tensor, ids: Tensor, rows: Tensor, chunk: int) -> BestLinks:
        """Return the best of the own receivers for each of some senders."""
        best, lookup, senders = self.none(ids), Lookup(nodes), Ends(ids.to(self._device), rows)
        for first in range(0, len(self._own), chunk):
            own, ids_there = self._own[first : first + chunk], self._ids[first : first + chunk]
            scores = self._scores(senders, Ends(ids_there, self._take(own).to(self._device)))
            scores = scores.detach().to(best.scores.dtype).contiguous()
            for known, column in self._known(own):
                row, is_asked = lookup(known)
                scores[row.to(scores.device), column[is_asked].to(scores.device)] = -math.inf
            best = best.or_better(ids_there, scores)
        if bool((is_nan := best.scores.isnan().any(1)).any()):
            sender_id = int(ids[is_nan.cpu()][0])
            raise ValueError(
                f"The score of sender {sender_id} with a receiver is NaN, which has no place in any order."
            )
        return best

    def _scores(self, senders: Ends, receivers: Ends) -> Tensor:
        """Score all pairs: by products of rows, or as the user's module scores the targets of a batch of them."""
        if self._search.score == "dot":
            return senders.rows.flatten(1) @ receivers.rows.flatten(1).T
        module, shape = self._search.module, (len(senders.ids), len(receivers.ids))
        found, count = module(self._batch(senders, receivers)), shape[0] * shape[1]
        if not isinstance(found, Tensor) or found.shape != (count,):
            got = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"forward() of {type(module).__name__} returned {got} for the {count} pairs of a batch: it must "
                'return a score for each column of edge_label_index. Or name score="dot", dot products of rows.'
            )
        return found.view(shape)

    def _batch(self, senders: Ends, receivers: Ends) -> Any:
        """Return what a module is called with; receivers stand behind senders of the same type."""
        links, (sending, receiving) = self._search.links, self._search.links.kinds
        keys: list[Any] = [None] if links.edge_type is None else list(links.types.node_types)
        ends = {keys[sending]: senders, keys[receiving]: receivers}
        if sending == receiving:
            ends = {keys[sending]: Ends(*map(torch.cat, zip(senders, receivers, strict=True)))}
        rows = [ends[key].rows if key in ends else None for key in keys]
        around = Neighbourhood(
            {key: len(ends[key].ids) if key in ends else 0 for key in keys},
            self._refuse,
            lambda key, name: ends[key].ids if name == "n_id" and key in ends else None,
            lambda module: (lambda: rows) if module is self._owner else None,
        )
        device, first = senders.rows.device, len(senders.ids) if sending == receiving else 0
        places = torch.arange(len(senders.ids), device=device), torch.arange(len(receivers.ids), device=device) + first
        pairs = torch.cartesian_prod(*places).view(-1, 2).T.contiguous()
        return SeedsOnly.around(around, self._nodes.names_in_batches, links.edge_type, {ENDS: pairs})

    def _refuse(self) -> Any:
        raise ValueError(
            f"forward() of {type(self._search.module).__name__} reads more of a batch than the rows of layers() and "
            'edge_label_index, and pairs have no more: let it score through_layers(self, batch), or name score="dot".'
        )

    def _sizes(self) -> tuple[int, int]:
        """Return how many senders a block has, and receivers a chunk of it, as memory allows. Collective."""
        num_receivers, num_senders = len(self._search.links.ends.receivers), len(self._search.asked)
        row = self._receivers.like.new_empty(self._receivers.like.shape[1:])
        there, channel = bytes_there(self._search.budget_bytes, self._device) or self._budget, self._channel
        least = torch.cat(channel.exchange([torch.tensor([min(self._budget, there)])] * channel.size)).min()
        per_pair = COPIES * row.element_size() + _WORK
        per_pair += 0 if self._search.score == "dot" else 2 * COPIES * row.nbytes
        taken = int(per_pair), 4 * row.nbytes, 64 * self.k * channel.size
        pairs, rows, kept = (int(_OF_THE_BUDGET * int(least)) // each for each in taken)
        at_once = max(1, min(num_senders, _AT_ONCE, pairs // min(_AT_ONCE, num_receivers), rows, kept))
        chunk = max(1, min(num_receivers, pairs // at_once, rows))
        rank_zero_info(
            f"The best {self.k} of {num_receivers:,} receivers for {num_senders:,} senders: {at_once:,} senders are "
            f"scored with {chunk:,} receivers at a time, in {checks.in_megabytes(at_once * chunk * int(per_pair))}."
        )
        return at_once, chunk

    def _held_links(self) -> Tensor:
        """Return held links that are left out by ids in the graph, of both directions, in the order of receivers."""
        links, found = self._search.links, torch.empty((2, 0), dtype=torch.int64)
        if (split := links.split) is not None:
            some = [links.ends.in_graph(edges) for name, edges in split.edges.items() if name in links.leave_out]
            found = torch.cat([found, *some, *(edges.flip(0) for edges in some if split.undirected)], 1)
        return found[:, found[1].argsort(stable=True)]

    def _known(self, receivers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs that are not proposed: their senders, and where their receivers are among some of the own."""
        links, held = self._search.links, self._held
        if "self" in links.leave_out and links.kinds[0] == links.kinds[1]:
            yield receivers, torch.arange(len(receivers))
        if held.shape[1]:
            least, most = receivers.aminmax()
            first, last = torch.searchsorted(held[1], torch.stack([least, most + 1])).tolist()
            column, is_here = Lookup(receivers)(held[1, first:last].contiguous())
            yield held[0, first:last][is_here], column
        if "edges" in links.leave_out:
            yield from self._edges_into(receivers)

    def _edges_into(self, receivers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        graph, first, kind = self._nodes.rows, 0, self._search.links.ends.kinds[0]
        for rows, positions in row_pieces(graph.indptr, ids_of(self._nodes.rows_at(receivers))):
            column = torch.arange(first, first + len(rows)).repeat_interleave(degrees_of(graph.indptr, rows))
            first, sender = first + len(rows), graph.indices[positions].to(torch.int64)
            if len(graph.types.edge_types) > 1:
                is_link = graph.types.edge_type[positions] == kind
                sender, column = sender[is_link], column[is_link]
            yield sender, column


def _with_rows(table: RowTable | None, kind: str) -> RowTable:
    if table is None:
        raise TypeError(f"The last layer of layers() returned no rows of the type {kind!r}, an end of links.")
    return table
