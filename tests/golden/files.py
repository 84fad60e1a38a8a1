"""Files that are written: saved graphs, splits and shards, graphs and shards of tables, and what the command says."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightning_gnn_dist import RandomPartitioner, prepare_graph, save_shards
from tests.golden import sources
from tests.golden.graphs import SPLITS
from tests.golden.place import GRAPHS, Place, prepare_a_shard
from tests.golden.runs import Run
from tests.golden.tally import Tally

LITTLE = 20_000  # bytes: many buckets, many pieces
OF_THE_MOMENT = r"(?<=parts of )[\d.,]+ .?B|[\d.,]+ .?B(?= are free)|[\d.,]+(?= s\b)"  # room, and seconds
RANGES, OWNED = "ranges", "owned"


def show_folder(tally: Tally, folder: Path) -> None:
    """Each file: arrays to the byte, and what is said of them."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name.startswith("."):
            continue  # marks, which name times and inodes
        if path.suffix == ".json":
            tally.add(name, json.loads(path.read_text()))
        else:
            tally.add(name, path)


def written(write: Callable[[Path], Any], tally: Tally, place: Place) -> None:
    write(place.own / "out")
    show_folder(tally, place.own / "out")


def divided(split: bool, name: str, tally: Tally, place: Place) -> None:
    whole: Any = SPLITS[name]() if split else GRAPHS[name]()
    graph = whole.graph if split else whole
    save_shards(whole, RandomPartitioner()(graph, 3, 0), place.own / "out")
    show_folder(tally, place.own / "out")


