"""Hashes of batches, trained weights and saved files, to compare before and after a change that must alter none.

    python -m tests.golden_runs before.json                    # at the commit before the change
    python -m tests.golden_runs after.json --against before.json

Sums come out with other last bits on other processors and other versions of torch, so compare on one machine, and
keep no hashes in the repository. Runs that only one of the two files has are listed, and are no difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as package
from lightning_gnn_dist import (
    Coverage,
    Drift,
    EveryPass,
    EverySteps,
    Fetch,
    Fixed,
    Graph,
    GrappaStrategy,
    Halo,
    Holding,
    Launch,
    LinkDataModule,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    Rotate,
    StreamingPartitioner,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
    coverage_mean,
    quantize_rows,
    split_edges,
)
from tests.ranks import quieten, run_ranks
from tests.samplers import SAMPLERS

Runs = dict[str, Callable[[], Any]]
PATIENCE = {"launch": Launch(timeout=timedelta(seconds=60), start_timeout=timedelta(seconds=60))}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "local_sgd": lambda: LocalSGDStrategy(EverySteps(3), **PATIENCE),
    "local_sgd_growing": lambda: LocalSGDStrategy(EverySteps(2, growth=1.5, limit=8), weights="nodes", **PATIENCE),
    "local_sgd_drift": lambda: LocalSGDStrategy(EveryPass(), drift=Drift("ranks"), average_optimizer=True, **PATIENCE),
    "llcg": lambda: LLCGStrategy(EverySteps(3), **PATIENCE),
    "llcg_paper": lambda: LLCGStrategy(EverySteps(3), drift=None, weights="uniform", correction_steps=2, **PATIENCE),
    "llcg_rank0": lambda: LLCGStrategy(EverySteps(3), correction="rank0", buffers="global", **PATIENCE),
    "tma": lambda: TMAStrategy(EverySteps(3), **PATIENCE),
    "grappa": lambda: GrappaStrategy(**PATIENCE),
    "grappa_nodes": lambda: GrappaStrategy(weights="nodes", **PATIENCE),
}


class Model(pl.LightningModule):
    """Two layers of SAGE with what strategies have to care for: a norm, dropout, weights of seeds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList([SAGEConv(12, 16), SAGEConv(16, 4)])
        self.norm = torch.nn.BatchNorm1d(16)

    def training_step(self, batch: Any) -> Tensor:
        x, last = batch.x, len(batch.blocks) - 1
        for place, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            adj = block.adj if block.weight is None else block.weighted_adj
            x = conv((x, x[: block.num_dst]), adj)
            x = x if place == last else functional.dropout(self.norm(x).relu(), 0.2, self.training)
        losses = functional.cross_entropy(x[: batch.batch_size], batch.y[: batch.batch_size], reduction="none")
        return coverage_mean(losses, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class LinkModel(pl.LightningModule):
    """Scores pairs by the product of two layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList([SAGEConv(12, 16), SAGEConv(16, 16)])

    def training_step(self, batch: Any) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj).tanh()
        sender, receiver = batch.edge_label_index
        return functional.binary_cross_entropy_with_logits((x[sender] * x[receiver]).sum(1), batch.edge_label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def hash_of(value: Any) -> str:
    """A name for tensors, batches, graphs, files and what holds them, down to the bit."""
    digest = hashlib.blake2b(digest_size=12)
    for piece in pieces_of(value):
        digest.update(piece)
    return digest.hexdigest()


def pieces_of(value: Any) -> Iterator[bytes]:
    """The bytes that make a value what it is."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        yield array.view(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from pieces_of(value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from pieces_of(item)
    elif isinstance(value, Graph):
        yield from pieces_of([value.indptr, value.indices, dict(value.node_arrays), dict(value.edge_arrays)])
    elif isinstance(value, Path):
        yield value.read_bytes()
    else:
        yield repr(value).encode()


def content_of(batch: Any) -> dict[str, Any]:
    """What a batch shows a module."""
    content = {name: batch[name] for name in sorted(batch.keys())} | {"edge_index": batch.edge_index}
    blocks = [(block.num_dst, block.indptr, block.indices) for block in batch.blocks]
    return content | {"blocks": blocks}


def contents(batches: Iterable[Any]) -> list[dict[str, Any]]:
    return [content_of(batch) for batch in batches]


def graph() -> Graph:
    """Directed, with weights of edges, loops and nodes without neighbours, from no generator of the package."""
    generator = torch.Generator().manual_seed(5)
    sender, receiver = (torch.randint(0, 900, (6000,), generator=generator) for _ in range(2))
    sender, receiver = torch.cat([sender, receiver[:3000]]), torch.cat([receiver, sender[:3000]])
    order = (receiver * 900 + sender).unique()
    receiver, sender = order // 900, order % 900
    keep = receiver > 20
    receiver, sender = receiver[keep], sender[keep]
    y = torch.arange(900) % 4
    x = torch.randn(900, 12, generator=generator) + functional.one_hot(y, 12)
    draw = torch.rand(900, generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(receiver, minlength=900).cumsum(0)])
    nodes = {
        "x": x,
        "y": y,
        "chunk": torch.arange(900) // 30,
        "train_mask": draw < 0.5,
        "val_mask": draw > 0.8,
        "test_mask": (draw > 0.6) & (draw < 0.8),
    }
    weight = torch.rand(sender.numel(), generator=generator) + 0.1
    return Graph(indptr, sender.to(torch.int32), nodes, {"weight": weight})


