"""Settings of batches: seeds, evaluations that draw and say so, and what cannot go together."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.boundary.boundary import Boundary
from tests.batch_contents import contents, is_same
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.placing import batches_of, placed
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.samplers import SAMPLERS
from tests.typed_sage import typed_graph_of_papers

SOME = lgd.Evaluation(batch_size=50, sampler=lgd.NeighborSampler([2, 3]))


def test_an_evaluation_may_draw_neighbours_and_says_once_that_it_estimates(informed: list[str]) -> None:
    graph = lgd.communities(300, 3, num_features=4, mean_degree=12.0)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([5, 5]), evaluation=SOME)
    loaders = [data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
    assert [line for line in informed if "estimates" in line] == [
        "Evaluation draws neighbours with NeighborSampler(num_neighbors=(2, 3), replace=False, weight=None): figures "
        "are estimates."
    ]
    for loader, whole in zip(loaders, (graph.split("val"), graph.split("test"), torch.arange(300)), strict=True):
        first, second = list(loader), list(loader)
        assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in first]), whole)
        for batch in first:
            assert max(block.adj.crow_indices().diff().max() for block in batch.blocks) <= 3
            assert batch.blocks[-1].adj.crow_indices().diff().max() <= 2
        assert any(one.n_id.tolist() != two.n_id.tolist() for one, two in zip(first, second, strict=True))
        loader.set_epoch(0)
        assert [batch.n_id.tolist() for batch in loader] == [batch.n_id.tolist() for batch in first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation": lgd.Evaluation(sampler=lgd.NeighborSampler([3]))}, "evaluation samples 1 hops and sampler"),
        ({"global_batching": lgd.GlobalBatching(sampler=lgd.NeighborSampler([3]))}, "global_batching samples 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.PartitionedDataModule(lgd.communities(60, 3), sampler=lgd.NeighborSampler([5, 5]), **options)


def test_what_batches_are_made_of_is_settled_as_a_search_for_a_batch_size_is_told(tmp_path: Path) -> None:
    data = data_with()
    data.batch_size, data.sampler, data.evaluation = 30, lgd.NeighborSampler([15, 10]), lgd.Evaluation()
    for name, value in {"batch_size": 60, "seed": 3, "sampler": lgd.NeighborSampler([2]), "loading": None}.items():
        with pytest.raises(AttributeError, match=rf"Make another, PartitionedDataModule\(..., {name}="):
            setattr(data, name, value)
    finder = pl.callbacks.BatchSizeFinder(max_trials=1)
    with pytest.raises(AttributeError, match="batch_size is 30 for good"):
        trainer(1, "auto", callbacks=[finder], default_root_dir=tmp_path).fit(model(), data)


class OfClass(lgd.PartitionedDataModule):
    batch_size: int = 1024
    evaluation = lgd.Evaluation(batch_size=7)


class SetBefore(lgd.PartitionedDataModule):
    def __init__(self, graph: lgd.Graph, **options: Any) -> None:
        self.sampler, self.batch_size = None, 16  # type: ignore[assignment]
        super().__init__(graph, **options)


@pytest.mark.parametrize("kind", [OfClass, SetBefore])
def test_a_data_module_of_a_users_class_is_made_with_the_settings_that_it_gives(kind: Any) -> None:
    data = kind(small_graph(), batch_size=30)
    assert (data.batch_size, data.evaluation) == (30, lgd.Evaluation())
    with pytest.raises(AttributeError, match="batch_size is 30 for good"):
        data.batch_size = torch.tensor([30, 31])


def test_what_is_uncovered_is_asked_of_a_run_alone() -> None:
    data = data_with()
    assert data.uncovered == (0, 0)
    trainer(1, "auto").fit(model(), data)
    assert data.uncovered == (0, 0) and "parts" not in vars(data._home)  # the next fit reads the graph as it is then


def data_with(seed: int | None = None) -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(small_graph(), partitioner=lgd.RandomPartitioner(), batch_size=30, seed=seed)


def seen(data: pl.LightningDataModule) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in data.train_dataloader()]


def test_batches_follow_seed_everything_and_partitions_do_not() -> None:
    data = data_with()
    assert (data.seed, seen(data)) == (0, seen(data_with(seed=0)))
    nodes = seen(data)
    pl.seed_everything(2, verbose=False)
    assert seen(data) == seen(data_with(seed=2)) != nodes
    assert seen(data_with(seed=0)) == nodes
    same, other = (data_with(seed).partition(2).assignment for seed in (0, 2))
    assert data.partition(2).assignment.equal(same) and not same.equal(other)


def test_a_seed_that_nobody_set_by_seed_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "two")
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED must be an integer between 0 and .*got 'two'"):
        seen(data_with())


def test_a_resumed_fit_keeps_its_seed(tmp_path: Path) -> None:
    pl.seed_everything(2, verbose=False)
    first = trainer(1, max_epochs=1)
    first.fit(model(), data_with())
    first.save_checkpoint(path := tmp_path / "first.ckpt")
    whole = trainer(1, max_epochs=2)
    whole.fit(model(), data_with())
    pl.seed_everything(3, verbose=False)
    data, resumed = data_with(), trainer(1, max_epochs=2)
    resumed.fit(model(), data, ckpt_path=path)
    assert data.seed == 2
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"a fit with seed 2, and this data module has seed=3, .*: give seed=2 to go"):
        trainer(1, max_epochs=2).fit(model(), data_with(seed=3), ckpt_path=path)
    trainer(1).validate(model(), data_with(seed=3), ckpt_path=path, verbose=False)  # it trains on nothing
    again = trainer(1, max_epochs=1)
    again.fit(model(), data)
    assert data.seed == 3  # another fit


def test_ranks_take_the_seed_of_rank_0() -> None:
    assert run_ranks(fit_of, 2, None) == [(4, None), (4, None)]


def fit_of(rank: int, world_size: int, given: list[int] | None) -> tuple[int, str | None]:
    pl.seed_everything(4 + rank, verbose=False)
    data = data_with(None if given is None else given[rank])
    try:
        trainer(world_size, lgd.LocalSGDStrategy(**PATIENCE), max_epochs=1).fit(model(), data)
    except ValueError as error:
        return data.seed, str(error)
    return data.seed, None


# Coverage against its definition, written out node by node.


def half_of_a_graph() -> tuple[lgd.Graph, Tensor]:
    """Each second node, with the degrees that they have in the whole graph."""
    graph, nodes = lgd.communities(300, 3, num_features=4, seed=1), torch.arange(0, 300, 2)
    return graph.induced(nodes), graph.degrees()[nodes]


@pytest.mark.parametrize(("kappa", "prior"), [(0.0, 0.0), (1.0, 0.0), (2.5, 0.4)])
def test_coverage_is_the_share_of_the_neighbourhood_that_is_visible(kappa: float, prior: float) -> None:
    part, degrees = half_of_a_graph()
    covered = lgd.Coverage(shrinkage=kappa, prior=prior).weights(part, degrees, slice(100))
    pairs = zip(part.degrees().tolist(), degrees.tolist(), strict=True)
    by_definition = [(here + kappa * prior) / (all_of + kappa) if all_of else 1.0 for here, all_of in pairs]
    assert torch.allclose(covered, torch.tensor(by_definition), atol=1e-6)
    assert float(covered.min()) >= 0 and float(covered.max()) <= 1


def test_by_default_it_shrinks_to_the_mean_of_the_own_nodes_if_there_are_any() -> None:
    part, degrees = half_of_a_graph()
    mean = float(lgd.Coverage().weights(part, degrees, slice(150))[:100].mean())
    shrunk = lgd.Coverage(shrinkage=3).weights(part, degrees, slice(100))
    assert torch.allclose(shrunk, lgd.Coverage(shrinkage=3, prior=mean).weights(part, degrees, slice(100)))
    assert lgd.Coverage().weights(part, degrees, slice(0)).isfinite().all()


def batch(coverage: Tensor | None) -> Data:
    return Data(batch_size=3, num_nodes=4, **({} if coverage is None else {"coverage": coverage}))


@pytest.mark.parametrize(
    ("coverage", "mean"),
    [(None, 2.0), ([1.0, 1.0, 1.0, 0.0], 2.0), ([0.0, 0.5, 0.5, 9.0], 2.5), ([0.0, 0.0, 0.0, 1.0], 2.0)],
)
def test_the_mean_weighs_seeds(coverage: Any, mean: float) -> None:
    losses = torch.tensor([1.0, 2.0, 3.0])
    assert float(lgd.coverage_mean(losses, batch(None if coverage is None else torch.tensor(coverage)))) == mean


def test_a_batch_that_fills_a_pass_up_has_a_mean_of_nothing() -> None:
    losses, filler = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), batch(torch.zeros(4))
    filler.is_filler = True
    result = lgd.coverage_mean(losses, filler)
    result.backward()  # ranks step together, so there is a gradient
    assert float(result.detach()) == 0.0 and not losses.grad.any()


def test_a_mean_or_too_many_losses_are_refused() -> None:
    for losses in (torch.tensor(1.0), torch.ones(4)):
        with pytest.raises(ValueError, match=r'one loss per seed, 3 in this batch.*reduction="none"'):
            lgd.coverage_mean(losses, batch(None))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_weights_that_weigh_nothing_are_refused(wrong: float) -> None:
    for coverage, message in (
        (torch.tensor([1.0, wrong, 1.0]), "negative, infinite or NaN"),
        (torch.ones(1), "a vector of a weight for each seed"),
        (torch.ones(3, 2), "a vector of a weight for each seed"),
        ([1.0, 1.0, 1.0], "must be a tensor of a weight"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            lgd.coverage_mean(torch.ones(3), Data(batch_size=3, coverage=coverage, num_nodes=3))


# A data module may be pickled and copied, before and after a fit: the copy is one at rest, with the same batches.


def pickled(data: Any) -> Any:
    return pickle.loads(pickle.dumps(data))


def of_a_run(data: Any) -> list[Any]:
    """Batches of training and validation, in the midst of which nothing is torn down."""
    data.setup("fit")
    return [batch.n_id.tolist() for load in (data.train_dataloader, data.val_dataloader) for batch in load()]


def check_copies(data: Any) -> None:
    fresh = pickled(data)
    there = of_a_run(data)
    running = copy.deepcopy(data)
    data.teardown("fit")
    for made in (fresh, running, pickled(data)):
        assert of_a_run(made) == there
        made.teardown("fit")


def test_copies_have_the_same_batches(tmp_path: Path) -> None:
    small_graph().save(tmp_path / "graph")
    for place in (small_graph(), tmp_path / "graph"):
        check_copies(lgd.PartitionedDataModule(place, batch_size=30))


@pytest.mark.parametrize("boundary", [lgd.Isolated(), lgd.Halo(1)])
def test_a_copy_in_a_run_of_two_ranks_is_one_of_the_whole_graph(boundary: Any) -> None:
    cut: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "boundary": boundary}
    data = lgd.PartitionedDataModule(small_graph(), batch_size=30, **cut)
    alone = of_a_run(pickled(data))
    placed(data, 1, 2)
    for copied in (copy.deepcopy(data), pickled(data)):
        assert of_a_run(copied) == alone


PAPERS = typed_graph_of_papers(200)
MADE: dict[str, Callable[..., Any]] = {
    "nodes": partial(lgd.PartitionedDataModule, small_graph(), batch_size=30),
    "types": partial(lgd.PartitionedDataModule, PAPERS, sampler=lgd.NeighborSampler([4, 3]), batch_size=32),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_threads_and_bulks_change_nothing(make: Callable[..., Any]) -> None:
    check_threads_and_bulks(make)


def check_threads_and_bulks(make: Callable[..., Any]) -> None:
    def made(loading: lgd.Loading, **options: Any) -> list[Any]:
        loader = make(loading=loading, **options).train_dataloader()
        return [contents(batch) for batch in (*loader, *islice(loader.stream(3), 3))]

    plain = made(lgd.Loading(num_threads=0, bulk_size=1))
    assert is_same(made(lgd.Loading(num_threads=2, bulk_size=4)), plain)
    assert not is_same(made(lgd.Loading(), seed=1), plain)


def test_after_a_fit_a_copy_has_neither_trainer_nor_model() -> None:
    data = lgd.PartitionedDataModule(small_graph(), batch_size=30)
    trainer(1, max_epochs=1).fit(model(), data)
    assert data.figures["data/waited_seconds"] > 0  # of the fit that is over
    again = pickle.loads(written := pickle.dumps(data))
    assert b"SAGE" not in written and again.trainer is None and again.figures["data/waited_seconds"] == 0
    trainer(1, max_epochs=1).fit(model(), again)


@pytest.mark.slow
def test_lightning_spawns_ranks_with_it() -> None:
    module = model()
    before = [weight.clone() for weight in module.parameters()]
    fit = trainer(2, "ddp_spawn", max_epochs=1, limit_val_batches=0)
    fit.fit(module, lgd.PartitionedDataModule(small_graph(), partitioner=lgd.RandomPartitioner(), batch_size=30))
    assert not all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


# What batches say of their seeds and edges: labels of seeds alone, and places in the split and in the data.


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
GRAPH.edge_arrays["weight"] = GRAPH.edge_arrays["edge_w"]


def check_edges(batch: SampledData) -> None:
    assert batch.e_id.dtype == torch.int64
    assert DATA.edge_index[:, batch.e_id].equal(batch.n_id[batch.edge_index])


def check_seeds(batch: SampledData, split: str) -> None:
    ids = torch.arange(300) if split == "predict" else DATA[f"{split}_mask"].nonzero().view(-1)
    assert ids[batch.input_id].equal(batch.n_id[: batch.batch_size])


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


class Places(pl.Callback):
    """Keeps where in its split each seed of every batch is."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "predict": []}

    def look(self, batch: Any, kind: str) -> None:
        self.seen[kind] += batch.input_id.tolist()
        places = {"train": batch.train_mask, "val": batch.val_mask}.get(kind)
        assert batch.input_id.shape == (batch.batch_size,)
        assert places is None or places[: batch.batch_size].all()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: int) -> None:
        self.look(batch, "train")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: int) -> None:
        self.look(batch, "val")

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *_: int) -> None:
        self.look(batch, "predict")


