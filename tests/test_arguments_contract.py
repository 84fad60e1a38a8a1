"""Every argument of everything public: a value is right, or refused in one sentence that names it and the way out."""

import inspect
import pickle
import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

import lightning_gnn_dist
import lightning_gnn_dist as lgd
from lightning_gnn_dist.answers import WORDS_OF_PYG
from lightning_gnn_dist.cli.mistakes import hint
from lightning_gnn_dist.gone import GONE
from lightning_gnn_dist.rounds.refusals import require_step
from tests.arguments import ODD, Case, World, cases
from tests.data_fitting import small_graph
from tests.extensions import MISSING
from tests.sage import SAGE

SECONDS = 10  # for one call: what takes longer hangs
MOST_LETTERS = 600


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"It took longer than {SECONDS} seconds.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(case: Case, argument: str, odd: str) -> tuple[str, str]:
    """``right``, ``refused``, or what is wrong: ``accepted``, ``alien`` words, ``unclear`` ones, ``hangs``."""
    value = case.value(argument, odd)
    try:
        with limited():
            case.call(**{argument: value})
    except TimeoutError as error:
        return "hangs", str(error)
    except Exception as error:
        return _of_error(error, argument, value)
    return ("right", "") if odd in case.right(argument) else ("accepted", "")


def _of_error(error: Exception, argument: str, value: object) -> tuple[str, str]:
    message = f"{type(error).__name__}: {error}"
    last = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
    ours = last.startswith("lightning_gnn_dist.") and isinstance(error, ValueError | TypeError | OSError)
    if not ours or (isinstance(error, OSError) and error.errno is not None):
        return "alien", f"{message[:300]} ({last})"
    text = str(error)
    names_it = re.search(rf"\b{argument}\b", text) or (isinstance(value, str) and value and value[:20] in text)
    if not names_it or "\n" in text or not text.endswith(".") or len(text) > MOST_LETTERS:
        return "unclear", message[:MOST_LETTERS]
    return "refused", message


def all_verdicts(world: World) -> Iterator[tuple[str, str, str, str, str]]:
    for case in cases(world):
        case.call()
        for argument in case.arguments():
            for odd in ODD:
                yield case.name, argument, odd, *verdict(case, argument, odd)


def test_each_value_of_each_argument_is_right_or_refused_in_our_words(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(all_verdicts(World(tmp_path)))
    wrong = [row for row in found if row[3] not in ("right", "refused")]
    assert wrong == [], Counter(row[3] for row in found)


# Arguments that nothing takes are answered by what went, words of PyG, the nearest name, or by who takes them.


def test_words_of_pyg_are_answered() -> None:
    check_words_of_pyg(lgd.PartitionedDataModule, small_graph())


def check_words_of_pyg(kind: Any, first: Any) -> None:
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
            lgd.PartitionedDataModule(small_graph(), **{name: 1})  # type: ignore[arg-type]
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
            lambda: lgd.NeighborSampler([10, 5], batch_size=32),
            r"takes no batch_size\. It is .* of .*PartitionedDataModule",
        ),
        (lambda: lgd.NeighborSampler([10], replce=True), "Did you mean 'replace'"),  # type: ignore[call-arg]
        (lambda: lgd.Correction(step=1), "Did you mean 'steps'"),  # type: ignore[call-arg]
        (lambda: lgd.Drift("global", colour=1), "Drift takes no colour. It takes towards, "),  # type: ignore[call-arg]
        (lambda: lgd.MetisPartitioner(balanced=1), "Did you mean 'balance'"),  # type: ignore[call-arg]
        (lambda: lgd.GrappaStrategy(outer=1), "It is an argument of LLCGStrategy, "),  # type: ignore[call-arg]
        (lambda: lgd.LocalSGDStrategy(outr=1), "Did you mean 'outer'"),  # type: ignore[call-arg]
        (
            lambda: lgd.Graph.from_pyg(1, edge_weights=1),
            r"Graph.from_pyg takes no edge_weights\. Did you mean .edge_ids",
        ),
        (lambda: lgd.communities(60, 2, seeds=1), "communities takes no seeds. Did you mean 'seed'"),  # type: ignore[call-arg]
    ],
)
def test_each_kind_of_class_and_function_answers(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said) as stop:
        make()
    assert str(stop.value).endswith((".", "?"))


def test_what_answers_is_the_same_to_pickle_and_to_whoever_inspects_it() -> None:
    held = pickle.loads(pickle.dumps((lgd.NeighborSampler([3]), lgd.communities, lgd.GrappaStrategy)))
    assert held == (lgd.NeighborSampler([3]), lgd.communities, lgd.GrappaStrategy)
    assert list(inspect.signature(lgd.NeighborSampler).parameters)[:2] == ["num_neighbors", "replace"]
    assert "num_nodes" in inspect.signature(lgd.communities).parameters


