"""The search for the best links: all pairs of some senders and all receivers, shared by the ranks.

    rows of all nodes, one layer after the other, each rank those of its own
    -> senders in blocks: their rows are sent to all ranks
    -> each rank scores its own receivers, chunk by chunk, without links, and keeps the best of each sender
    -> ranks put these together, each for its share of the block

No rank holds more scores than those of a block with a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.batch import ENDS, NamesOfTypes
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.callbacks.shared_rows import SharedRows
from lightning_gnn_dist.checks import in_megabytes
from lightning_gnn_dist.extensions.links.best import Best
from lightning_gnn_dist.extensions.links.edges import LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.passes.forecast import bytes_there
from lightning_gnn_dist.extensions.passes.prediction import pass_over_all
from lightning_gnn_dist.extensions.passes.row_table import RowTable
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, degrees_of, row_pieces
from lightning_gnn_dist.graph.storage.parquet_rows import TABLES
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeRanges
from lightning_gnn_dist.graph.user_ids import Columns, Ids, ids_for, named
from lightning_gnn_dist.homes.run import BUDGET_BYTES
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.layers.layer_pass import LayerNodes, Work, by_type, ids_of
from lightning_gnn_dist.layers.model_layers import ModelLayers, layers_of_model
from lightning_gnn_dist.layers.through_layers import COPIES
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel, open_channel

Score = Literal["model", "dot"]
LeftOut = Literal["edges", "val", "test", "self"]


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
    types: TypeRanges
    edge_type: EdgeType | None
    leave_out: tuple[LeftOut, ...]

    @property
    def ends(self) -> LinkEnds:
        """The nodes that they may be between."""
        return ends_of(self.types, self.edge_type)

    @property
    def kinds(self) -> tuple[int, int]:
        """The numbers of the types of senders and receivers."""
        names, kind = self.types.node_types, self.edge_type or self.types.edge_types[0]
        return names.index(kind[0]), names.index(kind[2])


class Ends(NamedTuple):
    """Some nodes of one type: their ids in it, and the rows that the last layer has computed for them."""

    ids: Tensor
    rows: Tensor


Scorer = Callable[[Ends, Ends], Tensor]


def by_rows(senders: Ends, receivers: Ends) -> Tensor:
    """Score pairs by dot products of rows."""
    return senders.rows.flatten(1) @ receivers.rows.flatten(1).T


class ByModel:
    """Scores pairs as the user's module scores the targets of a batch: it is called with a batch of these pairs.

    Args:
        module: The module.
        owner: The module in it whose layers have computed the rows.
        links: The links.
        names: The names of a batch's arrays, by the keys of its stores.
    """

    def __init__(self, module: LightningModule, owner: object, links: Links, names: NamesOfTypes) -> None:
        self._module, self._owner, self._links, self._names = module, owner, links, names

    def __call__(self, senders: Ends, receivers: Ends) -> Tensor:
        shape = len(senders.ids), len(receivers.ids)
        found, count = self._module(self._batch(senders, receivers)), shape[0] * shape[1]
        if not isinstance(found, Tensor) or found.shape != (count,):
            got = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"forward() of {type(self._module).__name__} returned {got} for the {count} pairs of a batch: it must "
                'return a score for each column of edge_label_index. Or name score="dot", dot products of rows.'
            )
        return found.view(shape)

    def _batch(self, senders: Ends, receivers: Ends) -> Any:
        links, types = self._links, self._links.types.node_types
        keys: list[Any] = [None] if links.edge_type is None else list(types)
        of_types: list[list[Ends]] = [[] for _ in types]
        for kind, ends in zip(links.kinds, (senders, receivers), strict=True):
            of_types[kind].append(ends)
        rows: RowsOfTypes = [torch.cat([end.rows for end in ends]) if ends else None for ends in of_types]
        ids = [torch.cat([end.ids for end in ends]) if ends else None for ends in of_types]
        around = Neighbourhood(
            {key: 0 if some is None else len(some) for key, some in zip(keys, ids, strict=True)},
            self._refuse,
            lambda key, name: ids[keys.index(key)] if name == "n_id" else None,
            lambda module: (lambda: rows) if module is self._owner else None,
        )
        first = len(senders.ids) if links.kinds[0] == links.kinds[1] else 0  # receivers stand behind senders
        pairs = torch.cartesian_prod(
            *(torch.arange(len(end.ids), device=end.rows.device) for end in (senders, receivers))
        )
        pairs = pairs.view(-1, 2).T + torch.tensor([[0], [first]], device=pairs.device)
        return SeedsOnly.around(around, self._names, links.edge_type, {ENDS: pairs})

    def _refuse(self) -> Any:
        raise ValueError(
            f"forward() of {type(self._module).__name__} reads more of a batch than the rows of layers() and "
            'edge_label_index, and pairs have no more: let it score through_layers(self, batch), or name score="dot".'
        )


_OF_THE_BUDGET = 0.4  # scores of a block with a chunk; rows of all nodes take a part of the rest
_AT_ONCE = 4096  # senders of a block at most, and receivers of a chunk if blocks of fewer senders leave room for them
_WORK = 24  # bytes of a pair beside its score: what is sorted, and where it stands


@dataclass(frozen=True)
class BestLinks:
    """The best links of some senders.

    Attributes:
        senders: Their ids, shape ``(n,)``.
        receivers: The receivers of each, the best first, shape ``(n, k)``; -1 where there are fewer.
        scores: Their scores, minus infinity where there are fewer.
    """

    senders: Tensor
    receivers: Tensor
    scores: Tensor


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
        parts = [(self.asked[:0], ranking.none(0)), *ranking.blocks()]
        places, order = torch.cat([of for of, _ in parts]).sort()
        ids, scores = (torch.cat(arrays).cpu()[order] for arrays in zip(*(best for _, best in parts), strict=True))
        self.found = BestLinks(self.asked[places], ids, scores)

    def _write(self, ranking: Ranking, path: Path) -> None:
        """Write ``k`` rows for each sender, of -1 where it has fewer. Collective."""
        score = ranking.none(0).scores.cpu().numpy().dtype
        row = np.dtype([("sender", np.int64), ("receiver", np.int64), ("score", score)])
        columns = [self._columns()] if path.suffix in TABLES else []
        file = SharedRows(path, len(self.asked) * ranking.k, self.module.device, "best_links", *columns)
        try:
            file.open(np.empty(0, row))
            for places, best in ranking.blocks():
                rows = np.empty((len(places), ranking.k), row)
                rows["sender"] = self.asked[places].numpy()[:, None]
                rows["receiver"], rows["score"] = best.ids.cpu().numpy(), best.scores.cpu().numpy()
                at = places.numpy()[:, None] * ranking.k + np.arange(ranking.k)
                file.write(at.reshape(-1), rows.reshape(-1))
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
        links, self._search, self._channel = search.links, search, channel
        sending, receiving = links.kinds
        types, self._device = links.types.node_types, search.module.device
        self.k = min(search.k, len(links.ends.receivers))
        self._budget = BUDGET_BYTES if search.budget_bytes is None else search.budget_bytes
        how = Work(self._device, search.dtype, True, self._budget, search.budget_bytes)
        work, of_rank = pass_over_all(links.where, model, channel, how, types[receiving])
        self._nodes = work.nodes
        own = [ids_of(ids) for ids in by_type(of_rank, self._nodes.offsets)]

        places, is_asked = Lookup(search.asked)(self._nodes.ids_in_type(sending, own[sending]))
        found = torch.cat(channel.exchange([torch.stack([own[sending][is_asked], places], 1)] * channel.size))
        self._asked, self._places = found[found[:, 0].argsort()].T.contiguous()  # of all ranks, in the graph's order

        work.plan_of_own(of_rank, len(model.layers), receiving)
        last, none = work.planned.pop().nodes, torch.empty(0, dtype=torch.int64)
        if sending != receiving:
            last = torch.cat([self._nodes.by_owner(self._asked)[channel.rank], ids_of(last)]).sort().values
        work.planned.append(LayerNodes(last, none, [none] * channel.size, last))  # no rank needs rows of another
        tables = work.rows(model.layers).of_types
        self._senders, self._receivers = (_with_rows(tables[kind], types[kind]) for kind in links.kinds)

        ids = self._nodes.ids_in_type(receiving, own[receiving])
        self._own, self._ids = own[receiving][ids.argsort()], ids.sort().values.to(self._device)
        follow = bool((self._own.diff() == 1).all())  # then they are scored where they lie
        self._take = self._receivers.take_run if follow else self._receivers.take
        self._held = self._held_links()
        by_model = ByModel(search.module, model.owner, links, self._nodes.names_in_batches)
        self._scorer: Scorer = by_model if search.score == "model" else by_rows

    def none(self, num_senders: int) -> Best:
        """Return no receivers of so many senders."""
        dtype = torch.float64 if self._receivers.like.dtype == torch.float64 else torch.float32
        return Best.none(num_senders, self.k, torch.empty(0, dtype=dtype, device=self._device))

    def blocks(self) -> Iterator[tuple[Tensor, Best]]:
        """Yield the best of this rank's share of each block, and where its senders stand among all. Collective."""
        at_once, chunk = self._sizes()
        channel, size = self._channel, self._channel.size
        for start in range(0, len(self._asked), at_once):
            some = self._asked[start : start + at_once]
            pieces = self._nodes.by_owner(some)
            own = self._senders.take(pieces[channel.rank]).to(channel.device)
            rows = channel.exchange([own] * size, [len(piece) for piece in pieces])
            nodes = torch.cat(pieces)
            places = self._places[start + torch.searchsorted(some, nodes)]
            best = self._ranked(nodes, self._search.asked[places], torch.cat(rows).to(self._device), chunk)
            shares = [share_of(len(nodes), size, rank) for rank in range(size)]
            share = shares[channel.rank]
            yield places[share.start : share.stop], self._joined(best, shares, len(share))

    def _ranked(self, nodes: Tensor, ids: Tensor, rows: Tensor, chunk: int) -> Best:
        """Return the best of the own receivers for each of some senders."""
        best, lookup, senders = self.none(len(rows)), Lookup(nodes), Ends(ids.to(self._device), rows)
        for first in range(0, len(self._own), chunk):
            own, ids_there = self._own[first : first + chunk], self._ids[first : first + chunk]
            scores = self._scorer(senders, Ends(ids_there, self._take(own).to(self._device)))
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

    def _joined(self, best: Best, shares: list[range], count: int) -> Best:
        """Return the best receivers of all ranks for this rank's share of a block, of so many. Collective."""
        channel = self._channel
        found = [
            channel.exchange(
                [array[share.start : share.stop].to(channel.device) for share in shares], [count] * len(shares)
            )
            for array in best
        ]
        return Best.joined([Best(*of_rank) for of_rank in zip(*found, strict=True)])

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
            f"scored with {chunk:,} receivers at a time, in {in_megabytes(at_once * chunk * int(per_pair))}."
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
        graph, first, kind = self._nodes.rows, 0, self._search.links.ends.target_type.number
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
