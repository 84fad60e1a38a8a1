"""``serve``: from a configuration and a checkpoint to answers, and its end by SIGTERM."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn.norm import GraphNorm

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.demo import SAGE
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.serving import command as serving
from lightning_gnn_dist.extensions.serving.question import IdIndex, RefusedError
from tests.extensions.serving.models import (
    COUNTS,
    MODELS,
    TYPED_EDGES,
    WIDTH,
    OnWeights,
    Typed,
    answerer,
    double,
    ends_of,
    plain_graph,
    typed_data,
)

CONFIG = """\
seed_everything: 0
model: {class_path: lightning_gnn_dist.cli.demo.SAGE, init_args: {num_features: 64, num_classes: 8}}
data: {graph: {class_path: lightning_gnn_dist.communities, init_args: {num_nodes: 500}}}
trainer: {accelerator: cpu, devices: 1, logger: false}
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "fit.yaml").write_text(CONFIG)
    torch.save({"state_dict": SAGE(64, 8).state_dict()}, tmp_path / "model.ckpt")
    return [f"--config={tmp_path}/fit.yaml", f"--ckpt_path={tmp_path}/model.ckpt"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the console script does in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "serve", *arguments])
        main()

    return run


def test_what_is_missing_is_named_in_one_line(
    files: list[str],
    command: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    torch.save(SAGE(64, 8).state_dict(), tmp_path / "bare.ckpt")
    lgd.save_shards(lgd.communities(50, 8), lgd.Partition(torch.zeros(50).int(), 1), tmp_path / "shards")
    for arguments, sentence in (
        (files[:1], "serve needs the weights of a trained model: name a checkpoint, --ckpt_path=model.ckpt."),
        ([files[0], "--ckpt_path=none.ckpt"], "ckpt_path must be a file, and 'none.ckpt' is none."),
        ([*files, f"--data.graph={tmp_path}/shards"], "A server reads the whole graph, and "),
        ([*files, "--port=70000"], "host '127.0.0.1' and port 70000 cannot be had (bind(): port must be 0-65535.)"),
        ([files[0], f"--ckpt_path={tmp_path}/fit.yaml"], "ckpt_path must be a checkpoint of tensors and plain values"),
        ([files[0], f"--ckpt_path={tmp_path}/bare.ckpt"], "bare.ckpt' has no state_dict."),
        ([*files, "--limits.nodes=0"], "limits.nodes must be an integer of at least 1, got 0."),
    ):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert sentence in capsys.readouterr().err
    monkeypatch.setattr(serving, "_NEEDS", ("starlette", "no_such_library"))
    with pytest.raises(SystemExit, match=r"no_such_library must be installed to serve: pip install .*\[serve\]"):
        command(*files)


def test_a_checkpoint_that_runs_code_is_refused(
    files: list[str], command: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {}, "more": Path}, tmp_path / "model.ckpt")
    with pytest.raises(SystemExit):
        command(*files)
    assert "model.ckpt' is none (it holds pathlib.Path)." in capsys.readouterr().err


# Rows of nodes that are asked for, and of new ones: those of one forward over the whole graph with the new nodes.


NODES, EDGES, NEW = 60, 300, 3