def test_what_went_is_answered_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "OldStrategy": lambda: exec("from lightning_gnn_dist import OldStrategy"),
        "NeighborSampler.replce": lambda: lgd.NeighborSampler([3], replce=1),  # type: ignore[call-arg]
        "RoundStrategy.outr": lambda: lgd.LocalSGDStrategy(outr=1),  # type: ignore[call-arg]  # of a base
        "Drift.towards='rank'": lambda: lgd.Drift("rank"),  # type: ignore[arg-type]
        "Drift.anchor_steps=-1": lambda: lgd.Drift("ranks", anchor_steps=-1),
        "LocalSGDStrategy.weights='old'": lambda: lgd.LocalSGDStrategy(weights="old"),  # type: ignore[arg-type]
        "Graph.open.versions": lambda: lgd.Graph.open("there", versions=1),  # type: ignore[call-arg]
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
        if MISSING and owner not in lightning_gnn_dist.__all__:  # type: ignore[attr-defined]
            continue
        kind = getattr(lightning_gnn_dist, owner)
        there = {*inspect.signature(kind).parameters, *dir(kind)}
        assert (argument in there) == bool(value), row


# What refusals are made of: a value on one line however large it is, and the edges of what is right.


GRAPH = lgd.communities(30, 2, num_features=2)


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a\nb", r"'a\nb'"),
        ((1 << 16609,), "a tuple"),  # too long for repr()
        (np.zeros((2, 3)), "a numpy array of float64 and shape (2, 3)"),
        (torch.zeros(2), "a tensor of torch.float32 and shape (2,)"),
        (Rude(), "Rude"),
    ],
)
def test_a_value_is_shown_on_one_line(value: object, text: str) -> None:
    assert text in lgd.checks.shown(value)


def test_a_path_is_shown_whole(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 100) / ("b" * 100) / "none.ckpt"
    with pytest.raises(FileNotFoundError, match=re.escape(f"ckpt_path must be a file, and '{path}' is none.")):
        lgd.checks.check_file("ckpt_path", path)


@pytest.mark.parametrize(
    "value", ["y" * 10**6, list(range(10**6)), {i: i for i in range(1000)}, [[["x" * 999] * 9] * 9]]
)
def test_a_large_value_is_shortened(value: object) -> None:
    assert len(lgd.checks.shown(value)) < 500


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cache_dir must be a folder, got .*file' is a file"):
            lgd.checks.check_folder("cache_dir", path)
    assert lgd.checks.check_folder("cache_dir", str(tmp_path / "new")) == tmp_path / "new"
    with pytest.raises(FileNotFoundError, match="assignment must be a file"):
        lgd.checks.check_file("assignment", tmp_path)


@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), timedelta.max])
def test_a_duration_is_longer_than_nothing(value: timedelta) -> None:
    with pytest.raises(ValueError, match="timeout must be longer than nothing"):
        lgd.checks.check_durations(timeout=value)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.arange(3), r"a numpy array of int64 and shape \(3,\)\. Make it one: torch\.as_tensor\(nodes\)"),
        ([0, 1], r"got \[0, 1\]\. Make it one: torch\.as_tensor\(nodes\)"),
        (torch.tensor([0.5]), "nodes must be a vector of node ids, got a tensor of torch.float32"),
        (torch.ones(30, dtype=torch.bool), r"Turn a mask into ids with mask\.nonzero\(\)\.view\(-1\)"),
        (torch.tensor([[0]]), "nodes must be a vector"),
    ],
)
def test_ids_are_a_tensor_of_integers(array: Any, reason: str) -> None:
    for method in (GRAPH.induced, GRAPH.halo):
        with pytest.raises((TypeError, ValueError), match=reason):
            method(array)


@pytest.mark.parametrize("mask", [torch.ones(30, dtype=torch.int64), torch.ones(30, 2, dtype=torch.bool)])
def test_a_mask_of_a_graph_is_a_boolean_per_node(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="train_mask"):
        lgd.Graph(GRAPH.indptr, GRAPH.indices, {"train_mask": mask})


def test_a_step_of_the_module_that_corrections_would_pass_over_is_refused() -> None:
    module: Any = SAGE(2, 2)
    require_step(module)
    module.correction_step = 3
    with pytest.raises(TypeError, match=r"correction_step must be a method of the module, .*got 3"):
        require_step(module)

    class Misspelt(SAGE):
        def corection_step(self, batch: Any) -> None: ...

    with pytest.raises(ValueError, match="has a method corection_step, and corrections call correction_step"):
        require_step(Misspelt(2, 2))
