"""Edges with labels: nothing leaks, batches and steps by hand, exact evaluation, and what is refused."""

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    Holding,
    LinkSplit,
    NeighborSampler,
    Partition,
    Rotate,
    communities,
    split_edges,
)
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.data_fitting import SOME_STRATEGIES, fit_and_test, trainer
from tests.edge_model import BACK, KNOWS, RATES, USERS, Rater, flat, rated
from tests.every_strategy import PATIENCE
from tests.extensions.links.link_model import edges_of
from tests.extensions.links.ratings import KINDS, data_of, held_of, labelled, split_of, store_of
from tests.placing import batches_of
from tests.ranks import run_ranks

# Batches.


@KINDS
def test_each_labelled_edge_is_asked_for_once_and_sends_nothing_then(kind: EdgeType | None) -> None:
    split = split_of(kind)
    data, asked = data_of(split), Counter[tuple[int, float]]()
    for batch in data.train_dataloader():
        targets, stores = (batch, [batch]) if kind is None else (batch[kind], [batch[k] for k in (RATES, BACK)])
        first, last = (batch, batch) if kind is None else (batch[kind[0]], batch[kind[2]])
        sender, receiver = targets.edge_label_index
        shown = set(zip(first.n_id[sender].tolist(), last.n_id[receiver].tolist(), strict=True))
        for store, ends in zip(stores, ((first, last), (last, first)), strict=False):
            pairs = [end.n_id[row].tolist() for end, row in zip(ends, store.edge_index, strict=True)]
            sent = set(zip(*(pairs if ends[0] is first else pairs[::-1]), strict=True))
            assert sent and not sent & shown
            assert kind is not None or not sent & {pair[::-1] for pair in shown}
        asked.update(zip(targets.edge_label_mark.tolist(), targets.edge_label.tolist(), strict=True))
        assert not any("rating" in name for store in batch.stores for name in store.keys())  # noqa: SIM118
        assert batch.num_targets == len(targets.edge_label)
    assert asked == labelled(split.graph, kind)


@KINDS
def test_ranks_ask_for_each_labelled_edge_inside_their_part_once(kind: EdgeType | None) -> None:
    split = split_of(kind)
    data = data_of(split, sampler=NeighborSampler([3, 3]), holding=Holding(Rotate()))
    owner, everything = data.parts_of_ranks(3).assignment, Counter[tuple[int, float]]()
    ends, mark, label = store_of(split.graph, kind)
    first = 0 if kind is None else split.graph.types.nodes_of("film").start  # type: ignore[union-attr]
    for rank in range(3):
        asked = Counter[tuple[int, float]]()
        for batch in batches_of(data, data.part(rank, 3), 8, 0, rank, 3):
            targets = batch if kind is None else batch[kind]
            asked.update(zip(targets.edge_label_mark.tolist(), targets.edge_label.tolist(), strict=True))
        inside = (owner[ends[0]] == rank) & (owner[ends[1] + first] == rank) & ~label.isnan()
        assert asked == Counter(zip(mark[inside].tolist(), label[inside].tolist(), strict=True))
        everything += asked
    assert everything <= labelled(split.graph, kind)


def test_classes_and_rows_keep_their_types() -> None:
    graph = rated()
    graph.edge_arrays["edge_class"] = torch.where(
        torch.arange(graph.num_edges) % 3 == 0, -1, torch.arange(graph.num_edges) % 3
    )
    graph.edge_arrays["edge_pair"] = torch.stack([graph.edge_arrays["edge_mark"].double()] * 2, 1)
    for name in ("edge_class", "edge_pair"):
        split = split_edges(graph, labels=name)
        (batch, *_) = data_of(split).train_dataloader()
        expected = graph.edge_arrays[name][graph.edge_arrays["edge_mark"].argsort()][batch.edge_label_mark]
        assert batch.edge_label.equal(expected) and batch.edge_label_rating.shape == (batch.num_targets,)
        if name == "edge_class":
            assert set(batch.edge_label.tolist()) == {1, 2}


# Fits.


