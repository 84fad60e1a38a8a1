"""The data module on typed graphs: in one process and on ranks, with every strategy, and what it refuses."""

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from tests.data_fitting import SOME_STRATEGIES, fit_whole_and_resumed, trainer
from tests.every_strategy import every_strategy
from tests.graph.typed.graphs import small
from tests.placing import seeds_and_source
from tests.ranks import run_ranks
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

STRATEGIES = every_strategy()


def module_of(graph: lgd.Graph) -> HeteroSAGE:
    torch.manual_seed(0)
    return HeteroSAGE(list(graph.types.edge_types))


def whole_rows(module: HeteroSAGE, graph: lgd.Graph) -> Tensor:
    """One forward over the whole graph."""
    with torch.no_grad():
        return module.eval()(graph.to_pyg())


def data_of(graph: lgd.Graph, **options: Any) -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(graph, **({"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 32} | options))


@pytest.mark.slow
def test_it_learns_and_is_judged_on_the_whole_graph(tmp_path: Path) -> None:
    typed_graph_of_papers().save(tmp_path / "graph")
    graph = lgd.Graph.open(tmp_path / "graph")
    module, data = module_of(graph), lgd.PartitionedDataModule(tmp_path / "graph", batch_size=32)
    fit = trainer(1, max_epochs=6)
    fit.fit(module, data)
    fit.test(module, data, verbose=False)
    papers = graph.types.node_arrays["paper"]
    is_right = (whole_rows(module, graph).argmax(1) == papers["y"])[papers["test_mask"]]
    assert float(fit.callback_metrics["test_acc"]) == pytest.approx(float(is_right.float().mean()), abs=1e-6)
    assert float(is_right.float().mean()) > 0.8
    rows = torch.cat(fit.predict(module, data))  # type: ignore[arg-type]
    torch.testing.assert_close(rows, whole_rows(module, graph), rtol=0, atol=1e-5)


def test_predictions_are_of_the_seeds_type(tmp_path: Path) -> None:
    graph = typed_graph_of_papers()
    module = module_of(graph)
    one = trainer(1, callbacks=[lgd.PredictionWriter(tmp_path / "rows.npy")])
    one.predict(module, data_of(graph), return_predictions=False)
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), whole_rows(module, graph).numpy(), atol=1e-5)


def states_after(rank: int, world_size: int, names: list[str]) -> list[list[Any]]:
    graph = typed_graph_of_papers()
    found = []
    for name in names:
        module, data = module_of(graph), data_of(graph)
        fit = trainer(world_size, STRATEGIES[name](), max_epochs=2)
        fit.fit(module, data)
        fit.test(module, data, verbose=False)
        weights = torch.cat([weight.detach().view(-1) for weight in module.parameters()])
        found.append([weights, float(fit.callback_metrics["test_acc"])])
    return found


@pytest.mark.parametrize("names", SOME_STRATEGIES)
def test_every_strategy_trains_equal_replicas_judged_exactly(names: list[str]) -> None:
    graph = typed_graph_of_papers()
    papers = graph.types.node_arrays["paper"]
    first, second = run_ranks(states_after, 2, names)
    for (weights, accuracy), (others, other) in zip(first, second, strict=True):
        module = module_of(graph)
        assert weights.equal(others) and accuracy == other
        assert not weights.equal(torch.cat([weight.detach().view(-1) for weight in module.parameters()]))
        torch.nn.utils.vector_to_parameters(weights, module.parameters())
        is_right = (whole_rows(module, graph).argmax(1) == papers["y"])[papers["test_mask"]]
        assert accuracy == pytest.approx(float(is_right.float().mean()), abs=1e-6)


BOUNDARIES = [lgd.Isolated(), lgd.Halo(1), lgd.Halo(2), lgd.Halo(1, neighbors=1)]


@pytest.mark.parametrize("holding", [lgd.Holding(), lgd.Holding(lgd.Rotate()), lgd.Holding(extra_nodes=0.2)], ids=repr)
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=repr)
def test_parts_are_those_of_the_graph_without_types(boundary: Boundary, holding: lgd.Holding) -> None:
    """The same nodes, edges, training nodes and weights; only the order of nodes is another."""
    typed = typed_graph_of_papers()
    mask = torch.zeros(typed.num_nodes, dtype=torch.bool).index_fill_(0, typed.split("train"), True)
    edge = {"edge_place": torch.arange(typed.num_edges)}
    plain = lgd.Graph(typed.indptr, typed.indices, {"train_mask": mask}, edge)
    weighs = lgd.Coverage(shrinkage=2.0)
    options: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "boundary": boundary, "holding": holding}
    for rank in range(2):
        part = lgd.PartitionedDataModule(typed, coverage=weighs, **options).part(rank, 3, 1)
        other = lgd.PartitionedDataModule(plain, coverage=weighs, **options).part(rank, 3, 1)
        order = other.node_arrays["n_id"].argsort()
        assert part.node_arrays["n_id"].equal(other.node_arrays["n_id"][order])
        for name in ("train_mask", "coverage"):
            torch.testing.assert_close(part.node_arrays[name], other.node_arrays[name][order])
        assert part.num_edges == other.num_edges and part.degrees().equal(other.degrees()[order])
        assert typed.types is not None
        part.check_edges()
        kinds = typed.types.edge_type[other.edge_arrays["edge_place"]]
        assert part.types.num_edges == tuple(torch.bincount(kinds.long(), minlength=8).tolist())
        for kind, arrays in part.types.node_arrays.items():
            ids = typed.types.to_global(kind, arrays["n_id"])
            assert part.node_arrays["n_id"][part.types.nodes_of(kind)].equal(ids)
            assert arrays["x"].equal(typed.types.node_arrays[kind]["x"][arrays["n_id"]])


