"""`inspect --plan`: what a graph would take, against graphs that are there."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, MetisPartitioner, NeighborSampler, communities
from lightning_gnn_dist.cli.inspecting import plan as planning
from lightning_gnn_dist.cli.inspecting.plan import Plan
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.options import parser
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.partition.advice import bytes_per_part

PARTS = 4


def graph() -> Graph:
    return communities(4000, 4, num_features=32, train_share=0.1, seed=0)


def planned(*words: str, **options: Any) -> tuple[Plan, Any]:
    given = parser().parse_args(["inspect", "--plan", *words])
    vars(given).update(options)
    return Plan.of(words), given


def of_graph(made: Graph, *words: str) -> Plan:
    return planned(f"nodes={made.num_nodes}", f"edges={made.num_edges}", "features=32", *words)[0]


def test_disk_and_memory_are_those_of_a_graph_that_is_there(tmp_path: Path) -> None:
    made = graph()
    made.save(tmp_path / "graph")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "graph").rglob("*.npy"))
    assert planning.saved_bytes(of_graph(made)) == pytest.approx(on_disk, rel=0.02)
    report = MetisPartitioner()(made, PARTS, seed=0).report(made)
    plan = of_graph(made, f"cut={report.cut_ratio}", f"hosts={PARTS}")
    mean = float(bytes_per_part(made, report).double().mean())
    assert planning.part_bytes(plan, PARTS) == pytest.approx(mean, rel=0.02)
    assert planning.part_bytes(plan, 1) == pytest.approx(made.num_bytes, rel=0.1)
    assert mean < planning.part_bytes(plan, PARTS, halo=True) <= planning.part_bytes(plan, 1)


def test_a_batch_reaches_as_many_nodes_as_those_that_are_drawn() -> None:
    num_nodes, degree = 20_000, 12
    senders = torch.randint(num_nodes, (num_nodes * degree,), generator=torch.Generator().manual_seed(0))
    made = Graph(torch.arange(0, num_nodes * degree + 1, degree), senders.int(), {"y": torch.zeros(num_nodes).long()})
    words = [f"nodes={num_nodes}", f"edges={num_nodes * degree}"]
    found = planning.batch_of(*planned(*words, fanout=[8, 20], batch_size=200))
    seeds = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(1))[:200]
    (drawn,) = NeighborSampler([8, 20]).sample_bulk(made, [seeds], [BatchKey(0, 0, 0)])
    assert found.nodes[0] == 200 and found.nodes[-1] == pytest.approx(len(drawn.nodes), rel=0.02)
    assert found.edges[-1] == pytest.approx(sum(drawn.num_sampled_edges), rel=0.02)


def test_what_is_sent_is_what_rings_of_models_send() -> None:
    plan, options = planned("nodes=1e6", "edges=1e7", "hosts=4", "ranks=2", "train=0.08", width=16, batch_size=1000)
    weights = 2 * 128 * 16 + 2 * 16 * 16
    sent = {name: size for name, size, _, _ in planning._strategies(plan, options, 10, 0.1)}
    ring = 2 * 3 / 4 * 4 * weights
    assert sent["GrappaStrategy()"] == 10 * ring and sent["GrappaStrategy(bits=8)"] == pytest.approx(3 * ring)
    assert sent["LLCGStrategy(EverySteps(16))"] == 2 * sent["LocalSGDStrategy(EverySteps(16))"] == 10 / 8 * ring
    nodes = planning.batch_of(plan, options).nodes
    rows = 10 * 2 * 0.3 * (nodes[-1] - nodes[0]) * (128 * 4 + 8 + 3 + 9)
    assert sent["GrappaStrategy(), boundary=Fetch()"] == pytest.approx(10 * ring + rows)


def test_it_says_what_fits_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["nodes=111e6", "edges=3.2e9", "train=.011"]
    main(["inspect", "--plan", *large, "memory=24"])
    alone = capsys.readouterr().out
    assert "A host has 24.0 GB of memory, and its ranks take 74.8 GB: save features as float16" in alone
    assert "Nothing goes over a wire" in alone and "cut, " not in alone
    (hosts,) = re.findall(r"take (\d+) hosts", alone)
    main(["inspect", "--plan", *large, "memory=24", f"hosts={hosts}", "--bandwidth", "10"])
    several = capsys.readouterr().out
    assert "A host has 24.0 GB of memory for the" in several and "GrappaStrategy(): gradients at every step" in several
    main(["inspect", "--plan", *large, "hosts=4", "ranks=2", "memory=64", "--bandwidth", "1e-5"])
    slow = capsys.readouterr().out
    assert 'Holding(per="host")' in slow and "meet rarely, LocalSGDStrategy(EverySteps(16)) on super-nodes" in slow


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nodes=1e6"], "--plan lacks edges: write --plan nodes=1e9 edges=2e10."),
        (["nodes=1e6", "edges=many"], "got 'edges=many'"),
        (["nodes=1e6", "edges=1e7", "feature=3"], "--plan takes nodes, edges, features, .*; got 'feature=3'"),
        (["nodes=1e6", "edges=1e7", "bytes=3"], "bytes=1, 2, 4 or 8 for each number of a node, got bytes=3"),
        (["nodes=1e6", "edges=1e7", "hosts=.5"], "hosts as a whole number of at least 1, got hosts=0.5"),
        (["nodes=inf", "edges=1e7"], "nodes as a whole number of at least 1, got nodes=inf"),
        (["nodes=1e6", "edges=1e7", "cut=1"], "cut from 0 and less than 1, memory in GB, got train=0.1, cut=1"),
        (["nodes=nan", "edges=1e7"], "got nodes=nan"),
    ],
)
def test_what_is_no_plan_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(["inspect", "--plan", *words])


def test_a_graph_or_a_plan(tmp_path: Path) -> None:
    for words in ([], [str(tmp_path), "--plan", "nodes=1e6"]):
        with pytest.raises(SystemExit, match="name the directory of a graph, or one that is not there yet"):
            main(["inspect", *words])


def test_a_host_without_room_for_what_more_hosts_do_not_make_less_takes_larger_ones() -> None:
    plan, options = planned("nodes=1e9", "edges=1e9", "bytes=1", "hosts=1000", "memory=2")
    (told,) = planning._about_memory(plan, options)
    assert "take hosts of more memory" in told and math.isfinite(planning.host_bytes(plan, options))
