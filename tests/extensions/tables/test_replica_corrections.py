"""Rows that live with one rank each, under LLCG: corrections are those of tables that all ranks hold."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_gnn_dist import Correction, EverySteps, LazyAdam, LLCGStrategy
from tests.every_strategy import PATIENCE
from tests.extensions.tables import test_llcg_rows
from tests.extensions.tables.fitting import Made, owned, state_of
from tests.extensions.tables.test_llcg_rows import PLAIN
from tests.extensions.tables.test_table_gradients import OfData
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs


def lazy(parameters: list[Tensor]) -> LazyAdam:
    return LazyAdam(parameters, lr=0.02)


CORRECTIONS: dict[str, dict[str, Any]] = {
    "by default": {},
    "plain": PLAIN,
    "of a function": PLAIN | {"correction": Correction(0.5, optimizer=lazy)},
    "averaged": PLAIN | {"average_optimizer": True, "correction": Correction(2, lr="local")},
    "variance": PLAIN | {"average_optimizer": "variance"},
    "left out": PLAIN | {"nonfinite": "leave_out", "buffers": "global"},
}


def corrected(rank: int, world_size: int, names: list[str], optimizer: str) -> dict[str, list[Made]]:
    """For each setting the end of a fit of a table that every rank holds, and of one whose rows have owners."""
    found: dict[str, list[Made]] = {}
    for name in names:
        for module in (OfData(optimizer), owned(OfData(optimizer))):
            strategy = LLCGStrategy(EverySteps(3), **CORRECTIONS[name], **PATIENCE)
            test_llcg_rows.train(strategy, module, world_size)
            found.setdefault(name, []).append(state_of(module))
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize(
    ("names", "optimizer"),
    [
        (["by default", "plain"], "LazyAdam"),
        pytest.param([*CORRECTIONS][2:], "LazyAdam", marks=pytest.mark.slow),
        pytest.param(["by default", "plain", "left out"], "Adagrad", marks=pytest.mark.slow),
    ],
)
def test_corrections_are_those_of_a_table_that_all_ranks_hold(names: list[str], optimizer: str) -> None:
    for found in run_ranks(corrected, 3, names, optimizer):
        for name, (whole, other) in found.items():
            assert differs(whole, other) == 0.0, name


def of_another_kind(rank: int, world_size: int, folder: str) -> None:
    path = str(Path(folder, "half.ckpt"))
    options = PLAIN | {"average_optimizer": True}
    strategy = LLCGStrategy(EverySteps(3), **options, **PATIENCE)
    test_llcg_rows.train(strategy, owned(OfData()), world_size, rounds=1).save_checkpoint(path)
    strategy = LLCGStrategy(EverySteps(3), **options, **PATIENCE)
    test_llcg_rows.train(strategy, OfData(), world_size, path)


@pytest.mark.slow
def test_moments_of_corrections_are_of_one_kind_of_table(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"correction optimizer has numbers of shape .* resume with the kind of table"):
        run_ranks(of_another_kind, 2, str(tmp_path))
