"""Makes a saved graph, or one shard of it, of files that do not fit into memory. After a kill the same call goes on.

Tables are turned into arrays. The edges of each type are sorted on disk, one type after the other, and the rows of all
types are put together, node after node. A graph without types is one of one type: its sorted edges are its rows.

files, read by every host -> own nodes, and edges into them -> sorted on disk -> a graph, or one shard of it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np

from lightning_gnn_dist.checks import (
    check_between,
    check_callable,
    check_folder,
    check_path,
    check_true_or_false,
    check_words,
    shown,
)
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import FULL
from lightning_gnn_dist.graph.typed.names import EdgeType, within
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of
from lightning_gnn_dist.prepare.describe import Prepared, describe, map_arrays
from lightning_gnn_dist.prepare.edge_sorting import EdgeSorting, check_times
from lightning_gnn_dist.prepare.estimate import Estimate, estimate_of
from lightning_gnn_dist.prepare.files.inputs import Inputs, check_types
from lightning_gnn_dist.prepare.files.raw import SPLITS
from lightning_gnn_dist.prepare.files.typed_source import NO_LABELS, with_reverse
from lightning_gnn_dist.prepare.files.typed_tables import is_typed
from lightning_gnn_dist.prepare.journal import Journal, journal_of
from lightning_gnn_dist.prepare.merge import SortedEdges, merge
from lightning_gnn_dist.prepare.nodes import MAX_BYTES_AT_ONCE, NodesOfType, has_fractions, unpack_nodes
from lightning_gnn_dist.prepare.numbering import Numbering, Part
from lightning_gnn_dist.prepare.one_shard import (
    OneShard,
    check_assignment,
    check_division,
    inputs_of,
    numbering_of,
    write_index,
)
from lightning_gnn_dist.prepare.shard import shard_name
from lightning_gnn_dist.rules import Count, Seed, check_fields

VERSION = 2  # of unfinished work: raise it when a new release cannot go on with it
OnProgress: TypeAlias = Callable[[str, float], None]
Nodes: TypeAlias = Mapping[str, NodesOfType]
DEFAULT_MEMORY = 2_000_000_000


def prepare_graph(
    source: str | Path,
    out: str | Path,
    *,
    shard: OneShard | None = None,
    nodes: str | Path | None = None,
    undirected: bool = False,
    time: str | None = None,
    reverse: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    float_labels: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, share: None,
) -> None:
    """Turn files into a saved graph, or one shard of it, in bounded memory. The same call goes on after a kill.

    The graph is the one that ``Graph.from_pyg(...).save(out)`` writes, to the bit, and a shard the one that
    :func:`save_shards` writes of that graph. It appears when it is complete; until then the work is in the folder
    ``.<name>.preparing`` beside it. All hosts that make a shard must be given the same files and settings; if not,
    ranks refuse to connect.

    Args:
        source: A ``.npy`` of edges, of shape (2, E) or (E, 2); a table (CSV, TSV, Parquet); a folder of these;
            or a folder with ``edge_index.npy`` (or a folder ``edge_index`` of files) and arrays per node: ``x.npy`` (or
            a folder ``x``), ``y.npy``, ``train_mask.npy`` or ``train_idx.npy``, ..., ``num_nodes.npy``. Of several
            types a folder with folders ``nodes`` and ``edges``. In ``nodes`` there is for each type a table, text or
            Parquet, with an id in each row, or a folder of such arrays; in ``edges`` for each type, called ``<source
            type>__<name>__<destination type>``, a table, or a folder with ``edge_index.npy`` and what edges carry.
            Where nodes are in a folder, their ids count from 0.
        out: The directory to write. Of a shard the directory of the shards, of which this host gets ``shares.json`` and
            its own shard.
        shard: Which shard to write, instead of the whole graph. Each host reads all files and keeps its own nodes and
            the edges into them. Without types, arrays of edges must be dropped.
        nodes: A table of nodes, in the order of their numbers 0, 1, 2, ..., for a graph without types.
        undirected: Add the reverse of every edge, and keep every edge once, of a graph without types.
        time: Of several types, the array in whose order the edges of one type into a node come, see
            :class:`GraphTypes`.
        reverse: Of several types, add an edge type ``rev_<name>`` for each, with the same arrays.
        split: Shares of labelled nodes, of each type, to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays and columns to leave out.
        float_labels: Accept a floating point ``y`` with one value per node, for regression.
        memory_bytes: Bytes that reading, sorting and copying may take, beside arrays of one entry per node (about 24
            bytes per node, and labels, masks, times and ids; with an assignment 8 to 12 bytes more) and the interpreter
            itself.
        overwrite: Replace a saved graph.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    check_true_or_false(overwrite=overwrite)
    source, out = check_path("source", source), check_folder("out", out)
    nodes = None if nodes is None else check_path("nodes", nodes)
    preparation = Preparation(
        source, out, shard, nodes, undirected, time, reverse, split, seed, tuple(drop), float_labels, memory_bytes
    )
    preparation.run(on_progress, overwrite=overwrite)


