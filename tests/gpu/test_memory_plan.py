"""On a device batches are those of RAM, wherever edges and rows lie, and making them never stops the training."""

from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, Loading, NeighborSampler, PartitionedDataModule, ShadowSampler, communities
from lightning_gnn_dist.batches.source import GraphSource, stream_to
from lightning_gnn_dist.extensions.larger_than_memory.memory_plan import Sizes
from lightning_gnn_dist.extensions.larger_than_memory.placement import Placement, release
from lightning_gnn_dist.extensions.larger_than_memory.sources import PlacedSource
from lightning_gnn_dist.graph.convert import quantize_rows
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.gpu.test_waits import Net
from tests.loaders import over
from tests.typed_sage import typed_graph_of_papers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")]
CUDA = torch.device("cuda", 0)
ROOMS = {
    "all": (1.0, 1.0),
    "edges, some rows": (1.0, 0.3),
    "edges": (1.0, 0.0),
    "some rows": (0.0, 0.4),
    "nothing": (0, 0),
}


def budget(graph: Graph, place: str) -> int:
    """Bytes that make a plan of a graph."""
    sizes, (edges, rows) = Sizes.of(graph), ROOMS[place]
    return int(edges * sizes.edges + rows * sizes.rows)


def graph_of(kind: str, num_nodes: int = 6000) -> Graph:
    plain = communities(num_nodes, 4, num_features=128, mean_degree=10.0, train_share=0.5, seed=2)
    x = plain.node_arrays["x"]
    arrays = {"float32": {"x": x}, "bfloat16": {"x": x.bfloat16()}}
    if kind == "int8":
        arrays["int8"] = dict(zip(("x", "x_scale"), quantize_rows(x), strict=True))
    edges = {"edge_attr": torch.randn(plain.num_edges, 3, generator=torch.Generator().manual_seed(0))}
    return Graph(plain.indptr, plain.indices, plain.node_arrays | arrays[kind], edges)


def batches_of(graph: Graph, sampler: Any, placement: Placement | None, seeds: Tensor) -> Any:
    """Two passes, of which each batch is looked at after those that follow it were begun."""
    source = GraphSource(graph, sampler, all_labels=False)
    if placement is not None:
        source = PlacedSource(graph, sampler, placement=placement, stream=stream_to(CUDA), all_labels=False)
    loader = over(source, seeds, -(-len(seeds) // 400), seed=0, bulk_size=2, num_threads=2)
    weight = torch.randn(256, 256, device="cpu" if placement is None else CUDA)
    for _ in range(2):
        for batch in loader:
            for _ in range(3 if placement else 0):
                weight = (weight @ weight).tanh()  # the training stream is behind
            yield contents(batch.to("cpu"))
    loader.close()


@pytest.mark.parametrize("place", ROOMS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_batches_are_those_of_ram(kind: str, place: str) -> None:
    graph, sampler = graph_of(kind), NeighborSampler([6, 4])
    placement = Placement(CUDA, "auto", budget(graph, place), samplers=(sampler,), batch_size=400)
    check_same(*(batches_of(graph, sampler, at, graph.split("train")) for at in (placement, None)))
    assert (placement.crossing.asked > 0) == (place not in ("all", "nothing"))
    assert (placement.crossing.num_bytes > 0) == (place != "all")
    release(graph)


@pytest.mark.parametrize("place", ["all", "some rows"])
def test_samplers_and_types_that_are_drawn_in_ram(place: str) -> None:
    for graph, sampler in (
        (graph_of("float32"), ShadowSampler([4], num_hops=1)),
        (typed_graph_of_papers(), NeighborSampler([4, 3])),
    ):
        nodes = graph.types.nodes_of(graph.types.node_types[0])
        seeds = torch.arange(nodes.start, min(nodes.stop, nodes.start + 400))
        placement = Placement(CUDA, "auto", budget(graph, place), samplers=(sampler,))
        check_same(*(batches_of(graph, sampler, at, seeds) for at in (placement, None)))
        assert placement.crossing.hits > 0
        release(graph)


class Logged(pl.Callback):
    """Keeps what the data module says of each fit."""

    def __init__(self) -> None:
        self.figures = dict[str, float]()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.figures = dict(trainer.datamodule.figures)  # type: ignore[attr-defined]


def test_budgets_that_change_between_fits() -> None:
    graph, found = communities(4000, 4, num_features=16, train_share=0.6), dict[str, tuple[dict[str, float], Tensor]]()
    for place in (*ROOMS, "all"):
        logged, loading = Logged(), Loading(sample_on="auto", device_bytes=budget(graph, place))
        data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), batch_size=64, loading=loading)
        torch.manual_seed(0)
        module = Net()
        options: dict[str, Any] = {"callbacks": [logged], "limit_val_batches": 0, "accelerator": "gpu"}
        trainer(1, **options).fit(module, data)
        weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach().cpu()
        found[place] = logged.figures, weights
    for place, (figures, weights) in found.items():
        assert torch.allclose(weights, found["nothing"][1], atol=1e-5), place
        assert ("data/bus_bytes" in figures) == (place != "all")
    bus = {place: figures.get("data/bus_bytes", 0.0) for place, (figures, _) in found.items()}
    rates = {place: figures.get("data/cache_hit_rate") for place, (figures, _) in found.items()}
    assert (
        0 == bus["all"] < bus["edges, some rows"] < bus["edges"] < bus["nothing"] and bus["some rows"] < bus["nothing"]
    )
    assert (rates["edges"], rates["all"], rates["nothing"]) == (0.0, None, None)
    assert 0.3 < (rates["edges, some rows"] or 0) < (rates["some rows"] or 0) < 1


class Counts(pl.Callback):
    """Keeps how often the host waited where rows are brought, in the second epoch."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.waits = notes, 0

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.notes.clear()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        found = ((times, place) for (kind, _, place), times in self.notes.items() if kind == "sync")
        self.waits = sum(times for times, place in found if "rows_on_device" in place)


@pytest.mark.parametrize(("place", "most"), [("some rows", 0), ("edges, some rows", 1), ("edges", 1)])
def test_bringing_rows_waits_once_a_bulk_for_ids_and_never_else(place: str, most: int) -> None:
    if find_spec("pretend") is None:
        pytest.skip("only pretended devices count how often the host waits")
    from pretend import notes

    graph = communities(4000, 4, num_features=16, train_share=0.6)
    loading = Loading(sample_on="auto", device_bytes=budget(graph, place), bulk_size=4)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), batch_size=64, loading=loading)
    counts = Counts(notes)
    trainer(1, callbacks=[counts], limit_val_batches=0, accelerator="gpu").fit(Net(), data)
    bulks = -(-len(graph.split("train")) // 64) // 4
    assert most * bulks // 2 <= counts.waits <= most * (bulks + 3)
