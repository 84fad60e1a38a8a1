"""Graphs without features from end to end: training, exact evaluation, boundaries, shards, and types."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE, SAGEConv

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import Made, owned, state_of
from tests.layers.models import NUM_CLASSES, Judged, graph_of, uneven_data
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs

WIDTH = 4


class Rows(Judged):
    """Two SAGE layers on learned rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(uneven_data().num_nodes, WIDTH, sparse=True)
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 5), SAGEConv(5, NUM_CLASSES)])
        self.double()

    def layer(self, number: int, x: Tensor, block: Any) -> Tensor:
        x = self.convs[number]((x, x[: block.num_dst]), block.edge_index)
        return x.relu() if number == 0 else x

    def forward(self, batch: Any) -> Tensor:
        x = self.table(batch.n_id)
        for number, block in enumerate(batch.blocks):
            x = self.layer(number, x, block)
        return x

    def predict_step(self, batch: Any) -> Tensor:
        out = self(batch)
        self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), out.detach().clone(), strict=True))
        return out

    def whole(self) -> Tensor:
        x, edge_index = self.table.weight, uneven_data().edge_index
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def configure_optimizers(self) -> Any:
        return lgd.LazyAdam(self.parameters(), lr=0.05)


class ByLayer(Rows):
    """The same, layer by layer."""

    def layers(self) -> Any:
        def first(batch: Any) -> Tensor:
            return self.layer(0, self.table(batch.n_id), batch.blocks[0])

        return [first, lambda batch: self.layer(1, batch.x, batch.blocks[0])]

    def forward(self, batch: Any) -> Tensor:
        return lgd.through_layers(self, batch)


class OfPyG(Rows):
    """A model of PyG's on learned rows."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = GraphSAGE(WIDTH, 5, 2, NUM_CLASSES).double()

    def forward(self, batch: Any) -> Tensor:
        return self.convs(self.table(batch.n_id), batch.edge_index)[: batch.batch_size]

    def whole(self) -> Tensor:
        return self.convs(self.table.weight, uneven_data().edge_index)


def bare_graph() -> lgd.Graph:
    graph = graph_of(uneven_data())
    arrays = {name: array for name, array in graph.node_arrays.items() if name != "x"}
    return lgd.Graph(graph.indptr, graph.indices, arrays)


def data_module(**options: Any) -> lgd.PartitionedDataModule:
    options = {"sampler": lgd.NeighborSampler([3, 3]), "batch_size": 7} | options
    return lgd.PartitionedDataModule(bare_graph(), partitioner=lgd.RandomPartitioner(), **options)


def errors_of_rows(fitted: Any, module: Any, data: Any, whole: Callable[[], Tensor]) -> list[float]:
    """The error of each row in validation, test and prediction, given what the rows of all nodes are after each."""
    errors = []
    for run in (fitted.validate, fitted.test, fitted.predict):
        module.rows = {}
        more = {"return_predictions": False} if run == fitted.predict else {"verbose": False}
        run(module, data, **more)
        with torch.no_grad():
            expected = whole()
        errors += [float((expected[node] - row).abs().max()) for node, row in module.rows.items()]
    return errors


def whole_of(module: Rows) -> Tensor:
    """The rows of all nodes by a model that has the whole table."""
    alone = type(module)()
    alone.load_state_dict(module.state_dict())
    return alone.whole()


def evaluated(rank: int, world_size: int, kinds: list[Any], in_rounds: bool, options: dict[str, Any]) -> list[Any]:
    """For models of each kind, whose rows all ranks have or one rank each, the largest error of a row."""
    found = []
    for module in [module for kind in kinds for module in (kind(), *([] if in_rounds else [owned(kind(), "table")]))]:
        strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE) if in_rounds else lgd.GrappaStrategy(**PATIENCE)
        data, fitted = data_module(**options), trainer(world_size, strategy)
        fitted.fit(module, data)
        errors = errors_of_rows(fitted, module, data, partial(whole_of, module))
        found.append((max(errors), len(errors), state_of(module)))
        assert module.kinds == {"SeedBatch"} or not isinstance(module, ByLayer)
    return found


@pytest.mark.parametrize(
    ("kinds", "in_rounds", "options"),
    [
        ([ByLayer], False, {}),
        pytest.param([Rows, OfPyG], False, {}, marks=pytest.mark.slow),
        pytest.param([Rows, ByLayer, OfPyG], True, {}, marks=pytest.mark.slow),
        pytest.param([ByLayer], True, {"boundary": lgd.History()}, marks=pytest.mark.slow),  # rows of the last meeting
    ],
)
def test_evaluation_and_prediction_are_exact(kinds: list[Any], in_rounds: bool, options: dict[str, Any]) -> None:
    for first, second in zip(*run_ranks(evaluated, 2, kinds, in_rounds, options), strict=True):
        assert max(first[0], second[0]) < 1e-12
        assert first[1] + second[1] > uneven_data().num_nodes
        assert differs(first[2], second[2]) == 0.0


def in_exchange(rank: int, world_size: int) -> Made:
    """Steps on the whole graph, alone or with layers exchanged at the boundary."""
    options: dict[str, Any] = {"boundary": lgd.Exchange()} if world_size > 1 else {}
    module, strategy = ByLayer(), lgd.GrappaStrategy(**PATIENCE)
    options |= {"partitioner": lgd.RandomPartitioner(), "sampler": lgd.WholePartSampler(2)}
    data = lgd.PartitionedDataModule(bare_graph(), batch_size=1000, **options)
    trainer(world_size, strategy, max_epochs=4, limit_val_batches=0).fit(module, data)
    return state_of(module)


def test_exchange_trains_rows_as_one_process_on_the_whole_graph() -> None:
    (alone,) = run_ranks(in_exchange, 1)
    first, second = run_ranks(in_exchange, 2)
    assert differs(first, second) == 0.0
    assert differs(alone, first) < 1e-12


def with_a_table(rank: int, world_size: int, strategy: Any, sparse: bool) -> None:
    module = Rows()
    module.table.sparse = sparse
    trainer(world_size, strategy, max_epochs=1).fit(module, data_module())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sparse", "message"),
    [
        ("ddp", True, r"table has sparse=True, .*use GrappaStrategy\(\)"),
        (lgd.LocalSGDStrategy(**PATIENCE), False, r"table has a row for each of \d+ nodes, .*1/2 .*sparse=True"),
    ],
)
def test_plain_ddp_is_refused_and_a_dense_table_brings_a_warning(strategy: Any, sparse: bool, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(with_a_table, 2, strategy, sparse)


# Graphs without features, with rows that live with one rank each: from end to end as with rows that all ranks hold.


OPTIONS: dict[str, Any] = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


def uneven_parts(num_ranks: int) -> lgd.Partition:
    """The last of several ranks has few nodes."""
    shares = torch.arange(bare_graph().num_nodes) % 12
    return lgd.Partition(((shares > 7).int() + (shares > 10).int()).clamp(max=num_ranks - 1).int(), num_ranks)


def uneven_data_module(num_ranks: int) -> lgd.PartitionedDataModule:
    parts, sampler = uneven_parts(num_ranks), lgd.NeighborSampler([3, 3])
    return lgd.PartitionedDataModule(bare_graph(), partitioner=parts, sampler=sampler, batch_size=7)


class Keeps(pl.Callback):
    """Writes a checkpoint at the end of the second epoch, and notes what validations find."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.found: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(float(trainer.callback_metrics["accuracy"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def on_graph(module: Any, world_size: int, path: str, ckpt_path: str | None = None) -> Any:
    """Fit and test; return the state, what validations have found, and rows of the last layer by node."""
    keeps = Keeps(path)
    fitted = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), callbacks=[keeps], **OPTIONS)
    fitted.fit(module, uneven_data_module(world_size), ckpt_path=ckpt_path)
    fitted.save_checkpoint(f"{path}.end")
    module.rows = {}
    fitted.test(module, uneven_data_module(world_size), verbose=False)
    return state_of(module), keeps.found, {str(node): row for node, row in module.rows.items()}


