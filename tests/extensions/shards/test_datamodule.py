"""Training on shards is training on parts: to the bit, with every exchange across shards."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Auto,
    Correction,
    Evaluation,
    EverySteps,
    Fetch,
    GlobalBatching,
    Graph,
    GrappaStrategy,
    Isolated,
    LadiesSampler,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    ShadowSampler,
    WholePartSampler,
    communities,
    save_shards,
    through_layers,
)
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.extensions.shards.fitting import Result, all_figures, check_alike
from tests.graph.parted import in_order_of_parts
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

OPTIONS: dict[str, Any] = {"sampler": NeighborSampler([4, 4]), "batch_size": 8, "evaluation": Evaluation(batch_size=70)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same graph in shards and whole, with the same numbers for nodes."""
    folder = tmp_path_factory.mktemp("graph")
    graph = communities(400, 4, num_features=12, train_share=0.2, noise=2.0, seed=3)
    graph.node_arrays["n_id"] = torch.arange(graph.num_nodes)
    partition = Partition((torch.arange(graph.num_nodes) * 7 % 5 // 3).to(torch.int32), 2)
    save_shards(graph, partition, folder / "shares")
    in_order_of_parts(graph, partition).save(folder / "whole")
    return folder


def fit(rank: int, world_size: int, folder: str, kind: str) -> Result:
    """With corrections in layers, which shards of types have not; all else is compared there."""
    options = OPTIONS | {"global_batching": GlobalBatching(sampler=LadiesSampler([60, 60]))}
    data: pl.LightningDataModule
    if kind == "shards":
        data = PartitionedDataModule(f"{folder}/shares", loading=Loading(bulk_size=3, cache_bytes=2000), **options)
    else:
        whole = Graph.open(f"{folder}/whole")
        partition = Partition((torch.arange(400) >= 240).int(), 2)
        data = PartitionedDataModule(whole, partitioner=partition, boundary=Isolated(), **options)
    pl.seed_everything(0, verbose=False)
    model = SAGE(12, 4, dropout=0.5, blocks=False)  # as batches have weights, and SAGE means
    model.predict_step = model.forward  # type: ignore[method-assign]
    return all_figures(world_size, LLCGStrategy(EverySteps(4), **PATIENCE), model, data, f"{folder}/{kind}.npy")


@pytest.mark.slow
def test_training_on_shards_is_training_on_parts(saved: Path) -> None:
    check_alike(fit, saved)


def evaluate(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank trains on and evaluates, where two groups of ranks have a copy each."""
    data = PartitionedDataModule(f"{folder}/shares", **OPTIONS)
    model, fitting = SAGE(12, 4), trainer(world_size, LocalSGDStrategy(EverySteps(2), **PATIENCE), max_epochs=8)
    fitting.fit(model, data)
    model.evaluated.clear()
    fitting.validate(model, data, verbose=False)
    return model.trained, [ids for ids, _ in model.evaluated]


def test_copies_divide_the_nodes_among_them(saved: Path) -> None:
    whole = Graph.open(saved / "whole")
    n_id = whole.node_arrays["n_id"]
    results = run_ranks(evaluate, 4, str(saved))
    evaluated = torch.cat([ids for _, shown in results for ids in shown])
    assert evaluated.sort().values.tolist() == n_id[whole.split("val")].sort().values.tolist()
    shards = [set(n_id[:240].tolist()), set(n_id[240:].tolist())]
    trained = [set(torch.cat(seeds).tolist()) for seeds, _ in results]
    assert trained[0] <= shards[0] and trained[2] <= shards[0] and not trained[0] & trained[2]
    assert trained[1] <= shards[1] and trained[3] <= shards[1] and not trained[1] & trained[3]
    assert set().union(*trained) == set(n_id[whole.split("train")].tolist())


def start(rank: int, world_size: int, folder: str, strategy: str) -> None:
    data = PartitionedDataModule(f"{folder}/shares", **OPTIONS)
    chosen = LLCGStrategy(EverySteps(2), correction=Correction(way=strategy), **PATIENCE)  # type: ignore[arg-type]
    trainer(world_size, chosen, fast_dev_run=True).fit(SAGE(12, 4), data)


@pytest.mark.parametrize(
    ("num_ranks", "way", "message"),
    [(3, "sliced", "2 shards, which 3 ranks cannot hold evenly"), (2, "rank0", 'use way="sliced"')],
)
def test_ranks_share_shards_and_corrections(saved: Path, num_ranks: int, way: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(start, num_ranks, str(saved), way)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": ShadowSampler([4, 4], num_hops=2)}, "got ShadowSampler"),
        ({"global_batching": GlobalBatching(sampler=ShadowSampler([4, 4], num_hops=2))}, "got ShadowSampler"),
        ({"boundary": Fetch(), "sampler": WholePartSampler(2)}, "got WholePartSampler"),
        ({"loading": Loading(sample_on="auto")}, 'sample_on must be "cpu" for shards'),
        ({"boundary": Auto(5)}, r"boundary must be Isolated\(\).* for shards, got Auto\(bytes=5"),
    ],
)
def test_what_cannot_work_is_refused(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionedDataModule(saved / "shares", **options)


class Mistaken(SAGE):
    """Is evaluated layer by layer, so that its batches are made when they are read."""

    def layers(self) -> list[Any]:
        return [lambda batch, conv=conv: conv(batch.x, batch.edge_index) for conv in self.convs]

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)

    def test_step(self, batch: Any) -> None:
        raise ValueError("a mistake of the user, in a batch of 100")


def judge(rank: int, world_size: int, folder: str) -> None:
    data = PartitionedDataModule(f"{folder}/shares", sampler=NeighborSampler([4, 4]))
    trainer(world_size, GrappaStrategy(**PATIENCE)).test(Mistaken(12, 4), data)


def test_an_error_of_the_user_is_told_as_it_is(saved: Path) -> None:
    """To explain it, nothing is sampled from ranks that may be gone."""
    with pytest.raises(RankError, match="a mistake of the user") as caught:
        run_ranks(judge, 2, str(saved))
    assert "During handling of the above exception" not in str(caught.value)


def test_what_only_a_whole_graph_has_is_refused(saved: Path) -> None:
    data = PartitionedDataModule(saved / "shares")
    assert (data.partitioner, data.shards_path, data.boundary) == (None, saved / "shares", Isolated())
    for use in (lambda: data.graph, lambda: data.holding, lambda: data.parts_of_ranks(2), lambda: data.part(0, 2)):
        with pytest.raises(AttributeError, match=r"is of a graph that every host has, and '.*shares' holds shards"):
            use()
    with pytest.raises(ValueError, match="the graph was cut when it was divided"):
        data.partition(2)


def limited(rank: int, world_size: int, folder: str) -> tuple[int, int, list[Tensor]]:
    """Where the loader stands after a pass that the trainer has limited, and what it trained on."""
    data, model = PartitionedDataModule(f"{folder}/shares", **OPTIONS), SAGE(12, 4)
    loaders: list[Any] = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            loaders.append(data._train_batches)

    limits = {"limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 2}
    ddp = plain_ddp()
    trainer(world_size, ddp, callbacks=[Look()], **limits).fit(model, data)
    (loader,) = loaders
    return len(loader), loader.state_dict()["batches_done"], model.trained
