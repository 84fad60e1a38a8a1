"""How a graph is asked to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, shown
from lightning_gnn_dist.graph.changing.change import Change, Form, extension, removal, update
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes

AGraph = TypeVar("AGraph", bound="Changeable")


class Changeable:
    """What a graph is asked for changes, of which each makes another graph.

    Attributes:
        types: Its types.
    """

    types: GraphTypes

    def extended(
        self: AGraph,
        nodes: Mapping[str, Any] | None = None,
        edges: Tensor | Mapping[Any, Any] | None = None,
        new_types: Sequence[str | EdgeType] = (),
    ) -> AGraph:
        """Return the graph with more nodes and edges, also of new types. All nodes keep their ids, in their type.

        Of a graph that was opened, a change is written to the log beside its files, and merged whenever it is opened.

        Args:
            nodes: Their arrays by name, all that the others have; masks, and a ``y`` that stands for no label, may be
                left out. Of a graph with types by type, ``{"paper": {"x": ...}}``, as are edges. ``"num_nodes"`` says
                how many there are where they have no arrays. Their ids go on behind the last; ``"id"`` has those in
                your tables, where the graph was prepared from these.
            edges: ``edge_index``, or a dictionary that has it beside the arrays that edges carry.
            new_types: The types among them that the graph has not; edge types at a new node type need not be named.
        """
        return self._changed(extension(Form.of(self.types), nodes, edges, new_types))

    def updated(self: AGraph, nodes: Mapping[str, Any]) -> AGraph:
        """Return the graph with other values of some arrays of some nodes, in the way of ``extended``.

        ``nodes`` has their ids, each once, as ``"n_id"``, and arrays with a row for each: ``{"n_id": [3], "x": ...}``.
        """
        return self._changed(update(Form.of(self.types), nodes))

    def removed(
        self: AGraph,
        nodes: Tensor | Sequence[int] | Mapping[str, Any] | None = None,
        edges: Tensor | Mapping[Any, Any] | None = None,
    ) -> AGraph:
        """Return the graph without some edges, in the way of ``extended``.

        Nodes that are removed keep their ids and rows, have no edges, and no mask marks them.

        Args:
            nodes: Their ids; of a graph with types by type.
            edges: ``edge_index``, by type as the nodes: all edges between these nodes go.
        """
        return self._changed(removal(Form.of(self.types), nodes, edges))

    def nodes_since(self, version: int, node_type: str | None = None) -> Tensor:
        """Return the nodes of a type that are newer than a ``version``, by their ids in it.

        ``node_type`` is by default the one that is learned from.
        """
        check_at_least(0, most=self.version, version=version)
        if node_type is not None and not have_names(self.types):
            raise ValueError(f"node_type ({shown(node_type)}) is for a graph with types, and this one has none.")
        kind = self.types.seed_type() if node_type is None else node_type
        count = len(self.types.nodes_of(kind))
        return torch.arange(([*self.types.history, {kind: count}][version]).get(kind, 0), count)

    @property
    def version(self) -> int:
        """How many changes have led to the graph."""
        return len(self.types.history)

    def _changed(self: AGraph, change: Change) -> AGraph:
        """Return the graph after a change; refuse one that does not fit."""
        raise NotImplementedError