def batch_runs(folder: Path) -> Runs:
    """Batches of every sampler: of a part of two passes, of corrections, of evaluation."""
    whole = graph()
    split = split_edges(whole, val=0.1, test=0.1, negatives=5, seed=1)

    def of_nodes(**options: Any) -> Any:
        data = PartitionedDataModule(
            whole, batch_size=64, **({"loading": Loading(num_threads=0)} | options), cache_dir=folder
        )
        data.setup("fit")
        loader = data.train_dataloader()
        shown = [contents(loader), contents(loader), contents(data.val_dataloader())]
        return [*shown, contents(data.correction_batches(1, stop=2)), contents(data.anchor_batches(1))]

    plain = Graph(whole.indptr, whole.indices, whole.node_arrays)

    def of_links(links: Any, **options: Any) -> Any:
        data = LinkDataModule(links, batch_size=64, **({"loading": Loading(num_threads=0)} | options), cache_dir=folder)
        data.setup("fit")
        return [contents(data.train_dataloader()), contents(data.val_dataloader())]

    def of_half() -> Any:
        arrays = dict(whole.node_arrays)
        values, scale = quantize_rows(arrays.pop("x"))
        narrow = Graph(whole.indptr, whole.indices, arrays | {"x": values, "x_scale": scale}, whole.edge_arrays)
        return contents(PartitionedDataModule(narrow, batch_size=64, loading=Loading(num_threads=0)).train_dataloader())

    runs: Runs = {f"batches/{name}": lambda s=sampler: of_nodes(sampler=s) for name, sampler in SAMPLERS.items()}
    runs["batches/bulk_of_3_in_background"] = lambda: of_nodes(
        sampler=SAMPLERS["neighbor"], loading=Loading(bulk_size=3)
    )
    runs["batches/quantized"] = of_half
    runs["batches/links"] = lambda: of_links(split, sampler=SAMPLERS["neighbor"])
    runs["batches/links_fetched"] = lambda: of_links(
        split_edges(plain, val=0.1, test=0.1, negatives=5, seed=1),
        sampler=NeighborSampler([4, 3]),
        boundary=Fetch(),
    )
    return runs


def part_runs(folder: Path) -> Runs:
    """Partitions, and what ranks hold of them."""
    whole = graph()
    partitioners = [MetisPartitioner(), RandomPartitioner(), SuperNodePartitioner(12), StreamingPartitioner()]
    runs: Runs = {
        f"parts/{type(each).__name__}": lambda p=each: [p(whole, number, 3).assignment for number in (2, 3, 5)]
        for each in partitioners
    }

    def held(**options: Any) -> Any:
        data = PartitionedDataModule(whole, partitioner=RandomPartitioner(), cache_dir=folder, **options)
        return [data.part(rank, 3, super_epoch) for rank in range(3) for super_epoch in range(3)]

    kinds: dict[str, dict[str, Any]] = {
        "fixed": {"holding": Holding(Fixed())},
        "rotate": {"holding": Holding(Rotate())},
        "redeal": {"holding": Holding(Redeal(12))},
        "halo": {"boundary": Halo()},
        "coverage": {"coverage": Coverage(hops=2)},
    }
    return runs | {f"parts/{name}": lambda o=options: held(**o) for name, options in kinds.items()}


