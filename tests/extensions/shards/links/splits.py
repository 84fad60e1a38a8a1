"""A split of edges in shards, and the same split whole, numbered as the shards number it."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Fetch, Graph, LinkDataModule, LinkSplit, Partition, communities, split_edges
from lightning_gnn_dist.extensions.links.task import WholeEdges
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.batch_contents import contents
from tests.extensions.links.test_events import SENT, events
from tests.extensions.links.test_typed_links import WRITES
from tests.extensions.links.test_typed_links import papers as plain_papers
from tests.graph.parted import as_shards_number_it, small_graph
from tests.placing import placed


def undirected_split() -> LinkSplit:
    graph = communities(240, 4, num_features=5, mean_degree=8.0, noise=1.0, seed=3)
    graph.node_arrays["n_id"] = torch.arange(240)
    return split_edges(graph, 0.1, 0.1, negatives=12)


def directed_split(**options: Any) -> LinkSplit:
    return split_edges(small_graph(200, 2000, edge_arrays=True), 0.1, 0.05, negatives=7, undirected=False, **options)


def labelled_split() -> LinkSplit:
    graph = small_graph(200, 2000, edge_arrays=True)
    prices = torch.rand(2000, generator=torch.Generator().manual_seed(5))
    graph.edge_arrays["edge_price"] = torch.where(prices < 0.2, torch.nan, prices)
    return split_edges(graph, 0.1, 0.05, labels="edge_price")


@cache
def papers() -> Graph:
    """Papers and others: some resemble each other, both ways, and what an author wrote has a price or none."""
    data = plain_papers().to_pyg()
    prices = torch.rand(data[WRITES].edge_index.shape[1], generator=torch.Generator().manual_seed(0))
    data[WRITES].edge_price = torch.where(prices < 0.2, torch.nan, prices)
    data[WRITES].edge_attr = torch.stack([prices.sqrt(), prices.cos()], 1)
    return Graph.from_pyg(data, check_features=False)


def typed_split(kind: EdgeType, **options: Any) -> LinkSplit:
    return split_edges(papers(), 0.1, 0.1, edge_type=kind, **({"negatives": 7} | options))


def priced_split() -> LinkSplit:
    return typed_split(WRITES, labels="edge_price", negatives=None)


def events_split(*, both_ways: bool = False, **options: Any) -> LinkSplit:
    """Many events are of one time, and pairs recur."""
    generator = torch.Generator().manual_seed(6)
    ends, times = torch.randint(60, (2, 900), generator=generator), torch.randint(50, (900,), generator=generator)
    ends = torch.cat([ends, ends.flip(0)], 1) if both_ways else ends
    x, times = torch.randn(60, 4, generator=generator), times.repeat(1 + both_ways)
    data = Data(x=x, edge_index=ends, edge_time=times)
    data.edge_price = torch.rand(900, generator=generator).repeat(1 + both_ways)
    graph = Graph.from_pyg(data)
    graph.node_arrays["n_id"] = torch.arange(60)
    return split_edges(graph, 0.1, 0.1, time="edge_time", **({"negatives": 5} | options))


def typed_events_split(**options: Any) -> LinkSplit:
    """Events with a reverse type, and items that come later than others."""
    return split_edges(events(SENT, 1, 600), 0.1, 0.1, time="time", edge_type=SENT, **({"negatives": 4} | options))


def unequal(graph: Graph, num_parts: int) -> Partition:
    """Part 0 has most nodes, and the last one few."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(graph.num_nodes, generator=generator)
    return Partition((draws * draws * num_parts).to(torch.int32), num_parts)


def as_shards_have_it(split: LinkSplit, partition: Partition) -> tuple[LinkSplit, Partition]:
    """The split with the numbers of the shards, held edges in the order of the shards of their receivers."""
    types = split.graph.types
    kinds = types.type_of(torch.arange(split.graph.num_nodes))
    order = (kinds * partition.num_parts + partition.assignment).argsort(stable=True)
    number = order.argsort()
    first = [0, 0]
    if split.edge_type is not None:
        first = [types.nodes_of(split.edge_type[end]).start for end in (0, 2)]
    edges, negatives, arrays = {}, {}, {}
    for name, ends in split.edges.items():
        at = partition.assignment[ends[1].long() + first[1]].argsort(stable=True)
        edges[name] = torch.stack([number[ends[end].long() + first[end]][at] - first[end] for end in (0, 1)])
        if name in split.negatives:
            negatives[name] = number[split.negatives[name].long() + first[1]][at] - first[1]
        arrays[name] = {array: rows[at] for array, rows in split.held_arrays.get(name, {}).items()}
    held = {} if split.labels is None and split.time is None else arrays
    graph = as_shards_number_it(split.graph, partition)
    whole = replace(split, graph=graph, edges=edges, negatives=negatives, held_arrays=held)
    return whole, Partition(partition.assignment[order], partition.num_parts)


def of_shards(folder: str, rank: int, world_size: int, **options: Any) -> LinkDataModule:
    return placed(LinkDataModule(folder, **options), rank, world_size)  # type: ignore[no-any-return]


def of_whole(split: LinkSplit, partition: Partition, rank: int, world_size: int, **options: Any) -> LinkDataModule:
    return placed(OneHost(split, partitioner=partition, **options), rank, world_size)  # type: ignore[no-any-return]


class OneHost(LinkDataModule):
    """Asks for the direction of an undirected edge that shards ask for: their ids follow the ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._task.__class__ = OnOneHost


class OnOneHost(WholeEdges):
    def positions(self, graph: Graph, owner: Tensor) -> Tensor:
        found = super().positions(graph, owner)
        is_across = isinstance(self.home.boundary, Fetch) or not owner.any()  # else both ends are in one part
        if not self.known.undirected or graph is not self.home.whole or not is_across:
            return found
        sender, receiver = graph.indices.long(), torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
        is_asked = torch.where((sender + receiver) % 2 == 1, sender > receiver, sender < receiver)
        if self.known.edge_type is not None:
            is_asked &= graph.types.edge_type == graph.types.edge_types.index(self.known.edge_type)
        at = self.of_labels_and_times(graph, is_asked.nonzero().view(-1))
        assert at.numel() == super().positions(graph, owner * 0).numel()
        return at[owner[receiver[at]] >= 0]


def content(batch: Any) -> dict[str, Any]:
    """All that a batch has, but for masks."""
    return {name: value for name, value in contents(batch).items() if not name.endswith("train_mask")}
