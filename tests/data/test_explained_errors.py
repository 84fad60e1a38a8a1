"""Arguments of PyG's loaders, and graphs without features, are answered with what to write here."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from lightning_gnn_dist import (
    Graph,
    LinkDataModule,
    PartitionedDataModule,
    split_edges,
)
from lightning_gnn_dist.cli.mistakes.misspelt import hint
from lightning_gnn_dist.data.explained_errors import WORDS_OF_PYG
from tests.data_fitting import model, small_graph, trainer

KINDS: dict[type, Any] = {
    PartitionedDataModule: small_graph,
    LinkDataModule: lambda: split_edges(small_graph()),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_words_of_pyg_are_answered(kind: Any) -> None:
    first = KINDS[kind]()
    for name, way in WORDS_OF_PYG.items():
        with pytest.raises(TypeError, match=f"^{kind.__name__} takes no {name}\\. ") as stop:
            kind(first, **{name: 1})
        assert str(stop.value).lower().endswith(f"{way.lower()}.")
        assert name not in inspect.signature(kind).parameters
    assert "checked" not in str(inspect.signature(kind)) and "unknown" not in str(inspect.signature(kind))


def test_other_names_are_answered_by_the_nearest_or_their_setting() -> None:
    for name, way in {
        "batchsize": "The nearest name is batch_size.",
        "num_threads": "It is a field of loading, write loading=Loading(num_threads=...).",
        "colour": "It takes graph, partitioner, sampler, batch_size, seed, ",
    }.items():
        with pytest.raises(TypeError) as stop:
            PartitionedDataModule(small_graph(), **{name: 1})  # type: ignore[arg-type]
        assert way in str(stop.value)


def test_a_configuration_is_answered_alike() -> None:
    said = "given class_path 'lightning_gnn_dist.PartitionedDataModule': Option 'num_workers' is not accepted"
    answer = hint(said, ())
    assert answer == (
        "There is no 'num_workers'. Write loading=Loading(num_threads=2): batches are made by threads, which share the "
        "graph."
    )


@pytest.mark.parametrize("blocks", [True, False])
def test_a_graph_without_features_is_named_where_the_model_fails(blocks: bool) -> None:
    graph = small_graph()
    bare = {name: array for name, array in graph.node_arrays.items() if name != "x"}
    data = PartitionedDataModule(Graph(graph.indptr, graph.indices, bare), batch_size=30)
    with pytest.raises((TypeError, AttributeError), match=r"^The graph has no features, and batch\.x is None"):
        trainer(1, limit_val_batches=0).fit(model(blocks=blocks), data)
    assert pickle.loads(pickle.dumps(data)).batch_size == 30


def test_a_mask_that_marks_nothing_is_named_with_the_way_out() -> None:
    graph = small_graph()
    graph.node_arrays["val_mask"][:] = False
    data = PartitionedDataModule(graph, batch_size=30)
    with pytest.raises(
        ValueError, match=r"^val_mask marks 0 nodes, but 1 ranks .*mark more or leave it out, limit_val"
    ):
        trainer(1).fit(model(), data)
    trainer(1, limit_val_batches=0).fit(model(), data)
