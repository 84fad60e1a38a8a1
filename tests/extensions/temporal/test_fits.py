"""Data modules by time: wherever a batch comes from, no seed of it sees what it must not, and all else is refused."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.temporal import temporal_sampler
from lightning_gnn_dist.layers.choice import Counter, Judged, seeds_at_once
from tests.data.test_settings import PAPERS, check_threads_and_bulks
from tests.data_fitting import SOME_STRATEGIES, trainer
from tests.every_strategy import every_strategy
from tests.graph.typed.graphs import WRITES, check_sentences, data_with, small
from tests.placing import seeds_and_source
from tests.ranks import run_ranks
from tests.typed_sage import typed_graph_of_papers

STRATEGIES = every_strategy()
SAMPLER = lgd.TemporalSampler([4, 3], "edge_time", "time")


def temporal_graph() -> lgd.Graph:
    """Nodes of four communities, each a seed at one of ten times; edges at any of them."""
    plain, generator = lgd.communities(300, 4, num_features=6, seed=3), torch.Generator().manual_seed(0)
    time = torch.randint(10, (plain.num_nodes,), generator=generator)
    edge_time = torch.randint(10, (plain.num_edges,), generator=generator)
    nodes = plain.node_arrays | {"time": time, "x": plain.node_arrays["x"].double()}
    return lgd.Graph(plain.indptr, plain.indices, nodes, {"edge_time": edge_time})


class Watcher(pl.LightningModule):
    """Looks at all edges of every batch that it is given. Its layers could be computed one by one for all nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(6, 8).double(), SAGEConv(8, 4).double()])
        self.num_edges = {"training_step": 0, "test_step": 0}

    def layers(self) -> Any:
        first, second = self.convs
        return [lambda batch: first(batch.x, batch.edge_index).relu(), lambda b: second(b.x, b.edge_index)]

    def forward(self, batch: Any) -> Tensor:
        check(batch)
        return lgd.through_layers(self, batch)

    def training_step(self, batch: Any) -> Tensor:
        self.num_edges["training_step"] += batch.num_edges
        return functional.cross_entropy(self(batch), batch.y)

    def validation_step(self, batch: Any) -> None:
        self.log("loss", functional.cross_entropy(self(batch), batch.y), batch_size=batch.batch_size, sync_dist=True)

    def test_step(self, batch: Any) -> None:
        self.num_edges["test_step"] += batch.num_edges
        self.validation_step(batch)

    def predict_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.n_id[: batch.batch_size], self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check(batch: Data) -> None:
    assert batch.time[: batch.batch_size].equal(batch.seed_time)
    sender, receiver = batch.edge_index
    assert batch.batch[sender].equal(batch.batch[receiver])
    assert bool((batch.edge_time < batch.seed_time[batch.batch[receiver]]).all())


def by_hand(module: Watcher, graph: lgd.Graph) -> Tensor:
    """The rows of all nodes: those of one time by a forward over the graph of all edges before it."""
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edge_index, x = torch.stack([graph.indices.long(), receiver]), graph.node_arrays["x"]
    rows = torch.empty(graph.num_nodes, 4, dtype=torch.float64)
    for time in graph.node_arrays["time"].unique():
        before = edge_index[:, graph.edge_arrays["edge_time"] < time]
        first, second = module.convs
        with torch.no_grad():
            of_time = second(first(x, before).relu(), before)
        at = graph.node_arrays["time"] == time
        rows[at] = of_time[at]
    return rows


def trained(rank: int, world_size: int, names: list[str], path: str) -> list[Any]:
    found = []
    for name in names:
        module = Watcher()
        data = lgd.PartitionedDataModule(path, sampler=SAMPLER, batch_size=16, partitioner=lgd.RandomPartitioner())
        fit = trainer(world_size, STRATEGIES[name](), max_epochs=2)
        fit.fit(module, data)
        fit.test(module, data, verbose=False)
        rows = fit.predict(module, data)
        assert rows is not None and all(count > 0 for count in module.num_edges.values())
        found.append(([module.state_dict()], [torch.cat(of) for of in zip(*rows, strict=True)]))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("names", SOME_STRATEGIES)