def test_batches_of_a_part_bring_its_weights() -> None:
    graph = typed_graph_of_papers()
    data = data_of(graph, partitioner=lgd.RandomPartitioner(), boundary=lgd.Isolated())
    part = data.part(0, 2)
    seeds, source = seeds_and_source(data, part, 0, 2)
    (batch,) = source.make([seeds[:5]], [(0, 0, 0)], [data._task.inputs_of(part, seeds[:5])])  # type: ignore[list-item]
    assert batch.coverage.equal(part.node_arrays["coverage"][seeds[:5]]) and bool((batch.coverage < 1).any())
    assert graph.split("train")[batch["paper"].input_id].equal(part.node_arrays["n_id"][seeds[:5]])
    assert batch["paper"].n_id[:5].equal(part.node_arrays["n_id"][seeds[:5]])
    assert batch["paper"].train_mask.equal(graph.types.node_arrays["paper"]["train_mask"][batch["paper"].n_id])


def test_types_that_are_left_out_are_left_out_everywhere() -> None:
    graph = typed_graph_of_papers()
    numbers = {kind: [2, 2] if kind[0] == "paper" else [0, 0] for kind in graph.types.edge_types}
    data = data_of(graph, sampler=lgd.NeighborSampler(numbers))
    loaders = [iter(data.train_dataloader()), iter(data.val_dataloader()), data.correction_batches(0, stop=1)]
    for batch in map(next, loaders):
        left_out = [store.num_edges for kind, store in batch.edge_items() if kind[0] != "paper"]
        assert not any(left_out) and batch["paper", "cites", "paper"].num_edges
        assert batch["author"].num_nodes == 0


def test_a_resumed_fit_ends_with_the_same_weights(tmp_path: Path) -> None:
    graph = typed_graph_of_papers()
    fit_whole_and_resumed(lambda: (module_of(graph), data_of(graph)), tmp_path / "last.ckpt")


def test_the_type_of_the_seeds_can_be_chosen(tmp_path: Path) -> None:
    graph = lgd.Graph.from_pyg(small())
    data = lgd.PartitionedDataModule(graph)  # the papers alone have labels
    assert next(iter(data.train_dataloader())).seed_type == "paper" and data.num_nodes == 12
    graph.save(tmp_path / "graph")
    chosen = lgd.Graph.open(tmp_path / "graph").with_seeds("author")
    for data in (lgd.PartitionedDataModule(chosen), lgd.PartitionedDataModule(tmp_path / "graph", task="author")):
        batch = next(iter(data.train_dataloader()))
        assert batch.seed_type == "author" and batch.batch_size == 2 and "y" not in batch["paper"]
    with pytest.raises(ValueError, match=r"task \('author'\) is for a graph with types, and this one has none"):
        lgd.PartitionedDataModule(lgd.communities(60, 2), task="author")
    assert pickle.loads(pickle.dumps(chosen)).split("train").equal(chosen.split("train"))


def two_types() -> Any:
    data = small()
    data["author"].y = torch.zeros(7, dtype=torch.int64)
    return data


