"""Evaluation layer by layer as Lightning runs it, and modules that do more than ask for rows: always today's rows."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE

from lightning_gnn_dist import Evaluation, Graph, NeighborSampler, PartitionedDataModule
from tests.data_fitting import trainer
from tests.layers.models import NUM_CLASSES, Ready, Sage, graph_of, uneven_data, whole_rows

DATA = uneven_data()
TESTED = DATA.test_mask.nonzero().view(-1).tolist()
VALIDATED = DATA.val_mask.nonzero().view(-1).tolist()


def data_module(graph: Graph | None = None, **options: Any) -> PartitionedDataModule:
    return PartitionedDataModule(
        graph_of(DATA) if graph is None else graph, sampler=NeighborSampler([3, 3]), batch_size=7, **options
    )


def in_batches(graph: Graph | None = None) -> PartitionedDataModule:
    """In so many batches of full neighbourhoods that layers cost less."""
    return data_module(graph, evaluation=Evaluation(batch_size=2))


class Gnn(Ready):
    """A module around a model of PyG, whose rows a subclass computes in another way."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(7)
        super().__init__(GraphSAGE, 2, **options)
        self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES)
        self.double()


def rows_of_test(module: Any, data: Any = None, **options: Any) -> dict[int, Tensor]:
    trainer(1, **options).test(module, data or in_batches(), verbose=False)
    return module.rows


def check(rows: dict[int, Tensor], expected: Tensor, nodes: list[int] = TESTED) -> None:
    assert sorted(rows) == nodes
    found = torch.stack([rows[node] for node in nodes]).to(expected.dtype)
    assert torch.allclose(found, expected[nodes], rtol=0, atol=1e-12), (found - expected[nodes]).abs().max()


def head(self: Any, batch: Any) -> Tensor:
    return self.head(self.gnn(batch.x, batch.edge_index))[: batch.batch_size]


def keywords(self: Any, batch: Any) -> Tensor:
    return self.gnn(edge_index=batch.edge_index, x=batch.x)[: batch.batch_size]


def twice(self: Any, batch: Any) -> Tensor:
    first = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
    return (first + self.gnn(batch.x, edge_index=batch.edge_index)[: batch.batch_size]) / 2


def two_ways(self: Any, batch: Any) -> Tensor:
    return (
        self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
        - self.gnn(-batch.x, batch.edge_index)[: batch.batch_size]
    )


def twice_after_another(self: Any, batch: Any) -> Tensor:
    return self.gnn(self.gnn.dropout(batch.x), batch.edge_index)[: batch.batch_size]


def in_place(self: Any, batch: Any) -> Tensor:
    rows = self.gnn(batch.x, batch.edge_index)
    rows.mul_(2)
    rows[:2] += 1
    rows[:2] -= 1
    return rows[: batch.batch_size]


def changed_x(self: Any, batch: Any) -> Tensor:
    batch.x = batch.x * 2
    return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]


def changed_x_in_place(self: Any, batch: Any) -> Tensor:
    batch.x.mul_(2)
    return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]


def other_edges(self: Any, batch: Any) -> Tensor:
    return self.gnn(batch.x, batch.edge_index[:, :0])[: batch.batch_size]


def other_weights(self: Any, batch: Any) -> Tensor:
    """As an average of weights kept by hand does: weights are swapped in a step, past the counter of versions."""
    weight = self.gnn.convs[0].lin_l.weight
    weight.data.mul_(2)
    rows = self.gnn(batch.x, batch.edge_index)
    weight.data.div_(2)
    return rows[: batch.batch_size]


def functional(self: Any, batch: Any) -> Tensor:
    weights = {name: weight * 2 for name, weight in self.gnn.named_parameters()}
    return torch.func.functional_call(self.gnn, weights, (batch.x, batch.edge_index))[: batch.batch_size]


