"""The formulas of the cost model, against counting by hand and against what is sampled."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine.sample import BatchKey


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "cost_model", Path(__file__).parents[1] / "benchmarks" / "cost_model.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cost_model"] = module
    spec.loader.exec_module(module)
    return module


model = load()
SMALL = model.Setting(nodes=4096, edges=65536, hosts=4, cut=0.75, batch_size=64, fanouts=(5, 3), bulk=1)


def random_graph(num_nodes: int, num_edges: int) -> Graph:
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, num_edges, generator=generator) ** 2 * num_nodes).long()
    return Graph.from_edge_index(torch.cat([ends, ends.flip(0)], 1), num_nodes, {})


@pytest.mark.parametrize("seeds", [32, 512])
def test_batches_are_as_large_as_the_degrees_promise(seeds: int) -> None:
    graph, nodes, edges = random_graph(4096, 20000), [], []
    for number in range(8):
        chosen = torch.randperm(4096, generator=torch.Generator().manual_seed(number))[:seeds]
        (made,) = NeighborSampler([5, 3]).sample_bulk(graph, [chosen], [BatchKey(0, 0, number)])
        nodes.append(torch.tensor(made.num_sampled_nodes))
        edges.append(torch.tensor(made.num_sampled_edges))
    promised = model.Batch.around(seeds, model.Degrees.of(graph.degrees().numpy()), (5, 3))
    assert torch.stack(nodes).double().mean(0).tolist() == pytest.approx(promised.nodes, rel=0.1)
    assert torch.stack(edges).double().mean(0).tolist() == pytest.approx(promised.edges, rel=0.1)


def test_a_node_is_remote_with_the_chance_of_the_cut() -> None:
    own = model.remote(SMALL, 2, own_seeds=True)
    assert own == pytest.approx([0, 0.75, 0.75])  # parts at random: any other host is as likely
    assert model.remote(SMALL, 2, own_seeds=False) == pytest.approx([0.75, 0.75, 0.75])
    assert model.remote(replace(SMALL, cut=0.0), 2, own_seeds=True) == [0, 0, 0]


def test_what_sampling_sends_is_counted_by_hand() -> None:
    setting = replace(SMALL, features=8, feature_bytes=2, other_bytes=1)  # 17 bytes a row
    batch = model.Batch((10.0, 20.0, 30.0), (40.0, 50.0))
    drawn = 0.75 * (20 * (4 + 4) + 50 * 4)  # the seeds' own edges are drawn at home
    rows = 0.75 * (20 + 30) * (8 + 17)
    announced = 3 * (2 * (16 + 8) + 8)
    sent = model.sampling_bytes(setting, batch, own_seeds=True, bulk=1)
    assert sent == pytest.approx(drawn + rows + announced)
    assert model.sampling_bytes(replace(setting, nodes=2**32), batch, own_seeds=True, bulk=1) == pytest.approx(
        sent + 0.75 * (20 * 4 + 50 * 4)  # ids of eight bytes
    )


def test_strategies_send_what_their_rounds_and_steps_say() -> None:
    setting, degrees, measured = replace(SMALL, model_bytes=1000.0), model.Degrees.full(4096, 65536), model.Measured()
    setting = replace(setting, train_share=1.0, local_steps=4)  # 16 steps, 4 rounds
    assert setting.steps == 16
    sent = {name: model.epoch(name, setting, degrees, measured).num_bytes for name in model.STRATEGIES}
    assert sent["local SGD"] == pytest.approx(4 * 1500)
    assert sent["Grappa"] == pytest.approx(16 * 1500)
    assert sent["TMA"] == pytest.approx(1500)  # a round is longer than the pass
    batch = model.Batch.around(64, degrees, setting.fanouts)
    corrected = model.sampling_bytes(setting, batch, own_seeds=False, bulk=1)
    assert sent["LLCG"] == pytest.approx(4 * (5 * 1500 + 5 * corrected))
    own = model.sampling_bytes(setting, batch, own_seeds=True, bulk=1)
    assert sent["DDP, global sampling"] == pytest.approx(16 * (1500 + own))