def graphs(rank: int, world_size: int, folder: str) -> list[Any]:
    """The fit of a table that all ranks hold, of one that no rank does, and the second half of that once more."""
    found = [on_graph(Rows(), world_size, f"{folder}/replicated.ckpt")]
    found.append(on_graph(owned(Rows(), "table"), world_size, f"{folder}/owned.ckpt"))
    found.append(on_graph(owned(Rows(), "table"), world_size, f"{folder}/again.ckpt", f"{folder}/owned.ckpt"))
    return found


def resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    """On another number of ranks, from what each kind has written."""
    warnings.filterwarnings("ignore", "The checkpoint was written by")
    kinds = {"replicated": Rows(), "owned": owned(Rows(), "table")}
    paths = {name: (f"{folder}/x.ckpt", f"{folder}/{name}.ckpt") for name in kinds}
    return [on_graph(kind, world_size, *paths[name]) for name, kind in kinds.items()]


def predicts(rank: int, world_size: int, path: str) -> Made:
    """Rows of the last layer, by as many ranks as one likes from a checkpoint of others."""
    module = owned(Rows(), "table")
    module.rows = {}
    fitted = trainer(world_size, lgd.GrappaStrategy(**PATIENCE))
    fitted.test(module, uneven_data_module(world_size), ckpt_path=path, verbose=False)
    return {str(node): row for node, row in module.rows.items()}


def agree(one: Any, other: Any) -> None:
    """The same weights, and the same rows of nodes; the same validations, as far as both have seen them."""
    assert differs(one[0], other[0]) < 1e-12
    length = min(len(one[1]), len(other[1]))
    assert one[1][-length:] == other[1][-length:]
    assert differs(one[2], other[2]) < 1e-12


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_a_fit_is_that_of_rows_that_all_ranks_hold(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(graphs, world_size, str(tmp_path))
    for replicated, whole, again in ranks:
        agree(whole, replicated)
        agree(again, whole)
    files = [tmp_path / f"{name}.ckpt.end" for name in ("replicated", "owned", "again")]
    written = [torch.load(file, weights_only=True) for file in files]
    for one in written[1:]:
        assert differs(one["state_dict"], written[0]["state_dict"]) < 1e-12
    rows = {node: row for _, whole, _ in ranks for node, row in whole[2].items()}
    for found in run_ranks(predicts, 2, str(tmp_path / "owned.ckpt.end")):
        assert differs(found, {node: rows[node] for node in found}) < 1e-12
    for one in written[1:]:
        states = [each["optimizer_states"][0]["state"][0] for each in (one, written[0])]
        assert differs(*states) < 1e-12
    for size in {1: (2,), 2: (3,), 3: (1, 2)}[world_size]:
        for replicated, whole in run_ranks(resumed, size, str(tmp_path)):
            agree(whole, replicated)