def test_every_strategy_learns_from_the_past_and_is_judged_by_it(names: list[str], tmp_path: Path) -> None:
    graph, module = temporal_graph(), Watcher()
    graph.save(tmp_path / "graph")
    for of_name in zip(*run_ranks(trained, 2, names, str(tmp_path / "graph")), strict=True):
        (first,), (second,) = (states for states, _ in of_name)
        assert all(first[name].equal(second[name]) for name in first)
        module.load_state_dict(first)
        for _, (ids, rows) in of_name:
            torch.testing.assert_close(rows, by_hand(module, graph)[ids], rtol=0, atol=1e-12)


def batches_of(data: lgd.PartitionedDataModule) -> Iterator[Any]:
    """All ways to a batch, on one rank and on one of three."""
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()
    yield from chain(*loaders, data.correction_batches(0, stop=2), data.anchor_batches(0))
    for rank in range(3):
        part = data.part(rank, 3)
        seeds, source = seeds_and_source(data, part, rank, 3)
        yield from source.make([seeds], [(0, 0, 0)])  # type: ignore[list-item]


@pytest.mark.parametrize("boundary", [pytest.param(lgd.Halo(1), marks=pytest.mark.slow), lgd.Fetch()], ids=repr)
def test_batches_of_all_loaders_and_parts_keep_the_law(boundary: Boundary) -> None:
    options: dict[str, Any] = {"batch_size": 20, "partitioner": lgd.RandomPartitioner(), "boundary": boundary}
    for sampler in (SAMPLER, lgd.TemporalSampler([4, 3], "edge_time", "time", pick="latest")):
        num_edges = 0
        for batch in batches_of(lgd.PartitionedDataModule(temporal_graph(), sampler=sampler, **options)):
            check(batch)
            num_edges += batch.num_edges
        assert num_edges > 1000
    by_nodes = lgd.TemporalSampler([4, 3], "time")
    for batch in batches_of(lgd.PartitionedDataModule(temporal_graph(), sampler=by_nodes, **options)):
        sender, receiver = batch.edge_index
        assert bool((batch.time[sender] < batch.seed_time[batch.batch[receiver]]).all()) and batch.num_edges
    at_the_time = lgd.TemporalSampler([4, 3], "time", equal=True)
    data = lgd.PartitionedDataModule(typed_graph_of_papers(200), sampler=at_the_time, **options)
    for batch in batches_of(data):
        assert batch["paper"].time[: batch.batch_size].equal(batch["paper"].seed_time)
        for kind, store in batch.edge_items():
            times = batch["paper"].seed_time[batch[kind[2]].batch[store.edge_index[1]]]
            assert bool((store.time <= times).all())
        assert batch.num_edges > 0


def test_an_evaluation_sees_as_many_of_the_latest_events_as_training() -> None:
    graph = temporal_graph()
    when = [times.sort().values for times in graph.edge_arrays["edge_time"].split(graph.degrees().tolist())]
    sampler = lgd.TemporalSampler([4, 3], "edge_time", "time", pick="latest")
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=20)
    all_seen = lgd.Evaluation(sampler=lgd.TemporalSampler([-1, -1], "edge_time", "time"))
    others = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=20, evaluation=all_seen)
    for most, loader in ((4, data.test_dataloader()), (graph.num_edges, others.test_dataloader())):
        for batch in loader:
            for root, (node, now) in enumerate(zip(batch.n_id, batch.seed_time, strict=False)):
                seen = when[node][when[node] < now][-most:]
                assert batch.edge_time[batch.edge_index[1] == root].sort().values.equal(seen)