@dataclass(frozen=True)
class Preparation:
    """The settings of :func:`prepare_graph`."""

    source: Path
    out: Path
    shard: Annotated[OneShard, "a OneShard, as OneShard(0, num_shards=4) makes it"] | None = None
    nodes: Path | None = None
    undirected: bool = False
    time: Annotated[str, "time"] | None = None
    reverse: bool = False
    split: Sequence[float] | None = None
    seed: Seed = 0
    drop: tuple[str, ...] = ()
    float_labels: bool = False
    memory_bytes: Count = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        check_fields(self)
        check_split(self.split)
        for file in (self.source, *([self.nodes] if self.nodes else [])):
            if not file.exists():
                raise FileNotFoundError(f"{file} does not exist.")
        has_nodes, has_time = self.nodes is not None, self.time is not None
        check_types(self.source, is_typed(self.source), has_nodes, self.undirected, has_time, self.reverse)
        if self.shard is not None:
            check_assignment(self.shard, self.inputs.nodes)
            self._check_carried()

    @property
    def target(self) -> Path:
        """The directory of the graph, or of the shard."""
        return self.out if self.shard is None else self.out / shard_name(self.shard.index)

    @property
    def folder(self) -> Path:
        """The folder in which the work is done."""
        return self.target.absolute().parent / f".{self.target.name}.preparing"

    @cached_property
    def inputs(self) -> Inputs:
        """The files of the source."""
        return Inputs.of(self.source, self.nodes, frozenset(self.drop), self.time)

    @cached_property
    def _edges(self) -> EdgeSorting:
        return EdgeSorting(
            self.inputs, self.folder, self._draft, self.shard is not None, self.undirected, self.time, self.memory_bytes
        )

    def _check_carried(self) -> None:
        """Refuse what edges without types carry: nobody would know their numbers among all edges."""
        files = self.inputs.plain
        if files is not None and (found := [*files.carried.arrays, *files.edges.carried]):
            raise ValueError(
                f"{found[0]} belongs to edges, which shards made on their own hosts cannot carry: leave it out (--drop "
                f"{found[0]}), or prepare the whole graph and divide it."
            )

    def estimate(self) -> Estimate:
        """Estimate disk space and time, from the headers of the files."""
        ways = 1 + (self.undirected or self.reverse)
        return estimate_of(self.inputs, ways, None if self.shard is None else self.shard.num_shards)

    def run(self, on_progress: OnProgress, *, overwrite: bool = False) -> Prepared:
        """Do the work that is left, and rename the result to the target."""
        if self.shard is not None:
            check_division(self.shard, self.out)
        store.check_target(self.target, overwrite=overwrite)
        self._check_room()
        try:
            with journal_of(self.folder, self._inputs()) as journal:
                prepared = self._write(journal, on_progress)
                store.replace(self._draft, self.target)
                flush(self.folder.parent)
                shutil.rmtree(self.folder)
        except MemoryError as error:
            raise MemoryError(
                f"{error} Sorting was given {self.memory_bytes:,} bytes, which this process cannot have: repeat the "
                f"command with less, and it goes on with what is done in {self.folder}."
            ) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"the disk of {self.folder} is full, or a file may not grow ({error.strerror}). What is done is kept "
                "there: make room and repeat the command to go on, or delete that folder",
            ) from error
        return prepared

    def _check_room(self) -> None:
        """Refuse to begin if the disk has too little room."""
        place = next(parent for parent in self.folder.parents if parent.exists())
        there = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        missing, free = self.estimate().disk_bytes - there, shutil.disk_usage(place).free
        if missing > free:
            raise OSError(f"{place} has {free:,} bytes free, and about {missing:,} are needed: choose another disk.")

    def _write(self, journal: Journal, on_progress: OnProgress) -> Prepared:
        """Write all files of the saved graph into the draft."""
        if not self._draft.exists():
            journal.clear()
            for name in ("nodes", "edges"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self._draft.mkdir()
        nodes = {}
        for kind in self.inputs.nodes:
            with _told_of(kind):
                nodes[kind] = self._read_nodes(kind, on_progress)
        self._check_nodes(nodes)
        for kind, of_kind in nodes.items():
            target = self._draft / "nodes" / kind
            if not target.exists():
                with _told_of(kind):
                    folder, progress = self._of_nodes(kind), partial(on_progress, f"copying {kind or 'arrays'}")
                    check_times(of_kind.files.arrays, self.time, "node")
                    of_kind.copy(folder, target, Journal(folder, {}), progress)
        edge_types = self._edge_types()
        parts = {kind: of_kind.part for kind, of_kind in nodes.items()}
        for edge_type, (as_read, flip) in edge_types.items():
            with _told_of(edge_type):
                self._edges.sort(edge_type, as_read, flip, parts, on_progress)
        types = self._merge(nodes, edge_types, on_progress) if self.inputs.have_names else None
        if self.shard is not None:
            journals = {edge_type: self._edges.journal(edge_type) for edge_type in edge_types}
            write_index(self.out, nodes, types, journals, self.undirected, self.time)
        names = next(iter(nodes.values())).names
        at_once = max(1, min(self.memory_bytes // 16, MAX_BYTES_AT_ONCE // 8))
        return describe(self._draft, names, types, at_once, partial(on_progress, "taking the fingerprint"))

    def _read_nodes(self, kind: str, on_progress: OnProgress) -> NodesOfType:
        """Turn a table of nodes into arrays, and find out which nodes of the type are prepared."""
        folder, table = self._of_nodes(kind), self.inputs.table_of_nodes(kind)
        folder.mkdir(parents=True, exist_ok=True)
        journal, progress = Journal(folder, {}), partial(on_progress, f"reading {kind or 'nodes'}")
        if table is not None and not journal.get("is_read"):
            for name in ("own", "arrays", "graph"):
                shutil.rmtree(folder / name, ignore_errors=True)
            part_of, named = partial(self._part, kind), self.inputs.have_names
            unpack_nodes(table, folder, part_of, self.drop, self.time, named, self.memory_bytes // 2, progress)
            journal.record(sorted(folder.rglob("*.npy")), is_read=True)
        files = self.inputs.nodes_of(kind, folder / "arrays")
        return NodesOfType(
            files=files,
            part=self._part(kind, files.num_nodes or self._count(kind, on_progress)),
            is_shard=self.shard is not None,
            source=self.inputs.nodes[kind] or self.source,
            split=self.split if "y" in files.arrays or not self.inputs.have_names else None,
            seed=self.seed,
            float_labels=self.float_labels and (has_fractions(files) or not self.inputs.have_names),
            memory_bytes=self.memory_bytes,
        )

    def _part(self, kind: str, num_nodes: int) -> Part:
        """Which nodes of a type are prepared."""
        if kind not in self._parts:
            whole, shard = Numbering.spread(num_nodes, 1), self.shard
            self._parts[kind] = (
                Part(whole) if shard is None else Part(numbering_of(shard, kind, num_nodes), shard.index)
            )
        return self._parts[kind]

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return {}

    def _count(self, kind: str, on_progress: OnProgress) -> int:
        """The number of nodes where only the edges of a graph without types tell."""
        if self.inputs.have_names:
            raise ValueError(f"{self.inputs.nodes[kind]} does not say how many nodes there are: add x, y or num_nodes.")
        if self.shard is not None:
            raise ValueError(
                f"{self.source} does not say how many nodes there are, and the host of a shard must know before it "
                "reads: add num_nodes.npy, x or y."
            )
        if num_nodes := self._edges.count(on_progress):
            return num_nodes
        raise ValueError(f"{self.source} has no edges, and does not say how many nodes there are.")

    def _check_nodes(self, nodes: Nodes) -> None:
        """Refuse settings that fit no type, and a shard without nodes."""
        if self.shard is not None:
            starts = np.sum([of_kind.part.numbering.bounds for of_kind in nodes.values()], 0)
            check_division(self.shard, self.out, starts.tolist())
            if not sum(of_kind.part.size for of_kind in nodes.values()):
                raise ValueError(
                    f"No node belongs to shard {self.shard.index} of {self.shard.num_shards}: every shard needs one."
                )
        if self.split and not any(of_kind.split for of_kind in nodes.values()):
            raise ValueError(NO_LABELS)
        if self.float_labels and not any(of_kind.float_labels for of_kind in nodes.values()):
            raise ValueError("float_labels says that a y is a target of regression, but no type has a y of fractions.")

    def _of_nodes(self, kind: str) -> Path:
        """The folder in which the nodes of a type are worked on."""
        return self.folder / "nodes" / kind

    def _edge_types(self) -> dict[EdgeType, tuple[EdgeType, bool]]:
        """For each edge type the one whose files are read, and whether their edges are read the other way round."""
        found = {edge_type: (edge_type, False) for edge_type in self.inputs.edges}
        return found | (with_reverse({kind: (kind, True) for kind in found}) if self.reverse else {})

    def _merge(self, nodes: Nodes, edge_types: Iterable[EdgeType], on_progress: OnProgress) -> GraphTypes:
        """Write the rows of all nodes, after a kill from the beginning; return the types, which look at all lengths."""
        found, parts = {}, {kind: of_kind.part for kind, of_kind in nodes.items()}
        for edge_type in edge_types:
            times = nodes[edge_type[0]].files.arrays.get(self.time or "")
            of_senders = None if times is None else times.load()
            found[edge_type] = SortedEdges.of(self._edges.out(edge_type), self.time, of_senders)
        merge(self._draft, found, parts, partial(on_progress, "putting rows together"))
        about: dict[str, Any] = {"nodes": [[kind, part.size] for kind, part in parts.items()]}
        about["edges"] = [[*edge_type, edges.senders.size] for edge_type, edges in found.items()]
        about["time"] = self.time
        if self.shard is not None:
            about["senders"] = list(offsets_of([part.num_all for part in parts.values()]))
        return GraphTypes.saved(about, map_arrays(self._draft, sorted(self._draft.rglob("*.npy"))))

    def _inputs(self) -> dict[str, Any]:
        """What the result depends on: the files, by size and time, and the settings."""
        paths = [self.source, *sorted(self.source.rglob("*"))] if self.source.is_dir() else [self.source]
        paths += [self.nodes, *sorted(self.nodes.rglob("*"))] if self.nodes else []
        files = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()}
        return {
            "version": VERSION,
            "files": files,
            "undirected": self.undirected,
            "split": self.split,
            "seed": int(self.seed),
            "drop": sorted(self.drop),
            "float_labels": self.float_labels,
            "time": self.time,
            "reverse": self.reverse,
            "shard": self.shard and inputs_of(self.shard),
        }

    @property
    def _draft(self) -> Path:
        return self.folder / "graph"


def check_split(split: Sequence[float] | None) -> None:
    """Refuse anything but None or three numbers in [0, 1]."""
    if split is None:
        return
    if isinstance(split, str | bytes) or not isinstance(split, Sequence) or len(split) != len(SPLITS):
        raise ValueError(f"split must be three shares, such as (0.6, 0.2, 0.2), got {shown(split)}.")
    for share in split:
        check_between(0, 1, **{"split: a share": share})


def _told_of(kind: str | EdgeType) -> AbstractContextManager[None]:
    """Let refusals say of which type they are, if it has a name."""
    return within(kind) if any(kind) else nullcontext()
