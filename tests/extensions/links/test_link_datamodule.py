"""The data module of links: what ranks are asked for, what they do not see, and that ranking is exact."""

import math
from collections import Counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GCNConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler, OwnLinks, edges_at, positions_of_links
from lightning_gnn_dist.extensions.links.negatives import Candidates, draw_receivers, has_edges
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.rounds.correction_gradients import average_gradient_, mean_gradient
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.links.link_model import LinkSAGE, Targets, edges_of, held, ranks_by_hand
from tests.layers.test_sight import C, F, Net, W, sparse_data
from tests.partition.test_default import take_metis_away
from tests.placing import batches_of, most_seeds, placing
from tests.ranks import run_ranks
from tests.sampling.neighborhoods import CHANGES, damaged
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import fit

NODES, FEATURES = 240, 8


def small_split(**options: Any) -> lgd.LinkSplit:
    """Of its held edges, three ranks judge unequal shares."""
    graph = lgd.communities(NODES, 4, num_features=FEATURES, mean_degree=8.0, noise=1.0, seed=3)
    return lgd.split_edges(graph, 0.1, 0.112, **({"negatives": 12} | options))


def module_of(split: lgd.LinkSplit | str, **options: Any) -> lgd.LinkDataModule:
    defaults: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 4]), "batch_size": 40}
    defaults |= {"partitioner": lgd.RandomPartitioner(), "boundary": lgd.Isolated()}
    return lgd.LinkDataModule(split, **(defaults | options))


def model(**options: Any) -> LinkSAGE:
    torch.manual_seed(0)
    return LinkSAGE(FEATURES, **options)


def pairs_of(graph: lgd.Graph) -> set[tuple[int, int]]:
    senders, receivers = edges_of(graph)
    return {(s, r) for s, r in zip(senders.tolist(), receivers.tolist(), strict=True) if s < r}


class Outcome(NamedTuple):
    asked: list[Targets]
    judged: list[Targets]
    own: list[int]
    state: State
    metrics: dict[str, float]


def train(rank: int, world_size: int, strategy: Any, split: lgd.LinkSplit | str, options: dict[str, Any]) -> Outcome:
    data, module = module_of(split, **options), model()
    fitting = trainer(world_size, strategy)
    fitting.fit(module, data)
    (metrics,) = fitting.test(module, data, verbose=False)
    part = data.part(rank, world_size)
    return Outcome(module.asked, module.judged, part.node_arrays["n_id"].tolist(), state_of(module), dict(metrics))


def test_ranks_are_asked_for_every_edge_inside_their_part_once_a_pass() -> None:
    split = small_split()
    everything = pairs_of(split.graph)
    results = run_ranks(train, 3, lgd.LocalSGDStrategy(**PATIENCE), split, {"num_negatives": 2})
    (batches,) = {len(result.asked) for result in results}
    for result in results:
        own, half = set(result.own), batches // 2
        inside = {pair for pair in everything if own.issuperset(pair)}
        for batch in (result.asked[:half], result.asked[half:]):
            true = [tuple(sorted(t[:2])) for targets in batch for t in targets if t[2] == 1.0]
            assert sorted(true) == sorted(inside)  # type: ignore[type-var]
        false = [t for targets in result.asked for t in targets if t[2] == 0.0]
        assert len(false) == 2 * 2 * len(inside)
        assert all(own.issuperset(t[:2]) and tuple(sorted(t[:2])) not in everything for t in false)
        first = [t for t in result.asked[0] if t[2] == 1.0]
        assert [t[0] for t in result.asked[0][len(first) :: 2]] == [t[0] for t in first]
    assert differs(results[0].state, results[1].state) == 0.0


def test_held_edges_are_shared_without_overlap_and_ranked_as_by_one_process() -> None:
    split = small_split()
    results = run_ranks(train, 3, lgd.LocalSGDStrategy(**PATIENCE), split, {"evaluation": lgd.Evaluation(batch_size=7)})
    judged = Counter(target for result in results for targets in result.judged for target in targets)
    assert judged == held(split, "val") + held(split, "val") + held(split, "test")  # two epochs, then the test
    alone = model()
    alone.load_state_dict(results[0].state)
    ranks = ranks_by_hand(alone, split, "test")
    for result in results:
        assert result.metrics["mrr"] == pytest.approx(float((1 / ranks).mean()), rel=1e-5)
        assert result.metrics["hits@5"] == pytest.approx(float((ranks <= 5).float().mean()), rel=1e-5)


