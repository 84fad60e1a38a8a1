"""Arguments that nothing takes are answered by what went, words of PyG, the nearest name, or by who takes them."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

import lightning_gnn_dist
from lightning_gnn_dist import (
    Correction,
    Drift,
    Exchange,
    Graph,
    GrappaStrategy,
    LinkDataModule,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    communities,
    split_edges,
)
from lightning_gnn_dist.answers import WORDS_OF_PYG
from lightning_gnn_dist.cli.mistakes import hint
from lightning_gnn_dist.gone import GONE
from tests.data_fitting import small_graph

KINDS: dict[type, Any] = {PartitionedDataModule: small_graph, LinkDataModule: lambda: split_edges(small_graph())}


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
        "batchsize": "Did you mean 'batch_size'?",
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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: NeighborSampler([10, 5], batch_size=32),  # type: ignore[call-arg]
            r"NeighborSampler takes no batch_size\. It is an argument of .*PartitionedDataModule",
        ),
        (lambda: NeighborSampler([10], replce=True), "Did you mean 'replace'"),  # type: ignore[call-arg]
        (lambda: Correction(step=1), "Did you mean 'steps'"),  # type: ignore[call-arg]
        (lambda: Drift("global", colour=1), "Drift takes no colour. It takes towards, "),  # type: ignore[call-arg]
        (lambda: Exchange(shares=1), "Did you mean 'share'"),  # type: ignore[call-arg]
        (lambda: MetisPartitioner(balanced=1), "Did you mean 'balance'"),  # type: ignore[call-arg]
        (lambda: GrappaStrategy(outer=1), "It is an argument of LLCGStrategy, "),  # type: ignore[call-arg]
        (lambda: LocalSGDStrategy(outr=1), "Did you mean 'outer'"),  # type: ignore[call-arg]
        (lambda: Graph.from_pyg(1, edge_weights=1), r"Graph.from_pyg takes no edge_weights\. Did you mean .edge_ids"),  # type: ignore[call-arg, arg-type]
        (lambda: communities(60, 2, seeds=1), "communities takes no seeds. Did you mean 'seed'"),  # type: ignore[call-arg]
    ],
)
def test_each_kind_of_class_and_function_answers(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said) as stop:
        make()
    assert str(stop.value).endswith((".", "?"))


def test_what_answers_is_the_same_to_pickle_and_to_whoever_inspects_it() -> None:
    held = pickle.loads(pickle.dumps((NeighborSampler([3]), communities, GrappaStrategy)))
    assert held == (NeighborSampler([3]), communities, GrappaStrategy)
    assert list(inspect.signature(NeighborSampler).parameters)[:2] == ["num_neighbors", "replace"]
    assert "num_nodes" in inspect.signature(communities).parameters


def test_what_went_is_answered_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "OldStrategy": lambda: exec("from lightning_gnn_dist import OldStrategy"),
        "NeighborSampler.replce": lambda: NeighborSampler([3], replce=1),  # type: ignore[call-arg]
        "RoundStrategy.outr": lambda: LocalSGDStrategy(outr=1),  # type: ignore[call-arg]  # of a base
        "Drift.towards='rank'": lambda: Drift("rank"),  # type: ignore[arg-type]
        "Drift.anchor_steps=-1": lambda: Drift("ranks", anchor_steps=-1),
        "LocalSGDStrategy.weights='old'": lambda: LocalSGDStrategy(weights="old"),  # type: ignore[arg-type]
        "Graph.open.versions": lambda: Graph.open("there", versions=1),  # type: ignore[call-arg]
        "Graph.extend": lambda: small_graph().extend,  # type: ignore[attr-defined]
    }
    for row, act in rows.items():
        monkeypatch.setitem(GONE, row, "write another")
        with pytest.raises((TypeError, ValueError, ImportError, AttributeError)) as stop:
            act()
        assert str(stop.value).endswith(f"{row} went: write another.")


@pytest.mark.parametrize("row", [row for row in GONE if row.startswith("Trainer.strategy=")])
def test_a_name_of_a_strategy_that_went_is_answered_by_lightning(row: str) -> None:
    with pytest.raises(ValueError, match=f"^{row} went: "):
        pl.Trainer(strategy=row.split("'")[1], accelerator="cpu", logger=False)


def test_every_row_names_what_was_public_and_is_no_more() -> None:
    for row in GONE:
        owner, _, name = row.partition(".")
        argument, _, value = name.partition("=")
        if owner == "Trainer" or " " in row or not name:  # of Lightning, a command or an option, a class
            assert not name or owner not in lightning_gnn_dist.__all__ or owner == "Trainer"  # type: ignore[attr-defined]
            continue
        kind = getattr(lightning_gnn_dist, owner)
        there = {*inspect.signature(kind).parameters, *dir(kind)}
        assert (argument in there) == bool(value), row