def unmarked() -> Any:
    data = small()
    del data["paper"].train_mask, data["author"].train_mask
    return data


LADIES = lgd.LadiesSampler([8, 8])
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "two types of seeds": (two_types, {}, r"2 node types have a train_mask .* graph\.with_seeds\('paper'\)"),
    "no seeds": (unmarked, {}, "No node type has a train_mask: set data"),
    "ladies for corrections": (small, {"global_batching": lgd.GlobalBatching(sampler=LADIES)}, "LadiesSampler draws"),
    "weights": (small, {"sampler": lgd.NeighborSampler([2, 2], weight="w")}, "weight .'w'. draws from graphs without"),
    "types that are not there": (
        small,
        {"sampler": lgd.NeighborSampler({("a", "b", "c"): [2]})},
        "names the edge type",
    ),
    "evaluation of others": (
        small,
        {"evaluation": lgd.Evaluation(sampler=lgd.NeighborSampler({("paper", "cites", "paper"): [2, 2]}))},
        "no numbers for the edge type",
    ),
    "device": (small, {"loading": lgd.Loading(sample_on="device")}, 'sample_on="device" is for graphs without types'),
    "a small halo": (small, {"boundary": lgd.Halo(bytes=1)}, "has no room for a single node"),
    "seeds of the halo": (
        small,
        {"boundary": lgd.Halo(2, seed_hops=1)},
        "is for graphs without types: leave seed_hops out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_take_types_is_refused(case: str) -> None:
    make, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        lgd.PartitionedDataModule(make(), **options)


def test_bad_labels_are_refused() -> None:
    graph = lgd.Graph.from_pyg(small())
    graph.types.node_arrays["paper"]["y"][4] = -3
    with pytest.raises(ValueError, match=r"y of node 4 is -3, and classes are counted from 0 .* but train_mask marks"):
        next(iter(lgd.PartitionedDataModule(graph).train_dataloader()))


def test_bad_values_are_refused_before_the_first_step() -> None:
    data = small()
    data["paper"].x = torch.full((12, 5), float("nan"))
    graph = lgd.Graph.from_pyg(data, check_features=False).with_seeds("paper")
    with pytest.raises(ValueError, match="x of node 0 of type 'paper' is NaN or infinite"):
        next(iter(lgd.PartitionedDataModule(graph).train_dataloader()))


def test_labels_of_all_nodes_are_explained() -> None:
    class Careless(HeteroSAGE):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self(batch), batch["paper"].y)

    graph = typed_graph_of_papers()
    with pytest.raises(ValueError, match=r"batch\['paper'\]\.y holds the labels of the \d+ seeds, the first nodes"):
        trainer(1).fit(Careless(list(graph.types.edge_types)), data_of(graph))


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"with_seeds\('paper'\) is for a graph with types, and this one has none"):
        lgd.Graph(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64)).with_seeds("paper")
    with pytest.raises(ValueError, match=r"node_type must be one of \['paper', 'author', 'venue'\], got 'word'"):
        lgd.Graph.from_pyg(small()).with_seeds("word")
    with pytest.raises(ValueError, match=r"The node type 'venue' has no train_mask: set data\['venue'\]\.train_mask"):
        next(iter(lgd.PartitionedDataModule(lgd.Graph.from_pyg(small()).with_seeds("venue")).train_dataloader()))


# Splits of one edge type: nothing shows a held edge, nothing false is true, other types stay, saved ones are equal.


WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
BACK: EdgeType = ("paper", "rev_writes", "author")
Pairs = set[tuple[int, int]]


@cache
def graph() -> lgd.Graph:
    return lgd.citations(200, 2)


def pairs(edges: Tensor) -> Pairs:
    return {(sender, receiver) for sender, receiver in edges.T.tolist()}


def turned(edges: Pairs) -> Pairs:
    return {(receiver, sender) for sender, receiver in edges}


def renamed(name: str, **more: Any) -> HeteroData:
    """The citations, where another type than `rev_writes` has the links of `writes` turned round."""
    data = graph().to_pyg()
    for kind, store in graph().to_pyg().edge_items():
        data[kind].time = store.time + 0  # of its own
    data["paper", name, "author"].edge_index = data[BACK].edge_index
    del data[BACK]
    for kind, edge_index in more.items():
        data["paper", kind, "author"].edge_index = edge_index
    return data


