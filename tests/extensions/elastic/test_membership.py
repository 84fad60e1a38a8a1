"""Membership, as far as one process can tell, and its page. The rest is in test_elastic_rounds.py."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist import Elastic
from lightning_gnn_dist.extensions.elastic.launcher import Launcher
from lightning_gnn_dist.extensions.elastic.membership import (
    LIGHTHOUSE,
    RANK,
    RANKS,
    Membership,
    Sign,
    check_available,
    is_silent,
    name_of_rank,
    quorum_of,
    waits,
)
from lightning_gnn_dist.wire import collectives
from tests.pages import ROOT, blocks
from tests.python_server import fast_python
from tests.ranks import join, run_ranks
from tests.test_public import NOT_FOR_GRAPHS, loaded
from tests.test_readme_code import commands

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None


def some_tensors(value: float) -> list[Tensor]:
    return [
        torch.full((2, 3), value),
        torch.full((4,), value, dtype=torch.float16),
        torch.full((), value, dtype=torch.float64),
        torch.full((2,), int(value)),
        torch.full((1,), complex(value, -value)),
        torch.tensor([value > 4]),
        torch.empty(0),
    ]


class Group:
    """What torchft's manager does when nobody dies."""

    def start_quorum(self) -> None:
        pass

    def participating_rank(self) -> int:
        return dist.get_rank()

    def num_participants(self) -> int:
        return dist.get_world_size()

    def allreduce(self, flat: Tensor, reduce_op: Any) -> Any:
        return dist.all_reduce(flat, reduce_op, async_op=True)

    def should_commit(self) -> bool:
        return True


def meet(rank: int, world_size: int, weights: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """What a plain meeting makes of the tensors, and what one of members does, in the old storage."""
    join(rank, world_size)
    plain, elastic = some_tensors([9.0, 1.0][rank]), some_tensors([9.0, 1.0][rank])
    member = Membership.__new__(Membership)
    member.elastic, member._manager, member._sign = Elastic(), Group(), Sign()
    places = [tensor.data_ptr() for tensor in elastic]
    rows = member.meet(lambda rows: elastic, weights[rank], lambda: [rank, 2**50 + rank])
    assert rows == [[0, 2**50], [1, 2**50 + 1]] and [tensor.data_ptr() for tensor in elastic] == places
    if sum(weights):
        collectives.average_(plain, weights[rank])
    return plain, elastic


def same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(tensors, others, strict=True))


def test_members_average_as_ranks_do_and_integers_by_their_maximum() -> None:
    expected = some_tensors(3.0)
    expected[3], expected[5] = torch.tensor([9, 9]), torch.tensor([True])
    for plain, elastic in run_ranks(meet, 2, [1.0, 3.0]):
        assert same(plain, elastic) and same(plain, expected)


def test_without_weight_floats_stay_as_they_are() -> None:
    for rank, (before, after) in enumerate(run_ranks(meet, 2, [0.0, 0.0])):
        before[3], before[5] = torch.tensor([9, 9]), torch.tensor([True])
        assert same(before, after) and after[0][0, 0] == [9.0, 1.0][rank]


def test_a_quorum_is_a_majority() -> None:
    assert [quorum_of(ranks) for ranks in (1, 2, 3, 4, 5, 8)] == [1, 2, 2, 3, 3, 5]


def test_names_sort_as_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for rank in (2, 10, 100):
        monkeypatch.setenv(RANK, str(rank))
        names.append(name_of_rank())
    assert names == sorted(names)
    for variable in (RANK, "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert "-" in name_of_rank()  # host and process


def test_the_launcher_says_how_many_ranks_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Elastic().ranks == 1
    monkeypatch.setenv(RANKS, "4")
    assert Elastic().ranks == 4 and Elastic(ranks=3).ranks == 3


@pytest.mark.skipif(HAS_TORCHFT, reason="torchft is installed")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"needs torchft.*pip install lightning-gnn-dist\[elastic\]"):
        check_available()


# The sign by which a launcher sees its ranks.


def test_a_rank_that_is_started_again_is_not_taken_for_the_dead_one(tmp_path: Path) -> None:
    launcher = Launcher([sys.executable, "-S", "-c", ""], 1, 0, 1.0, 5.0, print)
    launcher._signs = str(tmp_path)
    of_the_dead = launcher._sign(0)
    of_the_dead.write_text("waits")
    os.utime(of_the_dead, (0.0, 0.0))
    launcher._start(0, "http://127.0.0.1:1")
    try:
        assert not is_silent(launcher._sign(0), 6.0) and not waits(launcher._sign(0))
    finally:
        launcher._end_all()


@pytest.mark.slow
def test_the_launcher_needs_neither_pyg_nor_lightning() -> None:
    assert loaded("import lightning_gnn_dist.extensions.elastic.launcher") & NOT_FOR_GRAPHS == set()


# What the page on ranks that may die says, run as it stands.


@pytest.mark.slow
def test_the_elastic_block_runs_as_its_page_says(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")
    (block,) = [block for block in blocks("python", "elastic") if "peers=Elastic())" in block.code]
    (tmp_path / "block.txt").write_text(block.code)
    runs = 'from tests.test_readme_code import run_block\nrun_block(0, 1, open("block.txt").read(), ".")\n'
    (tmp_path / "train.py").write_text(runs)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_gnn_dist", "elastic", "--ranks", "2", "--", fast_python(), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "[elastic]" not in done.stdout, done.stderr
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


def test_the_variables_of_elastic_ranks_are_those_that_are_read() -> None:
    code = "".join(block.code for block in blocks("console", "elastic"))
    assert set(re.findall(r"\b([A-Z_]{6,})=", code)) == {LIGHTHOUSE, RANK, RANKS}


@pytest.mark.slow
def test_the_lighthouse_has_these_options() -> None:
    if (program := shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))) is None:
        pytest.skip("torchft is not installed: pip install lightning-gnn-dist[elastic]")
    known = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=240, check=True).stdout
    (words,) = commands("torchft_lighthouse")
    assert all(word in known for word in words if word.startswith("--"))
