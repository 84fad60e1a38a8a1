"""Fits on shards of edges: every strategy, exact ranking, copies of shards, resuming, and what is refused."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_gnn_dist as lgd
from lightning_gnn_dist import Graph, Loading, NeighborSampler, save_shards
from lightning_gnn_dist.batches.batches import GlobalBatches, OwnSeeds
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.links.link_sampler import FALSE_ENDS, FalseEnds
from lightning_gnn_dist.extensions.links.negatives import Candidates, draw_receivers
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard
from lightning_gnn_dist.extensions.shards.opening import held_of_shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedSource
from tests.batch_contents import check_same
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.links.link_model import LinkSAGE, Targets, held, ranks_by_hand
from tests.extensions.links.test_typed_links import CITES, PEERS, WRITES
from tests.extensions.shards.graphs import CountingGraph, change, joined, opened
from tests.extensions.shards.links.splits import (
    OneHost,
    as_shards_have_it,
    content,
    directed_split,
    events_split,
    labelled_split,
    of_shards,
    of_whole,
    papers,
    priced_split,
    typed_events_split,
    typed_split,
    undirected_split,
    unequal,
)
from tests.graph.parted import in_order_of_parts, small_graph
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, state_of

OPTIONS: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 4]), "batch_size": 40}


class Outcome(NamedTuple):
    asked: list[Targets]
    judged: list[Targets]
    state: State
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two unequal shards of a split, and one shard of it."""
    folder, split = tmp_path_factory.mktemp("links"), undirected_split()
    for num_shards in (1, 2):
        lgd.save_shards(split, unequal(split.graph, num_shards), folder / f"of {num_shards}")
    return folder


def model() -> LinkSAGE:
    torch.manual_seed(0)
    return LinkSAGE(5)


def fit(rank: int, world_size: int, strategy: Any, data: Any) -> Outcome:
    """What a fit of two epochs and a test ask for, and what they end with."""
    if isinstance(data, str):
        data = lgd.LinkDataModule(data, evaluation=lgd.Evaluation(batch_size=20), **OPTIONS)
    module, fitting = model(), trainer(world_size, strategy)
    fitting.fit(module, data)
    (metrics,) = fitting.test(module, data, verbose=False)
    return Outcome(module.asked, module.judged, state_of(module), dict(metrics))


def true_pairs(batches: list[Targets]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(t[:2])) for targets in batches for t in targets if t[2])