def plain_source(form: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the edges are, and where the nodes are if they have a place of their own."""
    if form == "arrays":
        return sources.plain_arrays(folder / "arrays"), {}
    if form == "archive":
        return sources.archive(sources.plain_arrays(folder / "arrays"), folder / "data.npz"), {}
    suffix = ".parquet" if form == "parquet" else ".csv"
    edges, nodes = sources.plain_tables(has_words=form == "csv")
    if form == "bare":
        sources.write({name: edges[name] for name in ("source", "target")}, folder / "edges.csv")
        return folder / "edges.csv", {}
    sources.write(edges, folder / f"edges{suffix}")
    sources.write(nodes, folder / f"nodes{suffix}")
    return folder / f"edges{suffix}", {"nodes": folder / f"nodes{suffix}"}


def prepared(form: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    """A graph without types, out of core."""
    source, nodes = plain_source(form, place.own)
    prepare_graph(source, place.own / "out", **nodes, **options)
    show_folder(tally, place.own / "out")


def prepared_shards(form: str, by: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    source, _ = plain_source(form, place.own)
    if by == OWNED:
        folder = sources.assignment(place.own / "parts", {"all": sources.NODES}, 3)
        options = options | {"assignment": folder / "all.npy"}
    for index in range(3):
        prepare_a_shard(source, place.own / "out", index, 3, **options)
    show_folder(tally, place.own / "out")


def prepared_typed(suffix: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    source = sources.typed_tables(place.own / "tables", suffix)
    prepare_graph(source, place.own / "out", **options)
    show_folder(tally, place.own / "out")


def prepared_typed_shards(suffix: str, by: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    source = sources.typed_tables(place.own / "tables", suffix)
    if by == OWNED:
        options = options | {"assignment": sources.assignment(place.own / "parts", sources.COUNTS, 3)}
    for index in range(3):
        prepare_a_shard(source, place.own / "out", index, 3, **options)
    show_folder(tally, place.own / "out")


def commanded(make: Callable[[Path, Path], list[list[Any]]], tally: Tally, place: Place) -> None:
    """What the command writes into ``out``, and what it says."""
    (run,) = entry_points(group="console_scripts", name="lightning-gnn-dist")
    main, said = run.load(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()):  # where it counts seconds
        for arguments in make(place.own, place.shared):
            main(list(map(str, arguments)))
    tally.say("said", re.sub(OF_THE_MOMENT, "<some>", said.getvalue()))
    if (place.own / "out").exists():
        show_folder(tally, place.own / "out")


def of_plain(form: str, own: Path, shared: Path) -> list[list[Any]]:
    source, nodes = plain_source(form, own)
    more = [word for name, path in nodes.items() for word in (f"--{name}", path)]
    more += ["--drop", "split" if nodes else "train_idx", "--split", "0.6", "0.2", "0.2"]
    return [["prepare", source, own / "out", *more, "--undirected"]]


def of_typed(suffix: str, own: Path, shared: Path) -> list[list[Any]]:
    source = sources.typed_tables(own / "tables", suffix)
    return [["prepare", source, own / "out", "--time", "year", "--reverse"]]


def inspected(name: str, more: list[str], own: Path, shared: Path) -> list[list[Any]]:
    return [["inspect", shared / name, *more]]


def cut(name: str, own: Path, shared: Path) -> list[list[Any]]:
    return [["divide", shared / name, own / "out", "--parts", "3", "--partitioner", "streaming"]]


def runs() -> Iterator[Run]:
    for name, make in GRAPHS.items():
        yield Run(f"files/{name}", partial(written, lambda path, make=make: make().save(path)))
        yield Run(f"files/{name}/shards", partial(divided, False, name))
    for name, of_split in SPLITS.items():
        yield Run(f"files/links/{name}", partial(written, lambda path, make=of_split: make().save(path)))
        yield Run(f"files/links/{name}/shards", partial(divided, True, name))
    settings: dict[str, dict[str, Any]] = {
        "directed": {},
        "undirected": {"undirected": True},
        "in_pieces": {"undirected": True, "memory_bytes": LITTLE},
        "split": {"split": (0.5, 0.25, 0.25), "seed": 4},
    }
    for form in ("arrays", "bare", "parquet"):
        for name, options in settings.items():
            if name == "split":
                options = options | {"drop": ["train_idx" if form == "arrays" else "split"]}
            if name == "split" and form == "bare":
                continue  # which has no nodes with labels
            yield Run(f"files/prepared/{form}/{name}", partial(prepared, form, options))
    for by in (RANGES, OWNED):
        for name in ("directed", "undirected", "in_pieces"):
            run = partial(prepared_shards, "arrays", by, settings[name] | {"drop": ["edge_weight"]})
            yield Run(f"files/prepared_shards/arrays/{by}/{name}", run)
    typed: dict[str, dict[str, Any]] = {
        "plain": {},
        "in_time": {"time": "year", "reverse": True},
        "in_pieces": {"time": "year", "reverse": True, "memory_bytes": LITTLE},
        "split": {"split": (0.5, 0.25, 0.25), "seed": 4, "drop": ["split"]},
    }
    for suffix in (".csv", ".parquet"):
        for name, options in typed.items():
            yield Run(f"files/prepared_typed/{suffix[1:]}/{name}", partial(prepared_typed, suffix, options))
            for by in (RANGES, OWNED):
                run = partial(prepared_typed_shards, suffix, by, options)
                yield Run(f"files/prepared_typed_shards/{suffix[1:]}/{by}/{name}", run)
    for form in ("arrays", "archive", "csv", "parquet"):
        yield Run(f"command/prepare/{form}", partial(commanded, partial(of_plain, form)))
    for suffix in (".csv", ".parquet"):
        yield Run(f"command/prepare/typed_{suffix[1:]}", partial(commanded, partial(of_typed, suffix)))
    parts = ["--parts", "2", "--partitioner", "metis", "random", "streaming"]
    for name in ("plain", "typed", "directed_split", "typed_split", "plain_shards", "typed_shards"):
        more = parts if name in ("plain", "typed") else []
        yield Run(f"command/inspect/{name}", partial(commanded, partial(inspected, name, more)))
    for name in ("plain", "typed", "events_split"):
        yield Run(f"command/divide/{name}", partial(commanded, partial(cut, name)))
