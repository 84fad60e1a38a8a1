"""Links in time on real graphs: average precision and rank of the last events, for each strategy.

    python benchmarks/events.py DIRECTORY --graphs collegemsg bitcoin_otc --ranks 4 --seeds 3

DIRECTORY holds ``<graph>.npz`` files and a ``read_typed.py`` with ``to_hetero(name)``, whose one type of edges has a
``time``. Nodes have learned rows, ends see the 6 latest events before, and these the 4 latest before, in both
directions, with the time since; two layers of hidden size 32, LazyAdam 0.003, 400 steps of 800 events of all ranks
together. The last 15 % of the events are tested, each against 20 random receivers, of which the average precision
takes one. With ``--shards`` each rank has a random part of the events, and asks the others for what it needs of theirs.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import keep
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torchmetrics.classification import BinaryAveragePrecision

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    GrappaStrategy,
    Launch,
    LazyAdam,
    LinkDataModule,
    LinkRanking,
    LLCGStrategy,
    LocalSGDStrategy,
    RandomPartitioner,
    TemporalSampler,
    save_shards,
    split_edges,
)

STEPS, EVENTS, ROUND, HIDDEN = 400, 800, 8, 32
FORK = Launch(start_method="fork")
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one process": lambda: SingleDeviceStrategy(torch.device("cpu")),
    "GrappaStrategy": lambda: GrappaStrategy(launch=FORK),
    "LocalSGDStrategy": lambda: LocalSGDStrategy(EverySteps(ROUND), launch=FORK),
    "LLCGStrategy": lambda: LLCGStrategy(EverySteps(ROUND), launch=FORK),
}
BOTH_WAYS = ("sent", "rev_sent")


def hetero_of(directory: Path, name: str, *, reverse: bool = False) -> HeteroData:
    """A graph of the directory, as its reader gives it."""
    spec = importlib.util.spec_from_file_location("read_typed", directory / "read_typed.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{directory} has no read_typed.py with to_hetero(name, reverse=False).")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return reader.to_hetero(name, reverse=reverse)


def events_of(directory: Path, name: str) -> tuple[Graph, tuple[str, str, str]]:
    """The graph of one edge type and its reverse, both with times, and the type."""
    raw, data = hetero_of(directory, name), HeteroData()
    ((sender, _, receiver), events) = next(iter(raw.edge_items()))
    for kind in {sender, receiver}:
        data[kind].num_nodes = raw[kind].num_nodes
    forward, back = (sender, BOTH_WAYS[0], receiver), (receiver, BOTH_WAYS[1], sender)
    data[forward].edge_index, data[forward].time = events.edge_index, events.time
    data[back].edge_index, data[back].time = events.edge_index.flip(0), events.time
    return Graph.from_pyg(data, time="time"), forward


class Layer(nn.Module):
    """The mean of what events brought, each with the other's row and the time since."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(HIDDEN, HIDDEN)
        self.sent = nn.ModuleDict({way: nn.Linear(HIDDEN + 8, HIDDEN) for way in BOTH_WAYS})
        self.register_buffer("scales", 2.0 ** -torch.arange(0, 16, 2.0) / 60)

    def forward(self, x: dict[str, Tensor], batch: Any, now: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = {kind: self.own(found) for kind, found in x.items()}
        for kind, store in batch.edge_items():
            source, way, target = kind
            sender, receiver = store.edge_index
            since = (now[target][receiver] - store.time).float()[:, None]
            message = self.sent[way](torch.cat([x[source][sender], torch.log1p(since * self.scales)], 1))
            number = torch.bincount(receiver, minlength=len(rows[target])).clamp(min=1)
            rows[target] = (
                rows[target] + torch.zeros_like(rows[target]).index_add(0, receiver, message) / number[:, None]
            )
        return {kind: found.relu() for kind, found in rows.items()}


class Predictor(pl.LightningModule):
    """Learned rows, two layers, and a decoder of both ends."""

    def __init__(self, num_nodes: dict[str, int], kind: tuple[str, str, str]) -> None:
        super().__init__()
        self.kind = kind
        self.rows = nn.ModuleDict({name: nn.Embedding(count, HIDDEN, sparse=True) for name, count in num_nodes.items()})
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.decoder = nn.Sequential(nn.Linear(3 * HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.precision, self.ranking = BinaryAveragePrecision(), LinkRanking(hits=[1])

    def forward(self, batch: Any) -> Tensor:
        x = {name: table(batch[name].n_id) for name, table in self.rows.items()}
        times = batch[self.kind].seed_time
        now = {name: times[batch[name].batch] for name in x}
        for layer in self.layers:
            x = layer(x, batch, now)
        senders, receivers = batch[self.kind].edge_label_index
        ends = x[self.kind[0]][senders], x[self.kind[2]][receivers]
        scores: Tensor = self.decoder(torch.cat([*ends, ends[0] * ends[1]], 1)).squeeze(1)
        return scores

    def training_step(self, batch: Any) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self(batch), batch[self.kind].edge_label)

    def test_step(self, batch: Any) -> None:
        scores, label = self(batch), batch[self.kind].edge_label
        size = int(label.sum())
        self.ranking.update(scores, label)
        one_each = torch.cat([scores[:size], scores[size:].view(size, -1)[:, 0]])
        self.precision.update(one_each, torch.arange(2 * size) < size)
        self.log("precision", self.precision, batch_size=size)
        self.log("mrr", self.ranking["mrr"], batch_size=size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LazyAdam(self.parameters(), lr=0.003)


class Keep(pl.Callback):
    """Hands the last weights to the process that forked rank 0."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(pl_module.state_dict(), self.file)


def run(graph: Graph, kind: tuple[str, str, str], arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One training, tested in one process."""
    ranks, assured = 1 if arm == "one process" else options.ranks, graph.types
    assert assured is not None
    pl.seed_everything(seed, verbose=False)
    module = Predictor(dict(assured.num_nodes), kind)
    split = split_edges(graph, 0.15, 0.15, seed=seed, negatives=20, edge_type=kind, time="time")
    sampler = TemporalSampler([6, 4], "time", pick="latest")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0, "limit_val_batches": 0}
    in_rounds = arm in ("LocalSGDStrategy", "LLCGStrategy")
    length = {"max_epochs": STEPS // ROUND} if in_rounds else {"max_steps": STEPS, "max_epochs": -1}
    trainer = pl.Trainer(
        devices=ranks, strategy=STRATEGIES[arm](), callbacks=[Keep(options.scratch)], **length, **quiet
    )
    data: Any = LinkDataModule(split, sampler=sampler, batch_size=EVENTS // ranks, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.shards and ranks > 1:
            shards = Path(folder) / "shards"
            save_shards(split, RandomPartitioner()(split.graph, ranks, seed=seed), shards)
            data = LinkDataModule(shards, sampler=sampler, batch_size=EVENTS // ranks, seed=seed)
        trainer.fit(module, data)
    module.load_state_dict(torch.load(options.scratch))
    alone = LinkDataModule(split, sampler=sampler, batch_size=200, seed=seed)
    (metrics,) = pl.Trainer(devices=1, **quiet).test(module, alone, verbose=False)
    return {"precision": metrics["precision"], "mrr": metrics["mrr"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["collegemsg"])
    parser.add_argument("--arms", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shards", action="store_true", help="divide the split into a shard for each rank")
    parser.add_argument("--scratch", type=Path, default=Path("events.tmp.pt"), help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print("| graph | strategy | average precision | MRR |\n| --- | --- | --- | --- |")
    for name in options.graphs:
        graph, kind = events_of(options.directory, name)
        for arm in options.arms:
            found = [run(graph, kind, arm, seed, options) for seed in range(options.seeds)]
            for seed, outcome in enumerate(found):
                keep(options.out, {"graph": name, "arm": arm, "seed": seed} | outcome)
            cells = [spread([outcome[metric] for outcome in found]) for metric in ("precision", "mrr")]
            print(f"| {name} | {arm} | {' | '.join(cells)} |", flush=True)


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * deviation:.1f}"


if __name__ == "__main__":
    main()