def request(seed: int = 5) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A request of three new nodes and two of the graph, and what its new nodes carry and their edges add to it."""
    x, ends = double(NEW, WIDTH, seed=seed), ends_of(NODES, 8, seed)
    old, new = ends[0], ends[1] % NEW
    both = torch.stack([torch.cat([old, NODES + new, torch.tensor([NODES])]),
                        torch.cat([NODES + new, old, torch.tensor([NODES + 1])])])  # fmt: skip
    names = {NODES + i: f"new:{i}" for i in range(NEW)}
    pairs = [[names.get(end, end) for end in pair] for pair in both.T.tolist()]
    asked = ["new:0", int(old[0]), "new:2", "new:1", 7]
    return {"nodes": asked, "new": {"x": x.tolist()}, "edges": pairs}, x, both


@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_those_of_a_forward_over_the_extended_graph(kind: str) -> None:
    ends, x, model = ends_of(NODES, EDGES), double(NODES, WIDTH), MODELS[kind]()
    data = lgd.PartitionedDataModule(plain_graph(ends, x), sampler=lgd.NeighborSampler([5, 5]))
    asked, new_x, new_ends = request()
    other, other_x, other_ends = request(seed=6)
    served = answerer(model, data)
    rows = served.rows([served.form.read(each) for each in (asked, {"nodes": [9, 7]}, other)])
    for given, more_x, more_ends, found in ((asked, new_x, new_ends, rows[0]), (other, other_x, other_ends, rows[2])):
        whole = model.rows(torch.cat([x, more_x]), torch.cat([ends, more_ends], 1))
        ids = [NODES + int(end[4:]) if isinstance(end, str) else end for end in given["nodes"]]
        torch.testing.assert_close(torch.from_numpy(found), whole[ids].detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(rows[1]), model.rows(x, ends)[[9, 7]].detach(), rtol=0, atol=1e-6)


def typed_request(seed: int, time: bool = False) -> tuple[dict[str, Any], dict[str, Tensor], dict[Any, Tensor]]:
    """Two new authors and three new papers that send to and receive from each other and nodes of the graph."""
    x = {"author": double(2, 2, seed=seed), "paper": double(3, WIDTH, seed=seed)}
    edges, pairs = {}, {}
    for number, kind in enumerate(TYPED_EDGES):
        old, first, last = ends_of(1000, 5, seed + number), kind[0], kind[2]
        senders = torch.cat([old[0] % COUNTS[first], old[1] % 2 + COUNTS[first], torch.tensor([COUNTS[first]])])
        receivers = torch.cat([old[1] % 2 + COUNTS[last], old[0] % COUNTS[last], torch.tensor([COUNTS[last] + 1])])
        edges[kind] = torch.stack([senders, receivers])
        pairs["__".join(kind)] = [
            [f"new:{end - COUNTS[k]}" if end >= COUNTS[k] else end for end, k in zip(pair, (first, last), strict=True)]
            for pair in edges[kind].T.tolist()
        ]
    new: dict[str, Any] = {kind: {"x": rows.tolist()} for kind, rows in x.items()}
    if time:
        new["author"]["time"], new["paper"]["time"] = [3, 60], [50, 90, 10]
    return {"type": "paper", "nodes": ["new:1", 4, "new:0", "new:2"], "new": new, "edges": pairs}, x, edges


IDS = [41, 4, 40, 42]  # those papers in the extended graph


def test_rows_of_types_are_those_of_a_forward_over_the_extended_graph() -> None:
    data, model = typed_data(), Typed()
    served = answerer(model, lgd.PartitionedDataModule(lgd.Graph.from_pyg(data), sampler=lgd.NeighborSampler([5, 5])))
    asked = [typed_request(seed) for seed in (7, 8)]
    found = served.rows([served.form.read(given) for given, _, _ in asked])
    for (_, x, edges), rows in zip(asked, found, strict=True):
        whole_x = {kind: torch.cat([data[kind].x, more]) for kind, more in x.items()}
        whole = model.rows(whole_x, {k: torch.cat([data[k].edge_index, more], 1) for k, more in edges.items()})
        torch.testing.assert_close(torch.from_numpy(rows), whole[IDS].detach(), rtol=0, atol=1e-6)


def test_new_nodes_see_what_was_before_their_time() -> None:
    """Senders have times here; of untyped graphs below edges have them."""
    data, model = typed_data(time=True), Typed()
    sampler = lgd.TemporalSampler([5, 5], time="time")
    served = answerer(model, lgd.PartitionedDataModule(lgd.Graph.from_pyg(data, time="time"), sampler=sampler))
    given, x, edges = typed_request(9, time=True)
    found = served.rows([served.form.read(each) for each in (typed_request(3, time=True)[0], given)])[1]
    time = {"author": torch.cat([data["author"].time, torch.tensor([3, 60])]),
            "paper": torch.cat([data["paper"].time, torch.tensor([50, 90, 10])])}  # fmt: skip
    whole_x = {kind: torch.cat([data[kind].x, more]) for kind, more in x.items()}
    for row, seed in zip(found, IDS, strict=True):
        whole = {k: torch.cat([data[k].edge_index, more], 1) for k, more in edges.items()}
        seen = {k: ends[:, time[k[0]][ends[0]] < time["paper"][seed]] for k, ends in whole.items()}
        torch.testing.assert_close(torch.from_numpy(row), model.rows(whole_x, seen)[seed].detach(), rtol=0, atol=1e-6)


def test_new_edges_have_times() -> None:
    ends, x, model = ends_of(NODES, EDGES), double(NODES, WIDTH), MODELS["SAGE"]()
    times, seeds = ends_of(1000, EDGES).view(-1)[:EDGES], ends_of(1000, NODES, 3)[0]
    graph = plain_graph(ends, x, time=times)
    graph.node_arrays["seed_time"] = seeds
    sampler = lgd.TemporalSampler([5, 5], time="time", seed_time="seed_time")
    served = answerer(model, lgd.PartitionedDataModule(graph, sampler=sampler))
    asked, new_x, new_ends = request()
    new_times, new_seeds = ends_of(1000, 20, 4)[0, : new_ends.shape[1]], torch.tensor([300, 999, 0])
    asked["edges"] = {"pairs": asked["edges"], "time": new_times.tolist()}
    asked["new"]["seed_time"] = new_seeds.tolist()
    found = served.rows([served.form.read({"nodes": [2]}), served.form.read(asked)])[1]
    whole, of_edges = torch.cat([ends, new_ends], 1), torch.cat([times, new_times])
    for end, row in zip(asked["nodes"], found, strict=True):
        seed = NODES + int(end[4:]) if isinstance(end, str) else end
        seen = whole[:, of_edges < torch.cat([seeds, new_seeds])[seed]]
        rows = model.rows(torch.cat([x, new_x]), seen)
        torch.testing.assert_close(torch.from_numpy(row), rows[seed].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"replace": True}, {"weight": "w"}], ids=str)
def test_what_is_drawn_for_a_node_depends_on_nobody_beside_it(how: dict[str, Any]) -> None:
    ends, x, model = ends_of(NODES, 3000), double(NODES, WIDTH), MODELS["SAGE"]()
    evaluation = lgd.Evaluation(sampler=lgd.NeighborSampler([4, 3], **how))
    graph = plain_graph(ends, x, w=double(3000).abs())
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([5, 5]), evaluation=evaluation)
    served = answerer(model, data)
    new = [request(seed)[0] for seed in (5, 6)]
    for each in new:
        each["edges"] = {"pairs": each["edges"], "w": [1.0 + n for n in range(len(each["edges"]))]}
    asked = [served.form.read(each) for each in (new[0], {"nodes": [*range(NODES)]}, new[1])]
    alone = [served.rows([question])[0] for question in asked]
    single = [served.rows([question._replace(nodes=node[None])])[0][0] for question in asked for node in question.nodes]
    assert np.concatenate(alone) == pytest.approx(np.stack(single), rel=1e-12, abs=1e-12)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0, 0, 1]):
        together = served.rows([asked[at] for at in order])
        for at, rows in zip(order, together, strict=True):
            assert rows == pytest.approx(alone[at], rel=1e-12, abs=1e-12)  # a matrix product may add in another order
    exact = model.rows(x, ends).detach().numpy()
    assert abs(alone[1] - exact).max() > 0.1  # it draws, and does not take all
    assert all((served.rows([question])[0] == rows).all() for question, rows in zip(asked, alone, strict=True))


def test_rows_of_nodes_with_more_neighbours_than_the_limit_are_estimates() -> None:
    ends, x, model = ends_of(NODES, 3000), double(NODES, WIDTH), MODELS["SAGE"]()
    data = lgd.PartitionedDataModule(plain_graph(ends, x), sampler=lgd.NeighborSampler([5, 5]))
    exact = model.rows(x, ends).detach().numpy()
    for most, is_exact in ((10, False), (100, True)):
        served = answerer(model, data, neighbors=most)
        (rows,) = served.rows([served.form.read({"nodes": [*range(NODES)]})])
        assert (abs(rows - exact).max() < 1e-6) == is_exact


def test_a_model_that_mixes_rows_is_refused() -> None:
    model = MODELS["SAGE"]()
    model.norm = GraphNorm(8)
    data = lgd.PartitionedDataModule(plain_graph(ends_of(NODES, EDGES), double(NODES, WIDTH)))
    with pytest.raises(ValueError, match="norm \\(GraphNorm\\) normalises by all rows of a batch"):
        answerer(model, data)


def test_new_edges_carry_what_edges_carry() -> None:
    ends, x, weights = ends_of(NODES, EDGES), double(NODES, WIDTH), double(EDGES, seed=8)
    model, (asked, new_x, new_ends) = OnWeights(), request()
    new_weights = double(new_ends.shape[1], seed=9)
    served = answerer(model, lgd.PartitionedDataModule(plain_graph(ends, x, edge_weight=weights)))
    with pytest.raises(RefusedError, match="edges must have 'edge_weight', as the graph has it"):
        served.form.read(asked)
    asked["edges"] = {"pairs": asked["edges"], "edge_weight": new_weights.tolist()}
    found = served.rows([served.form.read({"nodes": [3]}), served.form.read(asked)])[1]
    joined = torch.cat([x, new_x]), torch.cat([ends, new_ends], 1), torch.cat([weights, new_weights])
    ids = [NODES + int(end[4:]) if isinstance(end, str) else end for end in asked["nodes"]]
    torch.testing.assert_close(torch.from_numpy(found), model.rows(*joined)[ids].detach(), rtol=0, atol=1e-6)


def test_a_graph_that_was_cut_from_another_is_refused() -> None:
    graph = plain_graph(ends_of(NODES, EDGES), double(NODES, WIDTH)).induced(torch.arange(9))
    with pytest.raises(ValueError, match="The graph has n_id, ids of a larger graph"):
        answerer(MODELS["SAGE"](), lgd.PartitionedDataModule(graph))


@pytest.mark.gpu
def test_rows_of_a_gpu_are_those_of_a_cpu() -> None:
    ends, x = ends_of(NODES, EDGES), double(NODES, WIDTH)
    data, asked = lgd.PartitionedDataModule(plain_graph(ends, x)), request()[0]
    of_devices = []
    for device in ("cpu", "cuda"):
        served = answerer(MODELS["SAGE"]().to(device), data)
        of_devices.append(served.rows([served.form.read(asked)])[0])
    assert of_devices[0] == pytest.approx(of_devices[1], rel=1e-9, abs=1e-9)


STRANGE: list[Any] = ["zz", "b\0", "\ud800", "x" * 999, 5, 2**80, -(2**80), 7.0, True, None, ["b"]]


@pytest.mark.parametrize("ids", [["b", "a", "longer", "ü", "c"], [7, -3, 900, 2**40], ["b"]])
def test_a_node_is_found_by_its_id(ids: list[Any]) -> None:
    index = IdIndex(np.array(ids))
    assert [index.find(name) for name in ids] == list(range(len(ids)))
    assert [index.find(name) for name in STRANGE] == [None] * len(STRANGE)
