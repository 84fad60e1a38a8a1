"""Modules around a model of PyG's, evaluated layer by layer, whatever they do with its rows: always today's rows."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch_geometric.nn import GCN, GIN, GraphSAGE

from lightning_gnn_dist import Evaluation, Graph, PartitionedDataModule
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from tests.data_fitting import trainer
from tests.layers.models import MODELS, NUM_CLASSES, Ready, Sage, graph_of, uneven_data, whole_rows
from tests.layers.test_lightning import (
    DATA,
    OWN,
    SLOW,
    TESTED,
    TIMES,
    VALIDATED,
    check,
    check_fits,
    check_models,
    data_module,
    evaluate,
    fits,
    in_batches,
    rows_of_test,
    watched,
    works_after_an_exception,
)
from tests.layers.test_lightning import check_cases as check_ranks
from tests.ranks import run_ranks


class Gnn(Ready):
    """A module around a model of PyG, whose rows a subclass computes in another way."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(7)
        super().__init__(GraphSAGE, 2, **options)
        self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES)
        self.double()


def head(self: Any, batch: Any) -> Tensor:
    return self.head(self.gnn(batch.x, batch.edge_index))[: batch.batch_size]


def keywords(self: Any, batch: Any) -> Tensor:
    return self.gnn(edge_index=batch.edge_index, x=batch.x)[: batch.batch_size]


def twice(self: Any, batch: Any) -> Tensor:
    first = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
    return (first + self.gnn(batch.x, edge_index=batch.edge_index)[: batch.batch_size]) / 2


def in_place(self: Any, batch: Any) -> Tensor:
    rows = self.gnn(batch.x, batch.edge_index)
    rows.mul_(2)
    rows[:2] += 1
    rows[:2] -= 1
    return rows[: batch.batch_size]


def changed_x(self: Any, batch: Any) -> Tensor:
    batch.x = batch.x * 2
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


USES = {use.__name__: use for use in (head, keywords, twice, in_place, changed_x, other_edges, other_weights)}
USES |= {use.__name__: use for use in (copied, gradients)}


