"""README.md and docs: every block of Python runs, every command is understood, every link leads somewhere."""

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch_geometric
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import run as distributed_run
from torch_geometric.nn import GCNConv, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli import main as command_line
from tests.extensions import MISSING, brought
from tests.pages import GONE_PAGES, PAGES, ROOT, TUTORIALS, anchors, blocks, gone, links, run_commands, write_files
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.test_readme import as_pyg, names

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
# Run with what they need around them, in test_readme.py, test_tools.py,
# elastic/test_page.py and serving/test_app.py.
ELSEWHERE = {
    "peers=Elastic())": "elastic",
    "RayDDPStrategy": "hosts",
    "g.edges()": "migration",
    "urlopen": "serving",
    "import optuna": "tools",
}
# What a reader does with a block that only defines something, so that it is seen to work.
THEN = {
    "torch.topk(": """
pairs, linked = rows @ rows.T, {tuple(edge) for edge in graph.to_pyg().edge_index.T.tolist()}
for node, found, values in zip(asked.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
    others = [other for other in range(graph.num_nodes) if other != node and (node, other) not in linked]
    others.sort(key=lambda other: -float(pairs[node, other]))
    assert not {(node, other) for other in [*found, node]} & linked and node not in found
    assert numpy.allclose(values, pairs[node, others[:10]]) and len(set(found)) == 10
""",
    "batch.blocks, strict=True):\n    x =": "assert x.shape == (batch.batch_size, 4)",
    '(pyg_data).save("my_graph")': "pl.Trainer().fit(model, data)",
    "strategy = LLCGStrategy(": "pl.Trainer(strategy=strategy).fit(model, data)",
    "split_edges(graph, val=": "trainer.fit(LinkSAGE(8), data)",
    "batch.edge_label)": "assert training_step(Encoder(8), link_batch()).item() > 0",
    'weights="steps")': "assert strategy.weights == 'steps'",
    "MulticlassAccuracy(": "pl.Trainer().fit(SAGE(8, 4), data)",
    "class EdgeSampler": """
seeds, keys = [torch.tensor([5, 3]), torch.tensor([9])], [(0, 0, 1), (0, 0, 2)]
both, alone = EdgeSampler(0.5).sample_bulk(graph, seeds, keys), EdgeSampler(0.5).sample_bulk(graph, seeds[1:], keys[1:])
assert all(torch.equal(both[1][at], alone[0][at]) for at in range(3)) and both[0].nodes[:2].tolist() == [5, 3]
every = NeighborSampler([-1, -1]).sample_bulk(graph, seeds, keys)
assert sum(EdgeSampler(1.0).sample_bulk(graph, seeds, keys)[0].num_sampled_edges) == sum(every[0].num_sampled_edges)
""",
    "class RangePartitioner": "assert RangePartitioner()(graph, 4, seed=0).counts().tolist() == [75] * 4",
    "class SlowMomentum": """
class Watched(SlowMomentum):
    def end(self):
        assert all(velocity.abs().max() > 0 for velocity in self.velocity)
        ends.append(self)

SlowMomentum, ends = Watched, []
pl.Trainer(strategy=SlowMomentumStrategy(EverySteps(16))).fit(model, data)
assert len(ends) == 1
""",
    "class StrongTies": """
least, part, most = (
    PartitionedDataModule(graph, boundary=each).part(0, 4).num_nodes for each in (Isolated(), StrongTies(2), Halo())
)
assert least < part < most
""",
    "class WithNext": "assert data.part(0, 2).num_nodes == graph.num_nodes > data.part(0, 4).num_nodes",
    "neighbours = graph.indices[": "assert x.shape == (300, 8) and 0 < len(train_nodes) < 300 and weights is None",
    "class Halving": "assert trainer.global_step == 64",
    "holding=Holding(Rotate())": "trainer.fit(model, data)",
    "GCNNorm()": "assert graph.edge_arrays['edge_weight'].min() > 0 and not conv.normalize",
    "return through_layers(self, batch)": """
model = SAGE(8, 4).eval()
predict_by_layer(pl.Trainer(), model, Graph.from_pyg(pyg_data), "rows.npy")
pyg_data.batch_size = pyg_data.num_nodes
assert numpy.allclose(numpy.load("rows.npy"), model(pyg_data).detach(), atol=1e-5)
""",
    "class Hetero(": """
model, typed = Hetero(), citations(600).to_pyg()
del typed["venue"], typed["venue", "prints", "paper"], typed["paper", "rev_prints", "venue"]  # which have no features
model.first, model.last = (
    torch_geometric.nn.HeteroConv({kind: SAGEConv((-1, -1), width) for kind in typed.edge_types}) for width in (8, 6)
)
expected = model.last({kind: x.relu() for kind, x in model.first(typed.x_dict, typed.edge_index_dict).items()},
                      typed.edge_index_dict)["paper"].detach()
predict_by_layer(pl.Trainer(), model, Graph.from_pyg(typed), "papers.npy", seed_type="paper")
assert numpy.allclose(numpy.load("papers.npy"), expected, atol=1e-4)
""",
    "self.sums((": """
model = type("Model", (pl.LightningModule,), {"layers": layers})()
model.linear, model.sums = torch.nn.Linear(8, 4), torch_geometric.nn.SimpleConv(aggr="sum")
appnp, weight = torch_geometric.nn.APPNP(2, 0.1, normalize=False), torch.ones(pyg_data.num_edges)
expected, pyg_data.edge_weight = appnp(model.linear(pyg_data.x), pyg_data.edge_index, weight), weight
assert torch.allclose(through_layers(model, pyg_data), expected, rtol=1e-4)
""",
    "def milliseconds": "assert 9.9 < milliseconds(torch.nn.Linear(206_895, 1, bias=False), 4, 1) < 10",
    'accelerator="gpu"': "trainer.fit(model, data)",
    "save_shards(split, ": "assert data._home.bounds.num_shards == 4 and data._home.bounds.links.held['test'][-1] > 0",
    "rows = OwnedEmbedding(": "assert x.shape == (batch.num_nodes, 64)",
    "class OnTensors": "assert torch.allclose(rows, OnTensors(model)(pyg_data.x, pyg_data.edge_index), atol=1e-6)",
    "on_rows=evaluate": "assert 0 < accuracy.compute() < 1",
}

