"""Models are judged and predict on nodes that training has not seen, as one forward over their graph would."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.user_ids import nodes_with_ids
from tests.callbacks.test_predictions import COUNT, NAMES, Rows, prepared, prepared_from, start
from tests.callbacks.test_predictions import check as check_table
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.temporal.test_fits import SAMPLER, Watcher, temporal_graph
from tests.extensions.temporal.test_fits import by_hand as by_hand_in_time
from tests.ranks import run_ranks
from tests.slow import slow
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

SOME = [7, 300, 12, 299, 0]


def whole() -> lgd.Graph:
    """A graph whose training nodes and those without a split lie mostly before its test nodes."""
    plain = lgd.communities(320, 4, num_features=6, train_share=0.4, seed=5)
    arrays = plain.node_arrays
    return lgd.Graph(plain.indptr, plain.indices, arrays | {"x": arrays["x"].double()})


class Net(pl.LightningModule):
    """Two layers, of which the second has what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = {"SAGE": SAGEConv, "GCN": GCNConv, "GAT": GATConv}[kind]
        self.first, self.last = make(6, 8).double(), make(8, 4).double()
        self.accuracy = list[float]()

    def forward(self, batch: Any) -> Tensor:
        rows: Tensor = self.last(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
        return rows[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        self.note("val", batch)

    def test_step(self, batch: Any) -> None:
        self.note("test", batch)

    def note(self, name: str, batch: Any) -> None:
        is_right = (self(batch).argmax(1) == batch.y[: batch.batch_size]).double().mean()
        self.log(name, is_right, batch_size=batch.batch_size, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def by_hand(module: Net, graph: lgd.Graph) -> Tensor:
    """One forward over the whole graph, with PyG alone."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.indptr.diff())
    edges = torch.stack([graph.indices.long(), receivers])
    with torch.no_grad():
        rows: Tensor = module.last(module.first(graph.node_arrays["x"], edges).relu(), edges)
    return rows


STRATEGIES: dict[str, Any] = {
    "plain": lambda: "auto",
    "grappa": lambda: lgd.GrappaStrategy(**PATIENCE),
    "llcg": lambda: lgd.LLCGStrategy(**PATIENCE),
}


def judged_elsewhere(rank: int, world_size: int, kind: str, strategy: str, folder: Path) -> None:
    """Fit without the held nodes, and look at all of them in validation, tests and predictions."""
    graph, seen = whole(), lgd.inductive_graph(whole())
    options: dict[str, Any] = {"batch_size": 16, "evaluation": lgd.Evaluation(on=graph), "seed": 1}
    data = lgd.PartitionedDataModule(seen, sampler=lgd.NeighborSampler([4, 4]), **options)
    module = Net(kind)
    running = trainer(world_size, STRATEGIES[strategy]())
    running.fit(module, data)
    rows = by_hand(module, graph)
    right = rows.argmax(1) == graph.node_arrays["y"]
    assert float(running.callback_metrics["val"]) == pytest.approx(float(right[graph.split("val")].double().mean()))
    others = data.on(graph)
    assert others.batch_size == 16
    for each in (data, others):
        found = trainer(world_size, STRATEGIES[strategy]()).test(module, each, verbose=False)
        assert found[0]["test"] == pytest.approx(float(right[graph.split("test")].double().mean()))
    for name, asked, expected in (
        ("all", data, rows),
        ("other", others, rows),
        ("some", data.only(SOME), rows[SOME]),
        ("first", others.only([5, 4, 9]), rows[[5, 4, 9]]),
        ("one", data.only([9]), rows[[9]]),  # fewer than ranks
        ("again", data, rows),
        ("trained", data.on(seen).only(torch.tensor([3, 1, 2])), by_hand(module, seen)[[3, 1, 2]]),
    ):
        path = folder / f"{name}.npy"
        writer = lgd.PredictionWriter(path)
        trainer(world_size, STRATEGIES[strategy](), callbacks=[writer]).predict(module, asked, return_predictions=False)
        np.testing.assert_allclose(np.load(path), expected.numpy(), atol=1e-12)


CASES = [("SAGE", "plain", 1), ("GCN", "grappa", 2), slow("GAT", "llcg", 2), slow("SAGE", "llcg", 3)]


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
@pytest.mark.parametrize(("kind", "strategy", "num_ranks"), CASES)
def test_another_graph_is_judged_as_one_forward_of_it(kind: str, strategy: str, num_ranks: int, tmp_path: Path) -> None:
    run_ranks(judged_elsewhere, num_ranks, kind, strategy, tmp_path)


@pytest.mark.parametrize("leave_out", [("val", "test"), ("test",)])
def test_an_inductive_graph_has_no_held_node(leave_out: tuple[str, ...]) -> None:
    graph = whole()
    seen = lgd.inductive_graph(graph, leave_out)
    held = {node for name in leave_out for node in graph.split(name).tolist()}
    stays = [node for node in range(graph.num_nodes) if node not in held]
    rows = [graph.indices[a:b].tolist() for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)]
    assert seen.node_arrays["n_id"].tolist() == stays
    assert seen.node_arrays["x"].equal(graph.node_arrays["x"][stays])
    found = [seen.indices[a:b].tolist() for a, b in zip(seen.indptr[:-1], seen.indptr[1:], strict=True)]
    assert [[stays[at] for at in row] for row in found] == [[u for u in rows[v] if u not in held] for v in stays]


def test_a_typed_graph_leaves_held_nodes_of_the_learned_type_out() -> None:
    graph = typed_graph_of_papers()
    seen = lgd.inductive_graph(graph)
    papers = seen.types.node_arrays["paper"]
    held = sum(graph.split(name).numel() for name in ("val", "test"))
    assert len(papers["n_id"]) == len(graph.types.nodes_of("paper")) - held
    assert not papers["val_mask"].any() and not papers["test_mask"].any()
    assert seen.types.node_types == graph.types.node_types
    data = lgd.PartitionedDataModule(seen, sampler=lgd.NeighborSampler([4, 4]), evaluation=lgd.Evaluation(on=graph))
    module = HeteroSAGE(list(graph.types.edge_types))
    trainer(1, max_epochs=1).fit(module, data)
    whole = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([4, 4]))
    first, second = (trainer(1).test(module, of, verbose=False) for of in (data, whole))
    assert first == second


def test_the_graph_of_an_evaluation_may_be_a_path_or_pyg(tmp_path: Path) -> None:
    graph, module = whole(), Net("SAGE")
    graph.save(tmp_path / "whole")
    given: list[Any] = [tmp_path / "whole", str(tmp_path / "whole"), graph.to_pyg(), graph]
    found = []
    for each in given:
        seen, evaluation = lgd.inductive_graph(graph), lgd.Evaluation(on=each)
        data = lgd.PartitionedDataModule(seen, sampler=lgd.NeighborSampler([4, 4]), evaluation=evaluation)
        found += trainer(1).test(module, data, verbose=False)
    assert all(one == found[0] for one in found)


def narrow() -> lgd.Graph:
    graph = whole()
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays | {"x": graph.node_arrays["x"][:, :5].contiguous()})


def without_features() -> Data:
    data = whole().to_pyg()
    del data.x
    return data


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (narrow, r"^x has the shape \(320, 5\) in Evaluation\(on=...\) and \(\d+, 6\) in the graph that is trained on"),
        (without_features, r"^Evaluation\(on=...\) has no x, which the graph that is trained on has"),
        (typed_graph_of_papers, r"^Evaluation\(on=...\): the graph that is trained on has not the types .*'paper'"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(other: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lgd.PartitionedDataModule(lgd.inductive_graph(whole()), evaluation=lgd.Evaluation(on=other()))


def test_shards_and_links_are_not_judged_elsewhere(tmp_path: Path) -> None:
    graph = whole()
    lgd.save_shards(graph, lgd.PartitionedDataModule(graph).partition(2), tmp_path / "shards")
    with pytest.raises(ValueError, match=r"must be a graph that every host has, and this folder holds shards"):
        lgd.PartitionedDataModule(graph, evaluation=lgd.Evaluation(on=tmp_path / "shards"))
    with pytest.raises(ValueError, match=r"^Evaluation\(on=...\) is for nodes"):
        lgd.LinkDataModule(lgd.split_edges(graph), evaluation=lgd.Evaluation(on=graph))


def test_a_graph_with_new_types_is_refused_and_so_is_one_that_lacks_some() -> None:
    graph = typed_graph_of_papers()
    cited = ("journal", "cites", "paper")
    changed = graph.to_pyg()
    changed["journal"].x, changed[cited].edge_index = torch.ones(2, 3), torch.tensor([[0], [1]])
    later = lgd.Graph.from_pyg(changed, time="time")
    data, on_later = lgd.PartitionedDataModule(graph), lgd.Evaluation(on=later)
    said = r"has not the types \['journal', \('journal', 'cites', 'paper'\)\] of the other, and a model has weights"
    for on, call in (
        (
            r"^Evaluation\(on=...\): the graph that is trained on ",
            lambda: lgd.PartitionedDataModule(graph, evaluation=on_later),
        ),
        (r"^on\(...\): the graph that is trained on ", lambda: data.on(later)),
        (r"^on\(...\): the graph that is judged ", lambda: lgd.PartitionedDataModule(later).on(graph)),
    ):
        with pytest.raises(ValueError, match=on + said):
            call()


def test_nodes_that_are_asked_for_are_those_of_the_other_graph_too() -> None:
    graph, module = whole(), Net("SAGE")
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([4, 4])).only([5, 3])
    changed = graph.to_pyg()
    x, edges = torch.ones(1, 6).double(), torch.tensor([[320], [3]])
    later = lgd.Graph.from_pyg(Data(torch.cat([changed.x, x]), torch.cat([changed.edge_index, edges], 1)))
    rows = torch.cat(trainer(1).predict(module, data.on(later)))  # type: ignore[arg-type]
    edges = later.to_pyg().edge_index
    expected = module.last(module.first(later.node_arrays["x"], edges).relu(), edges)[[5, 3]]
    torch.testing.assert_close(rows, expected.detach())
    with pytest.raises(ValueError, match=r"^nodes must lie in \[0, 320\), got 320"):
        lgd.PartitionedDataModule(later).only([320]).on(graph)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([], "^nodes is empty"),
        ([320], r"^nodes must lie in \[0, 320\), got 320"),
        ([1.5], "nodes must be a tensor of node ids"),
        ([-1], "got -1"),
        ([3, 3], "nodes must be distinct, got 3 more than once"),
    ],
)
def test_nodes_to_predict_are_ids_of_the_graph(nodes: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        lgd.PartitionedDataModule(whole()).only(nodes)


def test_an_inductive_graph_says_what_it_misses() -> None:
    graph = whole()
    arrays = graph.node_arrays | {"val_mask": torch.zeros(graph.num_nodes, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"^val_mask marks no node"):
        lgd.inductive_graph(lgd.Graph(graph.indptr, graph.indices, arrays))
    wrong: list[tuple[Any, str]] = [("test", r"^leave_out must be a list"), (["train"], "leave_out must be")]
    for leave_out, said in wrong:
        with pytest.raises(ValueError, match=said):
            lgd.inductive_graph(graph, leave_out)


# Rows of nodes that came after training are those of one forward over the graph that has them.


NUM_NEW = 5


class InTime(Watcher):
    """Returns the rows of its seeds alone."""

    def predict_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        rows: Tensor = self(batch)
        return rows


def without_new(whole: lgd.Graph) -> lgd.Graph:
    """The graph without its last nodes."""
    return whole.induced(torch.arange(whole.num_nodes - NUM_NEW))


def without_new_of_types(data: HeteroData) -> lgd.Graph:
    """The graph without the last papers and the last author."""
    new = {"paper": NUM_NEW, "author": 1}
    old = {kind: torch.arange(data[kind].num_nodes - new.get(kind, 0)) for kind in data.node_types}
    return lgd.Graph.from_pyg(data.subgraph(old), time="time")


def predicted(rank: int, world_size: int, folder: Path) -> None:
    """Predict the new nodes, the last of their type, with data modules of the graphs before them."""
    sampler, later, timed = lgd.NeighborSampler([4, 4]), whole(), InTime()
    cases: dict[str, tuple[Any, ...]] = {}  # module, sampler, the graph without new nodes and with them, and all rows
    for name in ("SAGE", "GCN", "GAT"):
        cases[name] = Net(name), sampler, without_new(later), later, by_hand(Net(name), later)
    in_time = temporal_graph()
    cases["time"] = timed, SAMPLER, without_new(in_time), in_time, by_hand_in_time(timed, in_time)
    data = typed_graph_of_papers(200).to_pyg()
    for kind in data.node_types:
        data[kind].x = data[kind].x.double()
    torch.manual_seed(0)
    typed = HeteroSAGE(data.edge_types).double()
    of_types = without_new_of_types(data), lgd.Graph.from_pyg(data, time="time")
    cases["types"] = typed, sampler, *of_types, typed(data)
    for name, (module, drawn_by, before, after, rows) in cases.items():
        asked = lgd.PartitionedDataModule(before, sampler=drawn_by, batch_size=16).on(after)
        new, path = torch.arange(len(rows) - NUM_NEW, len(rows)), folder / f"{name}.npy"
        strategy = STRATEGIES["plain" if world_size == 1 else "grappa"]()
        running = trainer(world_size, strategy, callbacks=[lgd.PredictionWriter(path)])
        running.predict(module, asked.only(new), return_predictions=False)
        np.testing.assert_allclose(np.load(path), rows[new].detach().numpy(), rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_rows_of_new_nodes_are_those_of_one_forward(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(predicted, num_ranks, tmp_path)


# Tables of nodes that came after training name them by the ids that the user gave.


NEW = ["brand-new", "z"]
WRITES = ("author", "writes", "paper")


class OfPapers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = SAGEConv(2, 3)

    def forward(self, batch: Any) -> Tensor:
        ends = batch["author"].x, batch["paper"].x
        rows: Tensor = self.conv(ends, batch[WRITES].edge_index)[: batch["paper"].batch_size]
        return rows


def rows_by_hand(conv: SAGEConv, senders: Tensor, receivers: Tensor, edges: Tensor) -> Tensor:
    """The rows of all receivers, one after the other, in float64."""
    to, own = conv.lin_l.weight.double(), conv.lin_r.weight.double()
    of_each = [edges[0][edges[1] == node] for node in range(len(receivers))]
    means = [senders[some].double().mean(0) if len(some) else torch.zeros(2).double() for some in of_each]
    return (torch.stack(means) @ to.T + conv.lin_l.bias.double() + receivers.double() @ own.T).detach()


def prepared_again(folder: Path) -> lgd.Graph:
    """The graph of the same tables with two more nodes and their edges."""
    for name, lines in (
        ("nodes", [f"{name},{7 + place},1" for place, name in enumerate(NEW)]),
        ("edges", [f"{NEW[0]},{NAMES[3]}", f"{NEW[1]},{NAMES[5]}"]),
    ):
        with (folder / f"{name}.csv").open("a") as table:
            table.write("\n" + "\n".join(lines))
    return lgd.Graph.open(prepared_from(folder, "later"))


def prepared_with_types(folder: Path, name: str, new: list[str]) -> None:
    """Papers with words for ids, and authors with numbers; new papers cite nobody, and one new author writes them."""
    tables = folder / f"tables_of_{name}"
    for kind in ("nodes", "edges"):
        (tables / kind).mkdir(parents=True)
    papers = [f"P{7 * n % 11},{n % 3},train,{n},{-n}" for n in range(11)] + [f"{paper},0,train,1,1" for paper in new]
    (tables / "nodes" / "paper.csv").write_text("\n".join(["id,label,split,a,b", *papers]))
    authors = [f"{1000 - n},{n},1" for n in range(5)] + ["5,1,1"] * bool(new)
    (tables / "nodes" / "author.csv").write_text("\n".join(["id,a,b", *authors]))
    pairs = [f"{1000 - n % 5},P{n % 11}" for n in range(30)] + [f"5,{paper}" for paper in new]
    (tables / "edges" / "author__writes__paper.csv").write_text("\n".join(["source,target", *pairs]))
    lgd.prepare_graph(tables, folder / name)


def write_papers(rank: int, world_size: int, folder: Path) -> None:
    later, out, sampler = folder / "later", folder / "out", lgd.NeighborSampler([5])
    data = lgd.PartitionedDataModule(folder / "graph", sampler=sampler)
    typed = lgd.PartitionedDataModule(folder / "typed", sampler=sampler).on(folder / "typed_later")
    questions = {
        "before": data,
        "all": data.on(later),
        "new": data.on(later).only(range(COUNT, COUNT + 2)),
        "some": data.on(later).only(nodes_with_ids(later, ["z", NAMES[3], "brand-new"])),
        "papers": typed.only([12, 3, 11]),
    }
    for name, asked in questions.items():
        writer = lgd.PredictionWriter(out / f"{name}.parquet")
        module = OfPapers() if name == "papers" else Rows()
        start(writer).predict(module, asked, return_predictions=False)
    with pytest.raises(ValueError, match="has ids of 41 nodes, and the graph that is predicted has 43: nodes that"):
        start(lgd.PredictionWriter(out / "no.parquet", ids_of=folder / "graph")).predict(Rows(), questions["new"])


def test_tables_of_new_nodes_have_the_ids_they_came_with(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    before = lgd.Graph.open(prepared(tmp_path))
    later, known, out = prepared_again(tmp_path), NAMES + NEW, tmp_path / "out"
    prepared_with_types(tmp_path, "typed", [])
    prepared_with_types(tmp_path, "typed_later", ["P99", "P77"])
    run_ranks(write_papers, 2, tmp_path)
    x: Any = later.node_arrays["x"]
    rows = rows_by_hand(Rows().conv, x, x, later.to_pyg().edge_index)  # type: ignore[arg-type]
    for name, names in (("all", known), ("new", NEW), ("some", ["z", NAMES[3], "brand-new"])):
        check_table(out / f"{name}.parquet", names, known, rows)
    check_table(
        out / "before.parquet", NAMES, NAMES, rows_by_hand(Rows().conv, x, x[:COUNT], before.to_pyg().edge_index)
    )  # type: ignore[arg-type]
    typed: Any = lgd.Graph.open(tmp_path / "typed_later").to_pyg()
    rows = rows_by_hand(OfPapers().conv, typed["author"].x, typed["paper"].x, typed[WRITES].edge_index)
    papers = [*(f"P{7 * n % 11}" for n in range(11)), "P99", "P77"]
    check_table(out / "papers.parquet", ["P77", papers[3], "P99"], papers, rows)
    assert not (out / "no.parquet").exists()
