"""Objects that travel to other processes: one stays one, large arrays are mapped, and what cannot travel is refused."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gnn_dist.extensions.notebooks import by_value
from lightning_gnn_dist.extensions.notebooks.by_value import CannotTravelError

LARGE = 1 << 18  # of float32: a file of its own


def sent(item: Any, folder: Path, *, there: tuple[Any, ...] = (), here: tuple[Any, ...] = ()) -> Any:
    by_value.write(folder / "item", item, here)
    return by_value.read(folder / "item", there)


def test_large_arrays_are_files_that_readers_share(tmp_path: Path) -> None:
    tensor, array = torch.arange(LARGE, dtype=torch.float32), np.arange(LARGE, dtype=np.int64)
    got = sent([tensor, array, tensor, tensor.view(2, -1)], tmp_path)
    assert got[0] is got[2]
    assert torch.equal(got[0], tensor) and torch.equal(got[3], tensor.view(2, -1)) and np.array_equal(got[1], array)
    assert (tmp_path / "item").stat().st_size < 10_000
    assert len(list(tmp_path.glob("item.*.npy"))) == 3
    got[0][0] = -1  # its own copy of that page
    assert float(by_value.read(tmp_path / "item")[0][0]) == 0.0 == float(tensor[0])


PARAMETER = nn.Parameter(torch.ones(LARGE))


@pytest.mark.parametrize("item", [torch.ones(3), torch.ones(LARGE).bfloat16(), PARAMETER, torch.ones(2, LARGE).T])
def test_every_tensor_is_what_it_was(item: torch.Tensor, tmp_path: Path) -> None:
    got = sent(item, tmp_path)
    assert type(got) is type(item) and got.dtype == item.dtype and got.requires_grad == item.requires_grad
    assert torch.equal(got, item)


def test_what_both_sides_have_stays_what_it_is(tmp_path: Path) -> None:
    mine, theirs = nn.Linear(2, 2), nn.Linear(3, 3)
    got = sent({"model": mine, "other": [1]}, tmp_path, here=(mine,), there=(theirs,))
    assert got["model"] is theirs and got["other"] == [1]
    assert by_value.from_bytes(by_value.as_bytes([mine], (mine,)), (theirs,))[0] is theirs


def test_what_cannot_travel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotTravelError, match=r"list: cannot pickle '_thread.lock' object"):
        by_value.write(tmp_path / "item", [threading.Lock()])
    with pytest.raises(CannotTravelError):
        by_value.check([threading.Lock()])
    by_value.check([torch.ones(LARGE)])