def part_by_hand(split: LinkSplit, kind: EdgeType | None, owner: Tensor, rank: int, model: Rater) -> tuple[Tensor, int]:
    """The sum of squared errors of all labelled edges inside a part, none of which sends, and their number."""
    data = split.graph.to_pyg()
    ends, _, label = store_of(split.graph, kind)
    x, edges = (data.x, ends) if kind is None else flat(data, {"user": USERS})
    ends = ends if kind is None else ends + torch.tensor([[0], [USERS]])
    mine = owner == rank if kind is None else torch.cat([owner[50:], owner[:50]]) == rank  # films come first
    asked = mine[ends[0]] & mine[ends[1]] & ~label.isnan()
    pairs = {frozenset(pair) for pair in ends[:, asked].T.tolist()}
    shown = torch.tensor([frozenset(pair) in pairs for pair in edges.T.tolist()])
    inside = mine[edges[0]] & mine[edges[1]] & ~shown
    if kind is not None:  # edges of other types between the ends of a target stay
        first = [store.edge_index.shape[1] for store in data.edge_stores]
        of_type = torch.arange(len(first)).repeat_interleave(torch.tensor(first))
        is_other = of_type == [k for k, _ in data.edge_items()].index(KNOWS)
        inside |= mine[edges[0]] & mine[edges[1]] & is_other
    scores = model.scores(x, edges[:, inside], ends[:, asked])
    return ((scores - label[asked]) ** 2).sum(), int(asked.sum())


def step(rank: int, world_size: int, split: LinkSplit, kind: EdgeType | None) -> tuple[dict[str, Tensor], int]:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    model = Rater(edge_type=kind)
    fit = trainer(world_size, GrappaStrategy(**PATIENCE), max_epochs=1, limit_val_batches=0)
    fit.fit(model, data_of(split, batch_size=10_000, partitioner=uneven(split.graph)))
    return dict(model.state_dict()), sum(model.asked.values())


def uneven(graph: Graph) -> Partition:
    return Partition((torch.arange(graph.num_nodes) % 5 < 2).to(torch.int32), 2)


@KINDS
def test_a_step_of_two_unequal_ranks_is_that_of_one_process(kind: EdgeType | None) -> None:
    split, model = split_of(kind), Rater(edge_type=kind)
    owner = uneven(split.graph).assignment
    sums, counts = zip(*(part_by_hand(split, kind, owner, rank, model) for rank in range(2)), strict=True)
    (sum(sums) / sum(counts)).backward()  # type: ignore[union-attr]
    results = run_ranks(step, 2, split, kind)
    assert [count for _, count in results] == list(counts) and counts[0] > 1.5 * counts[1] > 0
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for state, _ in results:
            torch.testing.assert_close(state[name], weight.detach() - model.lr * grad, rtol=1e-10, atol=1e-12)


def made(split: LinkSplit, kind: EdgeType | None, name: str) -> tuple[Rater, Any]:
    return Rater(lr=0.01, edge_type=kind), data_of(split, sampler=NeighborSampler([4, 4]))


@KINDS
@pytest.mark.parametrize("names", SOME_STRATEGIES)
def test_every_strategy_trains_equal_replicas_judged_exactly(names: list[str], kind: EdgeType | None) -> None:
    split = split_of(kind)
    for of_ranks in zip(*run_ranks(fit_and_test, 3, names, partial(made, split, kind), "asked"), strict=True):
        states, metrics, asked = zip(*of_ranks, strict=True)
        assert all(state[name].equal(states[0][name]) for state in states for name in state if "error" not in name)
        assert sum(asked, Counter()) == held_of(split, "test") and all(asked)
        model = Rater(edge_type=kind)
        before = [weight.detach().clone() for weight in model.parameters()]
        model.load_state_dict(states[0])
        assert any(not new.equal(old) for new, old in zip(model.parameters(), before, strict=True))
        expected = pytest.approx(whole_error(model, split, kind), rel=1e-6)
        assert [of_rank["error"] for of_rank in metrics] == [expected] * 3


