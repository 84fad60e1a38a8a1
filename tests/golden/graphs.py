"""Small graphs and splits of edges, from no generator of the package: it may change one day.

They have all that merges may get wrong: weights, times, copies of edges, loops, nodes without edges, types without
features, labels that are not known.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph, LinkSplit, split_edges

NODES, CLASSES, WIDTH = 400, 4, 8
COUNTS = {"paper": 160, "author": 90, "venue": 9}
WIDTHS = {"paper": 6, "author": 5, "venue": 3}
CITES, WRITES, BACK = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")
PEERS, AT = ("paper", "resembles", "paper"), ("paper", "at", "venue")
PRINTS = ("venue", "rev_at", "paper")


def masks(count: int, draw: torch.Generator) -> dict[str, Tensor]:
    share = torch.rand(count, generator=draw)
    return {"train_mask": share < 0.5, "val_mask": share > 0.8, "test_mask": (share > 0.55) & (share < 0.75)}


@cache
def plain() -> Graph:
    """Directed, with weights, rows and times of edges."""
    graph = Graph.from_pyg(plain_data(), edge_ids=True)
    graph.edge_arrays["weight"] = graph.edge_arrays["edge_weight"].clone()  # the name that tests.samplers asks for
    return graph


@cache
def simple() -> Graph:
    """The same, with no edge twice."""
    data = plain_data()
    keep = torch.from_numpy(np.unique((data.edge_index[1] * NODES + data.edge_index[0]).numpy(), return_index=True)[1])
    for name in ("edge_index", "edge_weight", "edge_attr", "edge_time"):
        data[name] = data[name][:, keep] if name == "edge_index" else data[name][keep]
    return Graph.from_pyg(data)


def plain_data() -> Data:
    draw = torch.Generator().manual_seed(5)
    ends = torch.randint(0, NODES, (2, 2600), generator=draw)
    ends[0, :300] = ends[0, :300] % 20  # some are named more often than others
    ends = torch.cat([ends, ends[:, 100:140], torch.arange(9).expand(2, 9)], 1)
    ends = ends[:, ends[1] > 15]
    count, y = ends.shape[1], torch.arange(NODES) % CLASSES
    x = torch.randn(NODES, WIDTH, generator=draw) + torch.nn.functional.one_hot(y, WIDTH)
    data = Data(x=x, y=y, edge_index=ends, chunk=torch.arange(NODES) // 20, **masks(NODES, draw))
    data.time = torch.randint(5, 40, (NODES,), generator=draw)
    data.edge_weight = torch.rand(count, generator=draw) + 0.1
    data.edge_attr = torch.randn(count, 2, generator=draw)
    data.edge_time = torch.randint(0, 40, (count,), generator=draw)
    return data


def hetero() -> HeteroData:
    """Papers, authors and venues; venues have no features but in ``dense``."""
    draw, data = torch.Generator().manual_seed(6), HeteroData()

    def ends(source: str, target: str, count: int) -> Tensor:
        return torch.stack([torch.randint(COUNTS[kind], (count,), generator=draw) for kind in (source, target)])

    for kind in ("paper", "author"):
        data[kind].x = torch.randn(COUNTS[kind], WIDTHS[kind], generator=draw)
    data["paper"].y = torch.arange(COUNTS["paper"]) % CLASSES
    for name, mask in masks(COUNTS["paper"], draw).items():
        data["paper"][name] = mask
    data["paper"].time = torch.randint(3, 30, (COUNTS["paper"],), generator=draw)
    data["venue"].num_nodes = COUNTS["venue"]
    data[CITES].edge_index = ends("paper", "paper", 700)
    data[CITES].time = torch.randint(30, (700,), generator=draw)
    written = torch.cat([ends("author", "paper", 500), torch.tensor([[3, 3], [7, 7]])], 1)
    share, time = torch.rand(502, generator=draw), torch.randint(30, (502,), generator=draw)
    for kind, pairs in ((WRITES, written), (BACK, written.flip(0))):
        data[kind].edge_index, data[kind].time, data[kind].share = pairs, time, share
    data[WRITES].edge_attr = torch.randn(502, 2, generator=draw)
    at = torch.stack([torch.arange(COUNTS["paper"]), torch.arange(COUNTS["paper"]) % COUNTS["venue"]])
    data[AT].edge_index, data[PRINTS].edge_index = at, at.flip(0)
    return data


def dense() -> HeteroData:
    data = hetero()
    data["venue"].x = torch.randn(COUNTS["venue"], WIDTHS["venue"], generator=torch.Generator().manual_seed(8))
    return data


@cache
def typed() -> Graph:
    return Graph.from_pyg(dense(), edge_ids=True)


@cache
def typed_in_time() -> Graph:
    return Graph.from_pyg(hetero(), edge_ids=True, time="time")


def symmetric() -> Graph:
    draw = torch.Generator().manual_seed(9)
    ends = torch.randint(0, 200, (2, 900), generator=draw)
    ends = ends[:, ends[0] < ends[1]].unique(dim=1)
    x = torch.randn(200, WIDTH, generator=draw)
    return Graph.from_pyg(Data(x=x, edge_index=torch.cat([ends, ends.flip(0)], 1)))


def directed(**more: Any) -> Graph:
    """Without the arrays that tell other labels, and with times of few values."""
    draw = torch.Generator().manual_seed(10)
    ends = torch.randint(0, 200, (2, 1500), generator=draw)
    data = Data(x=torch.randn(200, WIDTH, generator=draw), edge_index=ends)
    data.edge_weight = torch.rand(1500, generator=draw)
    data.edge_attr = torch.randn(1500, 2, generator=draw)
    for name, array in more.items():
        data[name] = array
    return Graph.from_pyg(data, check_features=False)


def price(count: int) -> Tensor:
    found = torch.rand(count, generator=torch.Generator().manual_seed(11))
    return torch.where(found < 0.2, torch.nan, found)


def priced() -> Graph:
    return directed(edge_price=price(1500))


def timed(**more: Any) -> Graph:
    return directed(edge_time=torch.randint(50, (1500,), generator=torch.Generator().manual_seed(12)), **more)


def typed_for_links(*, priced: bool = False, mutual: bool = False) -> Graph:
    data = dense()
    for name in ("train_mask", "val_mask", "test_mask"):
        del data["paper"][name]
    if mutual:
        ends = torch.randint(COUNTS["paper"], (2, 200), generator=torch.Generator().manual_seed(13))
        ends = ends[:, ends[0] != ends[1]]
        data[PEERS].edge_index = torch.cat([ends, ends.flip(0)], 1)
    if priced:
        data[WRITES].price = price(502)
    return Graph.from_pyg(data, check_features=False)


Make = Callable[[], LinkSplit]
RIVALS: dict[str, Any] = {"val": 0.1, "test": 0.1, "seed": 1, "negatives": 5}
LABELS: dict[str, Any] = {"val": 0.1, "test": 0.1, "seed": 1}
SPLITS: dict[str, Make] = {
    "undirected": lambda: split_edges(symmetric(), **RIVALS),
    "directed": lambda: split_edges(directed(), undirected=False, **RIVALS),
    "labelled": lambda: split_edges(priced(), labels="edge_price", **LABELS),
    "events": lambda: split_edges(timed(), time="edge_time", **RIVALS),
    "labelled_events": lambda: split_edges(
        timed(edge_price=price(1500)), time="edge_time", labels="edge_price", **LABELS
    ),
    "typed": lambda: split_edges(typed_for_links(), edge_type=WRITES, **RIVALS),
    "typed_one_type": lambda: split_edges(typed_for_links(), edge_type=CITES, **RIVALS),
    "typed_mutual": lambda: split_edges(typed_for_links(mutual=True), edge_type=PEERS, **RIVALS),
    "typed_labelled": lambda: split_edges(typed_for_links(priced=True), edge_type=WRITES, labels="price", **LABELS),
    "typed_events": lambda: split_edges(typed_for_links(), edge_type=WRITES, time="time", **RIVALS),
}
SPLITS = {name: cache(partial(make)) for name, make in SPLITS.items()}


def asked_of(split: str) -> tuple[str, str, str] | None:
    """The edge type that a split is of, if its graph has types."""
    return {"typed_one_type": CITES, "typed_mutual": PEERS}.get(split, WRITES if split.startswith("typed") else None)
