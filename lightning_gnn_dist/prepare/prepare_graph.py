"""Makes a saved graph, or one shard of it, of files that need not fit into memory. After a kill the same call goes on.

Tables are turned into arrays. The edges of each type are sorted on disk, one type after the other, and the rows of all
types are put together, node after node. A graph without types is one of one type: its sorted edges are its rows.

files -> a plan -> nodes, and edges -> sorted on disk -> a graph, or a portion of it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from lightning_gnn_dist.checks import (
    Count,
    Seed,
    check_callable,
    check_fields,
    check_folder,
    check_instance,
    check_path,
    check_true_or_false,
    check_words,
    shown,
)
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.files import flush, remove_whole
from lightning_gnn_dist.graph.storage.npy import FULL, checksum_of
from lightning_gnn_dist.graph.typed.types import EdgeType, within
from lightning_gnn_dist.graph.user_ids import keep_ids
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.prepare.edges import EdgeSorting, MemoryTooSmall, OnProgress
from lightning_gnn_dist.prepare.engine import duckdb_for, literal, told
from lightning_gnn_dist.prepare.journal import Journal, Prepared, describe, journal_of
from lightning_gnn_dist.prepare.nodes import (
    MAX_BYTES_AT_ONCE,
    NO_LABELS,
    NodesOfType,
    Part,
    check_split,
    has_fractions,
)
from lightning_gnn_dist.prepare.plan import Plan, plan_of, with_reverse
from lightning_gnn_dist.prepare.reading import files_of
from lightning_gnn_dist.wire.memory import held_bytes

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.types import GraphTypes

KINDS = ("category", "number", "time", "text")  # of features
VERSION = 8  # of unfinished work: raise it when a new release cannot go on with it
OnColumns: TypeAlias = Callable[[Sequence[tuple[str, str, str]]], None]  # a table, a column, and what it becomes
DEFAULT_MEMORY = 2_000_000_000
IS_CONNECTION = "://"
REFUSALS = (ValueError, TypeError, FileExistsError, FileNotFoundError)  # of what was given
LEAST_ROOM = 1 << 28  # bytes for the work, however much the process holds


@dataclass(frozen=True)
class Choice:
    """What a user says of columns.

    Args:
        drop: Columns and arrays to leave out.
        kinds: The kinds of features, where they are told.
    """

    drop: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_instance("kinds", self.kinds, Mapping, 'a dict of columns, such as {"zip": "category"}')
        check_words("kinds", [*self.kinds, *self.kinds.values()], '{"zip": "category"}')


class Portion:
    """All of a graph. What derives from it prepares less."""

    is_whole: ClassVar[bool] = True
    sorting: ClassVar[type[EdgeSorting]] = EdgeSorting  # of its edges
    of_nodes: ClassVar[type[NodesOfType]] = NodesOfType  # what has the nodes of a type
    facts: dict[str, Any] | None = None  # what the result depends on beside the graph's files and the other settings

    def target(self, out: Path) -> Path:
        """The directory that is written."""
        return out

    def check_plan(self, plan: Plan) -> None:
        """Refuse files of which this cannot be prepared."""

    def part(self, kind: str, num_nodes: int) -> Part:
        """The nodes of a type that are prepared; the name of the type is empty if the graph has no types."""
        return Part(num_nodes)

    def count(self, source: Path, edges: EdgeSorting, on_progress: OnProgress) -> int:
        """The number of nodes where only the edges of a graph without types tell."""
        if num_nodes := edges.count(on_progress):
            return num_nodes
        raise ValueError(f"{source} has no edges, and does not say how many nodes there are.")

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


def prepare_graph(
    source: Any,
    out: str | Path,
    *,
    shard: Portion | None = None,
    nodes: Any | None = None,
    tasks: str | Path | None = None,
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
    :func:`save_shards` writes of that graph. Until it is complete the work is in ``.<name>.preparing`` beside it. All
    hosts that make a shard must be given the same files and settings; if not, ranks refuse to connect.

    Args:
        source: A ``Data`` or ``HeteroData`` that ``torch.save`` saved (``.pt``); a ``.npy`` of edges, of shape (2, E)
            or (E, 2); a table (CSV, TSV, Parquet), or a frame of Arrow, pandas or Polars; a folder of one of these; or
            an ``.npz`` or folder with ``edge_index`` and arrays per node: ``x.npy`` (or a folder), ``train_mask.npy``
            or ``train_idx.npy``, ... Of several types a folder with folders ``nodes`` and ``edges``: for each type a
            table, or such arrays. Rows of nodes have an id; edges are called ``<source type>__<name>__<destination
            type>``. Where nodes are arrays, ids count from 0. Tables with keys: RelBench's folder, one with a
            ``database.yaml``, or a connection, ``sqlite:///shop.db``. A table may be a pattern, or a list of files.
        out: The directory to write. Of a shard that of all shards: this host gets ``shares.json`` and its own.
        shard: Which shard to write, a :class:`OneShard`, instead of the whole graph. Each host reads all files and
            keeps its own nodes and the edges into them. Without types, arrays of edges must be dropped.
        nodes: A table or frame of nodes with their ids, or a folder or ``.npz`` of arrays, for a graph without types.
        tasks: The tasks of a database that is named by a connection: queries (``.sql``), or a ``database.yaml``.
        undirected: Add the reverse of every edge, and keep every edge once, of a graph without types.
        time: The array of times. It orders edges of one type into a node, of several types (:class:`GraphTypes`).
        reverse: Of several types, add an edge type ``rev_<name>`` for each, with the same arrays.
        split: Shares of labelled nodes, of each type, to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays and columns to leave out.
        kinds: What columns of features are, ``{"zip": "category"}``, if not what their cells hold.
        float_labels: Accept a floating point ``y``, for regression.
        memory_bytes: Bytes that this process may take, beside 24 per node, labels, masks, times and ids. Below 256 MB,
            and for shards, those of the work alone; with an assignment 8 to 12 bytes per node more.
        overwrite: Replace a saved graph.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    check_true_or_false(overwrite=overwrite)
    out, choice = check_folder("out", out), Choice(tuple(drop), {} if kinds is None else kinds)
    with as_files(out, {"source": source, "nodes": nodes}, tasks, on_progress, is_whole=shard is None) as files:
        settings = undirected, time, reverse, split, seed, choice, float_labels, memory_bytes
        preparation = Preparation(files["source"], out, shard, files.get("nodes"), *settings)
        preparation.run(on_progress, overwrite=overwrite)


@dataclass(frozen=True)
class Preparation:
    """The settings of :func:`prepare_graph`, checked, and the work itself."""

    source: Path
    out: Path
    shard: Annotated[Portion, "a OneShard, as OneShard(0, num_shards=4) makes it"] | None = None
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
        self._check_layout()
        self.portion.check_plan(self.plan)

    def _check_layout(self) -> None:
        """Refuse settings that do not go with what the source is."""
        plan, source, of_types = self.plan, self.source, self.time is not None or self.reverse
        if plan.unpacking is not None and (self.undirected or self.nodes or of_types or self.split is not None):
            raise ValueError(
                f"{source} says itself which columns are times and keys, and which questions are to train on: leave "
                "--nodes, --undirected, --time, --reverse and --split out."
            )
        if plan.have_names and (self.undirected or self.nodes):
            raise ValueError(
                f"{source} holds several types: their nodes are known (no --nodes), and the reverse of an edge is of "
                "another type (--reverse, no --undirected)."
            )
        if not plan.have_names and self.reverse:
            raise ValueError(
                "--reverse is of graphs with types: a HeteroData, or a folder with folders nodes and edges."
            )
        if not plan.have_names and not plan.tables and self.time is not None:
            raise ValueError("--time is of tables and of graphs with types: arrays of one type stay as they are.")
        if self.choice.kinds and (plan.unpacking is not None or not plan.tables):
            which = "has no tables" if plan.unpacking is None else "says itself what columns are (columns: ...)"
            raise ValueError(f"--as says what columns of tables are, and {source} {which}: leave it out.")
        features = {name for table in plan.tables for name in table.columns if name not in table.roles(self.time)}
        for name, kind in self.choice.kinds.items():
            if kind not in KINDS:
                raise ValueError(f"--as: {name!r} must be one of {shown(list(KINDS))}, got {shown(kind)}.")
            if name not in features:
                raise ValueError(
                    f"--as names the column {name!r}, which holds no features, as those of keys, labels, splits and "
                    f"times do not: those of {source} are {sorted(features)}."
                )

    @property
    def portion(self) -> Portion:
        """What of the graph is prepared."""
        return self.shard or Portion()

    @cached_property
    def room(self) -> int:
        """Bytes that the work may take: of a whole graph those that the process does not hold already."""
        held = (held_bytes() or 0) if self.portion.is_whole else 0
        return max(self.memory_bytes - held, min(self.memory_bytes, LEAST_ROOM))

    @property
    def target(self) -> Path:
        """The directory of the graph, or of the shard."""
        return self.portion.target(self.out)

    @property
    def folder(self) -> Path:
        """The folder in which the work is done."""
        return self.target.absolute().parent / f".{self.target.name}.preparing"

    @property
    def draft(self) -> Path:
        """The folder of what is written, until it is complete."""
        return self.folder / "graph"

    @cached_property
    def plan(self) -> Plan:
        """What the source holds."""
        plan = plan_of(self.source, self.nodes, self.choice.drop, self.time, self.choice.kinds)
        return replace(plan, float_labels=self.float_labels)

    def run(
        self, on_progress: OnProgress, *, overwrite: bool = False, on_columns: OnColumns = lambda told: None
    ) -> Prepared | None:
        """Do the work that is left, and rename the result to the target; return None if the renaming alone was left."""
        facts = self._facts()
        store.check_target(self.target, overwrite=overwrite)
        try:
            with journal_of(self.folder, facts) as journal:
                is_written = self.draft.exists() and journal.get("is_written")
                try:
                    prepared = None if is_written else self._write(journal, on_progress, on_columns)
                except MemoryTooSmall as error:
                    if self.room == self.memory_bytes:
                        raise
                    held = self.memory_bytes - self.room
                    raise MemoryTooSmall(f"{error} Beside these the process holds {held:,} bytes: add them.") from error
                except (ValueError, TypeError):
                    remove_whole(self.folder)  # nobody goes on with what was refused
                    raise
                store.replace(self.draft, self.target)
                flush(self.folder.parent)
                remove_whole(self.folder)
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
        plan = self.plan
        if plan.tables:
            from lightning_gnn_dist.prepare.unpack import Unpacking  # arrays need no DuckDB

            plan = (plan.unpacking or Unpacking)(plan, self.folder, self.room, on_progress).run()
            on_columns(plan.told)
        if not self.draft.exists():
            journal.record(is_written=False)
            for name in ("nodes", "edges", self.draft.name):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.draft.mkdir()
        shutil.rmtree(self.draft / store.IDS, ignore_errors=True)  # a kill may have left some, and they are no arrays
        prepared = self._write_arrays(plan, on_progress)
        for kind, file in plan.ids.items() if self.portion.is_whole else ():
            keep_ids(file, self.draft, kind)
        journal.record(is_written=True)
        return prepared

    def _write_arrays(self, plan: Plan, on_progress: OnProgress) -> Prepared:
        """Write the arrays of nodes and edges, and what is to be known of them."""
        edges = self.portion.sorting(plan, self.folder, self.draft, self.undirected, self.room)
        nodes = {}
        for kind in plan.nodes:
            with within(kind):
                nodes[kind] = self._read_nodes(kind, plan, edges, on_progress)
        parts = {kind: of_kind.part for kind, of_kind in nodes.items()}
        self.portion.check_nodes(self.out, [*parts.values()])
        if self.split and not any(of_kind.split for of_kind in nodes.values()):
            raise ValueError(NO_LABELS)
        if self.float_labels and not any(of_kind.float_labels for of_kind in nodes.values()):
            raise ValueError("float_labels says that a y is a target of regression, but no type has a y of fractions.")
        for kind, of_kind in nodes.items():
            target = self.draft / "nodes" / kind
            if not target.exists():
                with within(kind):
                    of_kind.times(plan.time)
                    work = self.folder / "nodes" / kind
                    of_kind.copy(work, target, partial(on_progress, f"copying {kind or 'arrays'}"))
        edge_types = {edge_type: edge_type for edge_type in plan.edges}  # each, and the one whose files are read
        edge_types |= with_reverse(edge_types) if self.reverse else {}
        for edge_type, as_read in edge_types.items():
            with within(edge_type):
                edges.sort(edge_type, as_read, parts, on_progress)
        types = None
        if plan.have_names:
            from lightning_gnn_dist.prepare.merge import merge_types  # a graph without types needs none of it

            progress = partial(on_progress, "putting rows together")
            types = merge_types(self.draft, nodes, edges, edge_types, not self.portion.is_whole, progress)
        self.portion.finish(self.out, nodes, types, edges, edge_types)
        at_once = max(1, min(self.room // 16, MAX_BYTES_AT_ONCE // 8))
        names = next(iter(nodes.values())).names
        return describe(self.draft, names, plan.halves, types, at_once, partial(on_progress, "taking the fingerprint"))

    def _read_nodes(self, kind: str, plan: Plan, edges: EdgeSorting, on_progress: OnProgress) -> NodesOfType:
        """Find out which nodes of a type are prepared."""
        (self.folder / "nodes" / kind).mkdir(parents=True, exist_ok=True)
        files, named = plan.nodes[kind], plan.have_names
        if not files.num_nodes and named:
            raise ValueError(f"{files.source} does not say how many nodes there are: add x, y or num_nodes.")
        num_nodes = files.num_nodes or self.portion.count(self.source, edges, on_progress)
        return self.portion.of_nodes(
            files=files,
            part=self.portion.part(kind, num_nodes),
            split=self.split if "y" in files.arrays or not named else None,
            seed=self.seed,
            float_labels=files.float_labels or (self.float_labels and (has_fractions(files) or not named)),
            memory_bytes=self.room,
        )

    def _facts(self) -> dict[str, Any]:
        """What the result depends on: the files, by size and time, and the settings."""
        given = [self.source, self.nodes] if self.nodes else [self.source]
        paths = [path for each in given for path in (sorted(each.rglob("*")) if each.is_dir() else files_of(each))]
        files = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()}
        without = ("source", "out", "shard", "nodes", "choice", "memory_bytes")
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in without}
        return {"version": VERSION, "files": files, **settings, **asdict(self.choice), "shard": self.portion.facts}


@contextmanager
def as_files(
    out: Path,
    given: Mapping[str, Any],
    tasks: str | Path | None = None,
    on_progress: OnProgress = lambda stage, share: None,
    *,
    is_whole: bool = True,
) -> Iterator[dict[str, Path]]:
    """The paths that were given, and files of what is none, which are removed when the graph is written or refused.

    The same frame has the same file again, so that the same call goes on after a kill.

    Args:
        out: What is written.
        given: Paths, frames, several paths of one table, or the connection of a database, by the names of arguments.
        tasks: The tasks of a database that is named by a connection.
        on_progress: Called with the name of a table that is copied, and the share of tables that is.
        is_whole: Whether all of the graph is made: shards are made by several processes, of the same files.
    """
    of_tasks = None if tasks is None else check_path("tasks", tasks)
    if of_tasks is not None and IS_CONNECTION not in str(given["source"]):
        raise ValueError("tasks are given (--task) for a database that is named by a connection: leave them out.")
    folder, found = out.absolute().parent / f".{out.name}.given", dict[str, Path]()
    words = {folder / f"{name}.parquet": f"the frame {name}" for name in given}
    try:
        for name, each in given.items():
            if each is None and name == "nodes":
                continue
            if hasattr(each, "__arrow_c_stream__"):
                found[name] = _of_frame(each, folder / f"{name}.parquet")
                continue
            paths = [check_path(name, path) for path in (each if isinstance(each, list | tuple) else [each])]
            if isinstance(each, list | tuple) and not (paths and all(path.is_file() for path in paths)):
                missing = next((f"{path} is none" for path in paths if not path.is_file()), "got none")
                raise FileNotFoundError(f"{name} must be a list of files that are there, and {missing}.")
            is_connection = isinstance(each, str) and IS_CONNECTION in each
            if not is_whole and (is_connection or len(paths) > 1):
                raise ValueError(
                    "Shards are made of files that all processes find alike: name several by a pattern, 'edges/*.csv', "
                    "and of a database prepare all, and divide it (lightning-gnn-dist divide)."
                )
            if is_connection:
                connections = extension("connection of a database")
                words[folder / name] = "the database"  # until its tables are known
                found[name] = connections.as_folder(each, folder / name, of_tasks, on_progress)
                words |= connections.words_of(found[name], of_tasks)
            elif len(paths) > 1:
                found[name] = _of_several(paths, folder / name)
                links = {link: str(link.readlink()) for link in found[name].iterdir()}
                words |= links | {found[name]: f"the files of {name}"}
            else:
                found[name] = paths[0]
        yield found
    except (ValueError, TypeError, OSError) as error:
        for path, said in sorted(words.items(), key=lambda each: -len(str(each[0]))):  # folders behind what is in them
            error.args = tuple(arg.replace(str(path), said) if isinstance(arg, str) else arg for arg in error.args)
        if isinstance(error, REFUSALS) and not isinstance(error, MemoryTooSmall):
            remove_whole(folder)  # nobody goes on with what was refused; after other errors the same call does
        raise
    remove_whole(folder)


def _of_frame(frame: Any, file: Path) -> Path:
    duckdb = duckdb_for()
    import pyarrow as pa

    file.parent.mkdir(parents=True, exist_ok=True)
    with told(file), duckdb.connect() as db:
        rows = pa.RecordBatchReader.from_stream(frame)
        if any(map(pa.types.is_float16, rows.schema.types)):  # which DuckDB does not know
            wide = [each.with_type(pa.float32()) if pa.types.is_float16(each.type) else each for each in rows.schema]
            rows = rows.cast(pa.schema(wide))
        db.register("frame", rows)
        db.execute(f"COPY (SELECT * FROM frame) TO {literal(file)} (FORMAT parquet)")
    os.utime(file, ns=(0, int(checksum_of(file)[:8], 16)))  # by which it is known
    return file


def _of_several(paths: Sequence[Path], folder: Path) -> Path:
    """A folder of links, in the order in which they were named."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for at, path in enumerate(paths):
        (folder / f"{at:05}-{path.name}").symlink_to(path.absolute())
    return folder
