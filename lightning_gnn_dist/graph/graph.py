"""The graph: who sends messages to whom, and what each node and edge carries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_arrays,
    check_arrays_if_given,
    check_at_least_if_given,
    check_folder,
    check_ids,
    check_path,
    check_plain,
    check_tensor,
    check_true_or_false,
    check_word,
    shown,
)
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.rows import Lookup, count_per_row, edge_positions, take_rows
from lightning_gnn_dist.graph.storage import store

if TYPE_CHECKING:
    from torch_geometric.data import Data

EDGES_AT_ONCE = 1 << 22  # bounds what a pass over a memory-mapped graph holds in RAM
EDGES_PER_PIECE = 1 << 20  # the same for look-ups, which take about 70 bytes per edge
NODES_PER_PIECE = 1 << 18  # the same for nodes


class Graph:
    """One CSR whose row ``v`` lists the nodes that send messages to ``v``, and arrays beside it.

    The arrays are tensors in RAM or over a memory map. Do not change them: what is computed from a graph is
    remembered. Most users call :meth:`from_pyg` or :meth:`open`.

    Args:
        indptr: Where each row starts, int64, shape ``(N + 1,)``.
        indices: The in-neighbours, row after row, shape ``(E,)``.
        node_arrays: Arrays with one row per node: ``x``, ``y``, ``train_mask``, ...
        edge_arrays: Arrays with one row per edge, in the order of ``indices``: ``edge_weight``, ...
        path: The directory that the graph was opened from, or ``None``.
        fingerprint: A hash of edges and masks. Default: computed when it is first asked for.
        num_senders: The entries of ``indices`` must lie below this. Default: the number of rows.
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        node_arrays: Mapping[str, Tensor] | None = None,
        edge_arrays: Mapping[str, Tensor] | None = None,
        *,
        path: Path | None = None,
        fingerprint: str | None = None,
        num_senders: int | None = None,
    ) -> None:
        check_tensor("indptr", indptr, "where each row starts")
        check_tensor("indices", indices, "in-neighbours")
        check_plain("indptr", indptr)
        check_plain("indices", indices)
        check_arrays_if_given(node_arrays=node_arrays, edge_arrays=edge_arrays)
        convert.check_names(node_arrays or {}, edge_arrays or {}, allowed=("n_id",))
        check_at_least_if_given(0, num_senders=num_senders)
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a text such as Graph.fingerprint gives, got {shown(fingerprint)}.")
        self._set(indptr, indices, node_arrays, edge_arrays, path, fingerprint, num_senders)
        self.check_edges()
        convert.warn_of_overlaps(self.node_arrays)

    def _set(
        self,
        indptr: Tensor,
        indices: Tensor,
        node_arrays: Mapping[str, Tensor] | None,
        edge_arrays: Mapping[str, Tensor] | None,
        path: Path | None,
        fingerprint: str | None,
        num_senders: int | None,
    ) -> None:
        self.indptr = indptr
        self.indices = indices
        self.node_arrays = dict(node_arrays or {})
        self.edge_arrays = dict(edge_arrays or {})
        self.path = None if path is None else check_path("path", path)
        self._fingerprint = fingerprint
        self._check_lengths()
        self.num_senders = self.num_nodes if num_senders is None else num_senders

    @classmethod
    def from_pyg(
        cls, data: Data, *, check_features: bool = True, float_labels: bool = False, edge_ids: bool = False
    ) -> Graph:
        """Build a graph from a PyG ``Data``: its edges, and every tensor with one row per node or per edge.

        Args:
            data: A homogeneous graph with ``edge_index``. Attributes that are not tensors are left out. Ids in
                ``train_idx``, ``val_idx`` (``valid_idx``) and ``test_idx`` become masks, without nodes of ``y`` NaN.
            check_features: Refuse NaN and infinity (one pass over ``x``, and over the edge arrays).
            float_labels: Accept a floating point ``y`` with one value per node, for regression.
            edge_ids: Give batches an ``e_id``: the place of each edge in ``data.edge_index``.
        """
        check_true_or_false(check_features=check_features, float_labels=float_labels, edge_ids=edge_ids)
        nodes, edges = convert.arrays_of(data)
        convert.check_arrays(nodes, check_features=check_features, float_labels=float_labels)
        if check_features:
            convert.check_edge_arrays(edges)
        edges = ({convert.EDGE_IDS: torch.arange(data.num_edges)} if edge_ids else {}) | edges
        return cls.from_edge_index(data.edge_index, data.num_nodes, convert.without_unlabelled(nodes), edges)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        node_arrays: Mapping[str, Tensor] | None = None,
        edge_arrays: Mapping[str, Tensor] | None = None,
    ) -> Graph:
        """Build a graph from a list of edges, shape (2, E): ``edge_index[0]`` sends to ``edge_index[1]``."""
        check_arrays_if_given(node_arrays=node_arrays, edge_arrays=edge_arrays)
        indptr, indices, order = convert.compress(edge_index, num_nodes)
        check_rows("edge", edge_arrays or {}, order.numel())
        return cls(indptr, indices, node_arrays, {name: a[order] for name, a in (edge_arrays or {}).items()})

    @classmethod
    def open(cls, path: str | Path) -> Graph:
        """Open a saved graph. Its arrays are memory-mapped: this costs milliseconds and no RAM.

        The first time, all edges are read and checked; later opens rely on a mark beside them. Features are not read.

        Args:
            path: The directory that :meth:`save` wrote. Its files must not change while they are mapped.
        """
        return open_rows(check_path("path", path), None)

    def save(
        self, path: str | Path, *, overwrite: bool = False, beside: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        """Write the graph to a directory that :meth:`open` reads. The directory appears when it is complete.

        ``beside`` holds further arrays for the same directory, named ``links/...``; :meth:`open` leaves them out.
        """
        path = check_folder("path", path)
        check_true_or_false(overwrite=overwrite)
        check_arrays(beside=beside, node_arrays=self.node_arrays, edge_arrays=self.edge_arrays)  # they may have changed
        self._check_lengths()
        self.check_edges()
        arrays = {"indptr": self.indptr, "indices": self.indices}
        arrays |= {f"nodes/{name}": array for name, array in self.node_arrays.items()}
        arrays |= {f"edges/{name}": array for name, array in self.edge_arrays.items()}
        if self.path is not None and path.resolve() == self.path:
            raise ValueError(f"The graph is read from {path} itself: save it to another path.")
        if twice := sorted(arrays.keys() & beside.keys()):
            raise ValueError(f"beside holds {twice}, which are arrays of the graph itself: call them links/...")
        store.write(path, arrays | dict(beside), self.fingerprint, overwrite=overwrite)

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, in RAM or on disk."""
        tensors = [self.indptr, self.indices, *self.node_arrays.values(), *self.edge_arrays.values()]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def fingerprint(self) -> str:
        """A hash of the edges and of every array whose name ends in ``_mask``."""
        if self._fingerprint is None:
            masks = {name: array for name, array in sorted(self.node_arrays.items()) if name.endswith("_mask")}
            arrays = {"indptr": self.indptr, "indices": self.indices, **masks}
            self._fingerprint = fingerprint_of(
                (name, tensor.dtype, tensor.shape, tensor.split(EDGES_AT_ONCE)) for name, tensor in arrays.items()
            )
        return self._fingerprint

    def degrees(self) -> Tensor:
        """In-degrees, int64, shape ``(N,)``."""
        return self.indptr.diff()

    def split(self, name: str) -> Tensor:
        """The ids of the nodes that ``<name>_mask`` marks, in increasing order."""
        check_word("name", name, "train")
        mask = self.node_arrays.get(f"{name}_mask")
        if mask is None:
            masks = sorted(key for key in self.node_arrays if key.endswith("_mask"))
            raise ValueError(
                f"The graph has no {name:.60}_mask (it has: {masks}). Set data.{name:.60}_mask, a boolean per node, "
                "before Graph.from_pyg(data)."
            )
        convert.check_mask(f"{name}_mask", mask)
        check_rows("node", {f"{name}_mask": mask}, self.num_nodes)
        return mask.nonzero().view(-1)

    def induced(self, nodes: Tensor) -> Graph:
        """The subgraph of ``nodes`` and the edges among them, copied into RAM.

        Node ``i`` of the result is ``nodes[i]``. Its ``node_arrays["n_id"]`` holds these ids, or this graph's own
        ``n_id`` where it has one. Takes memory in proportion to the result, also when this graph is a memory map.
        """
        nodes = self._checked(nodes)
        lookup, done, filled = Lookup(nodes), 0, 0
        indptr = nodes.new_zeros(nodes.numel() + 1)
        # Room for all edges into these nodes: memory that is never written to takes no RAM.
        most = count_edges(self.indptr, nodes)
        indices = torch.empty(most, dtype=convert.index_dtype(nodes.numel()))
        edges = {name: array.new_empty((most, *array.shape[1:])) for name, array in self.edge_arrays.items()}
        for rows, at in self._row_pieces(nodes):
            local, found = lookup(self.indices[at].to(torch.int64))
            piece = slice(filled, filled + local.numel())
            indices[piece] = local
            for name, array in self.edge_arrays.items():
                edges[name][piece] = take_rows(array, at[found])
            indptr[done + 1 : done + 1 + rows.numel()] = count_per_row(self.indptr, rows, found)
            done, filled = done + rows.numel(), filled + local.numel()
        arrays = {name: take_rows(array, nodes) for name, array in self.node_arrays.items()}
        arrays.setdefault("n_id", nodes)
        edges = {name: array[:filled] for name, array in edges.items()}
        return checked_graph(indptr.cumsum_(0), indices[:filled], arrays, edges)

    def halo(self, nodes: Tensor) -> Tensor:
        """The nodes outside ``nodes`` that send messages to one of them, in increasing order."""
        nodes = self._checked(nodes)
        lookup = Lookup(nodes)
        outside = [nodes[:0]]
        for _, at in self._row_pieces(nodes):
            senders = self.indices[at].to(torch.int64).unique()
            outside.append(senders[~lookup.contains(senders)])
        halo: Tensor = torch.cat(outside).unique()
        return halo

    def _row_pieces(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``nodes`` in pieces, each with the positions of its edges in ``indices``."""
        for some in nodes.split(NODES_PER_PIECE):
            degree = degrees_of(self.indptr, some)
            piece = (degree.cumsum(0) - degree) // EDGES_PER_PIECE
            for rows in some.split(piece.unique_consecutive(return_counts=True)[1].tolist()):
                yield rows, edge_positions(self.indptr, rows)

    def check_edges(self) -> None:
        """Refuse edges that lead out of the graph, for instance after a file was changed: compiled loops follow them.

        Reads all of ``indptr`` and ``indices`` once, also from disk.
        """
        for start in range(0, max(self.num_nodes, 1), EDGES_AT_ONCE):
            piece = self.indptr[start : start + EDGES_AT_ONCE + 1]
            if bool((falls := piece[1:] < piece[:-1]).any()):
                row = int(falls.nonzero()[0])
                raise ValueError(
                    f"indptr must not fall, but row {start + row} goes from {int(piece[row])} to {int(piece[row + 1])}."
                )
        self._check_ends()
        for piece in self.indices.split(EDGES_AT_ONCE) if self.num_edges else ():
            low, high = (int(end) for end in piece.aminmax())
            if low < 0 or high >= self.num_senders:
                raise ValueError(f"indices must lie in [0, {self.num_senders}), got {low} to {high}.")

    def check_whole(self) -> None:
        """Refuse some rows of a larger graph, where every sender must have a row of its own."""
        if self.num_senders != self.num_nodes:
            raise ValueError(
                f"The graph has rows for {self.num_nodes} nodes, and edges from {self.num_senders}: it is a shard, and "
                "the whole graph is needed here."
            )

    def _checked(self, nodes: Tensor) -> Tensor:
        """The ids as int64; an id that is no node of this graph is refused."""
        check_ids("nodes", nodes)
        nodes = nodes.to(torch.int64)
        if nodes.numel() and not (int(nodes.min()) >= 0 and int(nodes.max()) < self.num_nodes):
            raise ValueError(
                f"Node ids must lie in [0, {self.num_nodes}), got {int(nodes.min())} to {int(nodes.max())}."
            )
        return nodes

    def _check_lengths(self) -> None:
        if self.indptr.dim() != 1 or self.indptr.numel() == 0 or self.indices.dim() != 1:
            raise ValueError("indptr and indices must be vectors, and indptr must hold one entry more than nodes.")
        if self.indptr.dtype != torch.int64 or self.indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indptr and indices must hold integers, got {self.indptr.dtype} and {self.indices.dtype}: give indptr "
                "as torch.int64, and indices as torch.int32 or torch.int64."
            )
        self._check_ends()
        check_rows("node", self.node_arrays, self.num_nodes)
        check_rows("edge", self.edge_arrays, self.num_edges)
        for name, array in self.node_arrays.items():
            if name.endswith("_mask"):
                convert.check_mask(name, array)
        convert.check_scales(self.node_arrays)

    def _check_ends(self) -> None:
        if int(self.indptr[0]) != 0:
            raise ValueError(f"indptr must start at 0, got {int(self.indptr[0])}.")
        if int(self.indptr[-1]) != self.num_edges:
            raise ValueError(f"indptr ends at {int(self.indptr[-1])}, but indices holds {self.num_edges} edges.")

    def __repr__(self) -> str:
        arrays = [*self.node_arrays, *self.edge_arrays]
        where = f", path={str(self.path)!r}" if self.path else ""
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, arrays={arrays}{where})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map travels between processes as its path, never as its bytes.
        others = None if self.num_senders == self.num_nodes else self.num_senders
        if self.path is not None:
            return open_rows, (self.path, others)
        return _built, (self.indptr, self.indices, self.node_arrays, self.edge_arrays, others)


