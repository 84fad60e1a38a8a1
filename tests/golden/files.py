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

from lightning_gnn_dist import LinkSplit, RandomPartitioner, prepare_graph, save_shards
from tests.golden import sources
from tests.golden.graphs import SPLITS
from tests.golden.place import GRAPHS, Place, prepare_a_shard
from tests.golden.runs import Run
from tests.golden.tally import Tally

LITTLE = 20_000  # bytes: many buckets, many pieces
OF_THE_MOMENT = r"(?<=parts of )[\d.,]+ .?B|[\d.,]+ .?B(?= are free)|[\d.,]+(?= s\b)"  # room, and seconds
RANGES, OWNED = "ranges", "owned"
TYPED = {"typed_csv": ".csv", "typed_parquet": ".parquet"}


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


def saved(make: Callable[[], Any], tally: Tally, place: Place) -> None:
    make().save(place.own / "out")
    show_folder(tally, place.own / "out")


def divided(make: Callable[[], Any], tally: Tally, place: Place) -> None:
    whole = make()
    graph = whole.graph if isinstance(whole, LinkSplit) else whole
    save_shards(whole, RandomPartitioner()(graph, 3, 0), place.own / "out")
    show_folder(tally, place.own / "out")


def source_of(form: str, folder: Path) -> tuple[Path, dict[str, Path]]:
    """Where the edges are, and where the nodes are if they have a place of their own."""
    if form in TYPED:
        return sources.typed_tables(folder / "tables", TYPED[form]), {}
    if form in ("arrays", "archive"):
        arrays = sources.plain_arrays(folder / "arrays")
        return arrays if form == "arrays" else sources.archive(arrays, folder / "data.npz"), {}
    suffix = ".parquet" if form == "parquet" else ".csv"
    edges, nodes = sources.plain_tables(has_words=form == "csv")
    if form == "bare":
        edges = {name: edges[name] for name in ("source", "target")}
    sources.write(edges, folder / f"edges{suffix}")
    if form == "bare":
        return folder / "edges.csv", {}
    sources.write(nodes, folder / f"nodes{suffix}")
    return folder / f"edges{suffix}", {"nodes": folder / f"nodes{suffix}"}


def prepared(form: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    """A graph, out of core."""
    source, nodes = source_of(form, place.own)
    prepare_graph(source, place.own / "out", **nodes, **options)
    show_folder(tally, place.own / "out")


def prepared_shards(form: str, by: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    """Three shards, of ranges of nodes or of those that each one owns."""
    source, _ = source_of(form, place.own)
    if by == OWNED:
        counts = sources.COUNTS if form in TYPED else {"all": sources.NODES}
        folder = sources.assignment(place.own / "parts", counts, 3)
        options = options | {"assignment": folder if form in TYPED else folder / "all.npy"}
    for index in range(3):
        prepare_a_shard(source, place.own / "out", index, 3, **options)
    show_folder(tally, place.own / "out")


def commanded(make: Callable[[Path, Path], list[Any]], tally: Tally, place: Place) -> None:
    """What the command writes into ``out``, and what it says."""
    (run,) = entry_points(group="console_scripts", name="lightning-gnn-dist")
    main, said = run.load(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()):  # where it counts seconds
        main(list(map(str, make(place.own, place.shared))))
    tally.say("said", re.sub(OF_THE_MOMENT, "<some>", said.getvalue()))
    if (place.own / "out").exists():
        show_folder(tally, place.own / "out")


def to_prepare(form: str, own: Path, shared: Path) -> list[Any]:
    source, nodes = source_of(form, own)
    if form in TYPED:
        return ["prepare", source, own / "out", "--time", "year", "--reverse"]
    more = [word for name, path in nodes.items() for word in (f"--{name}", path)]
    more += ["--drop", "split" if nodes else "train_idx", "--split", "0.6", "0.2", "0.2"]
    return ["prepare", source, own / "out", *more, "--undirected"]


def to_inspect(name: str, more: list[str], own: Path, shared: Path) -> list[Any]:
    return ["inspect", shared / name, *more]


def to_divide(name: str, own: Path, shared: Path) -> list[Any]:
    return ["divide", shared / name, own / "out", "--parts", "3", "--partitioner", "streaming"]


def runs() -> Iterator[Run]:
    for name, make in (GRAPHS | {f"links/{name}": make for name, make in SPLITS.items()}).items():
        yield Run(f"files/{name}", partial(saved, make))
        yield Run(f"files/{name}/shards", partial(divided, make))
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
    for form in TYPED:
        kind = form.removeprefix("typed_")
        for name, options in typed.items():
            yield Run(f"files/prepared_typed/{kind}/{name}", partial(prepared, form, options))
            for by in (RANGES, OWNED):
                run = partial(prepared_shards, form, by, options)
                yield Run(f"files/prepared_typed_shards/{kind}/{by}/{name}", run)
    for form in ("arrays", "archive", "csv", "parquet", *TYPED):
        yield Run(f"command/prepare/{form}", partial(commanded, partial(to_prepare, form)))
    parts = ["--parts", "2", "--partitioner", "metis", "random", "streaming"]
    for name in ("plain", "typed", "directed_split", "typed_split", "plain_shards", "typed_shards"):
        more = parts if name in ("plain", "typed") else []
        yield Run(f"command/inspect/{name}", partial(commanded, partial(to_inspect, name, more)))
    for name in ("plain", "typed", "events_split"):
        yield Run(f"command/divide/{name}", partial(commanded, partial(to_divide, name)))