def test_copies_of_shards_divide_their_edges_and_all_ranks_the_held_ones(saved: Path) -> None:
    split = undirected_split()
    results = run_ranks(fit, 4, lgd.GrappaStrategy(**PATIENCE), str(saved / "of 2"))
    (batches,) = {len(result.asked) for result in results}
    sender, receiver = split.graph.indices.tolist(), split.graph.indptr.diff()
    to = torch.arange(split.graph.num_nodes).repeat_interleave(receiver).tolist()
    every = Counter((s, r) for s, r in zip(sender, to, strict=True) if s < r)
    for half in (slice(0, batches // 2), slice(batches // 2, None)):
        asked = sum((true_pairs(result.asked[half]) for result in results), Counter[tuple[int, ...]]())
        assert asked == every
    owner = unequal(split.graph, 2).assignment.tolist()
    for rank, result in enumerate(results):  # receivers are the shard's own, as one of two directions is drawn
        assert all(rank % 2 in (owner[s], owner[r]) for s, r in true_pairs(result.asked))
    judged = Counter(target for result in results for targets in result.judged for target in targets)
    assert judged == held(split, "val") + held(split, "val") + held(split, "test")  # two epochs, then the test
    counts = [sum(int(t[2]) for targets in result.judged for t in targets) for result in results]
    assert max(counts) - min(counts) <= 3
    alone = model()
    alone.load_state_dict(results[0].state)
    ranks = ranks_by_hand(alone, split, "test")
    assert results[0].metrics["mrr"] == pytest.approx(float((1 / ranks).mean()), rel=1e-5)


def resumed(rank: int, world_size: int, folder: str, path: str, name: str, stops: bool) -> State:
    """Fit nine steps, or four rounds, or stop half-way and go on from the checkpoint."""
    corrects = lgd.Correction(1)
    strategies: dict[str, Any] = {"llcg": lambda: lgd.LLCGStrategy(lgd.EverySteps(3), correction=corrects, **PATIENCE)}
    strategies["grappa"] = lambda: lgd.GrappaStrategy(**PATIENCE)  # in the middle of a pass
    half, whole, limit = (2, 4, "max_epochs") if name == "llcg" else (5, 9, "max_steps")
    plain: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 0}
    every = {"every_n_epochs": half} if name == "llcg" else {"every_n_train_steps": half}
    for to in (half, whole) if stops else (whole,):
        keep = ModelCheckpoint(
            f"{path}/{to}", filename=name, save_top_k=-1, save_on_train_epoch_end=name == "llcg", **every
        )
        options = plain | {"callbacks": [keep], "enable_checkpointing": True, limit: to}
        module, again = model(), to == whole and stops
        data, start = lgd.LinkDataModule(folder, **OPTIONS), f"{path}/{half}/{name}.ckpt" if again else None
        trainer(world_size, strategies[name](), **options).fit(module, data, ckpt_path=start)
    return state_of(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llcg", "grappa"])
def test_a_resumed_fit_ends_as_one_that_never_stopped(saved: Path, tmp_path: Path, name: str) -> None:
    whole = run_ranks(resumed, 2, str(saved / "of 2"), str(tmp_path / "whole"), name, False)
    parts = run_ranks(resumed, 2, str(saved / "of 2"), str(tmp_path), name, True)
    assert differs(whole[0], parts[0]) == 0.0 and differs(whole[0], state_of(model())) > 0


def test_embeddings_of_the_receivers_type_can_be_predicted(tmp_path: Path) -> None:
    split = typed_split(WRITES)
    lgd.save_shards(split, unequal(split.graph, 1), tmp_path / "shards")
    data = lgd.LinkDataModule(tmp_path / "shards", sampler=lgd.NeighborSampler([2, 2]))
    data.setup("predict")
    nodes = [n for batch in data.predict_dataloader() for n in batch["paper"].n_id[: batch.batch_size].tolist()]
    data.teardown("predict")
    assert nodes == list(range(200)) and data.num_nodes == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundary": lgd.Exchange()}, r"boundary must be Isolated\(\), Halo\(\) or Fetch\(\) for edges, got Exchange"),
        ({"sampler": lgd.ShadowSampler([4, 4], num_hops=2)}, "got ShadowSampler"),
        ({"global_batching": lgd.GlobalBatching(sampler=lgd.LadiesSampler([4, 4]))}, "got LadiesSampler"),
        ({"sampler": lgd.TemporalSampler([4, 4], "time")}, "holds them back at random.*or take NeighborSampler"),
        ({"sampler": lgd.WholePartSampler(2), "boundary": lgd.Fetch()}, r"take NeighborSampler, or boundary=Isolated"),
        ({"partitioner": lgd.RandomPartitioner()}, "a graph is cut when it is divided: leave partitioner="),
        ({"holding": lgd.Holding(extra_nodes=0.5)}, "a graph is cut when it is divided: leave holding="),
    ],
)
def test_what_cannot_work_is_refused(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.LinkDataModule(saved / "of 2", **options)


def test_folders_are_for_one_module_each(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"learn edges with LinkDataModule\(path\), or for nodes"):
        lgd.PartitionedDataModule(saved / "of 2")
    graph = small_graph()
    lgd.save_shards(graph, unequal(graph, 2), tmp_path / "nodes")
    with pytest.raises(ValueError, match=r"edges are not split: divide a split, as in save_shards\(split_edges"):
        lgd.LinkDataModule(tmp_path / "nodes")


def test_names_that_were_not_held_back(tmp_path: Path) -> None:
    split = lgd.split_edges(small_graph(), 0.1, 0.0, negatives=3, undirected=False)
    lgd.save_shards(split, unequal(split.graph, 1), tmp_path / "shards")
    data = lgd.LinkDataModule(tmp_path / "shards")
    with pytest.raises(RuntimeError, match=r"A graph in shards .* has no batches before its ranks have met"):
        data.val_dataloader()
    data.setup("test")
    with pytest.raises(ValueError, match=r"holds no test edges back \(it has: \['val'\]\): divide split_edges"):
        data.test_dataloader()
    data.teardown("test")


def started(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    trainer(world_size, lgd.GrappaStrategy(**PATIENCE)).fit(model(), lgd.LinkDataModule(folder, **OPTIONS, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no edges to learn that lead to shard 1 "),
        ({"boundary": lgd.Isolated()}, r"inside shard 1 .*boundary=Fetch\(\)"),
    ],
    ids=["fetch", "isolated"],
)
def test_a_shard_without_edges_is_refused_by_all_ranks(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    split = lgd.split_edges(small_graph(300, 600), 0.1, 0.1, negatives=3, undirected=False)
    alone = (split.graph.degrees() == 0).int()  # nodes that receive nothing
    lgd.save_shards(split, lgd.Partition(alone, 2), tmp_path / "shards")
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(started, 2, str(tmp_path / "shards"), options)
    assert len(caught.value.failures) == 2


def test_nodes_without_times_are_not_predicted(tmp_path: Path) -> None:
    split = events_split()
    lgd.save_shards(split, unequal(split.graph, 1), tmp_path / "shards")
    sharded = lgd.LinkDataModule(tmp_path / "shards")
    sharded.setup("predict")
    for data in (sharded, OneHost(split)):
        with pytest.raises(ValueError, match=r"rows at the times of its events.*score events by trainer\.test"):
            data.predict_dataloader()


# Batches of edges across shards are those of the module that has the whole graph, bit for bit.


SAMPLED: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 48, "seed": 2}
OWN = lgd.GlobalBatching(batch_size=31)
Made = dict[str, list[dict[str, Any]]]


def made_by(data: Any, corrections: Any) -> Made:
    """Two passes of training batches, corrections, anchors, and the evaluation."""
    made = {"train": list(map(content, islice(data.train_dataloader().stream(0), 2 * data._task.num_batches())))}
    made["corrections"] = list(map(content, corrections(3)))
    made["anchors"] = list(map(content, data.anchor_batches(2)))
    made["val"] = list(map(content, data.val_dataloader()))
    return made


def drawn_on_shards(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Made:
    with joined(rank, world_size):
        data = of_shards(folder, rank, world_size, global_batching=OWN, **options)
        data.setup("fit")
        made = made_by(data, lambda round_idx: data.correction_batches(round_idx, stop=3))
        data.teardown("fit")
    return made


def own_corrections(data: lgd.LinkDataModule, rank: int, num_ranks: int) -> Any:
    """Batches of the whole graph of which each rank deals the edges into its part."""
    graph, owner = data._home.whole, data.partition(num_ranks).assignment
    seeds = data._task.of_corrections()
    receivers = (graph.indptr[1:, None] <= seeds).sum(0)
    own = seeds[owner[receivers] == rank]
    settings = OWN.batch_size, data.seed, 1
    dealt = OwnSeeds(own, seeds.numel())
    return lambda round_idx: GlobalBatches(
        data._home.whole_source(data._task.across(data._home.running.settings.correction_sampler)), dealt, *settings
    ).of_round(round_idx, rank, num_ranks, stop=3)


PER_TYPE = lgd.NeighborSampler({kind: [3, 2] for kind in papers().types.edge_types})  # type: ignore[union-attr]
BY_TIME = lgd.TemporalSampler([4, 3], "edge_time")
OF_TYPES = lgd.TemporalSampler([3, 2], "time", pick="latest")
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "alone": (1, undirected_split, {}),
    "two": (2, directed_split, {"num_negatives": 2}),
    "three": (3, undirected_split, {"loading": lgd.Loading(bulk_size=3, ahead_bytes=0, cache_bytes=0)}),
    "four": (4, undirected_split, {"num_negatives": 3, "loading": lgd.Loading(bulk_size=1, cache_bytes=900)}),
    "labels": (2, labelled_split, {}),
    "isolated": (2, undirected_split, {"boundary": lgd.Isolated(), "num_negatives": 2}),
    "halo": (3, directed_split, {"boundary": lgd.Halo(1)}),
    "labels isolated": (2, labelled_split, {"boundary": lgd.Isolated()}),
    "labels in halos": (2, labelled_split, {"boundary": lgd.Halo(2)}),
    "typed alone": (1, partial(typed_split, WRITES), {}),
    "typed": (3, partial(typed_split, WRITES), {"num_negatives": 2, "sampler": PER_TYPE}),
    "typed, one type": (2, partial(typed_split, CITES), {"loading": lgd.Loading(bulk_size=1, cache_bytes=900)}),
    "typed, both ways": (2, partial(typed_split, PEERS), {"batch_size": 3}),
    "typed labels": (2, priced_split, {"loading": lgd.Loading(cache_bytes=0)}),
    "typed, isolated": (2, partial(typed_split, WRITES), {"boundary": lgd.Isolated()}),
    "typed, halo": (2, partial(typed_split, CITES), {"boundary": lgd.Halo(1), "num_negatives": 2}),
    "typed labels in halos": (2, priced_split, {"boundary": lgd.Halo(1)}),
    "events alone": (1, events_split, {"sampler": BY_TIME}),
    "events": (3, events_split, {"sampler": BY_TIME, "num_negatives": 3, "loading": lgd.Loading(cache_bytes=0)}),
    "events, equal times": (2, events_split, {"sampler": replace(BY_TIME, equal=True)}),
    "events both ways": (3, partial(events_split, both_ways=True), {"sampler": replace(BY_TIME, equal=True)}),
    "events, isolated": (2, events_split, {"sampler": BY_TIME, "boundary": lgd.Isolated()}),
    "events in halos": (2, events_split, {"sampler": BY_TIME, "boundary": lgd.Halo(1), "num_negatives": 2}),
    "labelled events": (2, partial(events_split, labels="edge_price", negatives=None), {"sampler": BY_TIME}),
    "typed events": (3, typed_events_split, {"sampler": OF_TYPES, "num_negatives": 3}),
    "typed events, equal times": (2, typed_events_split, {"sampler": replace(OF_TYPES, equal=True)}),
    "typed events in halos": (2, typed_events_split, {"sampler": OF_TYPES, "boundary": lgd.Halo(1)}),
}


QUICK = ("alone", "typed events")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_batches_are_those_of_the_whole_graph(tmp_path: Path, case: str) -> None:
    world_size, make, options = CASES[case]
    split: lgd.LinkSplit = make()
    partition = unequal(split.graph, world_size)
    lgd.save_shards(split, partition, tmp_path / "shards")
    whole, parts = as_shards_have_it(split, partition)
    options = SAMPLED | {"evaluation": lgd.Evaluation(batch_size=20)} | options
    results = run_ranks(drawn_on_shards, world_size, str(tmp_path / "shards"), options)
    for rank, found in enumerate(results):
        expected = by_one_host(whole, parts, rank, world_size, options)
        for kind, batches in expected.items():
            assert batches, kind
            check_same(found[kind], batches)


def by_one_host(split: lgd.LinkSplit, parts: lgd.Partition, rank: int, num_ranks: int, options: dict[str, Any]) -> Made:
    others = {name: value for name, value in options.items() if name != "loading"}
    boundary = options.get("boundary", lgd.Fetch())
    data = of_whole(split, parts, rank, num_ranks, **(others | {"boundary": boundary}))
    made = made_by(data, own_corrections(data, rank, num_ranks))
    is_part = not isinstance(boundary, lgd.Fetch) and num_ranks > 1
    if is_part and not split.graph.types.have_names:  # it calls nodes by its own ids
        n_id = split.graph.node_arrays["n_id"]
        for batch in (*made["train"], *made["anchors"]):
            batch["n_id"] = n_id[batch["n_id"]]
    return made


# The pieces by hand: negatives that owners agree to, the shares of held edges, and how often others are asked.


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