SMALLER = {"EverySeconds(30)": "EverySeconds(0.1)", "SuperNodePartitioner(400)": "SuperNodePartitioner(40)"}
SMALLER |= {"Sweep(bytes=4 * 10**9)": "Sweep(chunks=1)"}


# By what folders that blocks read are made.
MADE = {"my_shares": "save_shards", "my_chunks": "Sweep"}
LACKS = r"this copy of lightning_gnn_dist lacks|No module named 'lightning_gnn_dist|NameError: name"


def lacking(code: str) -> list[str]:
    """The public names in some code that went with an extension."""
    return sorted(name for name in gone() if re.search(rf"\b{name}\b", code))


@contextmanager
def skipped_without_its_extension() -> Iterator[None]:
    try:
        yield
    except (SystemExit, ImportError, RankError) as stop:
        is_told = stop.code != 0 if isinstance(stop, SystemExit) else re.search(LACKS, str(stop))
        if not MISSING or not is_told:
            raise
        pytest.skip("of an extension that is not there")


def python_blocks() -> list[Any]:
    here = [block for block in blocks("python") if not any(sign in block.code for sign in ELSEWHERE)]
    found = []
    for page, heading, code in here:
        run = [code, *(more for sign, more in {**THEN, **MADE}.items() if sign in code)]
        lacks = lacking("\n".join(run))
        mark = [pytest.mark.skip(reason=f"needs {lacks}, of an extension that is not there")] * bool(lacks)
        found.append(pytest.param(code, id=f"{page}: {heading}: {code.splitlines()[0][:40]}", marks=mark))
    return found