def whole_error(model: Rater, split: LinkSplit, kind: EdgeType | None) -> float:
    """The mean squared error of the test edges, from one forward over the whole graph."""
    data, arrays = split.graph.to_pyg(), split.held_arrays["test"]
    x, edges = (data.x, data.edge_index) if kind is None else flat(data, {"user": USERS})
    ends = split.edges["test"] + torch.tensor([[0], [0 if kind is None else USERS]])
    with torch.no_grad():
        scores = model.scores(x, edges, ends)
    return float(nn.functional.mse_loss(scores, arrays["edge_rating" if kind is None else "rating"]))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_fit_of_a_saved_split_ends_with_the_same_weights(tmp_path: Path) -> None:
    split_of(None).save(tmp_path / "split")

    def fit(name: str, passes: int, steps: int = -1, **options: Any) -> Rater:
        keeps = ModelCheckpoint(tmp_path / name, filename="last", every_n_train_steps=7)
        limits = {"max_epochs": passes, "max_steps": steps, "callbacks": [keeps], "enable_checkpointing": True}
        model = Rater()
        trainer(1, **limits).fit(model, data_of(tmp_path / "split"), **options)
        return model

    fit("stopped", 1, 7)  # within a pass
    weights = []
    for model in (fit("whole", 2), fit("resumed", 2, ckpt_path=tmp_path / "stopped" / "last.ckpt")):
        weights.append(torch.cat([weight.detach().view(-1) for weight in model.parameters()]))
    assert weights[0].equal(weights[1])


# Splits of edges: nothing leaks, nothing false is true, and a saved one is the same.


Pairs = set[tuple[int, int]]


def graph() -> Graph:
    return communities(300, 4, num_features=3, seed=1)


def pairs(edges: Tensor | tuple[Tensor, Tensor]) -> Pairs:
    return set(zip(edges[0].tolist(), edges[1].tolist(), strict=True))


def both(edges: Pairs) -> Pairs:
    return edges | {(r, s) for s, r in edges}


def test_pairs_are_split_with_both_directions() -> None:
    whole = graph()
    split = split_edges(whole, 0.1, 0.2, negatives=7)
    everything, kept = pairs(edges_of(whole)), pairs(edges_of(split.graph))
    val, test = pairs(split.edges["val"]), pairs(split.edges["test"])
    assert split.undirected
    assert both(kept) == kept
    assert kept | both(val) | both(test) == everything
    assert len(kept) + 2 * len(val) + 2 * len(test) == len(everything)
    assert len(val) == round(0.05 * len(everything)) and len(test) == round(0.1 * len(everything))
    assert 0.3 < sum(s < r for s, r in test) / len(test) < 0.7
    for name, edges in split.edges.items():
        false = split.negatives[name]
        assert false.shape == (edges.shape[1], 7)
        asked = pairs((edges[0].repeat_interleave(7), false.view(-1)))
        assert not asked & everything and all(s != r for s, r in asked)


def test_a_seed_decides() -> None:
    first, again, other = (split_edges(graph(), seed=seed, negatives=3) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.negatives["test"], again.negatives["test"])
    assert pairs(first.edges["test"]) != pairs(other.edges["test"])


def test_directed_edges_are_split_alone() -> None:
    nodes = torch.arange(50)
    edge_index = torch.cat([torch.stack([nodes, (nodes + step) % 50]) for step in (1, 3)], 1)
    whole = Graph.from_pyg(Data(edge_index=torch.cat([edge_index, edge_index[:, :5]], 1), num_nodes=50))
    split = split_edges(whole, 0.2, 0.2, negatives=4)
    assert not split.undirected
    kept, held = pairs(edges_of(split.graph)), pairs(split.edges["val"]) | pairs(split.edges["test"])
    assert kept | held == pairs(edge_index) and not kept & held  # copies go together
    false = pairs((split.edges["val"][0].repeat_interleave(4), split.negatives["val"].view(-1)))
    assert not false & pairs(edge_index)


def test_copies_of_one_direction_do_not_make_a_graph_directed() -> None:
    sender, receiver = edges_of(graph())
    edge_index = torch.stack([sender, receiver])
    whole = Graph.from_pyg(Data(edge_index=torch.cat([edge_index, edge_index[:, :5]], 1), num_nodes=300))
    split = split_edges(whole, 0.1, 0.2, negatives=2)
    assert split.undirected
    kept = pairs(edges_of(split.graph))
    for edges in split.edges.values():
        assert not both(pairs(edges)) & kept


