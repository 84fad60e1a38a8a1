"""Figures of databases: what each encoder is worth, whether tables lose anything, and what preparing costs.

    python benchmarks/databases.py encoders | ranks | typed --directory DIRECTORY | cost | scale --folder FOLDER

``encoders``: AUROC of the test questions of the made-up shop, with all columns, without one of the three that decide,
with answers planted in rows of one second later, and by a sampler that knows no times. ``ranks``: AUROC of the same
questions, and MAP@10 of what customers order next, on one process and on several ranks. ``typed``: test
accuracy on graphs of DIRECTORY, which has ``<graph>.npz`` files and a ``read_typed.py``, as arrays of types and as
tables with keys. ``cost``: seconds for a million rows in four tables of text, and the most memory beside the
interpreter's. ``scale``: the same of many tables in Parquet, which are written into FOLDER, and the graph too.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from events import FORK, hetero_of, spread
from harness import Peak, machine
from torch_geometric.data import HeteroData

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    GrappaStrategy,
    LinkDataModule,
    LLCGStrategy,
    NeighborSampler,
    PartitionedDataModule,
    prepare_graph,
)
from lightning_gnn_dist.graph.typed.tables import Feature, Tables, TableTask

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from relational import RelationalSAGE
from shop import write_shop

BATCH, PASSES, STEPS, ROUND = 256, 10, 240, 8
DROPPED = {
    "all columns": [],
    "without the maker": ["maker"],
    "without the words": ["words"],
    "without the year of birth": ["born"],
}
CLASSES = "multiclass_classification"


def figures_of(
    module: pl.LightningModule, data: pl.LightningDataModule, ranks: int = 1, llcg: bool = False, **length: Any
) -> dict[str, float]:
    """Metrics of a test after one training, on several ranks by Grappa or LLCG."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0, "devices": ranks}
    if ranks > 1:
        quiet["strategy"] = LLCGStrategy(EverySteps(ROUND), launch=FORK) if llcg else GrappaStrategy(launch=FORK)
    trainer = pl.Trainer(**quiet, **length)
    trainer.fit(module, data)
    return dict(trainer.test(module, data, verbose=False)[0])


