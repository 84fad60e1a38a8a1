"""What the release before had and this one has not, and what to use in its place.

A row is a public name (``AutoStrategy``), an argument of a class or function (``NeighborSampler.shared``), a value of
one (``Correction.way='anchor'``), a method (``Graph.extended``), a command (``lightning-gnn-dist report``) or an option
of one (``inspect --plan``). The rows of a release are deleted with the next.
"""

from __future__ import annotations

_CHANGED = "make another graph of the changed data, Graph.from_pyg(data), or prepare it again"
GONE: dict[str, str] = {
    "on_blocks": "define layers(), return layers_of(self.gnn), and let forward() return through_layers(self, batch)",
    "TemporalSampler.replace": "leave it out: each event that is seen is drawn once",
    "TemporalSampler.last": "draw the latest, pick='latest', or leave events of too long ago out of the graph",
    "NeighborSampler.shared": "leave it out: batches and steps take as long without",
    "MatrixSampler": "take the sampler itself, which draws the same batches, or on a device DeviceSampler",
    "PageRankSampler": "take ShadowSampler or NeighborSampler",
    **dict.fromkeys((f"{name}Strategy.overlap" for name in ("LLCG", "LocalSGD", "TMA")), "pass reducer=Overlapped()"),
    **dict.fromkeys(("GrappaStrategy.bits", "Outer.bits", "Overlapped.bits"), "pass the strategy reducer=Rounded(8)"),
    "GrappaStrategy.static_graph": "leave it out: zeros stand for gradients of unused parameters",
    "GrappaStrategy.gradient_as_bucket_view": "leave it out: torch's DDP keeps its default",
    "TMAStrategy.elastic": "pass peers=Elastic(), or Elastic(...) with other settings",
    "AsRanks": "GrappaStrategy resumes on another number of ranks, and accumulate_grad_batches sums batches of a rank",
    "LastStep": "write checkpoints, ModelCheckpoint(every_n_train_steps=50), and let torchrun start the ranks again",
    "AutoStrategy": "GrappaStrategy() first, and rounds where a step's bytes take longer than it (docs/choosing.md)",
    "Trainer.strategy='choose'": "name one, 'grappa' first (docs/choosing.md has a table)",
    "Auto.exchange": "name it, boundary=Exchange(), which takes WholePartSampler and GrappaStrategy or DDP",
    "Auto.work": "name the halo, boundary=Halo(2), which may take any work",
    "Halo.neighbors": "leave it out, or give bytes=..., which keeps the nodes with the most edges into the part",
    "inspect --bandwidth": "divide bytes by the wire's rate (docs/wire.md)",
    **dict.fromkeys(("inspect --batch-size", "inspect --fanout"), "leave it out: nothing that is left draws batches"),
    "inspect --cache": "try Loading(cache_bytes=...), and read data/cache_hit_rate of a fit",
    "inspect --device": "a line of the log of a fit says what lies on the GPU",
    "inspect --nodes": "docs/evaluation.md has what exact rows of some nodes cost",
    "inspect --plan": "docs/costs.md has the formulas, and docs/guides/plan.md an example",
    "inspect --sweep": "read data/sweep_bytes and data/switch_waited_seconds of a fit",
    **dict.fromkeys(("inspect --layers", "inspect --width"), "leave it out: no boundary is priced"),
    "prepare --out-of-core": "write --memory GB, or leave it out: edges are sorted on disk in any case",
    "lightning-gnn-dist choose": "fit, with the strategy that the table of docs/choosing.md names",
    "prepare --partitioner": "give the shard of each node (--assignment parts.npy), or prepare it whole and divide it",
    "Halo.seed_hops": "leave it out: GrappaStrategy() or super-nodes lose less where parts differ (docs/accuracy.md)",
    "StreamingPartitioner.method": "leave it out: cuts are close",
    "KaMinParPartitioner": "take MetisPartitioner(), or StreamingPartitioner() where METIS has no memory",
    "Exchange.bits": "take Exchange(), or send less with share, every or overlap",
    **dict.fromkeys(("split_edges.hide", "LinkSplit.hide"), "leave it out: batches hide the edges that they ask for"),
    "Holding.per": "leave it out: each rank holds a part, and a graph given by its path lies in memory once",
    "GlobalBatching.deal": "leave it out: all training nodes are drawn from, and edges of shards by their ranks",
    "History.every": "leave it out: rows are computed anew at the end of every round",
    "Exchange.sums": "take Exchange(), which computes the same step",
    "AdaptiveSteps": "use EverySteps(16), or EverySteps(16, growth=1.1, limit=256) for rounds that grow",
    "Correction.optimizer='reset'": "use 'averaged' or 'persistent'",
    "Correction.optimizer='sgd'": "use a function, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    "Correction.way='anchor'": "use Correction(1), one step on a batch of the whole graph",
    "Coverage.of": "read batch.coverage, which has the weight of each node",
    "Coverage.hops": "leave it out: the weight is the share of a node's neighbours that its part holds",
    "Drift.anchor_steps=0": "use anchor_steps=1, or leave it out for 4 batches",
    "WholePartSampler.bytes": "draw mini-batches, as NeighborSampler does, where a step does not fit into memory",
    **dict.fromkeys(("Graph.extended", "Graph.updated", "Graph.removed"), _CHANGED),
    "Graph.nodes_since": "name new nodes by their ids, data.on(graph).only(ids): they lie behind the others",
    **dict.fromkeys(("Graph.version", "Graph.open.version"), _CHANGED),
    "join_partition": "leave it out: the data module cuts a graph with new nodes anew",
    "extend_checkpoint": "give nodes features beside learned rows, or train anew on the larger graph",
    **dict.fromkeys(("RunReport.path", "RunReport.progress_bar"), "leave it out: loggers get its figures"),
    "RunReport.monitor": "leave it out: the loggers of the trainer have the metrics of every round",
    **dict.fromkeys(("best_links", "predict --best_links"), "rank products of rows: docs/links.md, The best new links"),
    "quantize_rows": "store features as float16, data.x = data.x.half()",
    "lightning-gnn-dist shop": "in a clone, python examples/shop.py shop writes the same tables",
    **dict.fromkeys(
        ("Launch.start_method='spawn'", "Launch.start_method='forkserver'"),
        "take 'fork' on CPUs; else write a script, %%writefile train.py, and run it, !python train.py",
    ),
    "lightning-gnn-dist report": "examples/compare_runs.py draws the files of Lightning's CSVLogger",
}


def way_out(what: str) -> str | None:
    """Return the sentence that answers something that went, or None if it is no row of the table."""
    return f"{what} went: {GONE[what]}." if what in GONE else None


def of_value(name: str, shown: str) -> str:
    """Return what a refusal of an argument's value adds if the release before took that value, of any owner."""
    return next((f" {way_out(row)}" for row in GONE if row.endswith(f".{name}={shown}")), "")
