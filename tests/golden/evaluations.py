"""Rows and metrics of evaluations and predictions: layer by layer and in batches, of every kind of graph."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist import Evaluation, NeighborSampler, PredictionWriter, predict_by_layer
from tests.golden.batches import BY_TIME, OF_TYPES
from tests.golden.boundaries import layered, ready_made
from tests.golden.fits import BASIC, edge_types, trainer, typed_module
from tests.golden.graphs import SPLITS, asked_of
from tests.golden.models import Blocks, Edges, Layered, Links
from tests.golden.place import GRAPHS, Place
from tests.golden.runs import Run
from tests.golden.tally import Tally

MODULES: dict[str, Callable[[Any], Any]] = {
    "blocks": lambda data: Blocks(),
    "edges": lambda data: Edges(),
    "layers": layered,
    "ready_made": ready_made,
}
EVALUATIONS: dict[str, Evaluation] = {
    "default": Evaluation(),
    "batches_of_17": Evaluation(batch_size=17),
    "little_memory": Evaluation(bytes=1 << 24),
    "estimate": Evaluation(sampler=NeighborSampler([4, 3])),
}


def evaluated(
    module: Callable[[Any], Any],
    data: Callable[[Place], Any],
    tally: Tally,
    place: Place,
    *,
    num_ranks: int = 1,
    predicts: bool = True,
    **options: Any,
) -> None:
    """Validate, test, predict, and write predictions into a file."""
    source, path = data(place), place.own / "rows.npy"
    torch.manual_seed(0)
    model = module(source)
    strategy = BASIC["grappa"]() if num_ranks > 1 else "auto"
    run = trainer(strategy, devices=num_ranks, callbacks=[Single(path)] if predicts else [], **options)
    tally.add("val", run.validate(model, source, verbose=False))
    tally.add("test", run.test(model, source, verbose=False))
    if predicts:
        tally.add("predict", run.predict(model, source))
        tally.add("file", path)


class Single(PredictionWriter):
    """Writes the rows of modules that return ids beside them."""

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        super().on_predict_batch_end(trainer, pl_module, outputs[1], *args, **kwargs)


def by_layer(store: str, num_ranks: int, tally: Tally, place: Place) -> None:
    """All rows, one layer after the other."""
    torch.manual_seed(0)
    model, path = Layered(), place.own / "rows.npy"
    where = place.shared / "plain_shards" if store == "shards" else GRAPHS["plain"]()
    rows: list[tuple[Tensor, Tensor]] = []

    def take(batch: Any, found: Tensor) -> None:
        rows.append((batch.n_id[: batch.batch_size], found))

    strategy = BASIC["grappa"]() if num_ranks > 1 else "auto"
    run = trainer(strategy, devices=num_ranks)
    predict_by_layer(run, model, where, path, on_rows=take)
    tally.add("rows", [each for pair in rows for each in pair])
    tally.add("file", torch.from_numpy(np.load(path)))


def runs() -> Iterator[Run]:
    for name, module in MODULES.items():
        for evaluation, value in EVALUATIONS.items():
            for store in ("ram", "shards"):
                ranks = 2 if store == "shards" else 1
                data = partial(Place.nodes, graph="plain", store=store, evaluation=value)
                run = partial(evaluated, module, data, num_ranks=ranks)
                yield Run(f"evaluation/{name}/{evaluation}/{store}", run, ranks)
        data = partial(Place.nodes, graph="plain", store="files")
        yield Run(f"evaluation/{name}/2_ranks", partial(evaluated, module, data, num_ranks=2), 2)
        limits = {"limit_val_batches": 2, "limit_test_batches": 0.5}
        run = partial(evaluated, module, data, predicts=False, num_ranks=2, **limits)
        yield Run(f"evaluation/{name}/limited", run, 2)
    for graph, sampler in (("plain", BY_TIME), ("typed", NeighborSampler([4, 3])), ("typed", OF_TYPES)):
        kind = "temporal" if sampler in (BY_TIME, OF_TYPES) else "neighbor"
        module = typed_module if graph == "typed" else MODULES["edges"]
        for store in ("ram", "files", "shards"):
            ranks = 1 if store == "files" else 2
            data = partial(Place.nodes, graph=graph, store=store, sampler=sampler)
            yield Run(f"evaluation/{graph}/{kind}/{store}", partial(evaluated, module, data, num_ranks=ranks), ranks)
    for split in SPLITS:
        for store in ("ram", "shards"):
            data = partial(Place.links, split=split, store=store)
            module = partial(link_module, split)
            run = partial(evaluated, module, data, num_ranks=2, predicts=False)
            yield Run(f"evaluation/links/{split}/{store}", run, 2)
    for store, ranks in (("ram", 1), ("ram", 2), ("shards", 2)):
        yield Run(f"evaluation/by_layer/{store}_{ranks}", partial(by_layer, store, ranks), ranks)


def link_module(split: str, data: Any) -> Links:
    asked = asked_of(split)
    types = edge_types(mutual=split == "typed_mutual") if asked else ()
    return Links(asked, types, labels="label" in split)