def test_what_is_held_is_nowhere_to_be_seen_and_the_rest_stays() -> None:
    whole, split = graph().to_pyg(), lgd.split_edges(graph(), 0.1, 0.2, negatives=7, edge_type=WRITES)
    rest = split.graph.to_pyg()
    held = {name: pairs(edges) for name, edges in split.edges.items()}
    every, kept = pairs(whole[WRITES].edge_index), pairs(rest[WRITES].edge_index)
    assert (split.reverse, split.undirected) == (BACK, False)
    assert [len(held[name]) for name in ("val", "test")] == [round(share * len(every)) for share in (0.1, 0.2)]
    assert kept | held["val"] | held["test"] == every and len(kept) + sum(map(len, held.values())) == len(every)
    assert pairs(rest[BACK].edge_index) == turned(kept)
    for name, edges in split.edges.items():
        false = split.negatives[name]
        assert false.shape == (edges.shape[1], 7) and 0 <= int(false.min()) <= int(false.max()) < 200
        assert not pairs(torch.stack([edges[0].repeat_interleave(7), false.view(-1)])) & every
    for kind, store in whole.edge_items():
        if kind in (WRITES, BACK):  # the arrays follow their edges: here, times are those of the papers
            day = rest["paper"].time[rest[kind].edge_index[kind.index("paper") // 2]]
            assert rest[kind].time.equal(day)
        else:
            assert rest[kind].edge_index.equal(store.edge_index) and rest[kind].time.equal(store.time)
    assert "train_mask" not in rest["paper"] and rest["paper"].y.equal(whole["paper"].y)
    split.graph.check_edges()


def test_edges_of_one_type_of_nodes_go_alone_or_in_both_directions() -> None:
    split = lgd.split_edges(graph(), 0.1, 0.1, negatives=3, edge_type=CITES)
    assert (split.reverse, split.undirected) == (None, False)
    data = graph().to_pyg()
    data[CITES].edge_index = torch.cat([data[CITES].edge_index, data[CITES].edge_index.flip(0)], 1)
    del data[CITES].time
    split = lgd.split_edges(lgd.Graph.from_pyg(data), 0.1, 0.1, negatives=3, edge_type=CITES)
    kept = pairs(split.graph.to_pyg()[CITES].edge_index)
    assert split.undirected and split.reverse is None and turned(kept) == kept
    for edges in split.edges.values():
        assert not (pairs(edges) | turned(pairs(edges))) & kept
    assert split.graph.to_pyg()["paper", "disputes", "paper"].edge_index.equal(
        data["paper", "disputes", "paper"].edge_index
    )


def test_copies_go_together_and_other_types_do_not_make_false_what_is_false() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 4, 6
    data["a", "to", "b"].edge_index = torch.tensor([[0, 0, 1, 2, 3, 3], [0, 0, 1, 2, 3, 3]])
    data["a", "near", "b"].edge_index = torch.cartesian_prod(torch.arange(4), torch.arange(6)).T
    split = lgd.split_edges(lgd.Graph.from_pyg(data), 0.25, 0.25, negatives=5, edge_type=("a", "to", "b"))
    kept = pairs(split.graph.to_pyg()["a", "to", "b"].edge_index)
    assert len(kept) == 2 and not kept & (pairs(split.edges["val"]) | pairs(split.edges["test"]))
    for name, edges in split.edges.items():  # all other nodes are false, though they are near
        assert set(split.negatives[name].flatten().tolist()) <= set(range(6)) - set(edges[1].tolist())
    assert split.graph.to_pyg()["a", "near", "b"].edge_index.shape == (2, 24)


def test_a_reverse_of_another_name_is_named() -> None:
    some, by = renamed("by"), ("paper", "by", "author")
    with pytest.raises(ValueError, match=r"'by', .* has (\d+) of the \1 links of .* reverse=None says"):
        lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES)
    split = lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by)
    kept = pairs(split.graph.to_pyg()[WRITES].edge_index)
    assert split.reverse == by and pairs(split.graph.to_pyg()[by].edge_index) == turned(kept)
    assert lgd.split_edges(graph(), negatives=2, edge_type=BACK).reverse == WRITES
    of_all = some[by].edge_index
    some[by].edge_index = of_all[:, of_all.shape[1] // 2 + 9 :]  # fewer than half, so these are others
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES).reverse is None
    some[by].edge_index = of_all[:, 5:]
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by).reverse == by
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=None).reverse is None


