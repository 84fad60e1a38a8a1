"""The pieces by hand: negatives that owners agree to, the shares of held edges, and how often others are asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, Loading, NeighborSampler, save_shards
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.links.link_sampler import FALSE_ENDS, FalseEnds
from lightning_gnn_dist.extensions.links.negatives import Candidates, draw_receivers
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard
from lightning_gnn_dist.extensions.shards.opening import held_of_shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedSource
from tests.extensions.shards.graphs import CountingGraph, change, joined, opened
from tests.extensions.shards.links.splits import of_shards, undirected_split, unequal
from tests.graph.parted import in_order_of_parts
from tests.ranks import run_ranks


def dense_graph(num_nodes: int = 90) -> Graph:
    """Node 0 sends to all others, node 1 to all but one, node 2 to half of them; others to few."""
    senders = [*[0] * num_nodes, *[1] * (num_nodes - 1), *[2] * (num_nodes // 2), *range(3, num_nodes)]
    receivers = [*range(num_nodes), *(v for v in range(num_nodes) if v != 40), *range(0, num_nodes, 2)]
    receivers += [(7 * v) % num_nodes for v in range(3, num_nodes)]
    return Graph.from_edge_index(torch.tensor([senders, receivers]), num_nodes, {"x": torch.ones(num_nodes, 1)})


def drawn(rank: int, world_size: int, folder: str, senders: list[int], candidates: range) -> tuple[list[int], int]:
    ids = torch.arange(len(senders)) + 100
    wanted = FalseEnds([torch.tensor([senders])], [ids], [BatchKey(5, 0, rank)], 2, Candidates(candidates))
    with opened(rank, world_size, folder) as graph:
        (found,) = graph.answered(graph.false_ends(wanted))
        return found.view(-1).tolist(), graph.turns


@pytest.mark.parametrize("candidates", [range(90), range(30, 75)], ids=["all", "some"])
def test_negatives_are_those_of_one_host(tmp_path: Path, candidates: range) -> None:
    graph = dense_graph()
    partition = unequal(graph, 3)
    save_shards(graph, partition, tmp_path / "shards")
    whole, number = in_order_of_parts(graph, partition), partition.assignment.argsort(stable=True).argsort()
    senders = number[[0, 1, 2, 2, 2, 50]].tolist()
    results = run_ranks(drawn, 3, str(tmp_path / "shards"), senders, candidates)
    for rank, (found, turns) in enumerate(results):
        word = key(5, 0, rank, FALSE_ENDS)
        ids, among = torch.arange(6) + 100, Candidates(candidates)
        expected, _ = draw_receivers(whole, torch.tensor([senders]), ids, 2, word, among)
        assert found == expected.flatten().tolist()
        assert turns == 2 + -(-len(candidates) // 64)  # node 0 sends to all: 2 tries, 14, then all nodes in blocks


def turns_of_bulks(rank: int, world_size: int, folder: str, fanouts: list[int]) -> list[int]:
    data, turns = of_shards(folder, rank, world_size, sampler=NeighborSampler(fanouts)), []
    with joined(rank, world_size) as channel:
        data.setup("fit")
        graph, seeds = CountingGraph(data._home.shard, channel), data._task._own()  # type: ignore[attr-defined]
        for count in (1, 6):
            source = ShardedSource(graph, data._task.across(data.sampler), Loading())
            of_bulk = [([seeds[10 * i : 10 * i + 10]], [BatchKey(0, 0, i)], None) for i in range(count)]
            before = graph.turns
            for _, batches in source.make_in_turn(iter(of_bulk)):
                list(batches)
            turns.append(graph.turns - before)
        graph.close()
        data.teardown("fit")
    return turns


def test_a_bulk_of_edges_takes_one_turn_more_than_one_of_nodes(tmp_path: Path) -> None:
    split = undirected_split()
    save_shards(split, unequal(split.graph, 2), tmp_path / "shards")
    for alone, six in run_ranks(turns_of_bulks, 2, str(tmp_path / "shards"), [4, 3]):
        # One for negatives, two for hops, one for rows; a few pairs of tries are both edges in so small a graph.
        assert alone in (4, 5) and six <= 4 + 5 + 2


# Splits of edges in shards: where each held edge lies, what the index says, and what is refused.


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    split = undirected_split()
    save_shards(split, unequal(split.graph, 2), tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"held": {"val": [0, 1]}}, "it must say how many held edges shards have"),
        ({"held": {"val": [0, 5, 4]}}, "it must say how many held edges shards have"),
        ({"held": {"train": [0, 1, 2]}}, "it must say how many held edges shards have"),
        ({"held": [1]}, "the entry 'held' is"),
        ({"edge_type": ["a", "b", "c"]}, "the graph has no edges of type"),
        ({"hide": 3}, "the entry 'hide' is 3"),
        ({"hide": False}, r"tells of shown edges\. split_edges\.hide went: "),
    ],
)
def test_a_damaged_index_is_refused(shards: Path, entries: dict[str, Any], message: str) -> None:
    change(shards / "shares.json", "links", **entries)
    with pytest.raises(ValueError, match=message):
        Bounds.read(shards)


def test_held_edges_of_another_division_are_refused(shards: Path) -> None:
    about = json.loads((shards / "shares.json").read_text())
    about["links"]["held"]["val"][1] += 1
    (shards / "shares.json").write_text(json.dumps(about))
    bounds = Bounds.read(shards)
    assert bounds.links is not None
    with pytest.raises(ValueError, match=r"does not hold the \d+ val edges .*two divisions\. Copy both"):
        held_of_shard(Shard.open(shards, 0), bounds.links, "val")


def test_changed_held_edges_are_refused(shards: Path) -> None:
    file = shards / "share-00001" / "links" / "test_negatives.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    bounds = Bounds.read(shards)
    assert bounds.links is not None
    with pytest.raises(ValueError, match="test_negatives"):
        held_of_shard(Shard.open(shards, 1), bounds.links, "test")


def test_a_saved_split_is_divided_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    undirected_split().save(tmp_path / "split")
    folder = str(tmp_path / "shards")
    main(["divide", str(tmp_path / "split"), folder, "--parts", "2", "--partitioner", "random"])
    said = capsys.readouterr().out
    assert "edges are predicted; held back: " in said and "train on LinkDataModule(path)" in said
    main(["inspect", folder])
    held = [edges.shape[1] for edges in undirected_split().edges.values()]
    assert f"held back: {held[0]} to validate and {held[1]} to test" in capsys.readouterr().out
    main(["inspect", folder, "--check"])
    assert capsys.readouterr().out.count("all arrays are what was saved") == 2
    shutil.rmtree(tmp_path / "shards" / "share-00001")
    main(["inspect", folder, "--check"])