def copied(self: Any, batch: Any) -> Tensor:
    """Copies and pickles of a model compute for themselves, whatever the model itself would answer."""
    file = io.BytesIO()
    torch.save(self.gnn, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    total = 0
    for other in (copy.deepcopy(self.gnn), pickle.loads(pickle.dumps(self.gnn)), loaded):
        other.convs[0].lin_l.weight.mul_(2)
        total = total + other(batch.x, batch.edge_index)[: batch.batch_size]
    return total / 3


def gradients(self: Any, batch: Any) -> Tensor:
    with torch.enable_grad():
        rows = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
        grad = torch.autograd.grad(rows.sum(), self.gnn.convs[-1].lin_l.bias)[0]
    return rows + 0 * grad.sum() if grad.abs().sum() > 0 else 0 * rows


USES = {use.__name__: use for use in (head, keywords, twice, two_ways, twice_after_another, in_place, changed_x)}
USES |= {use.__name__: use for use in (changed_x_in_place, other_edges, other_weights, functional, copied, gradients)}


def expected_of(use: str, module: Any) -> Tensor:
    x, edges, gnn = DATA.x, DATA.edge_index, module.gnn
    if use in ("other_weights", "functional", "copied"):
        gnn = copy.deepcopy(gnn)
        for name, weight in gnn.named_parameters():
            if use == "functional" or name == "convs.0.lin_l.weight":
                weight.data.mul_(2)
    rows = gnn(x, edges)
    return {
        "head": lambda: module.head(rows),
        "two_ways": lambda: rows - gnn(-x, edges),
        "in_place": lambda: 2 * rows,
        "changed_x": lambda: gnn(2 * x, edges),
        "changed_x_in_place": lambda: gnn(2 * x, edges),
        "other_edges": lambda: gnn(x, edges[:, :0]),
    }.get(use, lambda: rows)()


@pytest.mark.parametrize("use", USES)
def test_rows_are_those_that_the_module_would_compute(use):
    module = type("Module", (Gnn,), {"forward": USES[use]})()
    rows = rows_of_test(module, inference_mode=use != "gradients")
    assert module.kinds == {"SeedBatch"}
    with torch.no_grad():
        check(rows, expected_of(use, module.eval()))
    assert "forward" not in module.gnn.__dict__


def test_a_model_whose_rows_are_never_asked_for_is_passed_once(informed):
    module = type("Module", (Gnn,), {"forward": head})()
    kinds = []

    class Note(Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
            kinds.append(type(batch).__name__)

    trainer(1, max_epochs=3, callbacks=[Note()]).fit(module, in_batches())
    assert "".join(informed).count("nobody asked for them") == 1
    assert kinds == ["SeedBatch"] * 6 + ["SampledData"] * 12
    module.eval()
    with torch.no_grad():
        check(module.rows, module.head(module.gnn(DATA.x, DATA.edge_index)), VALIDATED)


class Watch(Callback):
    """Notes the whole graph's rows of the weights that a validation sees, and what a fit finds in the model."""

    def __init__(self) -> None:
        self.checked, self.patched = 0, []

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        module.rows.clear()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        expected = whole_rows(module, DATA)
        found = module.rows
        assert len(found) == batch.batch_size
        for node, row in found.items():
            assert torch.allclose(row, expected[node], rtol=0, atol=1e-12)
        self.checked += len(found)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        children = [
            (name, child) for name, child in module.named_modules() if name
        ]  # Lightning leaves one in the module
        self.patched.append([name for name, child in children if "forward" in child.__dict__])


@pytest.mark.parametrize("made", [lambda: Sage(2), Gnn], ids=["layers", "PyG"])
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 3 * 11),
        ({"num_sanity_val_steps": 1, "limit_val_batches": 1}, 4 * 1),
        ({"num_sanity_val_steps": 2, "val_check_interval": 2}, 3 + 3 * 3 * 11),
        ({"limit_val_batches": 0.5, "check_val_every_n_epoch": 3}, 5),
    ],
    ids=str,
)
def test_every_validation_of_a_fit_sees_the_weights_of_its_time(made, options, times):
    watch, module = Watch(), made().double()
    trainer(1, max_epochs=3, callbacks=[watch], **options).fit(module, in_batches())
    assert watch.checked == times
    assert module.kinds == {"SeedBatch"}
    assert watch.patched and not any(watch.patched)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(multi_avg_fn=None)

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None


@pytest.mark.parametrize("made", [lambda: Sage(2), Gnn], ids=["layers", "PyG"])
def test_averaged_weights_are_evaluated(made):
    watch, module = Watch(), made().double()
    trainer(1, max_epochs=3, num_sanity_val_steps=1, callbacks=[Average(), watch]).fit(module, in_batches())
    assert watch.checked == 3 * 11 + 1
    assert module.kinds == {"SeedBatch"}
    assert not any(watch.patched)