def surroundings() -> dict[str, Any]:
    """What the README takes for granted: the reader's own data and module, and the usual imports."""
    pyg_data, model = as_pyg(), SAGE(8, 4)
    scope = names(pyg_data=pyg_data, graph=lgd.Graph.from_pyg(pyg_data), model=model, self=model)
    data = scope["PartitionedDataModule"](pyg_data, sampler=scope["NeighborSampler"]([3, 3]), batch_size=32)
    batch = next(iter(data.val_dataloader()))
    data.teardown("fit")
    modules = {"torch_geometric": torch_geometric, "torchmetrics": torchmetrics, "GCNConv": GCNConv}
    modules["SAGEConv"] = SAGEConv
    batch.edge_weight = torch.ones(batch.num_edges)
    example = {"data": data, "batch": batch, "block": batch.blocks[0], "x": batch.x}
    example |= {"functional": torch.nn.functional, "ModelCheckpoint": ModelCheckpoint, "later": scope["graph"]}
    for more in brought("readme"):
        example |= more.SCOPE
    return scope | modules | example | {"SAGE": SAGE, "in_channels": 8, "out_channels": 4}


class Layered(SAGE):
    def forward(self, batch: Any) -> torch.Tensor:
        return lgd.through_layers(self, batch)

    def layers(self) -> list[Any]:
        return [partial(self.one_layer, conv) for conv in self.convs]

    def one_layer(self, conv: Any, batch: Any) -> Any:
        return conv(batch.x, batch.edge_index)


def run_block(rank: int, world_size: int, code: str, folder: str) -> dict[str, float]:
    """Run it as it stands, but for the number of ranks and epochs; the metrics, if it has trained."""
    os.chdir(folder)
    sys.path.append(str(ROOT / "examples"))
    small = QUIET | {"accelerator": "cpu", "devices": world_size, "max_epochs": 1}
    trainer_class = pl.Trainer
    pl.Trainer = lambda **options: trainer_class(**(options | small | {"enable_checkpointing": "callbacks" in options}))
    scope = surroundings()
    if any(word in code for word in ("on_rows", "rows.npy", "Exchange(", "History(", "OnTensors")):
        scope |= {"model": Layered(8, 4), "trainer": pl.Trainer()}
    for large, small_one in {", ...)": ")", **SMALLER}.items():
        code = code.replace(large, small_one)
    exec(code, scope)
    for sign, more in THEN.items():
        if sign in code:
            exec(more, scope)
    trainer = scope.get("trainer")
    return {} if trainer is None else {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("code", python_blocks())
def test_a_block_of_python_runs(code: str, tmp_path: Path) -> None:
    num_ranks = 2 if "Trainer(" in code or "my_shares" in code else 1
    if "my_shares" in code:
        graph = lgd.Graph.from_pyg(as_pyg())
        lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, seed=0), tmp_path / "my_shares")
    if '"my_graph"' in code and "save(" not in code:
        lgd.Graph.from_pyg(as_pyg()).save(tmp_path / "my_graph")
    if "my_chunks" in code:
        from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph

        graph = lgd.Graph.from_pyg(as_pyg())
        reorder_graph(graph, lgd.RandomPartitioner()(graph, 4, seed=0), tmp_path / "my_chunks")
    if "some.ckpt" in code:
        saved = {"state_dict": SAGE(8, 4).state_dict(), "pytorch-lightning_version": pl.__version__}
        torch.save(saved, tmp_path / "some.ckpt")
    with skipped_without_its_extension():
        of_ranks = run_ranks(run_block, num_ranks, code, str(tmp_path))
    for metrics in of_ranks:
        assert bool(metrics) == ("Trainer(" in code)


@pytest.mark.skipif(bool(GONE_PAGES), reason="blocks went with the page of an extension")
def test_no_block_is_forgotten() -> None:
    found = blocks("python")
    assert all(any(sign in block.code for block in found) for sign in THEN)
    assert [(block.page, sign) for block in found for sign in ELSEWHERE if sign in block.code] == [
        (page, sign) for sign, page in ELSEWHERE.items()
    ]


