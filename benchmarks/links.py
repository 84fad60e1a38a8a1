"""Link prediction on parts, against one process on the whole graph: MRR on real graphs.

    python benchmarks/links.py DIRECTORY --graphs dblp --methods full metis metis-fetch metis-fetch-llcg --seeds 3

The first word of a method says how the graph is cut, ``-fetch`` that batches are drawn from the whole graph
(``boundary=Fetch()``), and ``-llcg`` that ranks correct on it after each average: the only way to learn from
edges between parts.

DIRECTORY holds ``<graph>.npz`` files and a ``read.py`` with ``to_pyg(path)``. 5 % of the edges are held back for
validation and 10 % for testing, each with 100 fixed negatives; features are reduced to their first principal
components, for speed. Every rank takes as many local steps as the single process, and ranks average every ``--steps``.
At every ``--every``-th meeting the model is evaluated on the whole graph; the table shows the test MRR at the best
validation MRR, mean and standard deviation over seeds. A seed splits, cuts, draws and initialises.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import NO_KEY, load
from harness import keep
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    Fetch,
    Graph,
    GrappaStrategy,
    Halo,
    Isolated,
    Launch,
    LinkDataModule,
    LinkRanking,
    LinkSplit,
    LLCGStrategy,
    Loading,
    MetisPartitioner,
    NeighborSampler,
    RandomPartitioner,
    SuperNodePartitioner,
    TMAStrategy,
    WholePartSampler,
    split_edges,
)
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.partition.base import Partitioner

PAIRS_AT_ONCE = 1 << 18


class Predictor(pl.LightningModule):
    """Two layers of SAGE and a decoder of the product."""

    def __init__(self, num_features: int, hidden: int, lr: float) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, hidden), SAGEConv(hidden, hidden)])
        self.norm = torch.nn.LayerNorm(hidden)
        self.decoder = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
        self.lr = lr

    def encode(self, batch: Any) -> Tensor:
        (first, second), (outer, inner) = self.convs, batch.blocks
        x = self.norm(first((batch.x, batch.x[: outer.num_dst]), outer.adj)).relu()
        embedding: Tensor = second((x, x[: inner.num_dst]), inner.adj)
        return embedding

    def decode(self, senders: Tensor, receivers: Tensor) -> Tensor:
        scores: Tensor = self.decoder(senders * receivers).squeeze(1)
        return scores

    def training_step(self, batch: Any) -> Tensor:
        embedding, (sender, receiver) = self.encode(batch), batch.edge_label_index
        scores = self.decode(embedding[sender], embedding[receiver])
        return functional.binary_cross_entropy_with_logits(scores, batch.edge_label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Curve(pl.Callback):
    """On rank 0: the MRR of all held edges, from one forward over the whole graph. Written to a file at the end."""

    def __init__(self, split: LinkSplit, every: int, file: Path) -> None:
        self.split, self.every, self.file = split, every, file
        self.points: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and (trainer.current_epoch + 1) % self.every == 0:
            pl_module.eval()
            self.points.append(evaluate(pl_module, self.split) | {"step": trainer.global_step})
            pl_module.train()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(max(self.points, key=lambda point: point["val/mrr"])))


@torch.no_grad()
def evaluate(module: Any, split: LinkSplit) -> dict[str, float]:
    everyone = torch.arange(split.graph.num_nodes)
    (sample,) = WholePartSampler(num_hops=2).sample_bulk(split.graph, [everyone], [NO_KEY])
    embedding, figures = module.encode(assemble(split.graph, sample)), {}
    for name, edges in split.edges.items():
        ranking, negatives = LinkRanking(prefix=f"{name}/"), split.negatives[name]
        for metric in ranking.values():
            metric.distributed_available_fn = lambda: False  # rank 0 evaluates alone, others do not wait
        for at in torch.arange(edges.shape[1]).split(PAIRS_AT_ONCE // (1 + negatives.shape[1])):
            senders = torch.cat([edges[0, at], edges[0, at].repeat_interleave(negatives.shape[1])])
            receivers = torch.cat([edges[1, at], negatives[at].view(-1)])
            label = (torch.arange(senders.numel()) < at.numel()).float()
            ranking.update(module.decode(embedding[senders], embedding[receivers]), label)
        figures |= {key: float(value) for key, value in ranking.compute().items()}
    return figures


def averaging(options: argparse.Namespace) -> Strategy:
    return TMAStrategy(EverySteps(options.steps), launch=Launch(start_method="fork"))


def llcg(options: argparse.Namespace) -> Strategy:
    return LLCGStrategy(EverySteps(options.steps), launch=Launch(start_method="fork"))


def grappa(_: argparse.Namespace) -> Strategy:
    return GrappaStrategy(launch=Launch(start_method="fork"))


def methods(options: argparse.Namespace) -> dict[str, tuple[Partitioner | None, Any, dict[str, Any]]]:
    """What the names mean: how the graph is cut (None: not at all), how ranks meet, and what the data are."""
    cuts: dict[str, Partitioner] = {
        "metis": MetisPartitioner(),
        "supertma": SuperNodePartitioner(options.supernodes),
        "randomtma": RandomPartitioner(),
    }
    boundaries: dict[str, Any] = {"": Isolated(), "-halo": Halo(2), "-fetch": Fetch()}
    found: dict[str, tuple[Partitioner | None, Any, dict[str, Any]]] = {"full": (None, None, {})}
    for name, cut in cuts.items():
        for suffix, boundary in boundaries.items():
            found[name + suffix] = (cut, averaging, {"boundary": boundary})
            found[f"{name}{suffix}-llcg"] = (cut, llcg, {"boundary": boundary})
    for suffix, boundary in boundaries.items():
        found[f"grappa{suffix}"] = (cuts["supertma"], grappa, {"boundary": boundary})
    return found


def split_of(directory: Path, name: str, num_features: int, seed: int) -> LinkSplit:
    data = load(directory, name, 0)
    torch.manual_seed(0)
    x = data.x - data.x.mean(0)
    directions = torch.pca_lowrank(x, num_features, center=False)[2]
    x = x @ directions
    graph = Graph.from_edge_index(data.edge_index, data.num_nodes, {"x": x / x.std()})
    return split_edges(graph, 0.05, 0.1, seed)


def run(split: LinkSplit, method: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One training. Ranks are forked from here, and the curve comes back through a file."""
    partitioner, strategy, settings = methods(options)[method]
    data = LinkDataModule(
        split,
        partitioner=partitioner,
        sampler=NeighborSampler([10, 5]),
        batch_size=options.batch_size,
        seed=seed,
        loading=Loading(num_threads=0),
        **settings,
    )
    ranks = 1 if partitioner is None else options.parts
    meets = partitioner is not None and not method.startswith("grappa")
    data._enter(replace(data._home.running, num_ranks=ranks))  # as if they had started
    per_epoch = options.steps if meets else -(-data._task.most() // options.batch_size)
    data._enter(replace(data._home.running, num_ranks=1))
    epochs = -(-options.rounds * options.steps // per_epoch)
    every = max(1, round(options.every * options.steps / per_epoch))
    pl.seed_everything(seed, verbose=False)
    curve = Curve(split, every, options.scratch)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(options) if strategy else SingleDeviceStrategy(torch.device("cpu")),
        max_epochs=epochs,
        callbacks=[curve],
        limit_val_batches=0,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(Predictor(split.graph.node_arrays["x"].shape[1], options.hidden, options.lr), data)
    outcome: dict[str, Any] = json.loads(options.scratch.read_text())
    kept = 1.0 if partitioner is None else sum(edges_kept(data, ranks)) / split.graph.num_edges
    return outcome | {"kept": kept, "seconds": time.perf_counter() - started}


def edges_kept(data: LinkDataModule, ranks: int) -> list[int]:
    return [data.part(rank, ranks).num_edges for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["dblp"])
    parser.add_argument("--methods", nargs="+", default=["full", "supertma", "randomtma"])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--supernodes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20, help="local steps of a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="rounds between two looks at the MRR")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=Path("links-scratch.json"))
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print("| graph | method | edges kept | MRR | against full | Hits@10 | best step | seconds |")
    for name in options.graphs:
        outcomes: dict[str, list[dict[str, Any]]] = {method: [] for method in options.methods}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            split = split_of(options.directory, name, options.features, seed)
            for method in options.methods:
                outcomes[method].append(run(split, method, options, seed))
                keep(options.out, {"graph": name, "method": method, "seed": seed} | outcomes[method][-1])
        for method in options.methods:
            show(name, method, outcomes[method], outcomes.get("full", []))
    options.scratch.unlink(missing_ok=True)


def show(name: str, method: str, outcomes: list[dict[str, Any]], full: list[dict[str, Any]]) -> None:
    """A row of the table; the single process is compared seed by seed."""
    mrr, hits, kept, steps, seconds = (
        [outcome[key] for outcome in outcomes] for key in ("test/mrr", "test/hits@10", "kept", "step", "seconds")
    )
    shares = [100 * (own / alone["test/mrr"] - 1) for own, alone in zip(mrr, full, strict=bool(full))]
    print(
        f"| {name} | {method} | {statistics.mean(kept):.0%} | {spread(mrr)} | {spread(shares, '+.1f')} % "
        f"| {spread(hits)} | {statistics.median(steps):.0f} | {statistics.mean(seconds):.0f} |",
        flush=True,
    )


def spread(values: list[float], style: str = ".3f") -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    deviation = format(statistics.stdev(values), style.removeprefix("+")) if len(values) > 1 else "-"
    return f"{statistics.mean(values):{style}} ± {deviation}"


if __name__ == "__main__":
    main()