def asked(rank: int, world_size: int, folder: Path | None) -> dict[str, list[int]]:
    whole: dict[str, Any] = {"partitioner": lgd.RandomPartitioner()} if folder is None else {}
    data = lgd.PartitionedDataModule(folder or GRAPH, sampler=lgd.NeighborSampler([4, 3]), batch_size=30, **whole)
    module, places = SAGE(4, 3), Places()
    fitting = trainer(world_size, lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE), callbacks=[places])
    fitting.fit(module, data)
    fitting.predict(module, data)
    return places.seen


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


def all_batches(data: Any) -> Iterator[tuple[str, Any]]:
    """With the split of their seeds."""
    for split in ("train", "val", "test", "predict"):
        yield from ((split, batch) for batch in getattr(data, f"{split}_dataloader")())
    yield from (("train", batch) for batch in (*data.anchor_batches(0), *data.correction_batches(0, stop=2)))
    data.teardown("fit")


def check(batch: Any, y: Tensor, *, all_labels: bool) -> None:
    nodes = batch.n_id if all_labels else batch.n_id[: batch.batch_size]
    assert batch.y.equal(y[nodes])
    assert len(batch.get("val_mask", batch.x)) == batch.num_nodes


REFUSES_ALL = "temporal"  # would show a seed labels that come after its time
CASES = [(sampler, wanted) for name, sampler in SAMPLERS.items() for wanted in (False, name != REFUSES_ALL)]


@pytest.mark.parametrize(("sampler", "all_labels"), dict.fromkeys(CASES), ids=repr)
def test_batches_of_all_samplers_have_labels_and_say_where_seeds_and_edges_come_from(sampler, all_labels) -> None:
    loading = lgd.Loading(all_labels=all_labels, num_threads=0)
    data = lgd.PartitionedDataModule(GRAPH, sampler=sampler, batch_size=30, loading=loading)
    sizes = set()
    for split, batch in all_batches(data):
        check(batch, DATA.y, all_labels=all_labels)
        check_seeds(batch, split)
        check_edges(batch)
        sizes.add(len(batch.y) < batch.num_nodes)
    assert (True in sizes) != all_labels
