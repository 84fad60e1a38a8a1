"""Learned rows of nodes: tables that every rank has, and tables of which each rank owns a range."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_gnn_dist import Correction, Drift, Outer, Rounded
from tests.golden.fits import BASIC, OF_TYPES_BASIC, edge_types, grappa, local, of_nodes, published
from tests.golden.models import Rows, Typed
from tests.golden.runs import Run

KINDS = {"sparse": False, "owned": True}


def runs() -> Iterator[Run]:
    for kind, owned in KINDS.items():

        def module(data: Any, owned: bool = owned, optimizer: str = "lazy_adam") -> Rows:
            return Rows(owned=owned, optimizer=optimizer)

        def typed(data: Any, owned: bool = owned) -> Typed:
            return Typed(edge_types(), owned=owned)

        strategies = {"grappa": BASIC["grappa"]} if owned else BASIC
        for name, make in strategies.items():
            yield Run(f"rows/{kind}/{name}", partial(of_nodes, make, module=module), 2)
            yield Run(f"rows/{kind}/{name}/shards", partial(of_nodes, make, module=module, store="shards"), 2)
            of_types = partial(of_nodes, OF_TYPES_BASIC[name], module=typed, graph="typed")
            yield Run(f"rows/{kind}/{name}/typed", of_types, 2)
            if name != "tma":
                yield Run(f"rows/{kind}/{name}/3_ranks", partial(of_nodes, make, module=module, num_ranks=3), 3)
                yield Run(f"rows/{kind}/{name}/1_rank", partial(of_nodes, make, module=module, num_ranks=1), 1)
        for optimizer in ("sgd", "adagrad"):
            for name in strategies.keys() - {"tma"}:
                run = partial(of_nodes, BASIC[name], module=partial(module, optimizer=optimizer))
                yield Run(f"rows/{kind}/{name}/{optimizer}", run, 2)
        settings = {
            "llcg_paper": published(Correction.as_published(2)),
            "local_sgd_moments": local(average_optimizer=True, weights="nodes"),
            "local_sgd_drift": local(drift=Drift("ranks"), outer=Outer.diloco(), reducer=Rounded(8)),
            "grappa_8": grappa(reducer=Rounded(8)),
        }
        for name, make in settings.items():
            if owned and name != "grappa_8":
                continue
            yield Run(f"rows/{kind}/{name}", partial(of_nodes, make, module=module), 2)
        clipped = partial(of_nodes, BASIC["grappa"], module=module, gradient_clip_val=0.5)
        yield Run(f"rows/{kind}/grappa/clipped", clipped, 2)
