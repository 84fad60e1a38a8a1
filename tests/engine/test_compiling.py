"""Laws of what is kept of kernels on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core import event

from lightning_gnn_dist.engine import compiling, subgraph_kernels
from lightning_gnn_dist.sampling.shadow import ShadowSampler
from tests.sampling.neighborhoods import PLACE
from tests.sampling.reference import random_graph


def test_any_change_of_any_source_gives_another_digest(tmp_path: Path) -> None:
    digests = {compiling.digest_of(tmp_path)}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        (tmp_path / name).write_text(text)
        digests.add(compiling.digest_of(tmp_path))
    assert len(digests) == 4


def test_a_kernel_is_kept_under_the_sources_of_its_parts_too() -> None:
    graph = random_graph()
    seeds = graph.indices[:1].long()
    ShadowSampler([2], num_hops=1).sample_bulk(graph, [seeds], [PLACE])
    digest = compiling.digest_of(Path(compiling.__file__).parent)
    kept = Path(subgraph_kernels.sample_egos.stats.cache_path).glob(f"*sample_egos_{digest}*.nbi")  # type: ignore[attr-defined]
    assert len(list(kept)) == 1


def test_one_rank_says_once_that_kernels_of_the_package_are_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(notice: compiling.Notice, kernel: Any) -> int:
        caplog.clear()
        for status in (event.EventStatus.START, event.EventStatus.END):
            notice.notify(event.Event("numba:compile", status, {"dispatcher": kernel}))
        return len(caplog.records)

    notice, ours, theirs = compiling.Notice(), subgraph_kernels.sample_egos, njit(lambda number: number)
    assert [said(notice, kernel) for kernel in (theirs, ours, ours)] == [0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said(compiling.Notice(), ours) == 0