@pytest.mark.parametrize("boundary", [lgd.Isolated(), lgd.Halo(), lgd.Fetch()], ids=repr)
def test_targets_send_no_messages(boundary: Boundary) -> None:
    split = small_split()
    data = module_of(split, sampler=lgd.NeighborSampler([-1, -1]), boundary=boundary)
    part = data.graph if boundary == lgd.Fetch() else data.part(0, 2)
    here, own = pairs_of(split.graph), (data.partition(2).assignment == 0).nonzero().view(-1).tolist()
    seen = set(own) if boundary == lgd.Isolated() else set(range(NODES))
    loader = batches_of(data, part, 6, 0, 0, 2)
    num_dropped = 0
    for batch in loader:
        asked = {tuple(sorted(pair)) for pair in batch.n_id[batch.edge_label_index].T.tolist()}
        true = {pair for pair in asked if pair in here}
        assert all(set(pair) <= set(own) or (boundary == lgd.Fetch() and max(pair) in own) for pair in true)
        sent = batch.n_id[batch.edge_index].T.tolist()
        assert not true & {tuple(sorted(edge)) for edge in sent}
        assert all(tuple(sorted(edge)) in here for edge in sent)
        for seed in range(batch.batch_size):  # and all others do
            node = int(batch.n_id[seed])
            row = batch.n_id[batch.edge_index[0, batch.edge_index[1] == seed]].tolist()
            near = {s for pair in here for s in pair if node in pair} - {node}
            near &= seen
            asked_of_node = {s for pair in true for s in pair if node in pair}
            assert sorted(row) == sorted(near - asked_of_node)
            num_dropped += len(near & asked_of_node)
        block = batch.blocks[0]
        assert block.num_edges == batch.edge_index.shape[1] == sum(batch.num_sampled_edges)
        assert batch.blocks[-1].num_dst == batch.batch_size
        assert torch.equal(batch.x, split.graph.node_arrays["x"][batch.n_id])
    assert num_dropped > 50


def test_false_receivers_come_from_all_nodes_that_are_fetched() -> None:
    split = small_split()
    data = module_of(split, boundary=lgd.Fetch(), num_negatives=4)
    everything = pairs_of(split.graph)
    false = [
        pair
        for batch in batches_of(data, data.graph, 6, 0, 0, 2)
        for pair in batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]].T.tolist()
    ]
    assert all(tuple(sorted(pair)) not in everything for pair in false)
    own = data.partition(2).assignment == 0
    assert 0.4 < sum(not own[receiver] for _, receiver in false) / len(false) < 0.6


@pytest.mark.parametrize(
    ("options", "boundary", "partitioner"),
    [
        ({}, lgd.Fetch(), lgd.RandomPartitioner()),
        ({"boundary": lgd.Isolated()}, lgd.Isolated(), lgd.MetisPartitioner()),
        ({"holding": lgd.Holding(lgd.Rotate())}, lgd.Isolated(), lgd.MetisPartitioner()),
        ({"sampler": lgd.WholePartSampler(2)}, lgd.Isolated(), lgd.MetisPartitioner()),
        ({"partitioner": lgd.SuperNodePartitioner(8)}, lgd.Fetch(), lgd.SuperNodePartitioner(8)),
    ],
    ids=str,
)
def test_what_batches_see_by_default(options: dict[str, Any], boundary: Boundary, partitioner: Partitioner) -> None:
    data = lgd.LinkDataModule(small_split(), **options)
    assert (data.boundary, data.partitioner) == (boundary, partitioner)


def test_every_edge_is_asked_for_by_one_rank_where_all_are_seen() -> None:
    split = small_split()
    data = module_of(split, boundary=lgd.Fetch())
    asked = Counter(
        tuple(sorted(pair))
        for rank in range(3)
        for batch in batches_of(data, data.graph, -(-most_seeds(data, 3) // 40), 0, rank, 3)
        for pair in batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]].T.tolist()
    )
    assert asked == Counter(pairs_of(split.graph))


