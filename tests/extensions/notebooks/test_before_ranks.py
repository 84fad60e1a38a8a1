"""What would fail in every rank is refused once, by the process that would start them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.notebooks.launcher import ForkLauncher
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import every_strategy

DATA = Data(x=torch.randn(9, 12), y=torch.zeros(9).long(), edge_index=torch.randint(9, (2, 30)), num_nodes=9)
LOADERS: dict[str, Callable[[], Any]] = {
    "DataLoader": lambda: DataLoader([DATA]),
    "NeighborLoader": lambda: NeighborLoader(DATA, [2], batch_size=3),
    "LinkNeighborLoader": lambda: LinkNeighborLoader(DATA, [2], batch_size=3, edge_label_index=DATA.edge_index),
}
MEANT = r"Strategy takes batches from a data module, .* a {} of torch_geometric: use PartitionedDataModule\(data, "
pytestmark = pytest.mark.filterwarnings("ignore:Using .NeighborSampler. without a .pyg-lib")


class StartedError(Exception):
    """A rank would have been started."""


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise StartedError

    monkeypatch.setattr(ForkLauncher, "_run", start)


def many(strategy: Any = None, **options: Any) -> pl.Trainer:
    return trainer(2, strategy or lgd.GrappaStrategy(launch=lgd.Launch(start_method="fork")), **options)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("strategy", every_strategy())
def test_loaders_of_pyg_are_refused(strategy: str, kind: str, devices: int) -> None:
    made = every_strategy()[strategy]()
    made.launch = lgd.Launch(start_method="fork") if devices > 1 else made.launch
    running = trainer(devices, made)
    for call in (running.fit, running.validate):
        for given in (LOADERS[kind](), {"first": [torch.ones(2)], "second": LOADERS[kind]()}):
            with pytest.raises(ValueError, match=MEANT.format(kind)):
                call(model(), given)  # type: ignore[operator]


def test_a_loader_that_a_hook_makes_is_refused() -> None:
    module: Any = model()
    module.train_dataloader = LOADERS["DataLoader"]
    with pytest.raises(ValueError, match=MEANT.format("DataLoader")):
        trainer(1, lgd.GrappaStrategy(), limit_val_batches=0).fit(module)


def graph(without: str = "", **arrays: Any) -> lgd.Graph:
    whole = small_graph()
    kept = {name: array for name, array in whole.node_arrays.items() if name != without}
    return lgd.Graph(whole.indptr, whole.indices, kept | arrays)


def with_nan() -> torch.Tensor:
    x = small_graph().node_arrays["x"].clone()
    x[7, 2] = torch.nan
    return x


NOBODY = torch.zeros(600, dtype=torch.bool)
WRONG: dict[str, tuple[str, Callable[[], Any], str]] = {
    "no train_mask": ("fit", lambda: graph("train_mask"), r"The graph has no train_mask .* before Graph\.from_pyg"),
    "no val_mask": ("fit", lambda: graph("val_mask"), r"no val_mask .*leave validation out, Trainer\(limit_val_b"),
    "nobody to judge": ("fit", lambda: graph(val_mask=NOBODY), "val_mask marks 0 nodes, but 2 ranks share"),
    "NaN": ("fit", lambda: graph(x=with_nan()), "x of node 7 is NaN or infinite"),
    "no val_mask to validate": ("validate", lambda: graph("val_mask"), "The graph has no val_mask"),
    "no test_mask": ("test", lambda: graph("test_mask"), "The graph has no test_mask"),
}


@pytest.mark.parametrize(("call", "make", "said"), WRONG.values(), ids=WRONG)
def test_what_a_graph_lacks_is_said_before_ranks_start(call: str, make: Callable[[], Any], said: str) -> None:
    running = many()
    with pytest.raises(ValueError, match=said):
        getattr(running, call)(model(), datamodule=lgd.PartitionedDataModule(make()))
    with pytest.raises(StartedError):  # the trainer is as good as new
        running.fit(model(), lgd.PartitionedDataModule(small_graph()))


def test_what_a_call_does_not_need_may_lack() -> None:
    module, on = model(), lgd.Evaluation(on=small_graph())
    calls: list[Callable[[], Any]] = [
        lambda: many(limit_val_batches=0).fit(module, lgd.PartitionedDataModule(graph("val_mask"))),
        lambda: many().fit(module, lgd.PartitionedDataModule(graph("val_mask"), evaluation=on)),
        lambda: many().validate(module, lgd.PartitionedDataModule(graph("train_mask"))),
        lambda: many().predict(
            module, lgd.PartitionedDataModule(graph("train_mask", val_mask=NOBODY)), return_predictions=False
        ),
        lambda: many().fit(module, lgd.LinkDataModule(lgd.split_edges(small_graph()))),
    ]
    for call in calls:
        with pytest.raises(StartedError):
            call()


def test_edges_that_were_not_held_back_are_missed_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="The split holds no val edges back"):
        many().fit(model(), lgd.LinkDataModule(lgd.split_edges(small_graph(), val=0, test=0.1)))
