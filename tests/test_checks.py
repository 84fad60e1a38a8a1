"""What refusals are made of: a value on one line however large it is, and the edges of what is right."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import (
    Graph,
    LLCGStrategy,
    RandomWalkSampler,
    SuperNodePartitioner,
    checks,
    communities,
    predict_by_layer,
)
from lightning_gnn_dist.partition.cache import identity
from lightning_gnn_dist.rounds.refusals import require_step
from tests.sage import SAGE

GRAPH = communities(30, 2, num_features=2)


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
    assert text in checks.shown(value)


def test_a_path_is_shown_whole(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 100) / ("b" * 100) / "none.ckpt"
    with pytest.raises(FileNotFoundError, match=re.escape(f"ckpt_path must be a file, and '{path}' is none.")):
        checks.check_file("ckpt_path", path)


def test_an_integer_too_long_for_its_digits_is_shown_by_its_bits() -> None:
    assert checks.shown(1 << 16609) == "an integer of 16610 bits"


@pytest.mark.parametrize(
    "value", ["y" * 10**6, list(range(10**6)), {i: i for i in range(1000)}, [[["x" * 999] * 9] * 9]]
)
def test_a_large_value_is_shortened(value: object) -> None:
    assert len(checks.shown(value)) < 500


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cache_dir must be a folder, got .*file' is a file"):
            checks.check_folder("cache_dir", path)
    assert checks.check_folder("cache_dir", str(tmp_path / "new")) == tmp_path / "new"
    with pytest.raises(FileNotFoundError, match="assignment must be a file"):
        checks.check_file("assignment", tmp_path)


@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), timedelta.max])
def test_a_duration_is_longer_than_nothing(value: timedelta) -> None:
    with pytest.raises(ValueError, match="timeout must be longer than nothing"):
        checks.check_durations(timeout=value)


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
        Graph(GRAPH.indptr, GRAPH.indices, {"train_mask": mask})


def test_integers_of_numpy_are_as_good_as_others() -> None:
    assert identity(SuperNodePartitioner(np.int64(8))) == identity(SuperNodePartitioner(8))  # type: ignore[arg-type]


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


def test_arguments_that_nobody_knows_are_refused() -> None:
    with pytest.raises(TypeError, match="correction_step"):
        LLCGStrategy(correction_step=3)  # type: ignore[call-arg]
    trainer: Any = None
    with pytest.raises(TypeError, match=r"predict_by_layer\(\) knows no argument 'ckpt_pth'"):
        predict_by_layer(trainer, SAGE(2, 2), GRAPH, "rows.npy", ckpt_pth="x")


def test_numbers_of_numpy_become_plain() -> None:
    sampler = RandomWalkSampler(np.int8(2), visits=np.uint8(100))
    assert [type(value) for value in (sampler.num_hops, sampler.visits)] == [int, int]
