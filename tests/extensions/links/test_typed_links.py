"""Links of one edge type as seeds, and splits of them: batches by hand, nothing that leaks, and what is refused."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.extensions.links.test_splits import Pairs
from tests.extensions.links.test_splits import pairs as set_of
from tests.graph.typed.graphs import data_with
from tests.pages import blocks
from tests.placing import batches_of, most_seeds, placed, seeds_and_source
from tests.test_readme import after, names, quiet_trainer
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
PEERS: EdgeType = ("paper", "resembles", "paper")
ALL = lgd.NeighborSampler([-1, -1])


@cache
def papers() -> lgd.Graph:
    """Papers and others, of which some resemble each other: a type with both directions of each link."""
    data = typed_graph_of_papers(200).to_pyg()
    ends = data[CITES].edge_index[:, :60]
    data[PEERS].edge_index = torch.cat([ends, ends.flip(0)], 1)
    return lgd.Graph.from_pyg(data)


@cache
def split_of(kind: EdgeType = WRITES) -> lgd.LinkSplit:
    return lgd.split_edges(papers(), 0.1, 0.1, negatives=7, edge_type=kind)


def data_of(split: lgd.LinkSplit | Path, **options: Any) -> lgd.LinkDataModule:
    defaults = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 48, "partitioner": lgd.RandomPartitioner()}
    defaults["boundary"] = lgd.Isolated()
    return lgd.LinkDataModule(split, **(defaults | options))  # type: ignore[arg-type]


class LinkHetero(HeteroSAGE):
    """Scores links of one edge type by products of rows."""

    def __init__(self, edge_types: list[EdgeType], asked: EdgeType) -> None:
        super().__init__(edge_types)
        self.asked, self.ranking = asked, lgd.LinkRanking(hits=[1, 3])

    def forward(self, batch: Any) -> Tensor:
        rows, (sender, receiver) = self.rows(batch), batch[self.asked].edge_label_index
        return (rows[self.asked[0]][sender] * rows[self.asked[2]][receiver]).sum(1)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self(batch), batch[self.asked].edge_label)

    def _judge(self, name: str, batch: Any) -> None:
        label = batch[self.asked].edge_label
        self.ranking.update(self(batch), label)
        self.log_dict(dict(self.ranking), batch_size=int(label.sum()))


def targets_of(batch: Any, kind: EdgeType) -> list[tuple[int, int, float]]:
    """Sender, receiver and label of each target, by ids in the types of the whole graph."""
    sender, receiver = batch[kind].edge_label_index
    ids = batch[kind[0]].n_id[sender].tolist(), batch[kind[2]].n_id[receiver].tolist()
    return list(zip(*ids, batch[kind].edge_label.tolist(), strict=True))


def pairs(edges: Tensor) -> list[tuple[int, int]]:
    return [(sender, receiver) for sender, receiver in edges.T.tolist()]


def links(split: lgd.LinkSplit) -> set[tuple[int, int]]:
    return set(pairs(hetero(split)[split.edge_type].edge_index))


def hetero(split: lgd.LinkSplit) -> Any:
    return split.graph.to_pyg()


Edges = Counter[tuple[EdgeType, int, int]]


def hidden(split: lgd.LinkSplit, targets: set[tuple[int, int]]) -> Edges:
    """The edges that show a target, by the rule: in either direction, in its type and in the reverse one."""
    back, (source, _, target) = {(r, s) for s, r in targets}, split.edge_type or WRITES
    shown = targets | back if source == target else targets
    turned = targets | back if source == target else back
    found = [(split.edge_type, *pair) for pair in shown] + [(split.reverse, *pair) for pair in turned]
    return Counter(found)  # type: ignore[arg-type]


def by_hand(split: lgd.LinkSplit, here: dict[str, set[int]], batch: Any) -> Edges:
    """All edges into the seeds and into what sends to them, among nodes that are there, but those of the targets."""
    edges = [
        (k, s, r)
        for k, store in hetero(split).edge_items()
        for s, r in pairs(store.edge_index)
        if s in here[k[0]] and r in here[k[2]]
    ]
    seeds = {(kind, n) for kind in here for n in batch[kind].n_id[: batch[kind].get("batch_size", 0)].tolist()}
    first = {(k[0], s) for k, s, r in edges if (k[2], r) in seeds}
    asked = {(s, r) for s, r, label in targets_of(batch, batch.seed_type) if label}
    shown = hidden(split, asked)
    return Counter(e for e in edges if (e[0][2], e[2]) in seeds | first and e not in shown)


def edges_of_batch(batch: Any) -> Edges:
    found: Edges = Counter()
    for kind, store in batch.edge_items():
        ends = [batch[kind[end]].n_id[store.edge_index[end // 2]] for end in (0, 2)]
        found.update((kind, s, r) for s, r in pairs(torch.stack(ends)))
    return found


def nodes_of(part: lgd.Graph) -> dict[str, set[int]]:
    """The nodes of each type, by their ids in the whole graph."""
    whole = {kind: torch.arange(count) for kind, count in part.types.num_nodes.items()}
    return {k: set(arrays.get("n_id", whole[k]).tolist()) for k, arrays in part.types.node_arrays.items()}


CASES = [(WRITES, 1, ALL), (WRITES, 3, ALL), (CITES, 3, ALL), (PEERS, 2, ALL), (WRITES, 3, lgd.WholePartSampler(2))]


@pytest.mark.parametrize(("kind", "num_ranks", "sampler"), CASES, ids=str)
def test_batches_are_typed_subgraphs_without_their_targets(kind: EdgeType, num_ranks: int, sampler: Any) -> None:
    split = split_of(kind)
    data = data_of(split, sampler=sampler, num_negatives=2)
    part, true, asked = data.part(0, num_ranks), links(split), Counter[tuple[int, int]]()
    here, (source, _, target) = nodes_of(part), kind
    for batch in batches_of(data, part, 3, 0, 0, num_ranks):
        targets, count = targets_of(batch, kind), batch.num_targets // 3
        assert batch.seed_type == kind and [label for *_, label in targets] == [1.0] * count + [0.0] * 2 * count
        assert [s for s, *_ in targets[count:]] == [s for s, *_ in targets[:count] for _ in range(2)]
        for s, r, label in targets:
            assert s in here[source] and r in here[target] and ((s, r) in true) == bool(label)
        now = [(s, r) for s, r, label in targets if label]
        asked.update(now)
        if isinstance(sampler, lgd.NeighborSampler):
            assert edges_of_batch(batch) == by_hand(split, here, batch)
        else:
            assert not edges_of_batch(batch).keys() & hidden(split, set(now)).keys()
        check_seeds(batch, kind)
    of_part = [(s, r) for s, r in pairs(hetero(split)[kind].edge_index) if s in here[source] and r in here[target]]
    if split.undirected:
        assert Counter(map(frozenset, asked.elements())) == Counter(frozenset(p) for p in of_part if p[0] < p[1])
    else:
        assert asked == Counter(p for p in of_part if source != target or p[0] != p[1])


def check_seeds(batch: Any, kind: EdgeType) -> None:
    """The ends of all targets, and no others, are the first nodes of their types, with their labels."""
    counts = {end: batch[end].batch_size for end in (kind[0], kind[2])}
    assert batch.batch_size == sum(counts.values())
    for end, count in counts.items():
        ends = [row for row, of in zip(batch[kind].edge_label_index, (kind[0], kind[2]), strict=True) if of == end]
        assert torch.cat(ends).unique().tolist() == list(range(count))
        assert batch.blocks[-1][next(k for k in batch.edge_types if k[2] == end)].num_dst == count
    assert len(batch["paper"].y) == counts["paper"] and "y" not in batch["venue"]
    whole = papers().types
    assert whole is not None
    for end in batch.node_types:
        assert batch[end].x.equal(whole.node_arrays[end]["x"][batch[end].n_id])


def test_a_part_with_few_links_repeats_them_with_weight_zero() -> None:
    split = split_of()
    data = data_of(split, partitioner=unequal(split.graph), batch_size=150)
    placed(data, 1, 2)
    batches = list(data.train_dataloader())
    few = seeds_and_source(data, data.part(1, 2), 1, 2)[0].numel()
    assert few < len(batches) and [batch.is_filler for batch in batches] == [n >= few for n in range(len(batches))]
    assert not batches[-1].coverage.any() and "coverage" not in batches[0]


def unequal(graph: lgd.Graph) -> lgd.Partition:
    """The second of two parts has two links of authors and papers."""
    (a, b), starts = pairs(graph.to_pyg()[WRITES].edge_index[:, :200:199].flip(0)), graph.types
    assignment = torch.zeros(graph.num_nodes, dtype=torch.int32)
    for paper, author in (a, b):
        assignment[starts.nodes_of("paper")[paper]] = assignment[starts.nodes_of("author")[author]] = 1
    return lgd.Partition(assignment, 2)


def test_predictions_are_of_the_chosen_type() -> None:
    data = data_of(split_of())
    batches = list(data.predict_dataloader())
    assert torch.cat([batch["paper"].n_id[: batch.batch_size] for batch in batches]).tolist() == list(range(200))
    chosen = data_of(lgd.split_edges(papers().with_seeds("author"), negatives=2, edge_type=WRITES))
    assert next(iter(chosen.predict_dataloader())).seed_type == "author" and chosen.num_nodes == 100


def test_a_batch_can_lose_its_types_and_says_what_it_lacks() -> None:
    batch = next(iter(data_of(split_of()).train_dataloader()))
    plain = batch.to_homogeneous()
    assert plain.edge_label.equal(batch[WRITES].edge_label)
    kinds = [plain.node_type[ends].unique().tolist() for ends in plain.edge_label_index]
    names = [[batch.node_types[number] for number in found] for found in kinds]
    assert names == [["author"], ["paper"]]
    assert plain.n_id[plain.edge_label_index[0]].equal(batch["author"].n_id[batch[WRITES].edge_label_index[0]])
    with pytest.raises(AttributeError, match=r"seeds of two types, .* batch\['author'\]\.n_id and batch\['paper"):
        _ = batch.n_id


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"loading": lgd.Loading(sample_on="device")}, 'sample_on="device" is for graphs without types'),
    "other types": ({"sampler": lgd.NeighborSampler({WRITES: [2, 2]})}, "num_neighbors has no numbers for the edge"),
    "weights": ({"sampler": lgd.NeighborSampler([2, 2], weight="w")}, "weight .'w'. draws from graphs without types"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        data_of(split_of(), **options)


def test_a_rank_without_links_is_refused_by_name() -> None:
    split = split_of()
    apart = torch.zeros(split.graph.num_nodes, dtype=torch.int32)
    apart[split.graph.types.nodes_of("venue").start :] = 1  # venues and words have links of other types
    with pytest.raises(ValueError, match=r"rank 1 of 2 hold none of the .* training edges"):
        most_seeds(data_of(split, partitioner=lgd.Partition(apart, 2), boundary=lgd.Isolated()), 2)
    with pytest.raises(ValueError, match=r"none of the nodes that the .* training edges lead to.* another partition"):
        most_seeds(data_of(split, partitioner=lgd.Partition(apart, 2), boundary=lgd.Fetch()), 2)
    with pytest.raises(TypeError, match=r"split must be split_edges\(graph\)"):
        data_of(split.graph)  # type: ignore[arg-type]


def test_the_loader_of_links_is_replaced() -> None:
    (block,), graph = blocks("diff", "migration", "LinkNeighborLoader"), typed_graph_of_papers(200)
    kind, trainer = ("author", "writes", "paper"), quiet_trainer(accelerator="cpu", devices=1)
    model = LinkHetero(list(graph.types.edge_types) if graph.types else [], kind)
    exec(after(block), names(data=graph.to_pyg(), WRITES=kind, model=model, trainer=trainer))
    assert "mrr" in trainer.callback_metrics


# Splits of one edge type: nothing shows a held edge, nothing false is true, other types stay, saved ones are equal.


BACK: EdgeType = ("paper", "rev_writes", "author")


@cache
def graph() -> lgd.Graph:
    return lgd.citations(200, 2)


def turned(edges: Pairs) -> Pairs:
    return {(receiver, sender) for sender, receiver in edges}


def renamed(name: str) -> HeteroData:
    """The citations, where another type than `rev_writes` has the links of `writes` turned round."""
    data = graph().to_pyg()
    for kind, store in graph().to_pyg().edge_items():
        data[kind].time = store.time + 0  # of its own
    data["paper", name, "author"].edge_index = data[BACK].edge_index
    del data[BACK]
    return data


def test_what_is_held_is_nowhere_to_be_seen_and_the_rest_stays() -> None:
    whole, split = graph().to_pyg(), lgd.split_edges(graph(), 0.1, 0.2, negatives=7, edge_type=WRITES)
    rest = split.graph.to_pyg()
    held = {name: set_of(edges) for name, edges in split.edges.items()}
    every, kept = set_of(whole[WRITES].edge_index), set_of(rest[WRITES].edge_index)
    assert (split.reverse, split.undirected) == (BACK, False)
    assert [len(held[name]) for name in ("val", "test")] == [round(share * len(every)) for share in (0.1, 0.2)]
    assert kept | held["val"] | held["test"] == every and len(kept) + sum(map(len, held.values())) == len(every)
    assert set_of(rest[BACK].edge_index) == turned(kept)
    for name, edges in split.edges.items():
        false = split.negatives[name]
        assert false.shape == (edges.shape[1], 7) and 0 <= int(false.min()) <= int(false.max()) < 200
        assert not set_of(torch.stack([edges[0].repeat_interleave(7), false.view(-1)])) & every
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
    kept = set_of(split.graph.to_pyg()[CITES].edge_index)
    assert split.undirected and split.reverse is None and turned(kept) == kept
    for edges in split.edges.values():
        assert not (set_of(edges) | turned(set_of(edges))) & kept
    disputes = ("paper", "disputes", "paper")
    assert split.graph.to_pyg()[disputes].edge_index.equal(data[disputes].edge_index)


def test_copies_go_together_and_other_types_do_not_make_false_what_is_false() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 4, 6
    data["a", "to", "b"].edge_index = torch.tensor([[0, 0, 1, 2, 3, 3], [0, 0, 1, 2, 3, 3]])
    data["a", "near", "b"].edge_index = torch.cartesian_prod(torch.arange(4), torch.arange(6)).T
    split = lgd.split_edges(lgd.Graph.from_pyg(data), 0.25, 0.25, negatives=5, edge_type=("a", "to", "b"))
    kept = set_of(split.graph.to_pyg()["a", "to", "b"].edge_index)
    assert len(kept) == 2 and not kept & (set_of(split.edges["val"]) | set_of(split.edges["test"]))
    for name, edges in split.edges.items():  # all other nodes are false, though they are near
        assert set(split.negatives[name].flatten().tolist()) <= set(range(6)) - set(edges[1].tolist())
    assert split.graph.to_pyg()["a", "near", "b"].edge_index.shape == (2, 24)


def test_a_reverse_of_another_name_is_named() -> None:
    some, by = renamed("by"), ("paper", "by", "author")
    some["paper", "apart", "author"].edge_index = torch.tensor([[199], [99]])
    with pytest.raises(ValueError, match=r"'by', .* has (\d+) of the \1 links of .* reverse=None says"):
        lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES)
    split = lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by)
    kept = set_of(split.graph.to_pyg()[WRITES].edge_index)
    assert split.reverse == by and set_of(split.graph.to_pyg()[by].edge_index) == turned(kept)
    assert lgd.split_edges(graph(), negatives=2, edge_type=BACK).reverse == WRITES
    of_all = some[by].edge_index
    some[by].edge_index = of_all[:, of_all.shape[1] // 2 + 9 :]  # fewer than half, so these are others
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES).reverse is None
    some[by].edge_index = of_all[:, 5:]
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by).reverse == by
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=None).reverse is None
    said = r"reverse=\('paper', 'apart', 'author'\) has none of the links of .* turned round: name the type that has"
    with pytest.raises(ValueError, match=said):
        lgd.split_edges(lgd.Graph.from_pyg(some), edge_type=WRITES, reverse=("paper", "apart", "author"))


def test_a_split_of_ones_own_is_looked_at_in_both_types() -> None:
    split = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES)
    own = lgd.LinkSplit(split.graph, split.edges, split.negatives, edge_type=WRITES)
    assert own.fingerprint == split.fingerprint
    by_name = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES, reverse=None).graph
    alone: dict[str, Any] = {"negatives": 3, "edge_type": WRITES, "reverse": None}
    by_links = lgd.split_edges(lgd.Graph.from_pyg(renamed("by")), 0.1, 0.0, **alone).graph
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


def test_links_of_a_split_are_compared_with_other_edges_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    data = data_with(cites_time=1_700_000_000_000 + torch.arange(40))
    data[WRITES].time = 1_700_000_000 + torch.arange(data[WRITES].num_edges)
    split = lgd.split_edges(lgd.Graph.from_pyg(data), edge_type=WRITES, val=0.25, test=0.25, time="time")
    lgd.LinkDataModule(split)
    assert any(line.startswith("No seed sees edges of these types, by their time: paper__cites") for line in told)