def test_an_evaluation_takes_as_many_seeds_at_once_as_its_trees_have_memory() -> None:
    graph, ids, sampler = temporal_graph(), torch.arange(300), SAMPLER.of_all()
    counter, seeds = Counter(graph, 2, None), Judged(ids, 1, "", lambda _: sampler)
    assert seeds_at_once(graph, sampler, seeds, counter, 120, 1 << 30) == 120
    assert seeds_at_once(graph, sampler, seeds, counter, 120, 1) == 1
    size = seeds_at_once(graph, sampler, seeds, counter, 120, 1 << 19)
    (sample,) = sampler.sample_bulk(graph, [ids[:size]], [BatchKey(0, 0, 0)])
    assert 1 << 17 < counter.bytes_of(sample.nodes.numel(), sample.indices.numel()) < 1 << 19
    batches = list(lgd.PartitionedDataModule(graph, sampler=SAMPLER, batch_size=120).predict_dataloader())
    assert [batch.batch_size for batch in batches] == [100, 100, 100]


def test_it_tells_once_which_edges_have_no_time(informed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are always seen at a level that Lightning shows."""
    told: list[str] = []
    monkeypatch.setattr(temporal_sampler, "rank_zero_info", told.append)
    data = small()
    del data["paper", "cites", "paper"].time
    lgd.PartitionedDataModule(lgd.Graph.from_pyg(data).with_seeds("paper"), sampler=lgd.TemporalSampler([2], "time"))
    lgd.PartitionedDataModule(temporal_graph(), sampler=lgd.TemporalSampler([2], "time"))
    lgd.PartitionedDataModule(temporal_graph(), sampler=SAMPLER)
    of_paper = "['paper__cites__paper', 'paper__in__venue', 'paper__by__author']"
    assert informed == [
        f"Edges of these types have no time, and are seen by that of their sender: {of_paper}.",
        "Edges of these types have no time, and are seen by that of their sender: ['all edges'].",
    ]
    always = "['author__writes__paper', 'venue__of__paper']"
    assert told == [f"Edges of these types are always seen, as neither they nor their senders have a time: {always}."]


PLAIN = lgd.NeighborSampler([4, 3])
AT_THE_TIME = lgd.Evaluation(sampler=lgd.TemporalSampler([4, 3], "edge_time", "time", equal=True))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such time": ({"sampler": lgd.TemporalSampler([2], "when")}, "time names the array 'when', and neither"),
    "seeds without": ({"sampler": lgd.TemporalSampler([2], "edge_time")}, "Nodes have no 'edge_time' to say at what"),
    "corrections": ({"global_batching": lgd.GlobalBatching(sampler=PLAIN)}, "global_batching draws with Neighbor"),
    "equal times": (
        {"evaluation": AT_THE_TIME},
        "with the same time, seed_time and equal",
    ),
    "labels of later nodes": ({"loading": lgd.Loading(all_labels=True)}, r"Loading\(all_labels=True\) shows a seed"),
    "history": ({"boundary": lgd.History()}, r"boundary=History\(\) keeps one row of each node, whatever the time"),
    "device": ({"loading": lgd.Loading(sample_on="device")}, 'sample_on="device" needs a sampler that draws there'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_show_the_future_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        lgd.PartitionedDataModule(temporal_graph(), **({"sampler": SAMPLER} | options))


def test_the_oldest_nodes_are_for_training_and_the_latest_for_testing() -> None:
    graph = temporal_graph()
    graph.node_arrays["y"][:30] = -1
    time = graph.node_arrays["time"]
    found = lgd.split_by_time(graph, val=0.2, test=0.1)
    masks = [found.node_arrays[f"{name}_mask"] for name in ("train", "val", "test")]
    assert sum(mask.long() for mask in masks).equal((graph.node_arrays["y"] >= 0).long())  # type: ignore[union-attr]
    train, val, test = (time[mask] for mask in masks)
    assert train.max() < val.min() and val.max() < test.min()
    assert test.numel() >= 27 and test.numel() - int((test == test.min()).sum()) < 27
    held = val.numel() + test.numel()
    assert held >= 81 and held - int((val == val.min()).sum()) < 81
    with pytest.raises(ValueError, match=r"Nodes have no 'edge_time' .* or name another array of theirs as time"):
        lgd.split_by_time(graph, "edge_time")
    with pytest.raises(ValueError, match=r"shares between 0 and 1 .* such as 0\.15, got 15"):
        lgd.split_by_time(graph, val=15)
    everybody = lgd.split_by_time(graph, val=0, test=0).node_arrays
    assert int(everybody["train_mask"].sum()) == 270 and not everybody["val_mask"].any()


def test_a_split_by_time_of_a_typed_graph_is_of_one_type() -> None:
    graph = lgd.Graph.from_pyg(small())
    found = lgd.split_by_time(graph, val=0.2, test=0.2).types
    assert found is not None and found.seeds == "paper"
    arrays, before = found.node_arrays["paper"], graph.types.node_arrays["author"]  # type: ignore[union-attr]
    assert arrays["time"][arrays["train_mask"]].max() < arrays["time"][arrays["test_mask"]].min()
    assert found.node_arrays["author"] == before
    with pytest.raises(ValueError, match="time names the array 'when', and no node type with labels has it"):
        lgd.split_by_time(graph, "when")
    with pytest.raises(ValueError, match="Nodes of type 'author' have no 'time'"):
        lgd.split_by_time(graph.with_seeds("author"))
    data = data_with()
    data["author"].y, data["author"].time = torch.zeros(7).long(), torch.arange(7)
    said = r"2 node types have labels and 'time' \(\['paper', 'author'\]\), and one is split: choose it, as in"
    with pytest.raises(ValueError, match=said):
        lgd.split_by_time(lgd.Graph.from_pyg(data))
    with pytest.raises(ValueError, match=r"No node is left for train: with val=0.4 and test=0.4, 12 labelled nodes of"):
        lgd.split_by_time(graph, val=0.4, test=0.4)


def test_threads_and_bulks_change_nothing() -> None:
    by_time = lgd.TemporalSampler([4, 3], "time")
    check_threads_and_bulks(partial(lgd.PartitionedDataModule, PAPERS, sampler=by_time, batch_size=32))


# Times in several units.


SECONDS = 1_700_000_000 + torch.arange(12)


def test_seeds_and_events_in_two_units_are_told() -> None:
    of_cites = torch.full((40,), 1_700_000_000_000)
    graph = lgd.Graph.from_pyg(data_with(at=SECONDS, time=SECONDS * 1000, cites_time=of_cites))
    said = (
        r"No seed sees an event: the latest seed is at 1700000011 \(at\), and the earliest event at 1700000000000 "
        r"\(time\)\. Give both in one unit"
    )
    with pytest.raises(ValueError, match=said) as stop:
        lgd.PartitionedDataModule(graph, sampler=lgd.TemporalSampler([2], "time", "at"))
    check_sentences(str(stop.value))


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (1000, "No seed sees edges of these types, by their time: paper__cites__paper (1700000000000 to 170000003900"),
        (1, None),
        (1e-3, "Every seed sees all edges of these types, by their time: paper__cites__paper (1700000 to 1700000)."),
    ],
)
def test_a_type_of_edges_in_another_unit_is_told(
    monkeypatch: pytest.MonkeyPatch, unit: float, said: str | None
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    of_cites = ((1_700_000_000 + torch.arange(40)) * unit).long()
    data = data_with(time=SECONDS, cites_time=of_cites)
    data[WRITES].time = 1_700_000_000 + torch.arange(data[WRITES].num_edges) % 12
    lgd.PartitionedDataModule(lgd.Graph.from_pyg(data), sampler=lgd.TemporalSampler([2], "time"))
    about = [line for line in told if "units differ" in line]
    assert len(about) == (said is not None) and (said is None or about[0].startswith(said))
    if said is not None:
        assert "Seeds are at 1700000000 to 1700000011. If that cannot be, their units differ: give" in about[0]