def plant(shop: Path) -> None:
    """Add a table with the answer to each question, a second after it was asked."""
    with (shop / "tasks" / "stays" / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (shop / "future.csv").open("w", newline="") as file:
        later = [(row["customer_id"], _later(row["at"]), row["stays"]) for row in rows]
        csv.writer(file).writerows([("customer_id", "at", "answer"), *later])
    with (shop / "database.yaml").open("a") as file:
        file.write("  future: {time_col: at, fkeys: {customer_id: customer}}\n")


def _later(moment: str) -> str:
    return (datetime.fromisoformat(moment) + timedelta(seconds=1)).isoformat(" ")


def encoders(options: argparse.Namespace, folder: Path) -> None:
    """What each column is worth."""
    write_shop(folder / "shop")
    for name, drop in DROPPED.items():
        prepare_graph(folder / "shop", folder / name, drop=drop)
    write_shop(folder / "planted")
    plant(folder / "planted")
    prepare_graph(folder / "planted", folder / "planted_graph")
    arms: dict[str, dict[str, Any]] = {name: {"graph": name} for name in DROPPED}
    arms["answers planted a second later"] = {"graph": "planted_graph"}
    arms["answers planted, sampled without times"] = {
        "graph": "planted_graph",
        "sampler": NeighborSampler([1, 16, 8]),
    }
    print("| | test AUROC |\n| --- | --- |")
    for name, arm in arms.items():
        found = []
        for seed in range(options.seeds):
            pl.seed_everything(seed, verbose=False)
            graph = str(folder / arm["graph"])
            data = PartitionedDataModule(graph, task="stays", sampler=arm.get("sampler"), batch_size=BATCH)
            module = RelationalSAGE(graph, "stays")
            found.append(figures_of(module, data, max_epochs=PASSES)["test_auroc"])
        print(f"| {name} | {spread(found)} |", flush=True)


def ranks(options: argparse.Namespace, folder: Path) -> None:
    """What several ranks lose, with as many steps and as large batches together."""
    write_shop(folder / "shop")
    prepare_graph(folder / "shop", path := folder / "graph")
    modules: dict[str, Any] = {"stays": PartitionedDataModule, "buys": partial(LinkDataModule, num_negatives=16)}
    print("| task | ranks | test AUROC, or MAP@10 |\n| --- | --- | --- |")
    for task in options.tasks:
        for num_ranks, llcg in ((n, way) for n in options.ranks for way in ((False, True) if n > 1 else (False,))):
            found = []
            for seed in range(options.seeds):
                pl.seed_everything(seed, verbose=False)
                data = modules[task](path, task=task, batch_size=BATCH // num_ranks)
                module = RelationalSAGE(str(path), task)
                steps = PASSES * math.ceil(answers_of(path, task) / BATCH)  # an epoch of LLCG is a round
                figures = figures_of(
                    module, data, num_ranks, llcg, max_epochs=math.ceil(steps / ROUND) if llcg else PASSES
                )
                found.append(figures["test_auroc" if task == "stays" else "test_map"])
            way = "LLCGStrategy" if llcg else "GrappaStrategy" if num_ranks > 1 else "one process"
            print(f"| {task} | {num_ranks}, {way} | {spread(found)} |", flush=True)


def answers_of(path: Path, task: str) -> int:
    """What a pass learns from: questions, or the right answers of those that recommend."""
    graph = Graph.open(path)
    mask, answers = graph.types.node_arrays[task]["train_mask"], graph.types.tables.task(task).answers
    if answers is None:
        return int(mask.sum())
    return int(mask[graph.to_pyg()[answers].edge_index[0]].sum())


def arrays_of(directory: Path, name: str) -> tuple[HeteroData, str]:
    """A graph of types with dense features and no times, and the type that is classified."""
    data = hetero_of(directory, name)
    (target,) = (store._key for store in data.node_stores if "train_mask" in store)
    for store in data.node_stores:
        if "x" in store:
            store.x = store.x.to_dense().float() if store.x.is_sparse else store.x.float()
    for kind in data.edge_types:
        ends = data[kind].edge_index
        del data[kind]
        data[kind].edge_index = ends
    return data, target


def as_tables(data: HeteroData, target: str, folder: Path) -> None:
    """The same as tables in Parquet: links are tables of two keys, and the nodes with a split are asked about."""
    import pyarrow as pa
    from pyarrow import parquet

    tables: dict[str, Any] = {}
    (folder / "tasks" / "class").mkdir(parents=True)
    for kind in data.node_types:
        x = data[kind].x.numpy() if "x" in data[kind] else np.empty((data[kind].num_nodes, 0), np.float32)
        columns = {"id": np.arange(len(x)) * 3 + 5} | {f"f{at}": x[:, at] for at in range(x.shape[1])}
        parquet.write_table(pa.table(columns), folder / f"{kind}.parquet")
        tables[kind] = {"pkey": "id"}
    for source, name, end in data.edge_types:
        keys = dict(zip(("from", "to"), (data[source, name, end].edge_index * 3 + 5).numpy(), strict=True))
        parquet.write_table(pa.table(keys), folder / f"{source}_{name}_{end}.parquet")
        tables[f"{source}_{name}_{end}"] = {"fkeys": {"from": source, "to": end}}
    (folder / "database.yaml").write_text(yaml.safe_dump({"tables": tables}, sort_keys=False))
    task = {"task_type": CLASSES, "entity_table": target, "entity_col": "node", "target_col": "class"}
    (folder / "tasks" / "class" / "manifest.yaml").write_text(yaml.safe_dump(task))
    for split in ("train", "val", "test"):
        nodes = data[target][f"{split}_mask"].nonzero().view(-1)
        rows = {"node": (nodes * 3 + 5).numpy(), "class": data[target].y[nodes].numpy()}
        parquet.write_table(pa.table(rows), folder / "tasks" / "class" / f"{split}.parquet")


def of_arrays(data: HeteroData, target: str) -> tuple[Graph, Tables]:
    """The graph of types with its reverse types and standardised features, as tables of one column each."""
    data, features = data.clone(), dict[str, tuple[Feature, ...]]()
    for kind in data.node_types:
        features[kind] = ()
        if "x" in data[kind]:
            x = data[kind].x
            deviation = x.std(0, correction=0)
            data[kind].x = ((x - x.mean(0)) / deviation)[:, deviation > 0].clamp(-10, 10)
            features[kind] = (Feature("x", "x", 0, data[kind].x.shape[1]),)
    for source, name, end in data.edge_types:
        data[end, f"rev_{name}", source].edge_index = data[source, name, end].edge_index.flip(0)
    graph = Graph.from_pyg(data).with_seeds(target)
    task = TableTask(target, CLASSES, target, int(data[target].y.max()) + 1)
    return graph, Tables(features, {target: task}, graph.types.edge_types)


def typed(options: argparse.Namespace, folder: Path) -> None:
    """What graphs lose as tables."""
    print("| graph | as | test accuracy |\n| --- | --- | --- |")
    for name in options.graphs:
        data, target = arrays_of(options.directory, name)
        as_tables(data, target, folder / name)
        prepare_graph(folder / name, folder / f"{name}_graph")
        path, (graph, tables) = str(folder / f"{name}_graph"), of_arrays(data, target)
        found: dict[str, list[float]] = {"arrays of types": [], "tables": [], "tables, two ranks": []}
        for seed in range(options.seeds):
            for arm, figures in found.items():
                pl.seed_everything(seed, verbose=False)
                ranks = 2 if "ranks" in arm else 1
                if arm == "arrays of types":
                    module = RelationalSAGE(tables, target, num_hops=2)
                    made = PartitionedDataModule(graph, sampler=NeighborSampler([16, 8]), batch_size=64)
                else:
                    module = RelationalSAGE(path, "class")
                    made = PartitionedDataModule(path, task="class", batch_size=64 // ranks)
                figures.append(figures_of(module, made, ranks, max_steps=STEPS, max_epochs=-1)["test_accuracy"])
        for arm, figures in found.items():
            print(f"| {name} | {arm} | {spread(figures)} |", flush=True)


def cost(options: argparse.Namespace, folder: Path) -> None:
    """What preparing a large shop takes."""
    write_shop(folder / "shop", options.customers, options.customers // 10)
    rows = sum(len(path.read_bytes().splitlines()) - 1 for path in (folder / "shop").glob("*.csv"))
    peak, start = Peak("RssAnon"), time.process_time()
    prepare_graph(folder / "shop", folder / "graph", memory_bytes=options.memory)
    seconds = time.process_time() - start
    print(
        f"{rows:,} rows: {seconds / rows * 1e6:.1f} s of CPU time for a million, {peak.stop() / 1e9:.2f} GB of memory"
    )


def write_tables(folder: Path, rows: int, tables: int) -> None:
    """Write tables of several sizes, most of which name rows of two before them, and a task about the first."""
    folder.mkdir(parents=True)
    sizes = np.linspace(1, 4, tables)
    counts = dict(zip(map("t{:02d}".format, range(tables)), (sizes * rows / sizes.sum()).astype(int), strict=True))
    said: dict[str, Any] = {"val_timestamp": "2024-01-01", "test_timestamp": "2024-07-01", "tables": {}}
    for number, name in enumerate(counts):
        of = list(counts)[max(0, number - 2) : number]
        columns = {"note": "text"} if number % 5 == 4 else {}
        said["tables"][name] = {"pkey": "id", "fkeys": {f"{key}_id": key for key in of}, "columns": columns}
        said["tables"][name] |= {"time_col": "at"} if number else {}
        _write_table(folder / f"{name}.parquet", counts, number, of)
    (folder / "database.yaml").write_text(yaml.safe_dump(said, sort_keys=False))
    task = {"task_type": "regression", "entity_table": "t00", "entity_col": "row", "time_col": "at", "target_col": "y"}
    (folder / "tasks" / "sum").mkdir(parents=True)
    (folder / "tasks" / "sum" / "manifest.yaml").write_text(yaml.safe_dump(task))
    lines = [f"{row * 3},{2023 + row % 2}-0{1 + row % 9}-01,{row % 7}" for row in range(10_000)]
    (folder / "tasks" / "sum" / "labels.csv").write_text("\n".join(["row,at,y", *lines, ""]))


def _write_table(path: Path, counts: dict[str, int], number: int, of: list[str]) -> None:
    """Keys in no order, numbers with holes, words, times, and short texts in some tables."""
    import pyarrow as pa
    from pyarrow import parquet

    generator, count, writer = np.random.default_rng(number), list(counts.values())[number], None
    words = np.array([f"word {at}" for at in range(200)])
    for first in range(0, count, 1 << 20):
        size = min(1 << 20, count - first)
        made: dict[str, Any] = {"id": generator.permutation(size) * 3 + 3 * first}
        made |= {f"{key}_id": generator.integers(counts[key], size=size) * 3 for key in of}
        made["at"] = np.datetime64("2022-01-01", "s") + generator.integers(90_000_000, size=size)
        made["price"] = pa.array(generator.gamma(2.0, 9.0, size), mask=generator.random(size) < 0.1)
        made["amount"] = generator.integers(40, size=size)
        made["kind"] = words[generator.integers(50, size=size)]
        if number % 5 == 4:
            made["note"] = np.char.add(
                words[generator.integers(200, size=size)], words[generator.integers(200, size=size)]
            )
        table = pa.table(made)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def scale(options: argparse.Namespace, folder: Path) -> None:
    """What preparing many rows in many tables takes."""
    place = options.folder or folder
    if not (place / "tables").exists():
        write_tables(place / "tables", options.rows, options.tables)
    peak, start = Peak("RssAnon"), os.times()
    prepare_graph(place / "tables", place / "graph", memory_bytes=options.memory, overwrite=True)
    end, millions = os.times(), options.rows / 1e6
    user, system = (end.user - start.user) / millions, (end.system - start.system) / millions
    print(
        f"{options.rows:,} rows in {options.tables} tables: {user:.1f} s of user time for a million, and {system:.1f} "
        f"s of the system's; {peak.stop() / 1e9:.2f} GB of memory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("encoders", "ranks", "typed", "cost", "scale"))
    parser.add_argument("--tasks", nargs="+", default=["stays", "buys"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["acm", "openflights"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--customers", type=int, default=100_000)
    parser.add_argument("--memory", type=int, default=500_000_000, help="bytes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print(machine(), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"encoders": encoders, "ranks": ranks, "typed": typed, "cost": cost, "scale": scale}
        runs[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
