"""The data module of links: what ranks are asked for, what they do not see, and that ranking is exact."""

import copy
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Evaluation,
    Fetch,
    GlobalBatching,
    Graph,
    GrappaStrategy,
    Halo,
    History,
    Holding,
    Isolated,
    LadiesSampler,
    LinkDataModule,
    LinkSplit,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    RandomPartitioner,
    Rotate,
    ShadowSampler,
    SuperNodePartitioner,
    WholePartSampler,
    communities,
    split_edges,
    through_layers,
)
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.extensions.links.edges import edges_of
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.link_model import LinkSAGE, Targets, held, ranks_by_hand
from tests.placing import batches_of, most_seeds, placing
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of

NODES, FEATURES = 240, 8


def small_split(**options: Any) -> LinkSplit:
    graph = communities(NODES, 4, num_features=FEATURES, mean_degree=8.0, noise=1.0, seed=3)
    return split_edges(graph, 0.1, 0.1, **({"negatives": 12} | options))


def module_of(split: LinkSplit | str, **options: Any) -> LinkDataModule:
    defaults: dict[str, Any] = {
        "sampler": NeighborSampler([4, 4]),
        "batch_size": 40,
        "partitioner": RandomPartitioner(),
        "boundary": Isolated(),
    }
    return LinkDataModule(split, **(defaults | options))


def model(**options: Any) -> LinkSAGE:
    torch.manual_seed(0)
    return LinkSAGE(FEATURES, **options)


def pairs_of(graph: Graph) -> set[tuple[int, int]]:
    senders, receivers = edges_of(graph)
    return {(s, r) for s, r in zip(senders.tolist(), receivers.tolist(), strict=True) if s < r}


class Outcome(NamedTuple):
    asked: list[Targets]
    judged: list[Targets]
    own: list[int]
    state: State
    metrics: dict[str, float]


def train(rank: int, world_size: int, strategy: Any, split: LinkSplit | str, options: dict[str, Any]) -> Outcome:
    data, module = module_of(split, **options), model()
    fitting = trainer(world_size, strategy)
    fitting.fit(module, data)
    (metrics,) = fitting.test(module, data, verbose=False)
    part = data.part(rank, world_size)
    return Outcome(module.asked, module.judged, part.node_arrays["n_id"].tolist(), state_of(module), dict(metrics))


def test_ranks_are_asked_for_every_edge_inside_their_part_once_a_pass() -> None:
    split = small_split()
    everything = pairs_of(split.graph)
    results = run_ranks(train, 3, LocalSGDStrategy(**PATIENCE), split, {"num_negatives": 2})
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
    results = run_ranks(train, 3, LocalSGDStrategy(**PATIENCE), split, {"evaluation": Evaluation(batch_size=7)})
    judged = Counter(target for result in results for targets in result.judged for target in targets)
    assert judged == held(split, "val") + held(split, "val") + held(split, "test")  # two epochs, then the test
    alone = model()
    alone.load_state_dict(results[0].state)
    ranks = ranks_by_hand(alone, split, "test")
    for result in results:
        assert result.metrics["mrr"] == pytest.approx(float((1 / ranks).mean()), rel=1e-5)
        assert result.metrics["hits@5"] == pytest.approx(float((ranks <= 5).float().mean()), rel=1e-5)


@pytest.mark.parametrize("boundary", [Isolated(), Halo(), Fetch()], ids=repr)
def test_targets_send_no_messages(boundary: Boundary) -> None:
    split = small_split()
    data = module_of(split, sampler=NeighborSampler([-1, -1]), boundary=boundary)
    part = data.graph if boundary == Fetch() else data.part(0, 2)
    here, own = pairs_of(split.graph), (data.partition(2).assignment == 0).nonzero().view(-1).tolist()
    seen = set(own) if boundary == Isolated() else set(range(NODES))
    loader = batches_of(data, part, 6, 0, 0, 2)
    num_dropped = 0
    for batch in loader:
        asked = {tuple(sorted(pair)) for pair in batch.n_id[batch.edge_label_index].T.tolist()}
        true = {pair for pair in asked if pair in here}
        assert all(set(pair) <= set(own) or (boundary == Fetch() and max(pair) in own) for pair in true)
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
    data = module_of(split, boundary=Fetch(), num_negatives=4)
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
        ({}, Fetch(), RandomPartitioner()),
        ({"boundary": Isolated()}, Isolated(), MetisPartitioner()),
        ({"holding": Holding(Rotate())}, Isolated(), MetisPartitioner()),
        ({"sampler": WholePartSampler(2)}, Isolated(), MetisPartitioner()),
        ({"partitioner": SuperNodePartitioner(8)}, Fetch(), SuperNodePartitioner(8)),
    ],
    ids=str,
)
def test_what_batches_see_by_default(options: dict[str, Any], boundary: Boundary, partitioner: Partitioner) -> None:
    data = LinkDataModule(small_split(), **options)
    assert (data.boundary, data.partitioner) == (boundary, partitioner)


