"""Looking up node ids."""

import pytest
import torch

from lightning_gnn_dist.graph.rows import Lookup


@pytest.mark.parametrize("most", [40, 100_000], ids=["dense", "sparse"])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("num_asked", [3, 500], ids=["few", "many"])
@pytest.mark.parametrize("first", [0, 7_000])
def test_ids_are_found_where_they_are(most: int, is_sorted: bool, num_asked: int, first: int) -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randperm(most, generator=generator)[:20] + first
    nodes = nodes.sort().values if is_sorted else nodes
    some = nodes[torch.randint(20, (num_asked,), generator=generator)]
    asked = torch.where(torch.rand(num_asked, generator=generator) < 0.5, some, some + first // 2 - 2)
    places = {node: at for at, node in enumerate(nodes.tolist())}
    lookup = Lookup(nodes)
    for _ in range(2):
        at, is_found = lookup(asked)
        assert is_found.tolist() == lookup.contains(asked).tolist() == [node in places for node in asked.tolist()]
        assert at.tolist() == [places[node] for node in asked.tolist() if node in places]


def test_no_node_has_no_place() -> None:
    at, is_found = Lookup(torch.empty(0, dtype=torch.int64))(torch.tensor([3, 5]))
    assert at.numel() == 0 and is_found.tolist() == [False, False]