def test_loops_and_arrays_stay_and_masks_do_not() -> None:
    whole = graph()
    sender, receiver = edges_of(whole)
    nodes = torch.arange(300)
    edge_index = torch.stack([torch.cat([sender, nodes]), torch.cat([receiver, nodes])])
    data = Data(x=torch.randn(300, 2), edge_index=edge_index, edge_weight=edge_index[0] * 1000.0 + edge_index[1])
    data.train_mask = torch.ones(300, dtype=torch.bool)
    split = split_edges(Graph.from_pyg(data), negatives=2)
    sender, receiver = edges_of(split.graph)
    assert int((sender == receiver).sum()) == 300
    assert torch.equal(split.graph.edge_arrays["edge_weight"], sender * 1000.0 + receiver)
    assert set(split.graph.node_arrays) == {"x"}


def test_a_saved_split_is_the_same(tmp_path: Path) -> None:
    split = split_edges(graph(), 0.1, 0.0, negatives=5)
    split.save(tmp_path / "split")
    opened = LinkSplit.open(tmp_path / "split")
    assert opened.fingerprint == split.fingerprint
    assert set(opened.edges) == {"val"} and opened.undirected
    assert torch.equal(opened.negatives["val"], split.negatives["val"])
    assert Graph.open(tmp_path / "split").fingerprint == split.graph.fingerprint
    assert repr(opened) == f"LinkSplit({opened.graph}, val={split.edges['val'].shape[1]})"
    with pytest.raises(FileExistsError):
        split.save(tmp_path / "split")
    split.graph.save(tmp_path / "graph")
    with pytest.raises(ValueError, match=r"edges are not split: save split_edges"):
        LinkSplit.open(tmp_path / "graph")


def test_what_leaks_is_refused() -> None:
    whole = split_edges(graph(), 0.0, 0.0).graph
    sender, receiver = (int(end[0]) for end in edges_of(whole))
    edge, false = torch.tensor([[sender], [receiver]]), torch.tensor([[0]])
    for edges in (edge, edge.flip(0)):
        with pytest.raises(ValueError, match=r"val: 1 of 1 edges are among the graph's"):
            LinkSplit(whole, {"val": edges}, {"val": false})


def test_a_directed_graph_is_not_taken_for_an_undirected_one() -> None:
    nodes = torch.arange(50)
    ring = Graph.from_pyg(Data(edge_index=torch.stack([nodes, (nodes + 1) % 50]), num_nodes=50))
    edges, false = {"val": torch.tensor([[0], [7]])}, {"val": torch.tensor([[9]])}
    with pytest.raises(ValueError, match=r"has \d+ -> \d+ and not its reverse: give LinkSplit\(..., undirected=False"):
        LinkSplit(ring, edges, false)
    assert LinkSplit(ring, edges, false, undirected=False).graph is ring


