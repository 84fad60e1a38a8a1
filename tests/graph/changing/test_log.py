"""The log beside a saved graph: nobody reads half of it, and it is written into one at once."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, RandomPartitioner
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.partition.cache import cached_partition
from tests.graph.changing.whole import in_turn, parted, typed, untyped
from tests.graph.equal import check_equal

_NEW = {"x": torch.ones(2, 3, dtype=torch.float64)}
_PAIRS = {"edge_index": torch.tensor([[40, 1], [1, 41]]), "edge_weight": torch.tensor([1.0, 2.0])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Graph.from_pyg(untyped()).save(tmp_path / "graph")
    return tmp_path / "graph"


def test_a_log_is_written_into_one(path: Path) -> None:
    changed = Graph.open(path).extended(_NEW, _PAIRS).removed(nodes=[7])
    partition = cached_partition(changed, RandomPartitioner(), 2, 0)
    changed.save(path, overwrite=True)
    assert not (path / "changes").exists()
    whole = Graph.open(path)
    check_equal(whole, changed)
    assert (whole.version, whole.nodes_since(0).tolist()) == (2, [40, 41])
    assert cached_partition(whole, RandomPartitioner(), 2, 0).assignment.equal(partition.assignment)
    assert len(list((path / "partitions").iterdir())) == 1
    again = whole.extended(_NEW)
    assert (again.version, again.nodes_since(2).tolist()) == (3, [42, 43])
    with pytest.raises(ValueError, match="between 2 and 3, got 1"):
        Graph.open(path, version=1)


def test_a_typed_log_is_written_into_one(tmp_path: Path) -> None:
    old, nodes, edges = parted(typed())
    Graph.from_pyg(old, time="time").save(tmp_path / "graph")
    Graph.open(tmp_path / "graph").extended(nodes, edges, ["editor"]).save(tmp_path / "whole")
    chosen = Graph.open(tmp_path / "graph").with_seeds("paper")
    assert chosen.updated({"paper": {"n_id": [1], "y": torch.tensor([2])}}).version == 2
    assert pickle.loads(pickle.dumps(chosen)).types.seeds == "paper"
    whole = Graph.open(tmp_path / "whole")
    check_equal(whole, Graph.from_pyg(in_turn(old, edges), time="time"))
    assert whole.version == 1 and whole.nodes_since(0, "editor").tolist() == [0, 1, 2, 3]


def test_the_same_change_is_written_once(path: Path) -> None:
    first = Graph.open(path)
    for _ in range(2):  # as ranks that run one script do
        assert first.extended(_NEW).version == 1
    with pytest.raises(ValueError, match="open it again"):
        first.extended(_NEW, _PAIRS)
    assert Graph.open(path).version == 1
    opened = Graph.open(path)
    opened.extended(_NEW)
    with pytest.raises(ValueError, match="open it again"):
        opened.save(path, overwrite=True)


def test_a_log_of_another_graph_and_a_damaged_one_are_refused(path: Path, tmp_path: Path) -> None:
    Graph.open(path).extended(_NEW).updated({"n_id": [1], "y": torch.tensor([1])})
    Graph.from_pyg(untyped(seed=1)).save(tmp_path / "other")
    shutil.copytree(path / "changes", tmp_path / "other" / "changes")
    with pytest.raises(ValueError, match="a change of another graph"):
        Graph.open(tmp_path / "other")
    file = path / "changes" / "000001" / "nodes" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not the file that was saved"):
        Graph.open(path)
    shutil.rmtree(path / "changes" / "000001" / "nodes")
    with pytest.raises((ValueError, OSError)):
        Graph.open(path)


def _end_of(stage: int, change: Callable[[], object]) -> int:
    """Do it in another process, which is killed before its so-manieth call that a disk sees; return how it ends."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if next(calls) == stage:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return called

    os.rename, os.fsync, shutil.rmtree = counted(os.rename), counted(os.fsync), counted(shutil.rmtree)  # type: ignore[assignment]
    store.exchange = counted(store.exchange)
    try:
        change()
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize("compacts", [False, True])
def test_a_kill_at_any_stage_leaves_the_old_or_the_new(compacts: bool, path: Path, tmp_path: Path) -> None:
    after = Graph.from_pyg(untyped()).extended(_NEW, _PAIRS)
    before = Graph.open(path).extended(_NEW, _PAIRS) if compacts else Graph.open(path)
    found, stage, end = set(), 0, -signal.SIGKILL
    while end == -signal.SIGKILL:
        copy = tmp_path / f"copy{stage}"
        shutil.copytree(path, copy)
        graph = Graph.open(copy)
        change = partial(graph.save, copy, overwrite=True) if compacts else partial(graph.extended, _NEW, _PAIRS)
        end = _end_of(stage, change)
        is_new = Graph.open(copy).fingerprint == after.fingerprint
        check_equal(Graph.open(copy), after if is_new else before)
        found.add((is_new, (copy / "changes" / "000001").exists()))
        stage += 1
    assert end == 0 and stage > 6 and len(found) == 2


def test_an_open_graph_whose_log_was_written_into_one_is_opened_again(path: Path) -> None:
    opened = Graph.open(path).extended(_NEW)
    Graph.open(path).save(path, overwrite=True)
    with pytest.raises(ValueError, match="has changed since it was opened: open it again"):
        opened.extended(_NEW)
    assert Graph.open(path).version == 1


def test_a_graph_in_whose_place_another_lies_is_not_changed(path: Path, tmp_path: Path) -> None:
    first = Graph.open(path)
    first.extended(_NEW).save(path, overwrite=True)
    with pytest.raises(ValueError, match="graph has changed since it was opened: open it again"):
        first.updated({"n_id": torch.tensor([3]), "x": torch.ones(1, 3, dtype=torch.float64)})
    again = Graph.open(path)
    Graph.open(path).removed(nodes=[7]).save(tmp_path / "other")
    shutil.rmtree(path)
    (tmp_path / "other").rename(path)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        again.removed(nodes=[3])
    assert not (path / "changes").exists()


def test_what_a_killed_process_has_left_goes_with_the_next(path: Path) -> None:
    Graph.open(path).extended(_NEW)
    for stage in (2, 5):
        assert _end_of(stage, partial(Graph.open(path).save, path, overwrite=True)) == -signal.SIGKILL
    assert [file for file in path.parent.iterdir() if file.name.startswith(".")]
    Graph.open(path).save(path, overwrite=True)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