def fit(rank: int, world_size: int, name: str, folder: str, sampler: str, kind: str) -> Any:
    """Weights after a few epochs, as every rank has them."""
    warnings.simplefilter("ignore")
    quieten()
    data = data_of(kind, Path(folder), sampler)
    module = LinkModel() if kind == "links" else Model()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=STRATEGIES[name](),
        max_epochs=4,
        limit_val_batches=0,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, data)
    return hash_of(dict(module.state_dict()))


def data_of(kind: str, folder: Path, sampler: str) -> Any:
    """The data module that a fit reads."""
    options: dict[str, Any] = {"sampler": SAMPLERS[sampler], "batch_size": 48, "loading": Loading(num_threads=0)}
    if kind == "shards":
        sharded = getattr(package, "ShardedDataModule", None) or package.ScatteredDataModule
        return sharded(folder / "shards", **options)
    if kind == "links":
        split = split_edges(graph(), val=0.1, test=0.1, negatives=5, seed=1)
        return LinkDataModule(split, partitioner=RandomPartitioner(), cache_dir=folder, **options)
    moves: dict[str, Any] = {"rotate": {"holding": Holding(Rotate(), every=1)}, "halo": {"boundary": Halo()}}
    return PartitionedDataModule(
        graph(), partitioner=RandomPartitioner(), cache_dir=folder, **options, **moves.get(kind, {})
    )


def weight_runs(folder: Path) -> Runs:
    """Trained weights of every strategy on two and on three ranks, and of one on every kind of data."""

    def run(name: str, ranks: int, sampler: str = "neighbor", kind: str = "nodes") -> Callable[[], Any]:
        return lambda: run_ranks(fit, ranks, name, str(folder), sampler, kind)

    save = getattr(package, "save_shards", None) or package.save_shares
    save(graph(), RandomPartitioner()(graph(), 2, 0), folder / "shards")
    runs = {f"weights/{name}_{ranks}": run(name, ranks) for name in STRATEGIES for ranks in (2, 3)}
    for kind in ("links", "rotate", "halo", "shards"):
        runs |= {f"weights/{name}_{kind}": run(name, 2, kind=kind) for name in ("llcg", "grappa")}
    others = [sampler for sampler in SAMPLERS if sampler not in ("neighbor", "neighbor_three_hops")]
    return runs | {f"weights/llcg_{sampler}": run("llcg", 2, sampler) for sampler in others if sampler != "matrix"}


def file_runs(folder: Path) -> Runs:
    """Saved graphs, shards, link splits and prepared tables, file by file."""
    whole = graph()

    def files_of(name: str, write: Callable[[Path], Any]) -> Any:
        write(folder / name)
        written = sorted(path for path in (folder / name).rglob("*.npy") if path.is_file())
        return [(str(path.relative_to(folder)), path) for path in written]

    def prepared(path: Path) -> None:
        table = folder / "edges.csv"
        ends = torch.randint(0, 300, (2000, 2), generator=torch.Generator().manual_seed(2)).numpy()
        np.savetxt(table, ends, fmt="%d", delimiter=",", header="source,target", comments="")
        package.prepare_graph(table, path, undirected=True)

    save = getattr(package, "save_shards", None) or package.save_shares
    split = split_edges(whole, val=0.1, test=0.1, negatives=5, seed=1)
    return {
        "files/graph": lambda: files_of("graph", whole.save),
        "files/built_in": lambda: files_of("built_in", communities(500, 3, num_features=4).save),
        "files/links": lambda: files_of("links", split.save),
        "files/shards": lambda: files_of(
            "saved_shards", lambda path: save(whole, MetisPartitioner()(whole, 3, 0), path)
        ),
        "files/prepared": lambda: files_of("prepared", prepared),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the hashes are written")
    parser.add_argument("--against", type=Path, help="hashes to compare with")
    parser.add_argument("--only", default="", help="runs whose names begin so")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    quieten()
    hashes = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for runs in (batch_runs, part_runs, file_runs, weight_runs):
            for title, run in runs(folder).items():
                if title.startswith(options.only):
                    hashes[title] = hash_of(run())
                    sys.stdout.write(f"{hashes[title]}  {title}\n")
    options.out.write_text(json.dumps(hashes, indent=1) + "\n")
    return 0 if options.against is None else compare(json.loads(options.against.read_text()), hashes)


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Say what differs; 1 if anything does."""
    differ = [name for name in before if name in after and before[name] != after[name]]
    alone = sorted(before.keys() ^ after.keys())
    sys.stdout.write(f"{len(before.keys() & after.keys())} compared, {len(differ)} differ: {differ}; alone: {alone}\n")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
