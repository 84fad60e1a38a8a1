"""Edges with labels: batches and steps by hand, and exact evaluation."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.data_fitting import SOME_STRATEGIES, fit_and_test, trainer
from tests.edge_model import BACK, KNOWS, RATES, USERS, Rater, flat, rated
from tests.every_strategy import PATIENCE
from tests.extensions.links.ratings import KINDS, data_of, held_of, labelled, split_of, store_of
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


def test_classes_and_rows_keep_their_types() -> None:
    graph = rated()
    number = torch.arange(graph.num_edges)
    graph.edge_arrays["edge_class"] = torch.where(number % 3 == 0, -1, number % 3)
    graph.edge_arrays["edge_pair"] = torch.stack([graph.edge_arrays["edge_mark"].double()] * 2, 1)
    for name in ("edge_class", "edge_pair"):
        split = lgd.split_edges(graph, labels=name)
        (batch, *_) = data_of(split).train_dataloader()
        expected = graph.edge_arrays[name][graph.edge_arrays["edge_mark"].argsort()][batch.edge_label_mark]
        assert batch.edge_label.equal(expected) and batch.edge_label_rating.shape == (batch.num_targets,)
        if name == "edge_class":
            assert set(batch.edge_label.tolist()) == {1, 2}


# Fits.


def of_part(split: lgd.LinkSplit, kind: EdgeType | None, owner: Tensor, rank: int, model: Rater) -> tuple[Tensor, int]:
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


def step(rank: int, world_size: int, split: lgd.LinkSplit, kind: EdgeType | None) -> tuple[dict[str, Tensor], int]:
    model = Rater(edge_type=kind)
    fit = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), max_epochs=1, limit_val_batches=0)
    fit.fit(model, data_of(split, batch_size=10_000, partitioner=uneven(split.graph)))
    return dict(model.state_dict()), sum(model.asked.values())


def uneven(graph: lgd.Graph) -> lgd.Partition:
    return lgd.Partition((torch.arange(graph.num_nodes) % 5 < 2).to(torch.int32), 2)


@KINDS
def test_a_step_of_two_unequal_ranks_is_that_of_one_process(kind: EdgeType | None) -> None:
    split, model = split_of(kind), Rater(edge_type=kind)
    owner = uneven(split.graph).assignment
    sums, counts = zip(*(of_part(split, kind, owner, rank, model) for rank in range(2)), strict=True)
    (sum(sums) / sum(counts)).backward()  # type: ignore[union-attr]
    results = run_ranks(step, 2, split, kind)
    assert [count for _, count in results] == list(counts) and counts[0] > 1.5 * counts[1] > 0
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for state, _ in results:
            torch.testing.assert_close(state[name], weight.detach() - model.lr * grad, rtol=1e-10, atol=1e-12)


def made(split: lgd.LinkSplit, kind: EdgeType | None, name: str) -> tuple[Rater, Any]:
    return Rater(lr=0.01, edge_type=kind), data_of(split, sampler=lgd.NeighborSampler([4, 4]))


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


def whole_error(model: Rater, split: lgd.LinkSplit, kind: EdgeType | None) -> float:
    """The mean squared error of the test edges, from one forward over the whole graph."""
    data, arrays = split.graph.to_pyg(), split.held_arrays["test"]
    x, edges = (data.x, data.edge_index) if kind is None else flat(data, {"user": USERS})
    ends = split.edges["test"] + torch.tensor([[0], [0 if kind is None else USERS]])
    with torch.no_grad():
        scores = model.scores(x, edges, ends)
    return float(nn.functional.mse_loss(scores, arrays["edge_rating" if kind is None else "rating"]))


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