def test_corrections_are_slices_of_batches_of_the_whole_graph() -> None:
    split = small_split()
    data = module_of(split, global_batching=lgd.GlobalBatching(batch_size=31))
    whole = list(data.correction_batches(4, sliced=False, stop=3))
    everything = pairs_of(split.graph)
    for index, batch in enumerate(whole):
        pairs = batch.n_id[batch.edge_label_index].T.tolist()
        assert batch.edge_label.tolist() == [1.0] * 31 + [0.0] * 31
        assert all(tuple(sorted(pair)) in everything for pair in pairs[:31])
        with placing(data, 1, 2):
            (half,) = data.correction_batches(4, start=index, stop=index + 1)
        mine = half.n_id[half.edge_label_index].T.tolist()
        assert mine[:15] == pairs[16:31] and mine[15:] == pairs[31 + 16 :]
    (anchor, *_) = data.anchor_batches(2)
    assert int(anchor.edge_label.sum()) > 0


def test_what_cannot_work_is_refused() -> None:
    split = small_split()
    for options, message in (
        ({"sampler": lgd.ShadowSampler([5], num_hops=2)}, "NeighborSampler or WholePartSampler, got ShadowSampler"),
        ({"sampler": lgd.LadiesSampler([5, 5])}, "NeighborSampler or WholePartSampler, got LadiesSampler"),
        ({"boundary": lgd.History()}, r"boundary must be Isolated\(\), Halo\(\) or Fetch\(\) .*got History"),
        ({"boundary": lgd.Fetch(), "holding": lgd.Holding(extra_nodes=0.1)}, r"boundary=Fetch\(\) sees the whole"),
    ):
        with pytest.raises(ValueError, match=message):
            module_of(split, **options)
    with pytest.raises(ValueError, match=r"no test edges back .*split_edges\(graph, test=0.1\)"):
        module_of(lgd.split_edges(lgd.communities(NODES, 4), 0.1, 0.0, negatives=3)).test_dataloader()


# Edges as seeds: what is removed, what stays, and false edges, which are never true.


KEY = BatchKey(0, 0, 0)
OWN = OwnLinks(2, Candidates(range(80)), undirected=True)


def weighted() -> lgd.Graph:
    """Edges that know their ends."""
    graph = lgd.communities(80, 2, num_features=2)
    sender, receiver = edges_at(graph, torch.arange(graph.num_edges))
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_attr": torch.stack([sender, receiver], 1)})


def test_edge_arrays_follow_what_is_removed() -> None:
    graph = weighted()
    seeds = positions_of_links(graph, torch.zeros(80, dtype=torch.int64), True)[:20]
    (sample,) = LinkSampler(lgd.NeighborSampler([-1, 3]), OWN).sample_bulk(graph, [seeds], [KEY])
    batch = assemble(graph, sample)
    assert torch.equal(batch.n_id[batch.edge_index].T, batch.edge_attr)
    assert batch.blocks[1].num_edges == batch.num_sampled_edges[0]
    assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 40
    assert batch.batch_size == batch.edge_label_index.unique().numel()


def test_draws_avoid_edges_and_the_node_itself_and_are_uniform() -> None:
    graph = lgd.communities(50, 2, mean_degree=20, num_features=1)
    senders = torch.arange(50)
    drawn, failed = draw_receivers(graph, senders[None], senders, 2000, key(0, 0, 0, -1))
    pairs = torch.stack([senders.repeat_interleave(2000), drawn.view(-1)])
    assert not failed.numel() and not has_edges(graph, pairs).any() and not (pairs[0] == pairs[1]).any()
    for sender in (0, 31):
        neighbours = {int(node) for node in range(50) if has_edges(graph, torch.tensor([[sender], [node]]))}
        counts = torch.bincount(drawn[sender], minlength=50)
        free = torch.tensor([node for node in range(50) if node not in neighbours | {sender}])
        assert counts.sum() == counts[free].sum() == 2000
        assert (counts[free] > 0.5 * 2000 / free.numel()).all() and (counts[free] < 1.7 * 2000 / free.numel()).all()


def test_the_only_free_node_is_found_and_none_is_reported() -> None:
    others = [node for node in range(1, 500) if node != 321]
    graph = lgd.Graph.from_edge_index(torch.tensor([[0] * len(others), others]), 500)
    drawn, failed = draw_receivers(graph, torch.tensor([[0]]), torch.tensor([5]), 4, key(0, 0, 0, 0))
    assert drawn.tolist() == [[321] * 4] and not failed.numel()
    among = torch.tensor([[400, 0]]), torch.tensor([1, 2])
    _, failed = draw_receivers(graph, *among, 4, key(0, 0, 0, 0), Candidates(range(300)))
    assert failed.tolist() == [1]


