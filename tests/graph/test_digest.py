"""Digests tell arrays apart that were drawn otherwise, and read little of what is large."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.graph.digest import sampled_digest, sketches


def arrays(seed: int = 0, rows: int = 100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.randint(0, 5, (rows,), generator=generator)
    return {"x": x, "half": x.bfloat16(), "y": y, "mask": y > 2, "none": x[:, :0]}


def told_apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    values = zip(sketches(one), sketches(other), strict=True)
    return sampled_digest(one) != sampled_digest(other) or any(abs(a - b) > 2e-4 for a, b in values)


@pytest.mark.parametrize("rows", [100, 300_000])
def test_what_was_drawn_or_named_otherwise_is_told_apart(rows: int) -> None:
    one, other = arrays(0, rows), arrays(1, rows)
    assert not told_apart(one, arrays(0, rows))
    for name in ("x", "half", "y"):
        assert told_apart(one, one | {name: other[name]}), name
    assert told_apart(one, one | {"more": one["y"]})
    assert told_apart(one, one | {"x": one["x"].double()})
    assert told_apart(one, one | {"x": one["x"][1:]})


def test_last_digits_and_numbers_that_are_none_do_not_tell_apart() -> None:
    one = arrays()
    assert not told_apart(one, one | {"x": one["x"] * (1 + 1e-6)})
    one["x"][3] = torch.nan
    assert not told_apart(one, {name: array.clone() for name, array in one.items()})
    assert not told_apart({"x": torch.zeros(3, 0)}, {"x": torch.zeros(3, 0)})


def test_of_a_large_file_few_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (1 << 28, 64))  # 64 GB of holes: more than there is RAM
    mapped = torch.from_numpy(np.load(path, mmap_mode="r+"))
    before = pages_touched()
    for tells in (sampled_digest, sketches):
        tells({"x": mapped, "y": mapped.view(torch.int32)})
    assert pages_touched() - before < 50_000  # of 16 million


def pages_touched() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt
