"""What of a graph is prepared: all of it, by one process. The extension of shards prepares one part of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.prepare.files.inputs import Inputs
from lightning_gnn_dist.prepare.steps.edges import EdgeSorting, OnProgress
from lightning_gnn_dist.prepare.steps.nodes import AllNodes, NodesOfType, Part


class Portion:
    """All of a graph. What derives from it prepares less."""

    is_whole: ClassVar[bool] = True

    @property
    def shares(self) -> int | None:
        """Into how many portions the graph is divided, if it is."""
        return None

    def target(self, out: Path) -> Path:
        """The directory that is written."""
        return out

    @property
    def facts(self) -> dict[str, Any] | None:
        """What the result depends on beside the files of the graph and the other settings."""
        return None

    def check_inputs(self, inputs: Inputs) -> None:
        """Refuse files of which this cannot be prepared."""

    def edges(self, inputs: Inputs, folder: Path, draft: Path, undirected: bool, memory_bytes: int) -> EdgeSorting:
        """Sorts the edges."""
        return EdgeSorting(inputs, folder, draft, undirected, memory_bytes)

    def part(self, kind: str, num_nodes: int) -> Part:
        """The nodes of a type that are prepared; the name of the type is empty if the graph has no types."""
        return AllNodes(num_nodes)

    def count(self, source: Path, edges: EdgeSorting, on_progress: OnProgress) -> int:
        """The number of nodes where only the edges of a graph without types tell."""
        if num_nodes := edges.count(on_progress):
            return num_nodes
        raise ValueError(f"{source} has no edges, and does not say how many nodes there are.")

    def nodes_of(self, **given: Any) -> NodesOfType:
        """The nodes of a type, given what :class:`NodesOfType` takes."""
        return NodesOfType(**given)

    def check_nodes(self, out: Path, parts: Sequence[Part]) -> None:
        """Refuse a division that cannot be."""

    def finish(
        self,
        out: Path,
        nodes: Mapping[str, NodesOfType],
        types: GraphTypes | None,
        edges: EdgeSorting,
        edge_types: Collection[EdgeType],
    ) -> None:
        """Write what stands beside the graph."""