# Held links are judged by rows of the whole graph, though layers count the degrees of senders.


class Embeds(Net):
    def test_step(self, batch: Any) -> None:
        self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), self(batch).detach(), strict=True))


def rows_of_held(rank: int, world_size: int) -> Embeds:
    torch.manual_seed(1)
    module = Embeds(GCNConv(F, W), GCNConv(W, C)).double()
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([3, 3]), "evaluation": lgd.Evaluation(batch_size=5)}
    data = lgd.LinkDataModule(sparse_split(), **options)
    trainer(world_size, lgd.GrappaStrategy(**PATIENCE) if world_size > 1 else "auto").test(module, data, verbose=False)
    return module


def sparse_split() -> lgd.LinkSplit:
    return lgd.split_edges(lgd.Graph.from_pyg(sparse_data()), val=0.1, test=0.1, seed=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_of_held_links(num_ranks: int) -> None:
    graph = sparse_split().graph
    for module in run_ranks(rows_of_held, num_ranks):
        with torch.no_grad():
            expected = module.whole(graph.node_arrays["x"], edges_of(graph))
        assert module.rows
        assert all(torch.allclose(row, expected[node], rtol=0, atol=1e-12) for node, row in module.rows.items())


# MRR and Hits@k: ranks with ties, unequal shares, and what cannot be ranked.


def batch(edges: list[float], negatives: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Scores and labels as a batch has them."""
    scores = torch.tensor(edges + [score for row in negatives for score in row])
    return scores, (torch.arange(scores.numel()) < len(edges)).float()


def results(ranking: lgd.LinkRanking) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in ranking.compute().items()}


def test_ranks_count_those_above_and_half_of_those_level() -> None:
    ranking = lgd.LinkRanking(hits=[1, 2])
    ranking.update(*batch([3.0, 3.0, 3.0], [[1.0, 2.0], [3.0, 1.0], [4.0, 5.0]]))  # ranks 1, 1.5, 3
    expected = {"mrr": (1 + 1 / 1.5 + 1 / 3) / 3, "hits@1": 1 / 3, "hits@2": 2 / 3}
    assert results(ranking) == pytest.approx(expected, abs=1e-6)


def test_a_constant_score_and_nan_earn_nothing() -> None:
    constant, nan = lgd.LinkRanking(hits=[1]), lgd.LinkRanking(hits=[1])
    constant.update(*batch([1.0], [[1.0] * 9]))
    assert results(constant) == {"mrr": round(1 / 5.5, 6), "hits@1": 0.0}
    nan.update(*batch([math.nan, 1.0], [[0.0] * 9, [math.nan] * 9]))
    assert results(nan) == {"mrr": 0.1, "hits@1": 0.0}


def test_a_fit_follows_a_test() -> None:
    ranking = lgd.LinkRanking(hits=[1])
    with torch.inference_mode():  # as trainer.test() runs
        ranking.reset()
        ranking.update(*batch([3.0], [[1.0, 2.0]]))
    ranking.update(*batch([1.0], [[2.0, 0.0]]))
    assert results(ranking) == {"mrr": 0.75, "hits@1": 0.5}


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (*batch([1.0], [[0.0, 0.0]]), r"With 2 negatives for each edge, Hits@50 is always 1"),
        (torch.ones(3), torch.tensor([1.0, 1.0, 0.0, 0.0]), "a score for each target"),
        (torch.ones(4, 1), torch.tensor([1.0, 1.0, 0.0, 0.0]), "a score for each target"),
        (torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 0.0]), "as many negatives for each of its 3 edges"),
        (torch.rand(3, 1), torch.tensor([[1], [0], [0]]), "edge_label must be a vector of 1 and 0"),
        (torch.rand(4), torch.tensor([0.5, 0.5, 0.0, 0.0]), "edge_label must be a vector of 1 and 0"),
        (torch.rand(3), torch.tensor([0, 1, 0]), "all edges .* before their negatives"),
        (torch.ones(2), torch.zeros(2), "edge_label must have an edge"),
    ],
)
def test_what_cannot_be_ranked_is_refused(scores: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.LinkRanking(hits=[1, 50]).update(scores, labels)


def test_the_default_is_what_the_negatives_allow() -> None:
    scores, labels = batch([1.0], [[0.0] * 20])
    ranking, called = lgd.LinkRanking(), lgd.LinkRanking(prefix="val/")
    with pytest.raises(TypeError, match="edge_label must be a tensor"):
        ranking.update(scores, None)
    ranking.update(scores, labels)
    assert results(ranking) == {"mrr": 1.0, "hits@1": 1.0, "hits@10": 1.0}
    assert set(called(scores, labels)) == set(called.compute()) == {"val/mrr", "val/hits@1", "val/hits@10"}
    assert set(ranking.clone().compute()) == set(ranking.compute())
    with pytest.raises(ValueError, match="With 5 negatives for each edge, Hits@10 is always 1"):
        ranking.update(*batch([1.0], [[0.0] * 5]))


def test_negatives_stay_in_the_graph() -> None:
    for change in CHANGES:
        graph, nodes = damaged(lgd.communities(400), *change), torch.arange(400)
        receivers, _ = draw_receivers(graph, nodes[None], nodes, 3, key(0, 0, 0, 0))
        assert int(receivers.min()) >= 0 and int(receivers.max()) < 400
        has_edges(graph, torch.stack([nodes, nodes]))


def test_without_metis_another_partitioner_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    take_metis_away(monkeypatch)
    assert lgd.LinkDataModule(small_split(), boundary=lgd.Isolated()).partitioner == lgd.StreamingPartitioner()


# What a batch counts for: the pairs it asks for, whatever the number of their ends.


class Products(pl.LightningModule):
    """Looks at features alone, so that slices see what the whole batch sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).double()

    def training_step(self, batch: Any) -> Tensor:
        sender, receiver = self.layers(batch.x)[batch.edge_label_index]
        logits = (sender * receiver).sum(1)
        return functional.binary_cross_entropy_with_logits(logits, batch.edge_label.double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def link_data(**options: Any) -> lgd.LinkDataModule:
    graph = lgd.communities(120, 4, num_features=12, mean_degree=6.0, seed=3)
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    cut = lgd.Partition((torch.arange(120) > 80).int(), 2)
    split = lgd.split_edges(graph, 0.1, 0.1, negatives=5)
    return lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2]), batch_size=40, partitioner=cut, **options)


