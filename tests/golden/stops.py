"""Runs that are stopped and gone on with: what a checkpoint must hold is in what they end with."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lightning_gnn_dist import Correction, Drift, EverySteps, Exchange, History, Outer, Rounded, WholePartSampler
from tests.golden import fits
from tests.golden.boundaries import layered
from tests.golden.device import chosen
from tests.golden.graphs import asked_of
from tests.golden.models import Blocks, Links, Rows, Typed
from tests.golden.place import Place
from tests.golden.runs import Run
from tests.golden.tally import Tally


def stopped(
    make: fits.Make,
    data: Callable[[Place], Any],
    module: Callable[[], Any],
    tally: Tally,
    place: Place,
    *,
    num_ranks: int = 2,
    steps: int = -1,
) -> None:
    """Train two epochs, or so many steps; go on in a new module, data module and strategy up to the fourth epoch.

    Either half may be done alone, so that other processes do the other one.
    """
    path = place.own / "stopped.ckpt"
    if chosen("half") != "second":
        torch.manual_seed(0)
        first = module()
        run = fits.trainer(make(), devices=num_ranks, max_epochs=2, max_steps=steps)
        torch.manual_seed(1)
        run.fit(first, data(place))
        run.save_checkpoint(path)
        fits.show_state(tally, run, first)
    if chosen("half") != "first":
        torch.manual_seed(2)
        fits.show_fit(tally, data(place), module(), make(), num_ranks, max_epochs=4, ckpt_path=path)


def nodes(place: Place, graph: str = "plain", store: str = "ram", **options: Any) -> Any:
    return place.nodes(graph, store, **options)


def links_of(split: str, place: Place) -> Any:
    return place.links(split, "ram")


def links(split: str) -> Callable[[], Links]:
    return lambda: Links(asked_of(split), fits.edge_types() if asked_of(split) else (), labels="label" in split)


def runs() -> Iterator[Run]:
    strategies = fits.BASIC | {
        "local_sgd_outer_8": fits.local(
            drift=Drift("ranks"), outer=Outer.diloco(), reducer=Rounded(8), average_optimizer=True
        ),
        "llcg_persistent": fits.llcg(EverySteps(2, growth=1.5, limit=6), correction=Correction(optimizer="persistent")),
        "grappa_8": fits.grappa(reducer=Rounded(8)),
    }
    for name, make in strategies.items():
        yield Run(f"resumed/{name}", partial(stopped, make, nodes, Blocks), 2)
        if name in ("grappa", "grappa_8"):
            yield Run(f"resumed/{name}/owned", partial(stopped, make, nodes, lambda: Rows(owned=True)), 2)
    yield Run("resumed/grappa/mid_epoch", partial(stopped, fits.grappa(), nodes, Blocks, steps=4), 2)
    yield Run("resumed/grappa/1_rank", partial(stopped, fits.grappa(), nodes, Blocks, num_ranks=1), 1)
    for name in ("llcg", "grappa"):
        rotating = partial(nodes, **fits.HOLDINGS["rotate"])
        yield Run(f"resumed/{name}/rotate", partial(stopped, fits.BASIC[name], rotating, Blocks), 2)
        yield Run(f"resumed/{name}/sparse", partial(stopped, fits.BASIC[name], nodes, lambda: Rows(owned=False)), 2)
        yield Run(
            f"resumed/{name}/shards", partial(stopped, fits.BASIC[name], partial(nodes, store="shards"), Blocks), 2
        )
        make, of_types = fits.OF_TYPES_BASIC[name], partial(nodes, graph="typed")
        yield Run(f"resumed/{name}/typed", partial(stopped, make, of_types, lambda: fits.typed_module(None)), 2)
        if name == "grappa":
            owned = partial(stopped, make, of_types, lambda: Typed(fits.edge_types(), owned=True))
            yield Run(f"resumed/{name}/typed_owned", owned, 2)
        for split in ("undirected", "typed", "events"):
            of_split = partial(links_of, split)
            yield Run(f"resumed/{name}/links_{split}", partial(stopped, make, of_split, links(split)), 2)
    kept = partial(nodes, boundary=History())
    yield Run("resumed/local_sgd/history", partial(stopped, fits.local(), kept, lambda: layered(None)), 2)
    rows = partial(nodes, boundary=Exchange(), sampler=WholePartSampler(2))
    yield Run("resumed/grappa/exchange", partial(stopped, fits.grappa(), rows, lambda: layered(None)), 2)