@pytest.mark.parametrize("kind", [WRITES, CITES], ids=lambda kind: kind[1])
def test_a_saved_split_is_the_same(kind: EdgeType, tmp_path: Path) -> None:
    split = lgd.split_edges(graph(), 0.1, 0.0, negatives=5, edge_type=kind)
    split.save(tmp_path / "split")
    opened = lgd.LinkSplit.open(tmp_path / "split")
    assert (opened.edge_type, opened.reverse, opened.undirected) == (kind, split.reverse, split.undirected)
    assert opened.fingerprint == split.fingerprint != lgd.split_edges(graph(), 0.1, 0.0, 1, edge_type=kind).fingerprint
    assert opened.edges["val"].equal(split.edges["val"]) and opened.negatives["val"].equal(split.negatives["val"])
    assert repr(opened) == f"LinkSplit({opened.graph}, {kind}, val={split.edges['val'].shape[1]})"
    assert have_names(lgd.Graph.open(tmp_path / "split").types)
    np.save(tmp_path / "split" / "links" / "edge_types.npy", np.array([99, -1]))
    with pytest.raises(ValueError, match="edge_types"):
        lgd.LinkSplit.open(tmp_path / "split")


def test_a_split_of_ones_own_is_looked_at_in_both_types() -> None:
    split = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES)
    own = lgd.LinkSplit(split.graph, split.edges, split.negatives, edge_type=WRITES)
    assert own.fingerprint == split.fingerprint
    by_name = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES, reverse=None).graph
    by_links = lgd.split_edges(
        lgd.Graph.from_pyg(renamed("by")), 0.1, 0.0, negatives=3, edge_type=WRITES, reverse=None
    ).graph
    among = r"val: \d+ of \d+ edges are among the graph's .*asked for what it was"
    for careless, message in ((by_name, among), (by_links, r"'by', .* links of .* turned round")):
        with pytest.raises(ValueError, match=message):
            lgd.LinkSplit(careless, split.edges, split.negatives, edge_type=WRITES)
    with pytest.raises(ValueError, match=among):
        lgd.LinkSplit(by_links, split.edges, split.negatives, edge_type=WRITES, reverse=("paper", "by", "author"))
    edges, false = torch.tensor([[99], [0]]), torch.tensor([[199]])
    lgd.LinkSplit(split.graph, {"val": edges}, {"val": false}, edge_type=WRITES)
    for odd in (edges + torch.tensor([[1], [0]]), edges + torch.tensor([[0], [200]])):
        with pytest.raises(ValueError, match=r"val: edges and negatives hold node ids, integers in \[0, \d+00\)"):
            lgd.LinkSplit(split.graph, {"val": odd}, {"val": false}, edge_type=WRITES)
    with pytest.raises(ValueError, match=r"\['paper/train_mask', .*which split nodes"):
        lgd.LinkSplit(graph(), {}, {}, edge_type=WRITES)


REFUSED_SPLITS: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({}, r"links of one edge type are predicted at a time: name it, as in edge_type=\('paper', 'cites'"),
    "another type": ({"edge_type": ("author", "cites", "paper")}, "edge_type must be one of .*, got"),
    "its name alone": ({"edge_type": "writes"}, r"got 'writes'\. Its three names, \('author', .*, say"),
    "a reverse that is none": ({"edge_type": WRITES, "reverse": CITES}, r"from 'paper' to 'author'"),
    "itself": ({"edge_type": CITES, "reverse": CITES}, "it must be another edge type"),
    "an unknown reverse": ({"edge_type": WRITES, "reverse": "back"}, "reverse must be one of .*, got 'back'"),
    "both directions": ({"edge_type": WRITES, "undirected": True}, "their ends are of two types: leave it out"),
    "both directions of citations": ({"edge_type": CITES, "undirected": True}, "some edges have no reverse"),
}


@pytest.mark.parametrize("case", REFUSED_SPLITS)
def test_useless_arguments_are_refused(case: str) -> None:
    options, message = REFUSED_SPLITS[case]
    with pytest.raises(ValueError, match=message):
        lgd.split_edges(graph(), **options)


def test_a_graph_without_types_has_no_edge_types() -> None:
    plain = lgd.communities(100, 2, num_features=1)
    for option in ({"edge_type": WRITES}, {"reverse": WRITES}):
        with pytest.raises(ValueError, match=r"is for a graph with types, and this one has none"):
            lgd.split_edges(plain, **option)  # type: ignore[arg-type]
