"""A fit on a typed graph whose rows are read from files is the fit in RAM, on ranks and resumed within a pass."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Fetch,
    GlobalBatching,
    Graph,
    GrappaStrategy,
    Isolated,
    LinkDataModule,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    TemporalSampler,
    split_edges,
)
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.larger_than_memory.test_rows_in_files import strategy_of
from tests.ranks import run_ranks
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

CACHE = 4000  # bytes: papers have 32 for each in int8, authors 64, words 32, and venues learn theirs
CITES: EdgeType = ("paper", "cites", "paper")
IN_TIME = TemporalSampler([4, 3], "time")


def graph_of_papers() -> Graph:
    data = typed_graph_of_papers().to_pyg()
    del data["venue"].x
    data["venue"].num_nodes = 4
    data["paper"].x, data["paper"].x_scale = quantize_rows(data["paper"].x)
    return Graph.from_pyg(data, time="time")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("typed") / "graph"
    graph_of_papers().save(folder)
    return str(folder)


class LearnsVenues(HeteroSAGE):
    """Venues have rows that are learned."""

    def __init__(self, edge_types: list[EdgeType]) -> None:
        super().__init__(edge_types)
        self.venues = torch.nn.Embedding(4, 4, sparse=True)

    def forward(self, batch: Any) -> Tensor:
        batch["venue"].x = self.venues(batch["venue"].n_id)
        return super().forward(batch)


class Fit:
    """A fit of 12 batches a pass, or half as many on two ranks, and what its data module logs."""

    def __init__(self, where: Graph | str, world_size: int, strategy: str, loading: Loading, **options: Any) -> None:
        pl.seed_everything(0)
        settings: dict[str, Any] = {"boundary": Isolated() if strategy == "llcg" else Fetch(), "batch_size": 20}
        settings["global_batching"] = GlobalBatching(batch_size=40)
        self.data = PartitionedDataModule(where, sampler=options.pop("sampler"), loading=loading, **settings)
        edge_types = (where if isinstance(where, Graph) else Graph.open(where)).types.edge_types
        self.module, self.figures = LearnsVenues(list(edge_types)), dict[str, float]()
        data, figures = self.data, self.figures

        class Figures(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                figures.update(data.figures)
                if keeps is not None and trainer.global_step == 5:
                    trainer.save_checkpoint(keeps)

        resumed, keeps = options.pop("ckpt_path", None), options.pop("keeps", None)
        made = GrappaStrategy(**PATIENCE) if strategy == "grappa" else strategy_of(strategy)
        self.trainer = trainer(world_size, made, callbacks=[Figures()], **options)
        self.trainer.fit(self.module, self.data, ckpt_path=resumed)
        self.weights = torch.nn.utils.parameters_to_vector(self.module.parameters()).detach()


def fits(rank: int, world_size: int, folder: str, strategy: str) -> list[tuple[Tensor, dict[str, float]]]:
    options = {"sampler": NeighborSampler([4, 3]), "max_epochs": 1, "limit_val_batches": 1}
    made = [
        Fit(where, world_size, strategy, loading, **options)
        for where, loading in ((graph_of_papers(), Loading()), (folder, Loading(cache_bytes=CACHE, bulk_size=2)))
    ]
    return [(fit.weights, fit.figures) for fit in made]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "llcg"), (3, "grappa")])
def test_a_fit_on_ranks_is_the_one_in_ram(saved: str, world_size: int, strategy: str) -> None:
    for (expected, plain), (found, figures) in run_ranks(fits, world_size, saved, strategy):
        assert "data/fetched_bytes" not in plain
        assert figures["data/fetched_bytes"] > 0 and 0 < figures["data/cache_hit_rate"] < 1
        assert found.equal(expected)


@pytest.mark.parametrize(
    "sampler", [pytest.param(NeighborSampler([4, 3]), marks=pytest.mark.slow), IN_TIME], ids=["neighbors", "in time"]
)
def test_a_fit_goes_on_within_a_pass(saved: str, tmp_path: Path, sampler: Sampler) -> None:
    options: dict[str, Any] = {"sampler": sampler, "limit_val_batches": 0}
    expected = Fit(graph_of_papers(), 1, "one", Loading(), max_epochs=2, **options)
    some = Loading(cache_bytes=CACHE, bulk_size=2)
    stopped = Fit(saved, 1, "one", some, max_steps=7, keeps=tmp_path / "last.ckpt", **options)
    assert not stopped.weights.equal(expected.weights)
    resumed = Fit(saved, 1, "one", some, max_epochs=2, ckpt_path=tmp_path / "last.ckpt", **options)
    assert resumed.weights.equal(expected.weights) and resumed.figures["data/fetched_bytes"] > 0
    assert resumed.trainer.global_step == expected.trainer.global_step == 24


@pytest.mark.parametrize("timed", [False, True])
def test_links_are_learned_from_files(tmp_path: Path, timed: bool) -> None:
    how: dict[str, Any] = {"time": "time"} if timed else {}
    split = split_edges(graph_of_papers(), 0.1, 0.1, edge_type=CITES, negatives=3, **how)
    split.save(tmp_path / "split")
    sampler, phases = IN_TIME if timed else NeighborSampler([4, 3]), list[list[dict[str, Any]]]()
    for where, loading in ((split, Loading()), (tmp_path / "split", Loading(cache_bytes=CACHE))):
        data = LinkDataModule(where, sampler=sampler, batch_size=64, loading=loading)
        data.setup("fit")
        phases.append([contents(batch) for batch in (*data.train_dataloader(), *data.val_dataloader())])
        figures = data.figures
        data.teardown("fit")
    check_same(phases[1], phases[0])
    assert figures["data/fetched_bytes"] > 0 and 0 < figures["data/cache_hit_rate"] < 1