def check_rows(kind: str, arrays: Mapping[str, Tensor], length: int) -> None:
    """Refuse an array without ``length`` rows; ``kind`` is ``"node"`` or ``"edge"``."""
    for name, array in arrays.items():
        if array.dim() == 0 or len(array) != length:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, but the graph has {length} {kind}s: "
                f"a {kind} array needs one row per {kind}."
            )
        if array.shape[1:].numel() == 0:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, rows without a number: leave it out.")


def checked_graph(
    indptr: Tensor,
    indices: Tensor,
    node_arrays: Mapping[str, Tensor],
    edge_arrays: Mapping[str, Tensor],
    *,
    path: Path | None = None,
    fingerprint: str | None = None,
    num_senders: int | None = None,
) -> Graph:
    """Build a graph without :meth:`Graph.check_edges`, from edges that were checked before."""
    graph = Graph.__new__(Graph)
    graph._set(indptr, indices, node_arrays, edge_arrays, path, fingerprint, num_senders)
    return graph


def open_rows(path: Path, num_senders: int | None) -> Graph:
    """Open a saved graph whose ``indices`` lie below ``num_senders``, or below its number of rows if that is None."""
    arrays, fingerprint = store.read(path, num_senders)
    if missing := {"indptr", "indices"} - arrays.keys():
        raise ValueError(f"{path} holds no {min(missing)}.npy that its meta.json knows of: save the graph again.")
    nodes = {name.removeprefix("nodes/"): t for name, t in arrays.items() if name.startswith("nodes/")}
    edges = {name.removeprefix("edges/"): t for name, t in arrays.items() if name.startswith("edges/")}
    ends = arrays["indptr"], arrays["indices"]
    convert.check_names(nodes, edges, allowed=("n_id",))
    return checked_graph(*ends, nodes, edges, path=path.resolve(), fingerprint=fingerprint, num_senders=num_senders)


