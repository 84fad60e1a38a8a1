"""Fits under every boundary of a graph that every host has, and with rows that ranks exchange, also on shards."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_gnn_dist import Auto, EveryPass, Exchange, History, Holding, Rotate, WholePartSampler
from tests.golden.fits import BASIC, local, of_nodes
from tests.golden.models import Layered
from tests.golden.runs import Run
from tests.golden.shards import BOUNDARIES

EXCHANGES: dict[str, Exchange] = {
    "exact": Exchange(),
    "every_2": Exchange(every=2),
    "overlap": Exchange(overlap=True),
    "share": Exchange(share=0.5),
    "all": Exchange(every=2, overlap=True, share=0.5),
}


def layered(data: Any) -> Layered:
    return Layered()


def ready_made(data: Any) -> Layered:
    return Layered(ready_made=True)


def runs() -> Iterator[Run]:
    for boundary, around in BOUNDARIES.items():
        for name in ("local_sgd", "llcg", "grappa"):
            for store in ("ram", "files"):
                if store == "ram" or name == "llcg":
                    run = partial(of_nodes, BASIC[name], store=store, options={"boundary": around})
                    yield Run(f"fits/{name}/{boundary}/{store}", run, 2)
    yield Run("fits/grappa/auto", partial(of_nodes, BASIC["grappa"], options={"boundary": Auto(bytes=12_000)}), 2)
    whole = {"sampler": WholePartSampler(2)}
    for store in ("ram", "files", "shards"):
        for exchange, around in EXCHANGES.items():
            options = whole | {"boundary": around}
            run = partial(of_nodes, BASIC["grappa"], module=layered, store=store, options=options, max_epochs=5)
            yield Run(f"fits/grappa/exchange_{exchange}/{store}", run, 2)
        options = whole | {"boundary": Exchange()}
        ddp = partial(of_nodes, lambda: "ddp", module=ready_made, store=store, options=options, evaluates=False)
        yield Run(f"fits/ddp/exchange/{store}", ddp, 2)
    for store in ("ram", "files"):
        for name in ("local_sgd", "llcg", "tma"):
            run = partial(of_nodes, BASIC[name], module=layered, store=store, options={"boundary": History()})
            yield Run(f"fits/{name}/history/{store}", run, 2)
        rotated = {"boundary": History(), "holding": Holding(Rotate(), every=1)}  # two ranks would hold all
        rotating = partial(of_nodes, local(EveryPass()), module=layered, store=store, options=rotated, num_ranks=3)
        yield Run(f"fits/local_sgd/history_rotate/{store}", rotating, 3)
    three = partial(of_nodes, BASIC["local_sgd"], module=layered, num_ranks=3, options={"boundary": History()})
    yield Run("fits/local_sgd/history/3_ranks", three, 3)
    options = whole | {"boundary": Exchange()}
    three = partial(of_nodes, BASIC["grappa"], module=layered, num_ranks=3, options=options)
    yield Run("fits/grappa/exchange/3_ranks", three, 3)
