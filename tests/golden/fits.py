"""What training leaves: weights, moments, metrics, predictions and bytes sent, of every strategy and its settings."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_gnn_dist as lgd
from tests.golden.batches import BY_TIME, OF_TYPES
from tests.golden.device import chosen
from tests.golden.graphs import asked_of
from tests.golden.models import Blocks, Edges, Links, Typed
from tests.golden.place import Place
from tests.golden.runs import Run
from tests.golden.tally import Tally
from tests.samplers import SAMPLERS

PATIENCE: dict[str, Any] = {"launch": lgd.Launch(timeout=timedelta(seconds=60), start_timeout=timedelta(seconds=60))}
SECONDS = ("seconds", "waited", "_s")  # figures of time, which no two runs share
COUNTED = ("bytes_sent", "boundary_bytes", "fetched_bytes")
Make = Callable[[], Any]


def local(clock: Any = None, **options: Any) -> Make:
    return lambda: lgd.LocalSGDStrategy(lgd.EverySteps(3) if clock is None else clock, **PATIENCE, **options)


def llcg(clock: Any = None, **options: Any) -> Make:
    settings = {"reducer": lgd.Rounded(8)} | PATIENCE | options
    return lambda: lgd.LLCGStrategy(lgd.EverySteps(3) if clock is None else clock, **settings)


def published(correction: lgd.Correction | None) -> Make:
    return lambda: lgd.LLCGStrategy.as_published(lgd.EverySteps(3), correction=correction, **PATIENCE)


def tma(**options: Any) -> Make:
    return lambda: lgd.TMAStrategy(lgd.EverySteps(3), **PATIENCE, **options)


def grappa(**options: Any) -> Make:
    return lambda: lgd.GrappaStrategy(**PATIENCE, **options)


BASIC: dict[str, Make] = {"local_sgd": local(), "llcg": llcg(), "tma": tma(), "grappa": grappa()}
OF_TYPES_BASIC = BASIC | {"grappa": grappa(find_unused_parameters=True)}  # of types that no seed sees
SETTINGS: dict[str, Make] = {
    "local_sgd_growing": local(lgd.EverySteps(2, growth=1.5, limit=8), weights="nodes"),
    "local_sgd_passes": local(lgd.EveryPass(2)),
    "local_sgd_drift": local(lgd.EveryPass(), drift=lgd.Drift("ranks"), average_optimizer=True),
    "local_sgd_drift_decay": local(drift=lgd.Drift("ranks", decay=0.5, anchor_steps=2)),
    "local_sgd_momentum": local(average_optimizer="momentum"),
    "local_sgd_variance": local(average_optimizer="variance"),
    "local_sgd_own_buffers": local(buffers="local"),
    "local_sgd_leave_out": local(nonfinite="leave_out"),
    "local_sgd_outer": local(outer=lgd.Outer.diloco()),
    "local_sgd_outer_8": local(outer=lgd.Outer.diloco(), reducer=lgd.Rounded(8), average_optimizer=True),
    "local_sgd_outer_16": local(outer=lgd.Outer.diloco(), reducer=lgd.Rounded(16), drift=lgd.Drift("ranks")),
    "local_sgd_outer_adaptive": local(outer=lgd.Outer(momentum=0.8, adaptive=True)),
    "local_sgd_outer_adam": local(
        outer=lgd.Outer(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02, eps=1e-3))
    ),
    "llcg_paper": published(lgd.Correction.as_published(2)),
    "llcg_without_corrections": published(None),
    "llcg_rank0": llcg(correction=lgd.Correction(way="rank0"), buffers="global"),
    "llcg_drift_of_ranks": llcg(drift=lgd.Drift("ranks")),
    "llcg_share": llcg(lgd.EverySteps(2, growth=1.5, limit=6), correction=lgd.Correction(0.5, lr="local")),
    "llcg_persistent": llcg(correction=lgd.Correction(optimizer="persistent", lr=0.01)),
    "llcg_own_optimizer": llcg(
        correction=lgd.Correction(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    ),
    "llcg_32_bits": llcg(outer=lgd.Outer(), reducer=None),
    "llcg_16_bits": llcg(outer=lgd.Outer.diloco(), reducer=lgd.Rounded(16)),
    "tma_steps": tma(weights="steps"),
    "tma_failed": tma(failed_ranks=[1]),
    "grappa_nodes": grappa(weights="nodes"),
    "grappa_8": grappa(reducer=lgd.Rounded(8)),
    "grappa_16": grappa(reducer=lgd.Rounded(16)),
    "grappa_own_buffers": grappa(buffers="local"),
}
HOLDINGS: dict[str, dict[str, Any]] = {
    "rotate": {"holding": lgd.Holding(lgd.Rotate(), every=1)},
    "redeal": {"holding": lgd.Holding(lgd.Redeal(8), every=1)},
    "extra_nodes": {"holding": lgd.Holding(extra_nodes=0.3)},
    "extra_of_graph": {"holding": lgd.Holding(extra_nodes=0.3, extra_of="graph")},
    "no_coverage": {"coverage": None},
    "coverage_of_batches": {"coverage": lgd.Coverage("batch", shrinkage=1.0)},
}


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """One that says nothing, for the ranks of the job that it runs in."""
    defaults: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    where = {name: chosen(name) for name in ("accelerator", "precision")}
    return pl.Trainer(strategy=strategy, use_distributed_sampler=False, **where, **quiet, **defaults | options)


def show_fit(
    tally: Tally, data: Any, module: Any, strategy: Any, num_ranks: int, *, evaluates: bool = True, **options: Any
) -> None:
    """Fit, test and predict, and show all that comes of it."""
    report, metrics = lgd.RunReport(), Metrics()
    settings = {"devices": num_ranks, "callbacks": [report, metrics, *options.pop("callbacks", [])]}
    resume = options.pop("ckpt_path", None)
    run = trainer(strategy, **settings, **options)
    torch.manual_seed(1)
    run.fit(module, data, ckpt_path=resume)
    show_state(tally, run, module)
    show_report(tally, report, metrics)
    if evaluates:
        tally.add("test", run.test(module, data, verbose=False))
        if hasattr(module, "predict_step") and not isinstance(module, Links):
            tally.add("predict", run.predict(module, data))


def show_state(tally: Tally, run: pl.Trainer, module: Any) -> None:
    tally.add("weights", dict(module.state_dict()))
    tally.add("moments", [tensors_of(optimizer.state_dict()["state"]) for optimizer in run.optimizers])
    figures = {name: float(value) for name, value in run.callback_metrics.items()}
    counted = ("comm/", "data/")  # from the beginning of the process: the record has those of the fit
    is_shown = lambda name: not name.endswith(SECONDS) and not name.startswith(counted)  # noqa: E731
    tally.add("metrics", {name: value for name, value in figures.items() if is_shown(name) and "MB" not in name})


def tensors_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: tensors_of(value) for name, value in state.items()}
    return state if isinstance(state, torch.Tensor | int | float | bool | str | None) else str(state)


class Metrics(pl.Callback):
    """Keeps what was logged by the end of each round; nothing of a round without validation, if others have one."""

    def __init__(self) -> None:
        self.of_rounds: list[dict[str, float]] = []
        self.validates = self.has_validated = False

    def on_train_epoch_start(self, *args: Any) -> None:
        self.has_validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validates = self.has_validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "/" not in name}
        self.of_rounds.append(metrics if self.has_validated or not self.validates else {})


def show_report(tally: Tally, report: lgd.RunReport, metrics: Metrics) -> None:
    """What all ranks have done, which rank 0 has."""
    if report.ranks:
        tally.add("batches of ranks", [rank["batches"] for rank in report.ranks])
        tally.add("metrics of rounds", metrics.of_rounds)
        for name in COUNTED:  # of the fit: what ranks ask each other falls into this round or the next, by chance
            tally.say(f"ledger: {name}", str([rank.get(name, 0) for rank in report.ranks]))
        tally.add("coverage", [rank.get("coverage") for rank in report.ranks])
        tally.say("said", report.table.partition(". Where")[0])


def of_nodes(
    make: Make,
    tally: Tally,
    place: Place,
    *,
    module: Callable[[Any], Any] = lambda data: Blocks(),
    graph: str = "plain",
    store: str = "ram",
    num_ranks: int = 2,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    torch.manual_seed(0)
    data = place.nodes(graph, store, **(options or {}))
    show_fit(tally, data, module(data), make(), num_ranks, **settings)


def of_links(make: Make, split: str, tally: Tally, place: Place, *, store: str = "ram", **options: Any) -> None:
    torch.manual_seed(0)
    data, asked = place.links(split, store, **options), asked_of(split)
    module = Links(asked, () if asked is None else edge_types(), labels="label" in split)
    show_fit(tally, data, module, make(), 2)


def edge_types(*, mutual: bool = False) -> Any:
    from tests.golden.graphs import PEERS, typed

    return [*typed().types.edge_types, *[PEERS] * mutual]


def typed_module(data: Any) -> Typed:
    return Typed(edge_types())


def runs() -> Iterator[Run]:
    for name, make in BASIC.items():
        for ranks in (1, 3):
            yield Run(f"fits/{name}/{ranks}_ranks", partial(of_nodes, make, num_ranks=ranks), ranks)
    for name, make in (BASIC | SETTINGS).items():
        yield Run(f"fits/{name}", partial(of_nodes, make), 2)
    for name, options in HOLDINGS.items():
        for strategy in ("local_sgd", "llcg", "grappa"):
            yield Run(f"fits/{strategy}/{name}", partial(of_nodes, BASIC[strategy], options=options), 2)
    for name, sampler in (SAMPLERS | {"temporal_edges": BY_TIME}).items():
        if name not in ("matrix", "neighbor", "neighbor_three_hops"):
            run = partial(of_nodes, BASIC["llcg"], options={"sampler": sampler})
            yield Run(f"fits/llcg/sampler_{name}", run, 2)
    three = {"sampler": lgd.NeighborSampler([3, 2, 2])}
    yield Run("fits/llcg/three_hops", partial(of_nodes, llcg(), module=lambda data: Blocks(3), options=three), 2)
    yield Run("fits/grappa/edge_index", partial(of_nodes, grappa(), module=lambda data: Edges()), 2)
    clipped = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    for name, make in {"grappa": grappa(), "local_sgd": local(lgd.EverySteps(4))}.items():
        yield Run(f"fits/{name}/clipped_and_accumulated", partial(of_nodes, make, **clipped), 2)
    for name, make in OF_TYPES_BASIC.items():
        run = partial(of_nodes, make, module=typed_module, graph="typed")
        yield Run(f"fits/{name}/typed", run, 2)
        run = partial(of_nodes, make, module=typed_module, graph="typed", options={"sampler": OF_TYPES})
        yield Run(f"fits/{name}/typed_temporal", run, 2)
    for split in ("undirected", "labelled", "events", "typed", "typed_labelled", "typed_events"):
        for name in ("llcg", "grappa"):
            yield Run(f"fits/{name}/links_{split}", partial(of_links, OF_TYPES_BASIC[name], split), 2)
