"""Which edges of a graph go in some changes, and which come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.changing.change import IDS, PAIRS, Arrays, Change, told_of
from lightning_gnn_dist.graph.convert import MAX_NODES
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, edge_positions, row_pieces
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes


class Rows(NamedTuple):
    """The edges of a graph."""

    indptr: Tensor
    indices: Tensor
    types: GraphTypes

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    def kinds(self, positions: Tensor) -> Tensor:
        """The number of the type of each edge, by position."""
        if len(self.types.edge_types) == 1:
            return torch.zeros_like(positions)
        return self.types.edge_type[positions].to(torch.int64)

    def count(self, kind: str) -> int:
        """The number of nodes of a type, which need not be there."""
        return self.types.num_nodes.get(kind, 0)

    def first(self, kind: str) -> int:
        """The id of the first node of a type; of one that is not there, that of the next new node."""
        return self.types.nodes_of(kind).start if kind in self.types.node_types else self.num_nodes


class EdgeChanges:
    """What becomes of the edges of a graph in some changes, one after the other.

    Attributes:
        gone: The positions of edges that go, each once and increasing.
        new: The new edges of each type, with their arrays, in the order in which they were given.
    """

    def __init__(self, rows: Rows, changes: Sequence[Change]) -> None:
        self._rows = rows
        self.gone = torch.empty(0, dtype=torch.int64)
        self.new: dict[EdgeType, Arrays] = {}
        for change in changes:
            if change.kind == "extended":
                for edge_type, arrays in change.edges.items():
                    self._add(edge_type, arrays)
            elif change.kind == "removed":
                for edge_type, content in change.edges.items():
                    with told_of("edges", edge_type):
                        self._remove_pairs(edge_type, content[PAIRS])
                for kind, content in change.nodes.items():
                    self._remove_nodes(kind, content[IDS].to(torch.int64))

    def _add(self, edge_type: EdgeType, arrays: Arrays) -> None:
        known = self.new.get(edge_type)
        if known is not None:
            arrays = {
                name: torch.cat([known[name], array], 1 if name == PAIRS else 0) for name, array in arrays.items()
            }
        self.new[edge_type] = arrays

    def _keep(self, edge_type: EdgeType, stays: Tensor) -> None:
        of_type = self.new[edge_type]
        self.new[edge_type] = {n: array[:, stays] if n == PAIRS else array[stays] for n, array in of_type.items()}

    def _lose(self, positions: Tensor) -> None:
        self.gone = torch.cat([self.gone, positions]).unique()

    def _remove_pairs(self, edge_type: EdgeType, pairs: Tensor) -> None:
        """Let all edges of a type between some nodes go; refuse pairs without one."""
        found = torch.zeros(pairs.shape[1], dtype=torch.bool)
        if edge_type in self._rows.types.edge_types:
            positions, of_base = _edges_between(self._rows, edge_type, pairs)
            stays = ~torch.isin(positions, self.gone)
            found |= torch.isin(_keys(pairs), of_base[stays])
            self._lose(positions[stays])
        if edge_type in self.new:
            is_gone = torch.isin(_keys(self.new[edge_type][PAIRS]), _keys(pairs))
            found |= torch.isin(_keys(pairs), _keys(self.new[edge_type][PAIRS]))
            self._keep(edge_type, ~is_gone)
        if not bool(found.all()):
            sender, receiver = pairs[:, int((~found).nonzero()[0])].tolist()
            raise ValueError(f"there is no edge from {sender} to {receiver} to remove: edges are named by their ends.")

    def _remove_nodes(self, kind: str, ids: Tensor) -> None:
        rows = self._rows
        nodes = ids[ids < rows.count(kind)].sort().values + rows.first(kind)
        if nodes.numel():
            is_gone = torch.zeros(rows.num_nodes, dtype=torch.bool)
            is_gone[nodes] = True
            sent = [
                is_gone[piece.to(torch.int64)].nonzero().view(-1) + number * EDGES_PER_PIECE
                for number, piece in enumerate(rows.indices.split(EDGES_PER_PIECE))
            ]
            self._lose(torch.cat([edge_positions(rows.indptr, nodes), *sent]))
        for source, name, target in list(self.new):
            pairs = self.new[source, name, target][PAIRS]
            stays = torch.ones(pairs.shape[1], dtype=torch.bool)
            for end, end_type in zip(pairs, (source, target), strict=True):
                stays &= ~torch.isin(end, ids) if end_type == kind else True
            self._keep((source, name, target), stays)


def _edges_between(rows: Rows, edge_type: EdgeType, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of the edges of a type between some nodes, increasing, and the numbers of their ends."""
    source, _, target = edge_type
    number, first = rows.types.edge_types.index(edge_type), torch.tensor([rows.first(source), rows.first(target)])
    receivers = pairs[1][pairs[1] < rows.count(target)].unique() + first[1]
    wanted, found = _keys(pairs), [(receivers[:0], receivers[:0])]
    for some, at in row_pieces(rows.indptr, receivers):
        row = some.repeat_interleave(rows.indptr[some + 1] - rows.indptr[some])
        keys = _keys(torch.stack([rows.indices[at].to(torch.int64), row]) - first[:, None])
        is_one = (rows.kinds(at) == number) & torch.isin(keys, wanted)
        found.append((at[is_one], keys[is_one]))
    positions, keys = (torch.cat(each) for each in zip(*found, strict=True))
    return positions, keys


def _keys(pairs: Tensor) -> Tensor:
    """A number for each pair of ends."""
    return pairs[1] * MAX_NODES + pairs[0]
