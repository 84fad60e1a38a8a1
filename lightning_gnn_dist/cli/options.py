"""What may stand on the command line of ``lightning-gnn-dist``.

The one module that is imported for help and to refuse a misspelt option: it needs neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeAlias

from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.names import imported

LEAST_MEMORY = 1_000_000  # with less, files are read a few thousand edges at a time, or nothing can be sorted
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_HERE = __name__.rpartition(".")[0]
PROGRAM = "lightning-gnn-dist"
REFUSALS = ValueError, OSError
PURPOSE = "Train graph neural networks on partitioned graphs."
SERVE = "serve"
OF_LIGHTNING = {  # the commands that are listed here and parsed by Lightning
    "fit": "train as a configuration says",
    "validate": "evaluate on the validation nodes",
    "test": "evaluate on the test nodes",
    "predict": "write what a model says of every node",
    SERVE: "answer requests by HTTP with what a model says of nodes, also of new ones",
}
OF_EXTENSIONS = (  # called with commands
    "lightning_gnn_dist.extensions.shards.command:add_to",
    "lightning_gnn_dist.extensions.larger_than_memory.command:add_to",
    "lightning_gnn_dist.extensions.elastic.command:add_to",
)
BY_LAYER = "lightning_gnn_dist.extensions.passes.command:"  # predicts layer by layer, and has options for it
HOW = "how (default: auto, metis or, for graphs too large for it, or without it, streaming)"
PARTITIONERS = ("auto", "metis", "random", "streaming", "supernodes", "streaming-supernodes")
SOURCES = """\
SOURCE is a PyG Data or HeteroData saved by torch.save (.pt); arrays in an .npz or a directory of .npy: edge_index of
shape (2, edges), x, y, masks or lists of nodes (train_idx, ...), edge_attr, ...; or a table of edges (.csv, .tsv,
.txt, also gzipped, or .parquet, also a folder of these) whose columns "source" and "target", or the first two, are
sender and receiver. The table of nodes that goes with it has an id (the column "id", or the first), a label ("y" or
"label"), a split ("split": train, val, test); all other columns are features. Or a folder with tables of several
types of nodes, nodes/paper.csv, nodes/author.parquet, ..., and of edges, edges/author__writes__paper.csv, ..., by
source type, name and destination type; each may also be an .npz or a folder of .npy. Or a folder of tables with keys:
RelBench's, with a manifest.yaml, or one with a database.yaml, which names keys, times and kinds of columns. Or the
connection of a database, sqlite:///shop.db or postgresql://user@host/shop. A table may be in several files: a folder,
a pattern in quotes ('edges/*.csv'), or several names before OUT."""


class Parser(argparse.ArgumentParser):
    """Tells an error without the usage before it, which would fill the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nAll options: {self.prog} --help\n")


def parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of a whole command line; where the core has the ``command``, without the commands of extensions.

    What it returns has the function that ``does`` the work, ``module:name``, and its ``refusals``, told in one line.
    """
    version = import_module(__name__.partition(".")[0]).__version__
    whole: argparse.ArgumentParser = Parser(prog=PROGRAM, description=PURPOSE)
    whole.set_defaults(refusals=REFUSALS)
    whole.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    commands = whole.add_subparsers(required=True, metavar="command")
    of_core = {"demo": _add_demo, "prepare": _add_prepare, "inspect": _add_inspect}
    for add in of_core.values():
        add(commands)
    for add in filter(None, map(imported, OF_EXTENSIONS if command not in of_core else ())):
        add(commands)
    for name, purpose in OF_LIGHTNING.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return whole


def refuse_gone(given: Sequence[str]) -> None:
    """Refuse a command, or options of one, that the release before had."""
    options = [word.partition("=")[0] for word in given[1:] if word.startswith("--")]
    rows = [f"{PROGRAM} {command}" for command in given[:1]] + [f"{given[0]} {option}" for option in options]
    if said := next(filter(None, map(way_out, rows)), None):
        parser().error(said)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser("demo", help="train on a built-in graph with a few processes, on the CPU")
    demo.add_argument("--ranks", type=positive, default=2, help="processes (default: 2)")
    demo.add_argument("--rounds", type=positive, default=10, help="meetings (default: 10)")
    demo.add_argument("--steps", type=positive, default=16, help="local steps in a round (default: 16)")
    demo.add_argument("--nodes", type=positive, default=20_000, help="nodes of the graph (default: 20000)")
    demo.set_defaults(does=f"{_HERE}.demo:run")


def _add_prepare(commands: Commands) -> None:
    prepare = commands.add_parser(
        "prepare", help="turn a PyG file, arrays or tables into a saved graph", description=SOURCES
    )
    prepare.add_argument("source", nargs="+", help="what to read")
    prepare.add_argument("out", type=Path, help="the directory to write")
    prepare.add_argument("--nodes", metavar="TABLE", help="the table of nodes of a table of edges")
    prepare.add_argument("--task", metavar="FILE", help="of a connection: queries (.sql), or a database.yaml")
    prepare.add_argument("--undirected", action="store_true", help="add the reverse of every edge, remove duplicates")
    prepare.add_argument(
        "--split", type=float, nargs=3, metavar=("TRAIN", "VAL", "TEST"), help="deal labelled nodes: 0.6 0.2 0.2"
    )
    prepare.add_argument("--seed", type=int, default=0, help="decides the split, and random parts (default: 0)")
    prepare.add_argument("--time", metavar="NAME", help="the column of times; of several types it orders edges")
    prepare.add_argument("--reverse", action="store_true", help="of several types: add rev_... for each type of edges")
    prepare.add_argument("--drop", nargs="+", default=[], metavar="NAME", help="arrays or columns to leave out")
    prepare.add_argument(
        "--as",
        dest="kinds",
        nargs="+",
        action="append",
        default=[],
        metavar=("KIND", "COLUMN"),
        help="what columns of features are, as in --as category zip year --as text title; also number and time",
    )
    prepare.add_argument("--float-labels", action="store_true", help="y is a target of regression")
    prepare.add_argument(
        "--memory",
        type=memory,
        metavar="GB",
        help="RAM that this process takes, beside arrays as long as the nodes (default: 2); edges are "
        "sorted on disk. After a kill, the same command goes on",
    )
    prepare.add_argument(
        "--shard",
        type=int,
        metavar="INDEX",
        help="write this shard alone, for a host that must not hold the whole graph; OUT is the directory of shards",
    )
    prepare.add_argument("--num-shards", type=positive, metavar="P", help="how many shards there are in all")
    prepare.add_argument(
        "--assignment",
        type=Path,
        metavar="NPY",
        help="the shard of each node (default: ranges of equal length); of several types a folder with a file for each "
        "node type, paper.npy, ...",
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace a saved graph")
    of_files = TypeError, NotImplementedError, MemoryError, ModuleNotFoundError  # of what they hold, and take
    prepare.set_defaults(does=f"{_HERE}.prepare:run", refusals=(*REFUSALS, *of_files))


def _add_inspect(commands: Commands) -> None:
    inspect = commands.add_parser("inspect", help="report on a saved graph and on partitions of it")
    inspect.add_argument("graph", type=Path, help="the directory of the graph, of its shards, or of split links")
    inspect.add_argument(
        "--check", action="store_true", help="only read every array, and compare it with the checksum it was saved with"
    )
    inspect.add_argument("--parts", type=positive, metavar="P", help="cut it into so many parts")
    inspect.add_argument("--partitioner", nargs="+", choices=PARTITIONERS, default=["auto"], help=HOW)
    _add_partitioner_settings(inspect)
    inspect.set_defaults(does=f"{_HERE}.inspect:run")


def add_partitioner(command: argparse.ArgumentParser) -> None:
    """Add which partitioner cuts a graph, and its settings."""
    command.add_argument("--partitioner", choices=PARTITIONERS, default="auto", help=HOW)
    _add_partitioner_settings(command)


def _add_partitioner_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--balance", choices=("nodes", "train"), default="nodes", help="what METIS evens out")
    command.add_argument("--supernodes", type=positive, metavar="N", help="clusters (default: 50 for each part)")
    command.add_argument("--seed", type=int, default=0, help="decides the partition (default: 0)")


def check_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is, unless that may be replaced."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already: choose another path, or add --overwrite.")


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(1, text)


def count(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, more than 0, got {text:.40}")
    return value


def memory(text: str) -> int:
    """Gigabytes of memory to work with, returned in bytes."""
    value = float(text) * 1e9
    if not LEAST_MEMORY <= value < 2**63:
        least = f"{LEAST_MEMORY / 1e9:g} ({LEAST_MEMORY / 1e6:.1f} MB)"
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text:.40}")
    return round(value)


def nodes_named(text: str) -> list[int]:
    """Ids of nodes: numbers with commas between them, or a file that has one in each line."""
    words = words_in(text)
    if not words:
        raise ValueError(f"{text} names no node: write an id in each line.")
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ValueError(
            "nodes must be ids with commas between them, or a file of ids that is there, got "
            f"{wrong[0]!r:.40} in {text}."
        )
    return [int(word) for word in words]


def words_in(text: str) -> list[str]:
    """What stands between commas, or in the lines of a file of this name."""
    path = Path(text)
    if path.suffix == ".npy":
        raise ValueError(f"{text} is no text: write an id in each line, numpy.savetxt('ids.txt', ids, '%d').")
    if not _is_file(path):
        return [word.strip() for word in text.split(",")]
    return [word.strip() for word in path.read_text().splitlines() if word.strip()]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of ids that is too long for a name
        return False