def link_gradients(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Of a global batch by slices, of the whole of it by hand, and what counts there are."""
    data, module = link_data(global_batching=lgd.GlobalBatching(batch_size=51), num_negatives=2), Products()
    found: list[Any] = []

    class Watch(lgd.LLCGStrategy):
        def end_round(self) -> None:
            super().end_round()
            if not found:
                (own,) = data.correction_batches(0, stop=1)
                gradient, targets = mean_gradient(self.meeting.fit, [own])
                average_gradient_(self.meeting.fit, gradient, targets)
                (whole,) = data.correction_batches(0, stop=1, sliced=False)
                expected = torch.autograd.grad(module.training_step(whole), list(module.parameters()))
                found.extend((gradient, list(expected), [int(targets), own.edge_label.numel(), own.batch_size]))

    fit(Watch.as_published(lgd.EverySteps(1), **PATIENCE), module, data, world_size, max_epochs=1, limit_val_batches=0)
    return found[0], found[1], found[2]


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_slices_of_links_give_the_gradient_of_the_whole_batch() -> None:
    for sliced, whole, (counted, targets, ends) in run_ranks(link_gradients, 2):
        assert counted == targets in (3 * 25, 3 * 26) and ends != targets
        assert max(float((left - right).abs().max()) for left, right in zip(sliced, whole, strict=True)) < 1e-14


def test_a_prediction_that_reads_pairs_is_told_that_there_are_none() -> None:
    class Ranks(pl.LightningModule):
        def forward(self, batch: Any) -> Any:
            return batch.x[batch.edge_label_index[0]]

    data = lgd.LinkDataModule(lgd.split_edges(lgd.communities(60, 2, num_features=8)))
    with pytest.raises(AttributeError, match=r"A prediction is of nodes, and its batches have no edge_label_index"):
        trainer(1).predict(Ranks(), data)