def test_every_edge_is_asked_for_by_one_rank_where_all_are_seen() -> None:
    split = small_split()
    data = module_of(split, boundary=Fetch())
    asked = Counter(
        tuple(sorted(pair))
        for rank in range(3)
        for batch in batches_of(data, data.graph, -(-most_seeds(data, 3) // 40), 0, rank, 3)
        for pair in batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]].T.tolist()
    )
    assert asked == Counter(pairs_of(split.graph))


def test_corrections_are_slices_of_batches_of_the_whole_graph() -> None:
    split = small_split()
    data = module_of(split, global_batching=GlobalBatching(batch_size=31))
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


@pytest.mark.slow
def test_a_model_learns_to_rank() -> None:
    split = small_split()
    before, after = model(), model()
    data = module_of(split, batch_size=128)
    untrained = trainer(1).test(before, data, verbose=False)[0]["mrr"]
    fitting = trainer(1, max_epochs=20)
    fitting.fit(after, data)
    assert fitting.test(after, data, verbose=False)[0]["mrr"] > untrained + 0.05


def test_what_cannot_work_is_refused() -> None:
    split = small_split()
    for options, message in (
        ({"sampler": ShadowSampler([5], num_hops=2)}, "NeighborSampler or WholePartSampler, got ShadowSampler"),
        ({"sampler": MatrixSampler(LadiesSampler([5, 5]))}, "NeighborSampler or WholePartSampler, got LadiesSampler"),
        ({"boundary": History()}, r"boundary must be Isolated\(\), Halo\(\) or Fetch\(\) .*got History"),
        (
            {"boundary": Fetch(), "holding": Holding(extra_nodes=0.1)},
            r"boundary=Fetch\(\) sees the whole graph: choose",
        ),
        ({"global_batching": GlobalBatching(deal="own")}, "deals nodes to their owners, and links have two ends"),
    ):
        with pytest.raises(ValueError, match=message):
            module_of(split, **options)
    with pytest.raises(ValueError, match=r"no test edges back .*split_edges\(graph, test=0.1\)"):
        module_of(split_edges(communities(NODES, 4), 0.1, 0.0, negatives=3)).test_dataloader()


# Held links are ranked by rows that layers compute for all nodes as by those of sampled neighbourhoods.


class Links(LinkSAGE):
    """Ranks links by embeddings of layers; with ``blocks`` by those of sampled neighbourhoods, as it always was."""

    def __init__(self, by_layers: bool) -> None:
        torch.manual_seed(0)
        super().__init__(FEATURES)
        self.by_layers = by_layers
        self.kinds: set[str] = set()

    def layers(self) -> Any:
        def layer(batch: Any, is_last: bool) -> Tensor:
            (block,) = batch.blocks
            x = self.convs[is_last]((batch.x, batch.x[: block.num_dst]), block.adj)
            return x if is_last else x.relu()

        return [lambda batch: layer(batch, False), lambda batch: layer(batch, True)]

    def forward(self, batch: Any) -> Tensor:
        self.kinds.add(type(batch).__name__)
        if not self.by_layers:
            return super().forward(batch)
        x, (sender, receiver) = through_layers(self, batch), batch.edge_label_index
        scores: Tensor = self.decoder(x[sender] * x[receiver]).squeeze(1)
        return scores

    def validation_step(self, batch: Any) -> None:
        self.ranking.update(self(batch), batch.edge_label)
        self.log_dict(dict(self.ranking), batch_size=int(batch.edge_label.sum()))

    test_step = validation_step


def rank_links(rank: int, world_size: int) -> list[Any]:
    strategy: Any = GrappaStrategy(**PATIENCE) if world_size > 1 else "auto"
    found = []
    for by_layers in (False, True):
        module = Links(by_layers)
        data = module_of(small_split(), evaluation=Evaluation(batch_size=5))
        (metrics,) = trainer(world_size, copy.deepcopy(strategy)).test(module, data, verbose=False)
        found.append((metrics, module.kinds))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_links_rank_as_before(world_size: int) -> None:
    expected = rank_links(0, 1)[0][0]
    for (before, _), (metrics, kinds) in run_ranks(rank_links, world_size) if world_size > 1 else [rank_links(0, 1)]:
        assert before == pytest.approx(expected, abs=1e-6)
        assert metrics == pytest.approx(expected, abs=1e-6)
        assert kinds == {"SeedBatch"}
