"""Makes a saved graph, or one shard of it, of files that need not fit into memory. After a kill the same call goes on.

Tables are turned into arrays. The edges of each type are sorted on disk, one type after the other, and the rows of all
types are put together, node after node. A graph without types is one of one type: its sorted edges are its rows.

files, read by every host -> own nodes, and edges into them -> sorted on disk -> a graph, or one shard of it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from lightning_gnn_dist.checks import check_callable, check_folder, check_true_or_false, check_words
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import FULL
from lightning_gnn_dist.graph.typed.names import EdgeType, within
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.prepare.databases.manifest import is_database
from lightning_gnn_dist.prepare.databases.unpack import inputs_of_database
from lightning_gnn_dist.prepare.files.columns import Choice, named_kinds
from lightning_gnn_dist.prepare.files.inputs import EDGE, Inputs, check_carried, with_reverse
from lightning_gnn_dist.prepare.frames import as_files
from lightning_gnn_dist.prepare.kept import keep_ids
from lightning_gnn_dist.prepare.one_shard import OneShard, Part, check_assignment, inputs_of, part_of, reading_of
from lightning_gnn_dist.prepare.reading import Reading
from lightning_gnn_dist.prepare.refusals import (
    RENAMED,
    WRITTEN,
    check_alike,
    check_kinds,
    check_tables,
    check_types,
    needs_no_rank,
)
from lightning_gnn_dist.prepare.steps.describe import Prepared, describe
from lightning_gnn_dist.prepare.steps.edges import EdgeSorting, OnProgress, check_times
from lightning_gnn_dist.prepare.steps.estimate import Estimate, estimate_of
from lightning_gnn_dist.prepare.steps.external_sort import MemoryTooSmall
from lightning_gnn_dist.prepare.steps.journal import Journal, journal_of
from lightning_gnn_dist.prepare.steps.nodes import (
    MAX_BYTES_AT_ONCE,
    NO_LABELS,
    NodesOfType,
    check_split,
    has_fractions,
)
from lightning_gnn_dist.rules import Count, Seed, check_fields

VERSION = 5  # of unfinished work: raise it when a new release cannot go on with it
OnColumns: TypeAlias = Callable[[list[tuple[str, str, str]]], None]  # a table, a column, and what it becomes
Nodes: TypeAlias = Mapping[str, NodesOfType]
DEFAULT_MEMORY = 2_000_000_000


def prepare_graph(
    source: Any,
    out: str | Path,
    *,
    shard: OneShard | None = None,
    nodes: Any | None = None,
    undirected: bool = False,
    time: str | None = None,
    reverse: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    kinds: Mapping[str, str] | None = None,
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
        source: A ``Data`` or ``HeteroData`` that ``torch.save`` saved (``.pt``); a ``.npy`` of edges, of shape (2, E)
            or (E, 2); a table (CSV, TSV, Parquet), or a frame of Arrow, pandas or Polars; a folder of these; or an
            ``.npz`` or folder with ``edge_index.npy`` (or a folder of files) and arrays per node: ``x.npy`` (or a
            folder), ``y.npy``, ``train_mask.npy`` or ``train_idx.npy``, ... Of several types a folder with folders
            ``nodes`` and ``edges``: for each type a table, text or Parquet, or an ``.npz`` or folder of such arrays.
            Rows of nodes have an id; edges are called ``<source type>__<name>__<destination type>``. Where nodes are
            arrays, their ids count from 0. Tables with keys: RelBench's folder, or one with a ``database.yaml``.
        out: The directory to write. Of a shard the directory of the shards, of which this host gets ``shares.json`` and
            its own shard.
        shard: Which shard to write, instead of the whole graph. Each host reads all files and keeps its own nodes and
            the edges into them. Without types, arrays of edges must be dropped.
        nodes: A table or frame of nodes with their ids, or a folder or ``.npz`` of arrays, for a graph without types.
        undirected: Add the reverse of every edge, and keep every edge once, of a graph without types.
        time: Of several types, the array by which edges of one type into a node are ordered (:class:`GraphTypes`).
        reverse: Of several types, add an edge type ``rev_<name>`` for each, with the same arrays.
        split: Shares of labelled nodes, of each type, to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays and columns to leave out.
        kinds: What columns of features are, ``{"zip": "category"}``, if not what their cells hold.
        float_labels: Accept a floating point ``y``, for regression.
        memory_bytes: Bytes that reading, sorting and copying may take, beside arrays of one entry per node (24 bytes
            per node, labels, masks, times and ids; with an assignment 8 to 12 bytes more) and the interpreter.
        overwrite: Replace a saved graph.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    check_true_or_false(overwrite=overwrite)
    out, choice = check_folder("out", out), Choice(tuple(drop), named_kinds(kinds))
    with as_files(out, {"source": source} | ({} if nodes is None else {"nodes": nodes})) as files:
        edges, table = files["source"], files.get("nodes")
        given = edges, out, shard, table, undirected, time, reverse, split, seed, choice, float_labels, memory_bytes
        Preparation(*given).run(on_progress, overwrite=overwrite)


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
    choice: Choice = field(default_factory=Choice)
    float_labels: bool = False
    memory_bytes: Count = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        check_fields(self)
        check_split(self.split)
        if not self.source.exists():
            raise FileNotFoundError(f"{self.source} does not exist.")
        of_types = {"time": self.time is not None, "reverse": self.reverse, "split": self.split is not None}
        check_types(self.inputs, self.source, self.nodes, undirected=self.undirected, **of_types)
        check_kinds(self.choice.kinds, self.inputs, self.source)
        if self.shard is not None:
            check_assignment(self.shard, self.inputs.nodes)
            check_tables(self.shard, self.inputs)
            if not self.inputs.have_names:
                check_carried(self.inputs.edges[EDGE])

    @property
    def target(self) -> Path:
        """The directory of the graph, or of the shard."""
        return self.out if self.shard is None else self.out / store.shard_name(self.shard.index)

    @property
    def folder(self) -> Path:
        """The folder in which the work is done."""
        return self.target.absolute().parent / f".{self.target.name}.preparing"

    @cached_property
    def inputs(self) -> Inputs:
        """The files of the source."""
        if is_database(self.source):
            return inputs_of_database(self.source, frozenset(self.choice.drop))
        return Inputs.of(self.source, self.nodes, frozenset(self.choice.drop), self.time)

    @cached_property
    def reading(self) -> Reading:
        """Who reads the files."""
        return reading_of(self.shard)

    def estimate(self) -> Estimate:
        """Estimate disk space and time, from the headers of the files."""
        directions = 1 + (self.undirected or self.reverse)
        num_shards = None if self.shard is None else self.shard.num_shards
        return estimate_of(self.inputs, directions, num_shards, self.reading.num_readers)

    def run(
        self, on_progress: OnProgress, *, overwrite: bool = False, on_columns: OnColumns = lambda told: None
    ) -> Prepared | None:
        """Do the work that is left, and rename the result to the target; return None if the renaming alone was left."""
        if self.shard is not None:
            from lightning_gnn_dist.prepare.shard_index import check_division  # a whole graph needs none of it

            check_division(self.shard, self.out)
        check_alike(self.reading, self._inputs(), self.source)
        is_written = needs_no_rank(self.reading, self._stage(), overwrite=overwrite)
        if is_written and self.target.exists():
            return None  # other ranks were stopped before they renamed theirs
        store.check_target(self.target, overwrite=overwrite)
        self.estimate().check_room(self.folder)
        try:
            with journal_of(self.folder, self._inputs()) as journal:
                try:
                    prepared = None if is_written else self._write(journal, on_progress, on_columns)
                except (ValueError, TypeError) as error:
                    if not isinstance(error, MemoryTooSmall):
                        shutil.rmtree(self.folder)  # nobody goes on with what was refused
                    raise
                store.replace(self.draft, self.target)
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

    def _write(self, journal: Journal, on_progress: OnProgress, on_columns: OnColumns) -> Prepared:
        """Write all files of the saved graph into the draft, once tables have become arrays."""
        inputs, ids, tables = self.inputs, dict[str, Path](), None
        folder = self.folder / "tables"
        if inputs.database is not None:
            from lightning_gnn_dist.prepare.databases.unpack import unpack_database  # arrays need no DuckDB

            inputs, ids, tables = unpack_database(inputs, folder, self.choice.drop, self.memory_bytes, on_progress)
        elif inputs.tables:
            from lightning_gnn_dist.prepare.tables.unpack import unpack

            inputs, ids, told = unpack(inputs, folder, self.choice, self.memory_bytes, on_progress)
            on_columns(told)
        return Writing(self, inputs, ids, tables, on_progress).write(journal)

    def _stage(self) -> int:
        """How far this rank has come."""
        if self.target.exists():
            return RENAMED
        is_written = self.draft.exists() and Journal(self.folder, self._inputs()).get("is_written")
        return WRITTEN if is_written else 0

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
            "drop": sorted(self.choice.drop),
            "kinds": dict(sorted((self.choice.kinds).items())),
            "float_labels": self.float_labels,
            "time": self.time,
            "reverse": self.reverse,
            "shard": self.shard and inputs_of(self.shard),
        }

    @property
    def draft(self) -> Path:
        """The folder of what is written, until it is complete."""
        return self.folder / "graph"


@dataclass(frozen=True)
class Writing:
    """The work of a preparation.

    Args:
        settings: What was asked.
        inputs: The files, of which no table is left.
        ids: The files of the ids of nodes, by types, where tables tell them.
        tables: What became of the tables of a database.
        on_progress: Called with the name of a stage and the share of it that is done.
    """

    settings: Preparation
    inputs: Inputs
    ids: Mapping[str, Path]
    tables: Tables | None
    on_progress: OnProgress

    @cached_property
    def _edges(self) -> EdgeSorting:
        sorting = self._sorting(self.settings.folder, self.settings.draft)
        return replace(sorting, ranges=self._ranges) if self._is_streamed else sorting

    @cached_property
    def _ranges(self) -> EdgeSorting:
        """Sorts the edges into ranges of nodes, which are cut then."""
        folder = self.settings.folder / "ranges"
        return self._sorting(folder, folder / "graph")

    def _sorting(self, folder: Path, draft: Path) -> EdgeSorting:
        more = (
            self.settings.shard is not None,
            self.settings.undirected,
            self.inputs.time,
            self.settings.memory_bytes,
            self.settings.reading,
        )
        return EdgeSorting(self.inputs, folder, draft, *more)

    @property
    def _is_streamed(self) -> bool:
        return self.settings.shard is not None and isinstance(self.settings.shard.assignment, StreamingPartitioner)

    def write(self, journal: Journal) -> Prepared:
        """Write all files of the saved graph into the draft."""
        if not all(
            self.settings.reading.each(self.settings.draft.exists())
        ):  # what one rank has lost, all have sent it
            journal.clear()
            for name in ("nodes", "edges", "ranges", "cut", self.settings.draft.name):
                shutil.rmtree(self.settings.folder / name, ignore_errors=True)
            self.settings.draft.mkdir()
        nodes = {}
        for kind in self.inputs.nodes:
            with within(kind):
                nodes[kind] = self._read_nodes(kind)
        self._check_nodes(nodes)
        for kind, of_kind in nodes.items():
            target = self.settings.draft / "nodes" / kind
            if not all(self.settings.reading.each(target.exists())):
                with within(kind):
                    folder, progress = self._of_nodes(kind), partial(self.on_progress, f"copying {kind or 'arrays'}")
                    check_times(of_kind.files.arrays, self.inputs.time, "node")
                    of_kind.times(self.inputs.time)
                    of_kind.copy(folder, target, progress)
        edge_types = self._edge_types()
        parts = {kind: of_kind.part for kind, of_kind in nodes.items()}
        for edge_type, as_read in edge_types.items():
            with within(edge_type):
                self._edges.sort(edge_type, as_read, parts, self.on_progress)
        types = None
        if self.inputs.have_names:
            from lightning_gnn_dist.prepare.steps.merge import merge_types  # a graph without types needs none of it

            folders = {edge_type: self._edges.out(edge_type) for edge_type in edge_types}
            progress = partial(self.on_progress, "putting rows together")
            types = merge_types(
                self.settings.draft,
                nodes,
                folders,
                self.inputs.time,
                self.settings.shard is not None,
                self.tables,
                progress,
            )
        if self.settings.shard is not None:
            from lightning_gnn_dist.prepare.shard_index import write_index

            journals = {edge_type: self._edges.journal(edge_type) for edge_type in edge_types}
            write_index(self.settings.out, nodes, types, journals, self.settings.undirected, self.inputs.time)
        names = next(iter(nodes.values())).names
        at_once = max(1, min(self.settings.memory_bytes // 16, MAX_BYTES_AT_ONCE // 8))
        progress = partial(self.on_progress, "taking the fingerprint")
        prepared = describe(self.settings.draft, names, self.inputs.halves, types, at_once, progress)
        for kind, file in self.ids.items() if self.settings.shard is None else ():
            keep_ids(file, self.settings.draft, kind)
        journal.record(is_written=True)
        self.settings.reading.each(0)  # what has been renamed serves no other rank any more
        return prepared

    def _read_nodes(self, kind: str) -> NodesOfType:
        """Find out which nodes of a type are prepared."""
        self._of_nodes(kind).mkdir(parents=True, exist_ok=True)
        files, named = self.inputs.nodes[kind], self.inputs.have_names
        return NodesOfType(
            files=files,
            part=self._part(kind, files.num_nodes or self._count(kind)),
            reading=self.settings.reading,
            is_shard=self.settings.shard is not None,
            split=self.settings.split if "y" in files.arrays or not named else None,
            seed=self.settings.seed,
            float_labels=files.float_labels or (self.settings.float_labels and (has_fractions(files) or not named)),
            memory_bytes=self.settings.memory_bytes,
        )

    def _part(self, kind: str, num_nodes: int) -> Part:
        """Which nodes of a type are prepared."""
        if kind not in self._parts:
            part = part_of(self.settings.shard, kind, num_nodes)
            if self.settings.shard is not None and callable(partitioner := self.settings.shard.assignment):
                from lightning_gnn_dist.prepare.steps.cutting import cut  # other shards need none of it

                part = cut(
                    partitioner,
                    part,
                    self._ranges,
                    self.settings.seed,
                    self.settings.reading,
                    self.settings.folder,
                    self.on_progress,
                )
            self._parts[kind] = part
        return self._parts[kind]

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return {}

    def _count(self, kind: str) -> int:
        """The number of nodes where only the edges of a graph without types tell."""
        if self.inputs.have_names:
            raise ValueError(
                f"{self.inputs.nodes[kind].source} does not say how many nodes there are: add x, y or num_nodes."
            )
        if self.settings.shard is not None:
            raise ValueError(
                f"{self.settings.source} does not say how many nodes there are, and the host of a shard must know "
                "before it reads: add num_nodes.npy, x or y."
            )
        if num_nodes := self._edges.count(self.on_progress):
            return num_nodes
        raise ValueError(f"{self.settings.source} has no edges, and does not say how many nodes there are.")

    def _check_nodes(self, nodes: Nodes) -> None:
        """Refuse settings that fit no type, and a shard without nodes."""
        if self.settings.shard is not None:
            from lightning_gnn_dist.prepare.shard_index import check_nodes

            check_nodes(self.settings.shard, self.settings.out, [of_kind.part for of_kind in nodes.values()])
        if self.settings.split and not any(of_kind.split for of_kind in nodes.values()):
            raise ValueError(NO_LABELS)
        if self.settings.float_labels and not any(of_kind.float_labels for of_kind in nodes.values()):
            raise ValueError("float_labels says that a y is a target of regression, but no type has a y of fractions.")

    def _of_nodes(self, kind: str) -> Path:
        """The folder in which the nodes of a type are worked on."""
        return self.settings.folder / "nodes" / kind

    def _edge_types(self) -> dict[EdgeType, EdgeType]:
        """For each edge type the one whose files are read: itself, or the one that it is the reverse of."""
        found = {edge_type: edge_type for edge_type in self.inputs.edges}
        return found | (with_reverse(found) if self.settings.reverse else {})