def commands(*programs: str) -> list[list[str]]:
    """Every line of a console that starts one of these, with continued lines put together."""
    text = "".join(block.code for block in blocks("console")).replace("\\\n", " ")
    lines = [re.sub(r"^\w*\$ ", "", line) for line in text.splitlines() if re.match(r"\w*\$ ", line)]
    given = {tuple(shlex.split(line, comments=True)) for line in lines}
    return [list(words) for words in sorted(given) if words[0] in programs]


def new_commands() -> Iterator[list[str]]:
    """Commands with an option, or an argument beside options, that none before them has."""
    tried: set[tuple[str, ...]] = set()
    for words in commands("lightning-gnn-dist", "torchrun"):
        options = {(words[0], words[1], word) for word in words if word.startswith("-")} | {(words[0], words[1])}
        if options - tried or words[1] not in command_line.OF_LIGHTNING:
            tried |= options
            yield words


@pytest.mark.parametrize("words", [*new_commands()], ids=" ".join)
def test_a_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "torchrun":
        given = distributed_run.parse_args(words[1:])
        if given.training_script == "train.py":  # the reader's own
            return
        assert given.training_script == "lightning_gnn_dist"
        words = ["lightning-gnn-dist", *given.training_script_args]
    if words[1] not in command_line.OF_LIGHTNING:
        with skipped_without_its_extension():
            assert command_line.parser().parse_args(words[1:]) is not None
        return
    monkeypatch.chdir(ROOT / "examples")
    (config,) = [word for word in words if word.endswith(".yaml")]
    words = [word.replace(config, "configs/llcg.yaml") for word in words]
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", [*words, "--print_config"])
    with pytest.raises(SystemExit, match=r"^0$"), skipped_without_its_extension():
        command_line.main()


def test_targets_and_files_to_start_exist() -> None:
    for words in commands("make"):
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    for words in commands("sbatch", "./ssh.sh", "kubectl"):
        (name,) = [word for word in words if word.endswith((".sbatch", ".sh", "kubernetes.yaml"))]
        assert (ROOT / "examples" / name).is_file()


def test_the_extras_that_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r'pip install "?\.\[(\w+)\]', page.read_text())}
    assert named == {"elastic", "metis", "plots", "serve", "tables"} <= extras.keys()


def test_a_link_leads_somewhere() -> None:
    headings = cache(anchors)
    for page in [*PAGES, *TUTORIALS, *sorted((ROOT / "benchmarks").glob("*.md"))]:
        for name, anchor in links(page):
            target = (page.parent / name).resolve() if name else page
            assert target in GONE_PAGES or target.exists(), (page, name)
            assert target in GONE_PAGES or not anchor or anchor in headings(target), f"{page}: {name}#{anchor}"


def tables_of(data: Any, folder: Path) -> None:
    """The graph as the tables that the quick start begins with."""
    edges = [f"{a},{b}" for a, b in data.edge_index.t().tolist()]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]))
    names = ["id", "label", *(f"f{at}" for at in range(data.x.shape[1]))]
    rows = [[at, int(y), *x] for at, (y, x) in enumerate(zip(data.y, data.x.tolist(), strict=True))]
    (folder / "nodes.csv").write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))


@pytest.mark.slow
def test_the_quick_start_leads_to_predictions(tmp_path: Path) -> None:
    if lacks := lacking("".join(block.code for block in blocks("python", "quick-start"))):
        pytest.skip(f"needs {lacks}")
    tables_of(as_pyg(num_nodes=2000, num_classes=8, num_features=64), tmp_path)
    write_files(tmp_path)
    lines = "".join(block.code for block in blocks("console", "quick-start")).splitlines()
    said = run_commands([line.removeprefix("$ ") for line in lines if line.startswith("$ ")], tmp_path)
    assert numpy.load(tmp_path / "logits.npy").shape == (2000, 8)
    assert "Where the time went" in said
