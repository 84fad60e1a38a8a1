"""The search for the best links: all pairs of some senders and all receivers, shared by the ranks.

    rows of all nodes, one layer after the other, each rank those of its own
    -> senders in blocks: their rows are sent to all ranks
    -> each rank scores its own receivers, chunk by chunk, and keeps the best of each sender
    -> ranks put these together, each for its share of the block

No rank holds more scores than those of a block with a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.callbacks.shared_rows import SharedRows
from lightning_gnn_dist.checks import in_megabytes
from lightning_gnn_dist.extensions.links.edges import LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.ranking import Found, Known, LeftOut, Nodes, Ranking, held_links
from lightning_gnn_dist.extensions.links.scoring import Asked, Score, bytes_of_pair, scorer_of
from lightning_gnn_dist.extensions.passes.forecast import bytes_there
from lightning_gnn_dist.extensions.passes.prediction import AllNodes, OwnNodes, all_nodes
from lightning_gnn_dist.extensions.passes.row_table import RowTable, ids_by_type
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.graph.shard import TypedBounds
from lightning_gnn_dist.graph.storage.parquet_rows import TABLES
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeNames, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.graph.user_ids import Ids, ids_for, named
from lightning_gnn_dist.layers.layer_pass import LayerNodes, Work, ids_of
from lightning_gnn_dist.layers.model_layers import ModelLayers, layers_of_model
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel, open_channel

_OF_THE_BUDGET = 0.4  # scores of a block with a chunk; rows of all nodes take a part of the rest
_AT_ONCE = 4096  # senders of a block at most, and receivers of a chunk if blocks of fewer senders leave room for them


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


@dataclass(frozen=True)
class Links:
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
    types: GraphTypes | TypedBounds
    edge_type: EdgeType | None
    leave_out: tuple[LeftOut, ...]

    @property
    def ends(self) -> LinkEnds:
        """The nodes that they may be between."""
        return ends_of(self.types, self.edge_type)

    @property
    def kinds(self) -> tuple[int, int]:
        """The numbers of the types of senders and receivers."""
        names = self.types.node_types
        return (0, 0) if self.edge_type is None else (names.index(self.edge_type[0]), names.index(self.edge_type[2]))


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
        budget_bytes: Bytes that the work may take.
        dtype: The type of the model's numbers, if batches are brought to it.
        bytes_there: Bytes of its own memory that a device may be asked for. Default: half of what is free there.
        ids_of: The prepared graph whose ids nodes have in a table. Default: the graph.
        found: What this rank has found, if there is no file.
    """

    module: LightningModule
    links: Links
    asked: Tensor
    k: int
    score: Score
    path: Path | None
    budget_bytes: int
    dtype: torch.dtype | None
    bytes_there: int | None
    ids_of: Path | None
    found: BestLinks | None = None

    def step(self, batch: Tensor) -> Tensor:
        """Take the place of the module's ``predict_step``."""
        model = layers_that_rank(self.module, self.links.types)
        channel, undo = open_channel(collectives.world_size(), self.module.device), model.let_answer()
        try:
            ranking, senders, places = self.ranking(model, channel)
            self._keep(ranking, ranking.blocks(senders, places, *self.sizes(ranking, len(self.asked))))
        finally:
            undo()
            channel.close()
        return batch

    def ranking(self, model: ModelLayers, channel: Channel) -> tuple[Ranking, Nodes, Tensor]:
        """Compute all rows; return what ranks, the senders, and where they stand among those asked for. Collective."""
        sending, receiving = self.links.kinds
        seed_type = self.links.types.node_types[receiving]
        of_all = all_nodes(self.links.where, model.layers, channel, self.budget_bytes, seed_type)
        own = [ids_of(nodes) for nodes in ids_by_type(of_all.own, of_all.nodes.offsets)]
        senders, places = self._senders(of_all.nodes, own[sending], channel)
        asked = Asked(of_all.nodes.names_in_batches, self.links.types.node_types, self.links.edge_type)
        receivers = _in_order(of_all.nodes.ids_in_type(receiving, own[receiving]), own[receiving])
        ranking = Ranking(
            channel,
            of_all.nodes.by_owner,
            *self._rows(model, channel, of_all, senders.nodes),
            receivers,
            self._known(of_all.nodes),
            scorer_of(self.score, self.module, model, asked),
            min(self.k, len(self.links.ends.receivers)),
            self.module.device,
            in_place=bool((receivers.nodes.diff() == 1).all()),
        )
        return ranking, senders, places

    def _senders(self, nodes: OwnNodes, own: Tensor, channel: Channel) -> tuple[Nodes, Tensor]:
        """Return the senders in the order of the graph, and where they stand among those asked for. Collective."""
        places, is_asked = Lookup(self.asked)(nodes.ids_in_type(self.links.kinds[0], own))
        found = torch.cat(channel.exchange([torch.stack([own[is_asked], places], 1)] * channel.size))
        ids, places = found[found[:, 0].argsort()].unbind(1)
        return Nodes(ids.contiguous(), self.asked[places]), places

    def _rows(
        self, model: ModelLayers, channel: Channel, of_all: AllNodes, senders: Tensor
    ) -> tuple[RowTable, RowTable]:
        """Compute the rows of own nodes that may be senders, and receivers. Collective."""
        how, (sending, receiving) = (self.budget_bytes, self.bytes_there), self.links.kinds
        work = of_all.passed(channel, model.norm, Work(self.module.device, self.dtype, True, *how))
        planned = work.plan_of_own(of_all.own, len(model.layers), receiving)
        own = planned[-1].nodes
        if sending != receiving:
            asked = of_all.nodes.by_owner(senders)[channel.rank]
            own = torch.cat([asked, ids_of(own)]).sort().values
        none = torch.empty(0, dtype=torch.int64)
        last = LayerNodes(own, none, [none] * channel.size, own)  # no rank needs rows of another here
        tables = work.rows(model.layers, [*planned[:-1], last]).of_types
        of_senders, of_receivers = tables[sending], tables[receiving]
        if of_senders is None or of_receivers is None:
            name = self.links.types.node_types[sending if of_senders is None else receiving]
            raise TypeError(f"The last layer of layers() returned no rows of the type {name!r}, an end of links.")
        return of_senders, of_receivers

    def _known(self, nodes: OwnNodes) -> Known:
        ends, split, names = self.links.ends, self.links.split, self.links.leave_out
        held = torch.empty((2, 0), dtype=torch.int64) if split is None else held_links(split, ends, names)
        number = None if self.links.edge_type is None else ends.target_type.number
        has_self = "self" in names and len(set(self.links.kinds)) == 1
        return Known(nodes.rows, nodes.rows_at, number, held, "edges" in names, has_self)

    def sizes(self, ranking: Ranking, num_senders: int) -> tuple[int, int]:
        """Return how many senders a block has, and receivers a chunk of it, as memory allows. Collective."""
        num_receivers = len(self.links.ends.receivers)
        row = ranking.receivers.like.new_empty(ranking.receivers.like.shape[1:])
        there = bytes_there(self.bytes_there, self.module.device)
        own, channel = torch.tensor([min(self.budget_bytes, there or self.budget_bytes)]), ranking.channel
        may_take = int(_OF_THE_BUDGET * int(torch.cat(channel.exchange([own] * channel.size)).min()))
        per_pair = bytes_of_pair(self.score, row)
        pairs, rows, kept = (may_take // each for each in (per_pair, 4 * row.nbytes, 64 * ranking.k * channel.size))
        at_once = max(1, min(num_senders, _AT_ONCE, pairs // min(_AT_ONCE, num_receivers), rows, kept))
        chunk = max(1, min(num_receivers, pairs // at_once, rows))
        rank_zero_info(
            f"The best {ranking.k} of {num_receivers:,} receivers for {num_senders:,} senders: {at_once:,} senders are "
            f"scored with {chunk:,} receivers at a time, in {in_megabytes(at_once * chunk * per_pair)}."
        )
        return at_once, chunk

    def _keep(self, ranking: Ranking, blocks: Iterator[Found]) -> None:
        """Write what is found, ``k`` rows for each sender, of -1 where it has fewer, or keep it. Collective."""
        if self.path is None:
            parts = [Found(self.asked[:0], ranking.none(0)), *blocks]
            places, order = torch.cat([part.places for part in parts]).sort()
            ids, scores = (
                torch.cat(arrays).cpu()[order] for arrays in zip(*(part.best for part in parts), strict=True)
            )
            self.found = BestLinks(self.asked[places], ids, scores)
            return
        score = ranking.none(0).scores.cpu().numpy().dtype
        row = np.dtype([("sender", np.int64), ("receiver", np.int64), ("score", score)])
        how = len(self.asked) * ranking.k, self.module.device, "best_links", self._columns(self.path)
        file = SharedRows(self.path, *how)
        try:
            file.open(np.empty(0, row))
            for places, best in blocks:
                rows = np.empty((len(places), ranking.k), row)
                rows["sender"] = self.asked[places].numpy()[:, None]
                rows["receiver"], rows["score"] = best.ids.cpu().numpy(), best.scores.cpu().numpy()
                at = places.numpy()[:, None] * ranking.k + np.arange(ranking.k)
                file.write(at.reshape(-1), rows.reshape(-1))
            file.publish()
        finally:
            file.discard()

    def _columns(self, path: Path) -> LinkColumns:
        """Return how a table names the nodes."""
        if path.suffix not in TABLES:
            return LinkColumns()
        graph = self.links.where.path if isinstance(self.links.where, Graph) else None
        ends, names = self.links.ends, [self.links.types.node_types[kind] for kind in self.links.kinds]
        nodes = zip(names, (ends.senders, ends.receivers), strict=True)
        return LinkColumns(*(ids_for(self.ids_of, graph, name, len(of_type)) for name, of_type in nodes))


def layers_that_rank(module: LightningModule, types: TypeNames) -> ModelLayers:
    """Return the layers of a model by whose rows links are scored."""
    model = layers_of_model(module)
    assert model is not None
    if model.is_found and have_names(types):
        raise TypeError(
            f"model: {type(module).__name__} has no method layers(), and a model of PyG's in it takes no types: let "
            "layers() return one function for each layer."
        )
    return model


def _in_order(ids: Tensor, nodes: Tensor) -> Nodes:
    order = ids.argsort()
    return Nodes(nodes[order], ids[order])


@dataclass(frozen=True)
class LinkColumns:
    """The columns of a table of links, which has no receivers that are not there.

    Attributes:
        of_senders: The users' ids of all nodes that may send; None where nobody knows them.
        of_receivers: Those of all that may receive.
    """

    of_senders: Ids | None = None
    of_receivers: Ids | None = None

    def __call__(self, first: int, rows: Ids) -> dict[str, Ids]:
        rows = rows[rows["receiver"] >= 0]
        ends = named(rows["sender"], self.of_senders), named(rows["receiver"], self.of_receivers)
        return {"sender": ends[0], "receiver": ends[1], "score": rows["score"]}