def expected_of(use: str, module: Any) -> Tensor:
    x, edges, gnn = DATA.x, DATA.edge_index, module.gnn
    if use in ("other_weights", "copied"):
        gnn = copy.deepcopy(gnn)
        gnn.convs[0].lin_l.weight.data.mul_(2)
    rows = gnn(x, edges)
    return {
        "head": lambda: module.head(rows),
        "in_place": lambda: 2 * rows,
        "changed_x": lambda: gnn(2 * x, edges),
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


@pytest.mark.parametrize(("options", "times"), TIMES, ids=str)
def test_every_validation_of_a_fit_sees_the_weights_of_its_time(options: dict[str, Any], times: int) -> None:
    assert watched(Gnn, **options) == times


def test_after_an_exception_everything_works_again() -> None:
    works_after_an_exception(Gnn)


def test_a_module_in_training_is_evaluated_on_full_neighbourhoods():
    class Trained(Gnn):
        def on_test_start(self) -> None:
            self.gnn.dropout.train()

    module = Trained()
    rows_of_test(module)
    assert module.kinds == {"SampledData"}


def test_a_step_that_goes_into_training_draws_every_time():
    class Drawn(Gnn):
        def test_step(self, batch: Any) -> None:
            once = self(batch)
            self.train()
            drawn = [self(batch) for _ in range(5)]
            self.eval()
            assert len({float(rows.sum()) for rows in drawn}) > 1
            torch.testing.assert_close(self(batch), once, atol=1e-12, rtol=0)  # of the batch, and of the pass
            super().test_step(batch)

    module = Drawn()
    check(rows_of_test(module), whole_rows(module, DATA))


def test_a_watched_model_is_not_passed():
    seen = []
    module = Gnn()
    module.gnn.convs[0].register_forward_hook(lambda *_: seen.append(0))
    check(rows_of_test(module), whole_rows(module, DATA))
    assert seen and module.kinds == {"SampledData"}


class Encoded(Gnn):
    """A model of PyG's that takes what an encoder makes of the features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(DATA.num_features, 9)
        self.gnn = GraphSAGE(num_features, 8, num_layers=2, out_channels=NUM_CLASSES)
        self.double()

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(self.encoder(batch.x), batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(self.encoder(x), edge_index)


@pytest.mark.parametrize("num_features", [9, -1], ids=["built", "lazy"])
def test_a_model_that_takes_other_rows_than_the_graphs_is_evaluated_on_batches(num_features):
    module = Encoded(num_features)
    rows = rows_of_test(module)
    check(rows, whole_rows(module, DATA))
    assert module.kinds == {"SampledData"}


def test_a_graph_without_features_is_evaluated_on_batches():
    class Embedded(Encoded):
        def __init__(self) -> None:
            super().__init__(9)
            self.ids = nn.Embedding(DATA.num_nodes, 9).double()

        def forward(self, batch: Any) -> Tensor:
            return self.gnn(self.ids(batch.n_id), batch.edge_index)[: batch.batch_size]

        def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.gnn(self.ids.weight, edge_index)

    module, data = Embedded(), DATA.clone()
    data.num_nodes = DATA.num_nodes
    del data.x
    batches = data_module(Graph.from_pyg(data), evaluation=Evaluation(batch_size=7))
    check(rows_of_test(module, batches), whole_rows(module, DATA))


def test_one_data_module_serves_two_models_and_two_trainers():
    data, first, second = in_batches(), trainer(1), trainer(1)
    sage, gnn = Sage(2).double(), Gnn()
    for run in (first, second, first):
        for module in (sage, gnn, sage):
            module.rows.clear()
            run.test(module, data, verbose=False)
            check(module.rows, whole_rows(module, DATA))


def test_two_loaders_of_one_evaluation():
    class Both(Gnn):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            assert isinstance(batch, SeedBatch)
            self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), self(batch), strict=True))

    class Loaders(PartitionedDataModule):
        def test_dataloader(self) -> Any:
            return [super().test_dataloader(), self.val_dataloader()]

    module, data = Both(), in_batches()
    data.__class__ = Loaders
    nodes = (DATA.test_mask | DATA.val_mask).nonzero().view(-1).tolist()
    check(rows_of_test(module, data), whole_rows(module, DATA), nodes)
    assert "forward" not in module.gnn.__dict__


def test_a_kept_batch_can_be_read_after_the_evaluation():
    class Keeps(Gnn):
        def test_step(self, batch: Any) -> None:
            self.last = batch, self.gnn(batch.x, batch.edge_index)

    module = Keeps()
    trainer(1).test(module, in_batches(), verbose=False)
    batch, rows = module.last
    nodes = batch.n_id[: batch.batch_size]
    assert batch.y[: batch.batch_size].equal(DATA.y[nodes])
    assert torch.allclose(rows[: batch.batch_size], whole_rows(module, DATA)[nodes], atol=1e-12)
    assert batch.x.equal(DATA.x[batch.n_id])
    assert torch.allclose(rows.detach()[: batch.batch_size], whole_rows(module, DATA)[nodes], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [GCN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (GraphSAGE, GIN))])
def test_narrow_features_are_widened(dtype, kind, tmp_path):
    data = DATA.clone()
    data.x = data.x.to(dtype)
    graph_of(data).save(tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    torch.manual_seed(0)
    module = Ready(kind, 2)
    whole = in_batches(graph)
    rows = rows_of_test(module, whole)
    assert module.kinds == {"SeedBatch"}
    expected = module.eval().whole(data.x.float(), DATA.edge_index).detach()
    assert torch.allclose(torch.stack([rows[node] for node in TESTED]), expected[TESTED], atol=1e-5)


# Models of PyG's are evaluated by ranks as one process evaluates them on the whole graph.


OF_PYG = [name for name in MODELS if name not in OWN]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_those_of_the_whole_graph(world_size: int) -> None:
    check_models(world_size, [(name, 3) for name in OF_PYG if world_size == 1 or name not in SLOW])


def test_rows_of_a_graph_in_files(tmp_path: Path) -> None:
    graph_of(uneven_data()).save(tmp_path / "graph")
    cases = [("PyG GCN", 2)]
    check_ranks(cases, run_ranks(evaluate, 1, str(tmp_path / "graph"), "files", cases))


def two_layers() -> Any:
    return Ready(GraphSAGE, 2).double()


def test_fits_validate_the_weights_of_their_time() -> None:
    check_fits(run_ranks(fits, 2, two_layers))
