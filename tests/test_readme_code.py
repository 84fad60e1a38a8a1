"""Every block of Python in the README runs, and every command in it is one that is understood."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch_geometric
import torchmetrics
from torch.distributed import run as distributed_run
from torch_geometric.nn import GCNConv, SAGEConv

from lightning_gnn_dist.cli import main as command_line
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.link_module import LinkDataModule
from lightning_gnn_dist.links import split_edges
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.scattered.share import save_shares
from tests.link_model import LinkSAGE
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.test_readme import README, ROOT, as_pyg, names

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
# Run elsewhere, with what they need around them.
ELSEWHERE = {
    "Ranks that die and come back": "trainer.fit",  # a lighthouse: tests/strategies/test_elastic_rounds.py
    "Coming from DistDGL": "g.edges()",  # a graph of DGL: tests/test_readme.py
}
# What a reader does with a block that only defines something, so that it is seen to work.
THEN = {
    "for conv, block": "assert x.shape == (batch.batch_size, 4)",
    'save("my_graph")': "pl.Trainer().fit(model, data)",
    "strategy = LLCGStrategy(": "pl.Trainer(strategy=strategy).fit(model, data)",
    "split_edges(": "trainer.fit(LinkSAGE(8), data)",
    "batch.edge_label)": "assert training_step(Encoder(8), link_batch()).item() > 0",
    "strategy = TMAStrategy(": "assert strategy.weights == 'steps'",
    "class MyStrategy": "pl.Trainer(strategy=MyStrategy(EverySteps(2))).fit(model, data)",
    "residency=Rotate()": "trainer.fit(model, data)",
    "GCNNorm()": "assert graph.edge_arrays['edge_weight'].min() > 0 and not conv.normalize",
    "def layers": """
model = SAGE(8, 4).eval()
predict_by_layer(pl.Trainer(), model, Graph.from_pyg(pyg_data), "rows.npy")
pyg_data.batch_size = pyg_data.num_nodes
assert numpy.allclose(numpy.load("rows.npy"), model(pyg_data).detach(), atol=1e-5)
""",
    "on_rows=evaluate": "assert 0 < accuracy.compute() < 1",
}

SMALLER = {"EverySeconds(30)": "EverySeconds(0.1)", "SuperNodePartitioner(400)": "SuperNodePartitioner(40)"}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Each block with the heading above it."""
    headings = [(match.start(), match[1]) for match in re.finditer(r"^#+ (.*)$", README, re.MULTILINE)]
    for match in re.finditer(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        yield [title for start, title in headings if start < match.start()][-1], match[1]


def python_blocks() -> list[Any]:
    here = [(title, code) for title, code in blocks("python") if ELSEWHERE.get(title, "\0") not in code]
    return [pytest.param(code, id=f"{title}: {code.splitlines()[0][:40]}") for title, code in here]


def surroundings() -> dict[str, Any]:
    """What the README takes for granted: the reader's own data and module, and the usual imports."""
    pyg_data, model = as_pyg(), SAGE(8, 4)
    scope = names(pyg_data=pyg_data, graph=Graph.from_pyg(pyg_data), model=model, self=model)
    data = scope["PartitionedDataModule"](pyg_data, sampler=scope["NeighborSampler"]([3, 3]), batch_size=32)
    batch = next(iter(data.val_dataloader()))
    data.teardown("fit")
    modules = {"torch_geometric": torch_geometric, "torchmetrics": torchmetrics, "GCNConv": GCNConv}
    modules["SAGEConv"] = SAGEConv
    batch.edge_weight = torch.ones(batch.num_edges)
    example = {"data": data, "batch": batch, "block": batch.blocks[0], "x": batch.x, "link_batch": link_batch}
    example["functional"] = torch.nn.functional
    return scope | modules | example | {"in_channels": 8, "out_channels": 4, "LinkSAGE": LinkSAGE, "Encoder": Encoder}


class Layered(SAGE):
    def layers(self) -> list[Any]:
        return [partial(self.one_layer, conv) for conv in self.convs]

    def one_layer(self, conv: Any, batch: Any) -> Any:
        return conv(batch.x, batch.edge_index)


class Encoder(LinkSAGE):
    def encode(self, batch: Any) -> torch.Tensor:
        return batch.x @ torch.ones(8, 16)


def link_batch() -> Any:
    split = split_edges(Graph.from_pyg(as_pyg()), negatives=3)
    return next(iter(LinkDataModule(split, sampler=NeighborSampler([3, 3]), num_threads=0).train_dataloader()))


def run_block(rank: int, world_size: int, code: str, folder: str) -> dict[str, float]:
    """Run it as it stands, but for the number of ranks and epochs; the metrics, if it has trained."""
    os.chdir(folder)
    small = QUIET | {"accelerator": "cpu", "devices": world_size, "max_epochs": 1}
    trainer_class = pl.Trainer
    pl.Trainer = lambda **options: trainer_class(**(options | small))
    scope = surroundings()
    if "on_rows" in code:
        scope |= {"model": Layered(8, 4), "trainer": pl.Trainer()}
    for large, small_one in {", ...)": ")", **SMALLER}.items():
        code = code.replace(large, small_one)
    exec(code, scope)
    for sign, more in THEN.items():
        if sign in code:
            exec(more, scope)
    trainer = scope.get("trainer")
    return {} if trainer is None else {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("code", python_blocks())
def test_a_block_of_python_runs(code: str, tmp_path: Path) -> None:
    num_ranks = 2 if "Trainer(" in code or "my_shares" in code else 1
    if "my_shares" in code:
        graph = Graph.from_pyg(as_pyg())
        save_shares(graph, RandomPartitioner()(graph, 2, seed=0), tmp_path / "my_shares")
    for metrics in run_ranks(run_block, num_ranks, code, str(tmp_path)):
        assert bool(metrics) == ("Trainer(" in code)


def test_no_block_is_forgotten() -> None:
    found = [code for _, code in blocks("python")]
    assert all(any(sign in code for code in found) for sign in [*THEN, *ELSEWHERE.values()])
    assert len(found) == len(python_blocks()) + len(ELSEWHERE)


def commands() -> list[Any]:
    """Every line of a console that starts this package's command, with continued lines put together."""
    text = "".join(code for _, code in blocks("console")).replace("\\\n", " ")
    lines = [re.sub(r"^\w*\$ ", "", line) for line in text.splitlines()]
    given = [words for line in lines if (words := shlex.split(line, comments=True))]
    ours = [words for words in given if words[0] in ("lightning-gnn-dist", "torchrun")]
    return [pytest.param(words, id=" ".join(words[:6])) for words in ours]


@pytest.mark.parametrize("words", commands())
def test_a_command_is_understood(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "torchrun":
        given = distributed_run.parse_args(words[1:])
        assert given.training_script == "lightning_gnn_dist"
        words = ["lightning-gnn-dist", *given.training_script_args]
    if words[1] not in command_line.train.COMMANDS:
        assert command_line._parser().parse_args(words[1:]) is not None
        return
    monkeypatch.chdir(ROOT / "examples")
    (config,) = [word for word in words if word.endswith(".yaml")]
    words = [word.replace(config, "configs/llcg.yaml") for word in words]
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", [*words, "--print_config"])
    with pytest.raises(SystemExit, match=r"^0$"):
        command_line.main()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
