"""The data module on typed graphs: in one process and on ranks, with every strategy, and what it refuses."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
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


BOUNDARIES = [lgd.Isolated(), lgd.Halo(1), lgd.Halo(2)]


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
        part.check_edges()
        kinds = typed.types.edge_type[other.edge_arrays["edge_place"]]
        assert part.types.num_edges == tuple(torch.bincount(kinds.long(), minlength=8).tolist())
        for kind, arrays in part.types.node_arrays.items():
            ids = arrays["n_id"] + typed.types.nodes_of(kind).start
            assert part.node_arrays["n_id"][part.types.nodes_of(kind)].equal(ids)
            assert arrays["x"].equal(typed.types.node_arrays[kind]["x"][arrays["n_id"]])


def test_batches_of_a_part_bring_its_weights() -> None:
    graph = typed_graph_of_papers()
    data = data_of(graph, partitioner=lgd.RandomPartitioner(), boundary=lgd.Isolated())
    part = data.part(0, 2)
    seeds, source = seeds_and_source(data, part, 0, 2)
    (batch,) = source.make([seeds[:5]], [(0, 0, 0)], [data._home.seeds_of(part).places[:5]])  # type: ignore[list-item]
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


LADIES = lgd.GlobalBatching(sampler=lgd.LadiesSampler([8, 8]))
SOME = lgd.Evaluation(sampler=lgd.NeighborSampler({("paper", "cites", "paper"): [2, 2]}))
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (two_types, {}, r"2 node types have a train_mask .* graph\.with_seeds\('paper'\)"),
    (unmarked, {}, "No node type has a train_mask: set data"),
    (small, {"global_batching": LADIES}, "LadiesSampler draws"),
    (small, {"sampler": lgd.NeighborSampler([2, 2], weight="w")}, "weight .'w'. draws from graphs without"),
    (small, {"sampler": lgd.NeighborSampler({("a", "b", "c"): [2]})}, "names the edge type"),
    (small, {"evaluation": SOME}, "no numbers for the edge type"),
    (small, {"boundary": lgd.Halo(bytes=1)}, "has no room for a single node"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_does_not_take_types_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.PartitionedDataModule(make(), **options)


def test_bad_values_are_refused_before_the_first_step() -> None:
    data = small()
    data["paper"].x = torch.full((12, 5), float("nan"))
    graph = lgd.Graph.from_pyg(data, check_features=False).with_seeds("paper")
    with pytest.raises(ValueError, match="x of node 0 of type 'paper' is NaN or infinite"):
        next(iter(lgd.PartitionedDataModule(graph).train_dataloader()))


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"with_seeds\('paper'\) is for a graph with types, and this one has none"):
        lgd.Graph(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64)).with_seeds("paper")
    with pytest.raises(ValueError, match=r"node_type must be one of \['paper', 'author', 'venue'\], got 'word'"):
        lgd.Graph.from_pyg(small()).with_seeds("word")
    with pytest.raises(ValueError, match=r"The node type 'venue' has no train_mask: set data\['venue'\]\.train_mask"):
        next(iter(lgd.PartitionedDataModule(lgd.Graph.from_pyg(small()).with_seeds("venue")).train_dataloader()))
