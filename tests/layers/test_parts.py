"""The parts of an evaluation by layers, each against the plainest thing that does the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import NeighborSampler
from lightning_gnn_dist.homes.run import DEFAULT_BYTES, halved
from lightning_gnn_dist.homes.settings import LEAST_BYTES
from lightning_gnn_dist.layers.choice import Counter, Judged, Neighbourhoods
from lightning_gnn_dist.layers.layer_pass import GraphNodes, LayerPass, Work
from lightning_gnn_dist.wire import memory as of_hosts
from lightning_gnn_dist.wire.channel import open_channel
from lightning_gnn_dist.wire.memory import free_bytes, ranks_here
from tests.layers.models import Sage, graph_of, uneven_data, whole_rows

CPU = torch.device("cpu")
DATA = uneven_data()
GRAPH = graph_of(DATA)
EDGES = [tuple(edge) for edge in DATA.edge_index.t().tolist()]


def brute_reach(seeds: list[int], num_hops: int) -> tuple[list[int], list[int]]:
    found, nodes, edges = set(seeds), [len(seeds)], []
    for _ in range(num_hops):
        into = [edge for edge in EDGES if edge[1] in found]
        found |= {sender for sender, _ in into}
        nodes.append(len(found)), edges.append(len(into))
    return nodes, edges


@pytest.mark.parametrize("num_hops", [1, 2, 4])
def test_reach_counts_what_sets_count(num_hops):
    neighbourhoods = Neighbourhoods(GRAPH, num_hops)
    chance = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 7, 90, 1):
        seeds = torch.randperm(90, generator=chance)[:size]
        assert neighbourhoods.of(seeds) == brute_reach(seeds.tolist(), num_hops)
        senders = {sender for sender, node in EDGES if node in seeds.tolist()} | set(seeds.tolist())
        assert neighbourhoods.senders(seeds).tolist() == sorted(senders)
        hops = neighbourhoods.hops(seeds)
        assert [sum(map(len, hops[: hop + 1])) for hop in range(num_hops + 1)] == brute_reach(seeds.tolist(), num_hops)[
            0
        ]
        assert set(torch.cat(hops[:2]).tolist()) == senders
        stopped = neighbourhoods.of(seeds, 3)
        assert stopped.edges[-1] > 3 or stopped == brute_reach(seeds.tolist(), num_hops)
    assert not neighbourhoods._found.any()


def evaluated(num_seeds: int, num_ranks: int) -> Judged:
    ids = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:num_seeds]
    return Judged(ids, num_ranks, "", lambda _: NeighborSampler([-1, -1]))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("num_seeds", [7, 8, 50, 90])
def test_evaluation_batches_are_as_large_as_fits(num_ranks, num_seeds):
    counter, seeds = Counter(GRAPH, 2, Sage(2)), evaluated(num_seeds, num_ranks)
    share = -(-num_seeds // num_ranks)
    assert counter.batch_size(seeds, 4, 1 << 30) == max(share, 4)  # all at once
    assert counter.batch_size(seeds, 4, 1) == 4  # never less than training batches
    sizes = [counter.batch_size(seeds, 4, num_bytes) for num_bytes in (1, 20_000, 60_000, 90_000, 1 << 30)]
    assert sizes == sorted(sizes)
    assert all(4 <= size <= max(share, 4) for size in sizes)


def test_a_batch_that_fits_keeps_to_the_budget():
    counter, seeds = Counter(GRAPH, 2, Sage(2)), evaluated(90, 1)
    for num_bytes in range(5_000, 120_000, 5_000):
        size = counter.batch_size(seeds, 1, num_bytes)
        if size > 1:
            reached = [Neighbourhoods(GRAPH, 2).of(nodes) for nodes in seeds.some(seeds.num_batches(size))]
            assert max(counter.bytes_of(each.nodes[-1], each.edges[-1]) for each in reached) <= num_bytes


def rows_of(layers: Any, seeds: Tensor, budget_bytes: int = 1 << 30) -> Tensor:
    nodes = GraphNodes(GRAPH, torch.tensor([0, GRAPH.num_nodes]))
    work = LayerPass(nodes, open_channel(1), Work(CPU, None, True, budget_bytes)).plan_for(seeds, len(layers))
    with torch.no_grad():
        return work.rows(layers).take([seeds])[0]


def check_small_batches(rows_of: Callable[..., Tensor], budget_bytes: int) -> None:
    module, sizes = Sage(3).double(), []
    expected = whole_rows(module, DATA)
    layers = [lambda batch, layer=layer: sizes.append(batch.batch_size) or layer(batch) for layer in module.layers()]
    seeds = DATA.test_mask.nonzero().view(-1)
    assert torch.allclose(rows_of(layers, seeds, budget_bytes), expected[seeds], rtol=0, atol=1e-12)
    assert (len(sizes) == 3) == (budget_bytes == 1 << 30)
    assert (set(sizes) == {1}) == (budget_bytes == 1)


@pytest.mark.parametrize("budget_bytes", [1, 30_000, 200_000, 1 << 30])
def test_many_small_batches_make_the_rows_of_one(budget_bytes):
    check_small_batches(rows_of, budget_bytes)


def test_other_errors_of_a_layer_are_raised_at_once():
    calls = []

    def broken(batch: Any) -> Tensor:
        calls.append(0)
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot"):
        rows_of([broken], torch.arange(90))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda batch: None, "a NoneType"),
        (lambda batch: batch.x[:1], r"a tensor of \(1, \d+\)"),
        (lambda batch: 3, "a int"),
    ],
)
def test_what_is_no_row_for_each_seed_is_refused(made, got):
    with pytest.raises(TypeError, match=f"Layer 0 of layers\\(\\) returned {got} for a batch"):
        rows_of([made], torch.arange(90))


def test_rows_of_a_type_that_ranks_cannot_name_are_refused():
    with pytest.raises(TypeError, match=r"Layer 0 of layers\(\) .* torch\.complex64, and may return torch\.float32, "):
        rows_of([lambda batch: batch.x[: batch.batch_size].to(torch.complex64)], torch.arange(90))


@pytest.mark.parametrize(
    ("limit", "stat", "free"),
    [
        ("max", "anon 5\nfile 7", None),
        (str(3 << 30), f"anon {1 << 30}\nfile {1 << 30}\n", 2 << 30),
        (str(1 << 30), f"file 1\nanon {2 << 30}\n", 0),
        (str(1 << 30), "", 1 << 30),
        (str(1 << 30), f"anon {1 << 28}\nshmem {1 << 28}\n", 1 << 29),
        (str(1 << 62), "anon 1", None),
    ],
)
def test_memory_that_a_group_of_processes_may_take(limit, stat, free, tmp_path, monkeypatch):
    free_here = free_bytes()
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(of_hosts, "_groups", lambda: [(tmp_path, *of_hosts._GROUPS[""])])
    found = free_bytes()
    if free is None:
        assert abs(found - free_here) < 8 << 30
    else:
        assert found == min(free, found) and found >= 0
        assert halved(DEFAULT_BYTES, found) <= max(free // 2, LEAST_BYTES)
        assert halved(LEAST_BYTES, found) == LEAST_BYTES


@pytest.mark.parametrize(
    ("group", "limit", "stat"),
    [
        ("0::/a/b", "memory.max", "anon"),
        ("0::/a/b", "memory.high", "shmem"),
        ("4:memory:/a/b", "memory.limit_in_bytes", "total_rss"),
    ],
)
def test_the_tightest_of_nested_groups_counts(group, limit, stat, tmp_path, monkeypatch):
    """A group without a limit of its own in one that has one, for both versions."""
    root = tmp_path / ("memory" if "memory:" in group else "")
    for folder, most in ((root / "a" / "b", "max"), (root / "a", "5000"), (root, "9000")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(most)
        (folder / "memory.stat").write_text(f"{stat} 1000\nfile 3000")
    (tmp_path / "own").write_text(f"7:cpu:/x\n{group}\n")
    monkeypatch.setattr(of_hosts, "_ROOT", tmp_path)
    monkeypatch.setattr(of_hosts, "_OWN", tmp_path / "own")
    assert free_bytes() == 4000


def test_ranks_of_a_host(monkeypatch):
    for given, ranks in (("2", 2), ("0", 8), ("9", 8), ("x", 8), ("", 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
        assert ranks_here(8) == ranks
