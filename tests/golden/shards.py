"""Batches on two ranks, of parts of a whole graph and of shards, under every boundary that they share; and fits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.golden.batches import BY_TIME, OF_TYPES
from tests.golden.fits import BASIC, OF_TYPES_BASIC, Make, of_links, of_nodes, trainer, typed_module
from tests.golden.graphs import SPLITS
from tests.golden.place import AT_ONCE, Place
from tests.golden.runs import Run
from tests.golden.tally import Tally, content_of

BOUNDARIES: dict[str, Any] = {
    "isolated": lgd.Isolated(),
    "halo": lgd.Halo(),
    "halo_2": lgd.Halo(2),
    "halo_of_bytes": lgd.Halo(2, bytes=6_000),
    "fetch": lgd.Fetch(),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {
        "neighbor": lgd.NeighborSampler([4, 3]),
        "replaced": lgd.NeighborSampler([4, 3], replace=True),
        "weighted": lgd.NeighborSampler([4, 3], weight="edge_weight"),
        "ladies": lgd.LadiesSampler([20, 15]),
        "temporal": BY_TIME,
    },
    "typed": {"neighbor": lgd.NeighborSampler([3, 2]), "temporal": OF_TYPES},
    "timed": {"temporal": lgd.TemporalSampler([3, 2], "time", pick="latest", equal=True)},
}
OF_PARTS: dict[str, Any] = {"shadow": lgd.ShadowSampler([3, 2], num_hops=2), "whole": lgd.WholePartSampler(2)}


class Recorder(pl.LightningModule):
    """Learns nothing, and shows all batches of a fit, and those for corrections and anchors."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.weight, self.tally = torch.nn.Parameter(torch.zeros(1)), tally

    def training_step(self, batch: Any) -> Tensor:
        self.tally.add("train", content_of(batch))
        return (self.weight * batch.num_targets).sum()

    def validation_step(self, batch: Any) -> None:
        self.tally.add("val", content_of(batch))

    def test_step(self, batch: Any) -> None:
        self.tally.add("test", content_of(batch))

    def predict_step(self, batch: Any) -> None:
        self.tally.add("predict", content_of(batch))

    def on_train_epoch_end(self) -> None:
        """All ranks come here, so that shards may ask each other."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for batch in data.correction_batches(self.current_epoch, stop=2):
            self.tally.add("corrections", content_of(batch))
        for batch in data.anchor_batches(self.current_epoch):
            self.tally.add("anchors", content_of(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def show(tally: Tally, data: Any, make: Make = BASIC["grappa"], *, predicts: bool = True) -> None:
    module, run = Recorder(tally), trainer(make(), devices=2, max_epochs=2)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    if predicts:
        run.predict(module, data, return_predictions=False)


def of_graph(graph: str, store: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    show(tally, place.nodes(graph, store, **options))


def of_split(split: str, store: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    show(tally, place.links(split, store, **options), predicts="events" not in split)


def batch_runs() -> Iterator[Run]:
    for store in ("ram", "shards"):
        for graph, samplers in SAMPLERS.items():
            for name, sampler in samplers.items():
                if store == "shards" and name in ("replaced", "weighted"):
                    continue  # owners draw without
                for boundary in ("isolated", "halo_2", "fetch") if name != "neighbor" else BOUNDARIES:
                    options = {"sampler": sampler, "boundary": BOUNDARIES[boundary]}
                    yield Run(f"ranks/{graph}/{name}/{boundary}/{store}", partial(of_graph, graph, store, options), 2)
            for name, sampler in OF_PARTS.items() if graph != "timed" else ():
                others = {"global_batching": lgd.GlobalBatching(sampler=lgd.NeighborSampler([4, 3]))}
                options = {"sampler": sampler, "boundary": BOUNDARIES["halo"], **others}
                yield Run(f"ranks/{graph}/{name}/halo/{store}", partial(of_graph, graph, store, options), 2)
        for split in SPLITS:
            for boundary in ("isolated", "halo", "fetch"):
                options = {"boundary": BOUNDARIES[boundary]}
                yield Run(f"ranks/links/{split}/{boundary}/{store}", partial(of_split, split, store, options), 2)
    of_shards: dict[str, dict[str, Any]] = {
        "ahead": {"loading": lgd.Loading(bulk_size=3), "boundary": lgd.Fetch()},
        "no_cache": {"loading": replace(AT_ONCE, cache_bytes=0), "boundary": lgd.Fetch()},
        "small_cache": {"loading": replace(AT_ONCE, cache_bytes=900), "boundary": lgd.Fetch()},
    }
    for name, options in of_shards.items():
        for graph in ("plain", "typed"):
            yield Run(f"ranks/{graph}/neighbor/{name}/shards", partial(of_graph, graph, "shards", options), 2)
    yield Run("ranks/links/directed/negatives/shards", partial(of_split, "directed", "shards", {"num_negatives": 3}), 2)
    yield Run("ranks/links/typed/negatives/shards", partial(of_split, "typed", "shards", {"num_negatives": 3}), 2)


def fit_runs() -> Iterator[Run]:
    for name, make in BASIC.items():
        for boundary in ("isolated", "halo", "fetch"):
            around = {"boundary": BOUNDARIES[boundary]}
            yield Run(f"fits/{name}/{boundary}/shards", partial(of_nodes, make, store="shards", options=around), 2)
            typed = partial(of_nodes, OF_TYPES_BASIC[name], module=typed_module, graph="typed", options=around)
            yield Run(f"fits/{name}/typed/{boundary}/shards", partial(typed, store="shards"), 2)
            if name in ("llcg", "grappa"):
                yield Run(f"fits/{name}/typed/{boundary}", typed, 2)
    for split in ("undirected", "directed", "labelled", "events", "typed", "typed_labelled", "typed_events"):
        for name in ("llcg", "grappa"):
            yield Run(
                f"fits/{name}/links_{split}/shards", partial(of_links, OF_TYPES_BASIC[name], split, store="shards"), 2
            )


def runs() -> Iterator[Run]:
    yield from batch_runs()
    yield from fit_runs()
