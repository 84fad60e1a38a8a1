"""The names of the types of a graph, and what they may be."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_gnn_dist.checks import shown

EdgeType = tuple[str, str, str]
NODE, EDGE = "", ("", "", "")  # the types of a graph without any
MAX_EDGE_TYPES = 2**15  # torch can do little with numbers of 16 bits without a sign
MAX_NAME = 200  # bytes: a type is the name of a folder, an array that of a file
NAME = re.compile(r"\w[^/\\\0\n]*")
_OF_DATA = re.compile(r"(?<![\w/.-])data\.")  # and not the name of a file, such as metadata.json


class TypeNames(ABC):
    """The types of a graph, without its edges and arrays, which nobody may have.

    A graph without types is of one type of nodes and one of edges, whose names are empty.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    offsets: tuple[int, ...]  # the first id of each node type, and at the end the number of all nodes

    @property
    def have_names(self) -> bool:
        """Whether the graph has types. They decide the class of its batches, ``Data`` or ``HeteroData``."""
        return self.node_types != (NODE,)

    def nodes_of(self, node_type: str) -> range:
        """The ids in the graph of all nodes of a type."""
        number = number_of(node_type, self.node_types, "node")
        return range(self.offsets[number], self.offsets[number + 1])

    @abstractmethod
    def seed_type(self) -> str:
        """The node type that is learned from."""


def number_of(kind: Any, kinds: tuple[Any, ...], of: str) -> int:
    """The place of a type among the node types or the edge types."""
    if not isinstance(kind, str | tuple) or kind not in kinds:
        raise ValueError(f"{of}_type must be one of {shown(list(kinds))}, got {shown(kind)}.")
    return kinds.index(kind)


def check_names(node_types: tuple[str, ...], edge_types: tuple[EdgeType, ...]) -> None:
    """Refuse types without a name, with one that no folder can have, or twice, and edges between unknown types."""
    if not node_types or not edge_types:
        raise ValueError("A typed graph needs a node type and an edge type at least: a type may have no edges.")
    for name in (*node_types, *(word for edge_type in edge_types for word in edge_type)):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{shown(name)} cannot be the name of a type, nor of its folder: start it with a letter, and use "
                "neither slashes nor line ends."
            )
    for edge_type in edge_types:
        for end in (edge_type[0], edge_type[2]):
            if end not in node_types:
                raise ValueError(
                    f"The edge type {edge_type} names the node type {end!r}, which is not there (there are: "
                    f"{shown(list(node_types))}): say how many nodes it has, data[{end!r}].num_nodes = ..."
                )
    if len(edge_types) > MAX_EDGE_TYPES:
        raise ValueError(f"There may be up to {MAX_EDGE_TYPES} edge types, got {len(edge_types)}.")
    _check_folders(node_types)
    _check_folders(edge_types)


def _check_folders(kinds: Sequence[str | EdgeType]) -> None:
    """Refuse types whose arrays would have one folder, or one whose name is too long."""
    known: dict[str, str | EdgeType] = {}
    for kind in kinds:
        folder = kind if isinstance(kind, str) else folder_of(kind)
        if folder in known:
            raise ValueError(f"{kind!r} and {known[folder]!r} would have one folder, {folder}: rename one of them.")
        if len(folder.encode(errors="surrogatepass")) > MAX_NAME:
            raise ValueError(f"The name of the type {shown(kind)} has more than {MAX_NAME} bytes: shorten it.")
        known[folder] = kind


def folder_of(edge_type: EdgeType) -> str:
    """The folder of an edge type's arrays in a saved graph; nothing where types have no names."""
    return "__".join(edge_type) if any(edge_type) else ""


def below_nodes(kind: str) -> str:
    """How the names of the arrays of a node type begin in a saved graph."""
    return f"nodes/{kind}/" if kind else "nodes/"


def below_edges(edge_type: EdgeType) -> str:
    """How the names of the arrays of an edge type begin in a saved graph."""
    return f"edges/{folder_of(edge_type)}/" if any(edge_type) else "edges/"


@contextmanager
def within(kind: str | EdgeType) -> Iterator[None]:
    """Let refusals of arrays say of which type they are, as PyG writes it: ``data['paper']``."""
    if not any(kind):
        yield
        return
    place = f"data[{', '.join(map(repr, (kind,) if isinstance(kind, str) else kind))}]"
    try:
        yield
    except (ValueError, TypeError) as error:
        kind_of_error = TypeError if isinstance(error, TypeError) else ValueError
        said = _OF_DATA.sub(lambda _: f"{place}.", str(error))
        raise kind_of_error(said if said.startswith(f"{place}.") else f"{place}: {said}") from error