def _built(
    indptr: Tensor, indices: Tensor, nodes: dict[str, Tensor], edges: dict[str, Tensor], num_senders: int | None
) -> Graph:
    graph = checked_graph(indptr, indices, nodes, edges, num_senders=num_senders)
    graph.check_edges()
    return graph


def fingerprint_of(arrays: Iterable[tuple[str, torch.dtype, Sequence[int], Iterable[Tensor]]]) -> str:
    """The hash of ``indptr``, ``indices`` and the masks, each given as name, type, shape and pieces of its content."""
    digest = hashlib.blake2b(digest_size=16)
    for name, dtype, shape, pieces in arrays:
        digest.update(f"{name} {dtype} {tuple(shape)}".encode())
        for piece in pieces:
            digest.update(piece.contiguous().numpy().data)
    return digest.hexdigest()


def degrees_of(indptr: Tensor, nodes: Tensor) -> Tensor:
    """The in-degrees of ``nodes``, in their order."""
    pieces = [indptr[some + 1] - indptr[some] for some in nodes.split(NODES_PER_PIECE)]
    return torch.cat([nodes[:0], *pieces])


def count_edges(indptr: Tensor, nodes: Tensor) -> int:
    """The sum of the in-degrees of ``nodes``."""
    return sum(int((indptr[some + 1] - indptr[some]).sum()) for some in nodes.split(NODES_PER_PIECE))


def row_slices(indptr: Tensor) -> Iterator[slice]:
    """Yield all rows in slices of at most ``EDGES_PER_PIECE`` edges, or of one row that has more."""
    first, num_rows = 0, indptr.numel() - 1
    while first < num_rows:
        reached = int(torch.searchsorted(indptr, int(indptr[first]) + EDGES_PER_PIECE, right=True)) - 1
        last = min(max(reached, first + 1), num_rows, first + NODES_PER_PIECE)
        yield slice(first, last)
        first = last
