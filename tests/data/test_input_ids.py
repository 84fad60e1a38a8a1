"""What batches say of their seeds and edges: labels of seeds alone, and places in the split and in the data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.sampling.base import Sampler
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.placing import batches_of
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.samplers import SAMPLERS, graph_for_all


def pyg_data() -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = coalesce(torch.randint(300, (2, 2000), generator=generator))
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1], generator=generator)]
    kind = torch.randint(3, (300,), generator=generator)
    masks = {name: kind == place for place, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    chunk, weight = torch.arange(300) % 7, torch.rand(edge_index.shape[1])
    return Data(x=torch.randn(300, 4), y=kind, edge_index=edge_index, chunk=chunk, edge_w=weight, **masks)


DATA = pyg_data()
GRAPH = lgd.Graph.from_pyg(DATA, edge_ids=True)
SAMPLERS_HERE = [s for s in SAMPLERS.values() if getattr(s, "weight", None) is None]


def check_edges(batch: SampledData) -> None:
    assert batch.e_id.dtype == torch.int64
    assert DATA.edge_index[:, batch.e_id].equal(batch.n_id[batch.edge_index])


def check_seeds(batch: SampledData, split: str) -> None:
    ids = torch.arange(300) if split == "all" else DATA[f"{split}_mask"].nonzero().view(-1)
    assert ids[batch.input_id].equal(batch.n_id[: batch.batch_size])


@pytest.mark.parametrize("sampler", SAMPLERS_HERE, ids=repr)
def test_batches_of_all_samplers_say_where_seeds_and_edges_come_from(sampler: Sampler) -> None:
    data = lgd.PartitionedDataModule(GRAPH, sampler=sampler, batch_size=30)
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "all": data.predict_dataloader()}
    for split, loader in loaders.items():
        for batch in loader:
            check_seeds(batch, split)
            check_edges(batch)
    for batch in (*data.anchor_batches(0), *data.correction_batches(0, stop=2)):
        check_seeds(batch, "train")
    data.teardown("fit")


@pytest.mark.parametrize("boundary", [lgd.Isolated(), lgd.Halo(), lgd.Fetch()], ids=repr)
@pytest.mark.parametrize("is_saved", [False, True])
def test_batches_of_parts_say_it_of_the_whole_graph(boundary: Boundary, is_saved: bool, tmp_path: Any) -> None:
    GRAPH.save(tmp_path / "graph")
    graph, seen = (tmp_path / "graph" if is_saved else GRAPH), []
    options: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "sampler": lgd.NeighborSampler([4, 3])}
    data = lgd.PartitionedDataModule(graph, batch_size=30, boundary=boundary, **options)
    for rank in range(2):
        part = data.graph if isinstance(boundary, lgd.Fetch) else data.part(rank, 2)
        for batch in batches_of(data, part, 3, 0, rank, 2):
            check_seeds(batch, "train")
            check_edges(batch)
            seen += batch.input_id.tolist()
    assert sorted(seen) == list(range(int(DATA.train_mask.sum())))


class Asking(SAGE):
    """Looks at every batch that it is given."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "predict": []}

    def look(self, batch: Any, kind: str) -> None:
        self.seen[kind] += batch.input_id.tolist()
        places = {"train": batch.train_mask, "val": batch.val_mask}.get(kind)
        assert batch.input_id.shape == (batch.batch_size,)
        assert places is None or places[: batch.batch_size].all()

    def training_step(self, batch: Any) -> Any:
        self.look(batch, "train")
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.look(batch, "val")

    def predict_step(self, batch: Any) -> Any:
        self.look(batch, "predict")
        return batch.input_id


def asked(rank: int, world_size: int, folder: Path | None) -> dict[str, list[int]]:
    whole: dict[str, Any] = {"partitioner": lgd.RandomPartitioner()} if folder is None else {}
    data = lgd.PartitionedDataModule(folder or GRAPH, sampler=lgd.NeighborSampler([4, 3]), batch_size=30, **whole)
    model, ddp = Asking(), lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE)
    fitting = trainer(world_size, ddp, max_epochs=2)
    fitting.fit(model, data)
    fitting.predict(model, data)
    return model.seen


def check_that_ranks_share_places(folder: Path | None) -> None:
    one, other = run_ranks(asked, 2, folder)
    for kind, split in (("train", "train"), ("val", "val")):
        count = int(DATA[f"{split}_mask"].sum())
        assert set(one[kind]) | set(other[kind]) == set(range(count))
        assert not set(one[kind]) & set(other[kind])
    assert sorted(one["predict"] + other["predict"]) == list(range(300))


def test_ranks_share_the_places_of_each_split() -> None:
    check_that_ranks_share_places(None)


def test_a_batch_without_them_says_how_to_get_them() -> None:
    data = lgd.PartitionedDataModule(DATA, sampler=lgd.NeighborSampler([4]), batch_size=50)
    batch = next(iter(data.train_dataloader()))
    with pytest.raises(AttributeError, match=r"Graph\.from_pyg\(data, edge_ids=True\) keeps that"):
        _ = batch.e_id
    assert "e_id" not in batch and "input_id" in batch
    assert not hasattr(batch, "e_id")


def all_batches(data: Any) -> Iterator[Any]:
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        yield from loader
    yield from data.anchor_batches(0)
    yield from data.correction_batches(0, stop=2)
    data.teardown("fit")


def check(batch: Any, y: Tensor, *, all_labels: bool) -> None:
    nodes = batch.n_id if all_labels else batch.n_id[: batch.batch_size]
    assert batch.y.equal(y[nodes])
    assert len(batch.get("val_mask", batch.x)) == batch.num_nodes


REFUSES_ALL = "temporal"  # would show a seed labels that come after its time
CASES = [(sampler, wanted) for name, sampler in SAMPLERS.items() for wanted in (False, name != REFUSES_ALL)]


@pytest.mark.parametrize(("sampler", "all_labels"), dict.fromkeys(CASES), ids=repr)
def test_batches_of_all_samplers(sampler: Sampler, all_labels: bool) -> None:
    graph = graph_for_all()
    loading = lgd.Loading(all_labels=all_labels, num_threads=0)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=60, loading=loading)
    sizes = set()
    for batch in all_batches(data):
        check(batch, graph.node_arrays["y"], all_labels=all_labels)
        sizes.add(len(batch.y) < batch.num_nodes)
    assert (True in sizes) != all_labels
