"""Mistakes are answered in the user's terms: words of PyG, and features and labels that a model cannot take."""

import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torchmetrics.functional.classification import multiclass_accuracy

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.explaining.models import explain_features
from tests.data.test_typed import data_of
from tests.data_fitting import model, small_graph, trainer
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers


@pytest.mark.parametrize("blocks", [True, False])
def test_a_graph_without_features_is_named_where_the_model_fails(blocks: bool) -> None:
    graph = small_graph()
    bare = {name: array for name, array in graph.node_arrays.items() if name != "x"}
    data = lgd.PartitionedDataModule(lgd.Graph(graph.indptr, graph.indices, bare), batch_size=30)
    with pytest.raises((TypeError, AttributeError), match=r"^The graph has no features, and batch\.x is None"):
        trainer(1, limit_val_batches=0).fit(model(blocks=blocks), data)
    assert pickle.loads(pickle.dumps(data)).batch_size == 30


def test_a_mask_that_marks_nothing_is_named_with_the_way_out() -> None:
    graph = small_graph()
    graph.node_arrays["val_mask"][:] = False
    data = lgd.PartitionedDataModule(graph, batch_size=30)
    with pytest.raises(
        ValueError, match=r"^val_mask marks 0 nodes, but 1 ranks .*fewer ranks, or leave it out, limit_val"
    ):
        trainer(1).fit(model(), data)
    trainer(1, limit_val_batches=0).fit(model(), data)


GRAPH = lgd.communities(60, 2, num_features=8)
X = GRAPH.node_arrays["x"]


class OneLayer(pl.LightningModule):
    """A layer on what a batch has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def training_step(self, batch: Any) -> Tensor:
        logits = self.layer(batch.x, batch.edge_index)[: batch.batch_size]
        return functional.cross_entropy(logits, batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> Tensor:
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def data_with(all_labels: bool = False, **arrays: Tensor) -> lgd.PartitionedDataModule:
    graph = lgd.Graph(GRAPH.indptr, GRAPH.indices, {**GRAPH.node_arrays, **arrays})
    loading = lgd.Loading(num_threads=0, all_labels=all_labels)
    return lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([3]), batch_size=9, loading=loading)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X.double(), r"x holds torch\.float64, and the model computes with another type: data\.x = data\.x\.float\(\)"),
        (X.long(), r"x holds torch\.int64, and the model"),
        (X > 0, r"x holds torch\.bool, and the model"),
        (X[:, 0].contiguous(), r"x has the shape \(60,\), .* data\.x = data\.x\.view\(-1, 1\)"),
        (X.view(60, 2, 4), r"x has the shape \(60, 2, 4\), .* data\.x = data\.x\.flatten\(1\)"),
        (X[:, :5].contiguous(), "x has 5 features, and a layer of the model takes 8: build it with 5"),
    ],
)
@pytest.mark.parametrize("kind", [SAGEConv, GCNConv])
def test_features_that_a_layer_cannot_take_are_named(kind: type[nn.Module], x: Tensor, reason: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=reason):
        trainer(1, max_steps=1).fit(OneLayer(kind(8, 2)), data_with(x=x))


def test_what_has_nothing_to_do_with_features_keeps_its_words() -> None:
    for error in (ValueError("mine"), RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 8x2)")):
        explain_features(error, X)
        explain_features(error, X[:, 0])
        explain_features(error, None)
        assert "x h" not in str(error)


def cross_entropy(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out, batch.y)


def of_a_mask(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out[batch.val_mask], batch.y[batch.val_mask])


def metric(out: Tensor, batch: Any) -> Tensor:
    return multiclass_accuracy(out, batch.y, 2) + 0 * out.sum()


WHOLE_GRAPH_LOSSES = [cross_entropy, of_a_mask, metric]


class WholeGraphLoss(OneLayer):
    """As written for a graph that is one batch."""

    def __init__(self, loss: Any) -> None:
        super().__init__(SAGEConv(8, 2))
        self.loss = loss

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self.layer(batch.x, batch.edge_index), batch)


class SeedLoss(WholeGraphLoss):
    """The loss of the seeds."""

    def training_step(self, batch: Any) -> Tensor:
        out = self.layer(batch.x, batch.edge_index)[: batch.batch_size]
        return self.loss(out, Data(y=batch.y[: batch.batch_size]))


@pytest.mark.parametrize("step", ["training", "validation"])
@pytest.mark.parametrize("loss", WHOLE_GRAPH_LOSSES)
def test_a_loss_over_nodes_that_are_no_seeds_is_refused(loss: Any, step: str) -> None:
    running = trainer(1, max_steps=1)
    run = running.fit if step == "training" else running.validate
    with pytest.raises((RuntimeError, IndexError, ValueError), match=r"labels of the \d+ seeds, .*\(all_labels=True\)"):
        run(WholeGraphLoss(loss), data_with())


@pytest.mark.parametrize("loss", [cross_entropy, metric])
def test_labels_of_several_columns_are_named_where_classes_are_taken(loss: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"^batch\.y has 3 columns, and a loss or a metric of class"):
        trainer(1, limit_val_batches=0).fit(SeedLoss(loss), data_with(y=torch.zeros(60, 3).long()))


def test_errors_of_other_sizes_keep_their_words() -> None:
    def wrong(out: Tensor, batch: Any) -> Tensor:
        raise ValueError("mine, with 9 and 60")

    with pytest.raises(ValueError, match=r"^mine"):
        trainer(1).validate(WholeGraphLoss(wrong), data_with(all_labels=True), verbose=False)


def test_ranks_that_are_forked_say_it_too() -> None:
    forked = trainer(2, lgd.LocalSGDStrategy(launch=lgd.Launch(start_method="fork")))
    with pytest.raises(ValueError, match=r"batch\.y holds the labels of the \d+ seeds"):
        forked.fit(WholeGraphLoss(cross_entropy), data_with())


def test_a_table_with_too_few_rows_is_named_with_the_rows_that_are_asked_for() -> None:
    class WithRows(OneLayer):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 2))
            self.rows = nn.Embedding(40, 4, sparse=True)

        def training_step(self, batch: Any) -> Tensor:
            return self.layer(self.rows(batch.n_id)).sum()

    data = lgd.PartitionedDataModule(GRAPH, batch_size=30)
    with pytest.raises(IndexError, match=r"^rows has 40 rows, nn\.Embedding\(40, 4\), and rows \d to 5\d were asked"):
        trainer(1, limit_val_batches=0).fit(WithRows(), data)


def test_a_prediction_that_reads_pairs_is_told_that_there_are_none() -> None:
    class Ranks(pl.LightningModule):
        def forward(self, batch: Any) -> Any:
            return batch.x[batch.edge_label_index[0]]

    data = lgd.LinkDataModule(lgd.split_edges(small_graph()))
    with pytest.raises(AttributeError, match=r"A prediction is of nodes, and its batches have no edge_label_index"):
        trainer(1).predict(Ranks(), data)


def test_labels_of_all_nodes_are_explained() -> None:
    class Careless(HeteroSAGE):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self(batch), batch["paper"].y)

    graph = typed_graph_of_papers()
    with pytest.raises(ValueError, match=r"batch\['paper'\]\.y holds the labels of the \d+ seeds, the first nodes"):
        trainer(1).fit(Careless(list(graph.types.edge_types)), data_of(graph))
