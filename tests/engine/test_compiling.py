"""Laws of what is kept of kernels on disk."""

from __future__ import annotations

from pathlib import Path

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