def test_useless_arguments_are_refused() -> None:
    whole = graph()
    with pytest.raises(ValueError, match=r"shares that leave edges to train on, got 0\.5 and 0\.5"):
        split_edges(whole, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"got '0\.1' and 0\.1"):
        split_edges(whole, "0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some edges have no reverse"):
        split_edges(Graph.from_edge_index(torch.tensor([[0], [1]]), 3), undirected=True)
    (sender, receiver), number = graph().to_pyg().edge_index, graph().num_edges
    nearly = Graph.from_edge_index(torch.stack([sender[1:], receiver[1:]]), 300)
    with pytest.raises(ValueError, match=rf"^1 of {number - 1} edges have no reverse.*undirected=False, which"):
        split_edges(nearly)
    assert split_edges(nearly, 0.0, 0.1, undirected=False).edges["test"].shape[1] == round((number - 1) / 10)
    complete = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
    with pytest.raises(ValueError, match=r"Node \d has an edge to every other"):
        split_edges(Graph.from_edge_index(complete, 3), 0.4, 0.0, negatives=1)
    with pytest.raises(ValueError, match=r"'train_mask', .*which split nodes"):
        LinkSplit(whole, {}, {})
    training = split_edges(whole, 0.0, 0.0).graph
    with pytest.raises(ValueError, match=r"edges for \['val'\] and negatives for \[\]"):
        LinkSplit(training, {"val": torch.zeros(2, 1)}, {})
    with pytest.raises(ValueError, match=r"got \(2, 1\) and \(2, 3\)"):
        LinkSplit(training, {"val": torch.zeros(2, 1)}, {"val": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"integers in \[0, 300\)"):
        LinkSplit(training, {"val": torch.tensor([[0], [300]])}, {"val": torch.zeros(1, 1, dtype=torch.int64)})


def test_held_edges_that_compete_with_nobody_are_refused() -> None:
    split = split_edges(graph(), 0.1, 0.0, negatives=3)
    edges, false = split.edges["val"], split.negatives["val"]
    with pytest.raises(ValueError, match=r"not for \['valid'\]"):
        LinkSplit(split.graph, {"valid": edges}, {"valid": false})
    with pytest.raises(ValueError, match="leave each edge without a rival"):
        LinkSplit(split.graph, {"val": edges}, {"val": false[:, :0]})
    false[2, 1] = edges[1, 2]
    sender, receiver = edges[:, 2].tolist()
    with pytest.raises(ValueError, match=rf"val: 1 of {len(false)} .*the first is {sender} -> {receiver}\)"):
        LinkSplit(split.graph, {"val": edges}, {"val": false})


def ring(num_nodes: int) -> Graph:
    nodes = torch.arange(num_nodes)
    there = torch.stack([nodes, (nodes + 1) % num_nodes])
    return Graph.from_edge_index(torch.cat([there, there.flip(0)], 1), num_nodes)


@pytest.mark.parametrize(
    ("edges", "negatives", "message"),
    [
        ({"val": [[0], [2]]}, {"val": [[1]]}, "val: 1 of 1 negatives .* are edges, such as 0 -> 1"),
        ({"val": [[0, 3], [2, 5]]}, {"val": [[4], [0]]}, None),
        ({"val": [[0, 0], [2, 4]]}, {"val": [[4], [5]]}, "negatives .* are edges, such as 0 -> 4"),
        ({"val": [[0], [2]], "test": [[4], [2]]}, {"val": [[4]], "test": [[7]]}, None),
        (
            {"val": [[0], [2]], "test": [[2], [4]]},
            {"val": [[4]], "test": [[0]]},
            "negatives .* are edges, such as 2 -> 0",
        ),
        ({"val": [[0, 0], [2, 2]]}, {"val": [[4], [5]]}, "val: some edges are there twice"),
        ({"val": [[0], [2]], "test": [[2], [0]]}, {"val": [[4]], "test": [[5]]}, "val and test share edges"),
        ({"val": [[], []]}, {"val": []}, "val: there are no edges to judge by"),
    ],
)
def test_what_is_judged_is_true_once_and_its_rivals_are_false(
    edges: dict[str, list[list[int]]], negatives: dict[str, list[list[int]]], message: str | None
) -> None:
    held = {name: torch.tensor(ends, dtype=torch.int64) for name, ends in edges.items()}
    false = {name: torch.tensor(ends, dtype=torch.int64).view(-1, 1) for name, ends in negatives.items()}
    if message is None:
        LinkSplit(ring(9), held, false)
        return
    with pytest.raises(ValueError, match=message):
        LinkSplit(ring(9), held, false)


@pytest.mark.parametrize(
    ("num_edges", "val", "test", "message"),
    [
        (0, 0.05, 0.1, "There are no edges to hold back"),
        (1, 0.05, 0.1, "val=0.05 of 1 edges"),
        (1, 0, 0.1, "test=0.1 of 1 edges"),
        (1, 0, 0.9, "val and test would hold all 1 edges"),
        (2, 0.5, 0.45, "val and test would hold all 2 edges"),
    ],
)
def test_shares_of_few_edges_that_are_none_or_all_are_refused(
    num_edges: int, val: float, test: float, message: str
) -> None:
    nodes = torch.arange(num_edges)
    few = Graph.from_edge_index(torch.stack([nodes, nodes + 1]), 9)
    with pytest.raises(ValueError, match=message):
        split_edges(few, val, test, negatives=2)
    assert split_edges(few, 0, 0).graph.num_edges == num_edges
