"""Training on shards is training on parts: to the bit, with every exchange across shards."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.extensions.shards.home import ShardHome
from tests.callbacks.test_run_report import fit as fit_with_report
from tests.callbacks.test_run_report import logged
from tests.cli.conftest import EXAMPLES
from tests.cli.test_train import SMALL, command
from tests.cli.test_train import logged as logged_rows
from tests.data.test_datamodule import stored_as
from tests.data.test_settings import GRAPH, check_copies, check_that_ranks_share_places
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.graph.parted import in_order_of_parts, in_order_of_shards, typed_graph_of_widths, uneven_partition
from tests.graph.test_graph import spoilt
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

OPTIONS: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 4]), "batch_size": 8}
OPTIONS["evaluation"] = lgd.Evaluation(batch_size=70)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same graph in shards and whole, with the same numbers for nodes."""
    folder = tmp_path_factory.mktemp("graph")
    graph = lgd.communities(400, 4, num_features=12, train_share=0.2, noise=2.0, seed=3)
    graph.node_arrays["n_id"] = torch.arange(graph.num_nodes)
    partition = lgd.Partition((torch.arange(graph.num_nodes) * 7 % 5 // 3).to(torch.int32), 2)
    lgd.save_shards(graph, partition, folder / "shares")
    in_order_of_parts(graph, partition).save(folder / "whole")
    return folder


def evaluate(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank trains on and evaluates, where two groups of ranks have a copy each."""
    data = lgd.PartitionedDataModule(f"{folder}/shares", **OPTIONS)
    model, fitting = SAGE(12, 4), trainer(world_size, lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE), max_epochs=8)
    fitting.fit(model, data)
    model.evaluated.clear()
    fitting.validate(model, data, verbose=False)
    return model.trained, [ids for ids, _ in model.evaluated]


def test_copies_divide_the_nodes_among_them(saved: Path) -> None:
    whole = lgd.Graph.open(saved / "whole")
    n_id = whole.node_arrays["n_id"]
    results = run_ranks(evaluate, 4, str(saved))
    evaluated = torch.cat([ids for _, shown in results for ids in shown])
    assert evaluated.sort().values.tolist() == n_id[whole.split("val")].sort().values.tolist()
    shards = [set(n_id[:240].tolist()), set(n_id[240:].tolist())]
    trained = [set(torch.cat(seeds).tolist()) for seeds, _ in results]
    assert trained[0] <= shards[0] and trained[2] <= shards[0] and not trained[0] & trained[2]
    assert trained[1] <= shards[1] and trained[3] <= shards[1] and not trained[1] & trained[3]
    assert set().union(*trained) == set(n_id[whole.split("train")].tolist())


class Mistaken(SAGE):
    """Is evaluated layer by layer, so that its batches are made when they are read."""

    def layers(self) -> list[Any]:
        return [lambda batch, conv=conv: conv(batch.x, batch.edge_index) for conv in self.convs]

    def forward(self, batch: Any) -> Tensor:
        return lgd.through_layers(self, batch)

    def test_step(self, batch: Any) -> None:
        raise ValueError("a mistake of the user, in a batch of 100")


def judge(rank: int, world_size: int, folder: str) -> None:
    data = lgd.PartitionedDataModule(f"{folder}/shares", sampler=lgd.NeighborSampler([4, 4]))
    trainer(world_size, lgd.GrappaStrategy(**PATIENCE)).test(Mistaken(12, 4), data)


def test_an_error_of_the_user_is_told_as_it_is(saved: Path) -> None:
    """To explain it, nothing is sampled from ranks that may be gone."""
    with pytest.raises(RankError, match="a mistake of the user") as caught:
        run_ranks(judge, 2, str(saved))
    assert "During handling of the above exception" not in str(caught.value)


def test_what_only_a_whole_graph_has_is_refused(saved: Path) -> None:
    data = lgd.PartitionedDataModule(saved / "shares")
    assert (data.partitioner, data.shards_path, data.boundary) == (None, saved / "shares", lgd.Isolated())
    for use in (lambda: data.graph, lambda: data.holding, lambda: data.parts_of_ranks(2), lambda: data.part(0, 2)):
        with pytest.raises(AttributeError, match=r"is of a graph that every host has, and '.*shares' holds shards"):
            use()
    with pytest.raises(ValueError, match="the graph was cut when it was divided"):
        data.partition(2)


# Training on shards of a typed graph is training on parts of it: to the bit, with every exchange across shards.


OPTIONS_OF_TYPES: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 16}
OPTIONS_OF_TYPES |= {"evaluation": lgd.Evaluation(batch_size=70)}
UNUSED = {"find_unused_parameters": True}  # of types that no loss reads
STRATEGIES: dict[str, Any] = {
    "llcg": lambda: lgd.LLCGStrategy(lgd.EverySteps(4), **PATIENCE),
    "grappa": lambda: lgd.GrappaStrategy(**UNUSED, **PATIENCE),
    "local_sgd": lambda: lgd.LocalSGDStrategy(lgd.EverySteps(3), **PATIENCE),
    "tma": lambda: lgd.TMAStrategy(lgd.EverySteps(3), **PATIENCE),
    "ddp": lambda: plain_ddp(**UNUSED),
}


@pytest.fixture(scope="module")
def saved_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same graph in shards and whole, with the same numbers for nodes."""
    folder = tmp_path_factory.mktemp("graph")
    graph = typed_graph_of_papers(300)
    partition = lgd.Partition((torch.arange(graph.num_nodes) * 7 % 5 // 3).to(torch.int32), 2)
    lgd.save_shards(graph, partition, folder / "shards")
    whole = in_order_of_shards(graph, partition)
    whole.save(folder / "whole")
    lgd.save_shards(graph, lgd.Partition(torch.zeros(graph.num_nodes).int(), 1), folder / "one")
    before = [array["n_id"] + whole.types.nodes_of(kind).start for kind, array in whole.types.node_arrays.items()]
    torch.save(partition.assignment[torch.cat(before)], folder / "owners.pt")
    return folder


def data_of(folder: str, kind: str, **more: Any) -> pl.LightningDataModule:
    options = OPTIONS_OF_TYPES | more
    if kind == "shards":
        loading = lgd.Loading(bulk_size=3, cache_bytes=20_000)
        return lgd.PartitionedDataModule(f"{folder}/shards", loading=loading, **options)
    partition = lgd.Partition(torch.load(f"{folder}/owners.pt"), 2)
    whole = lgd.Graph.open(f"{folder}/whole")
    return lgd.PartitionedDataModule(whole, partitioner=partition, **({"boundary": lgd.Isolated()} | options))


def fit_types(
    rank: int, world_size: int, folder: str, kind: str, name: str, more: dict[str, Any]
) -> tuple[list[Tensor], dict[str, float]]:
    """The weights of a fit, its metrics and those of a test; predictions are written to a file."""
    data, path = data_of(folder, kind, **more), f"{folder}/{kind}.npy"
    pl.seed_everything(0, verbose=False)
    model = HeteroSAGE(edge_types(folder))
    fitting = trainer(world_size, STRATEGIES[name](), callbacks=[lgd.PredictionWriter(path, overwrite=True)])
    fitting.fit(model, data)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    names = [name for name in ("loss", "accuracy", "val_acc") if name in fitting.callback_metrics]
    metrics = {name: float(fitting.callback_metrics[name]) for name in names}
    (tested,) = fitting.test(model, data, verbose=False)
    fitting.predict(model, data, return_predictions=False)
    return weights, metrics | {f"test {name}": value for name, value in tested.items()}


def edge_types(folder: str) -> list[Any]:
    return list(lgd.Graph.open(f"{folder}/whole").types.edge_types)


FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "llcg": ("llcg", {}),
    "llcg with halos": ("llcg", {"boundary": lgd.Halo(2)}),
    "grappa": ("grappa", {}),
    "grappa with halos": ("grappa", {"boundary": lgd.Halo(1)}),
    "local_sgd on whole parts": ("local_sgd", {"sampler": lgd.WholePartSampler(2)}),
    "local_sgd on subgraphs": (
        "local_sgd",
        {
            "sampler": lgd.ShadowSampler([3, 3], num_hops=2),
            "global_batching": lgd.GlobalBatching(sampler=lgd.NeighborSampler([3, 3])),
            "evaluation": lgd.Evaluation(batch_size=70, sampler=lgd.NeighborSampler([-1, -1])),
        },
    ),
    "llcg by time": ("llcg", {"sampler": lgd.TemporalSampler([4, 3], "time")}),
    "ddp by time": ("ddp", {"sampler": lgd.TemporalSampler([4, 3], "time", pick="latest"), "boundary": lgd.Fetch()}),
    "tma": ("tma", {}),
    "ddp": ("ddp", {"boundary": lgd.Fetch()}),
}


QUICK = ("llcg", "llcg by time")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FITS])
def test_training_on_shards_of_types_is_training_on_parts(saved_types: Path, name: str) -> None:
    shards, parts = (run_ranks(fit_types, 2, str(saved_types), kind, *FITS[name]) for kind in ("shards", "whole"))
    for (ours, figures), (theirs, expected) in zip(shards, parts, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
        assert len(figures) > 1 and figures == expected
    assert (saved_types / "shards.npy").read_bytes() == (saved_types / "whole.npy").read_bytes()


def test_nodes_of_one_type_are_learned_from(tmp_path: Path) -> None:
    graph = typed_graph_of_widths()
    data = graph.to_pyg()
    data["author"].train_mask, data["author"].y = torch.ones(7, dtype=torch.bool), torch.zeros(7).long()
    both = lgd.Graph.from_pyg(data)
    lgd.save_shards(both, uneven_partition(both, 1), tmp_path / "open")
    with pytest.raises(ValueError, match=r"choose it, as in PartitionedDataModule\(path, task='paper'\)"):
        lgd.PartitionedDataModule(tmp_path / "open")
    lgd.save_shards(both.with_seeds("author"), uneven_partition(both, 1), tmp_path / "chosen")
    chosen = {"author": lgd.PartitionedDataModule(tmp_path / "chosen")}
    chosen["paper"] = lgd.PartitionedDataModule(tmp_path / "open", task="paper")
    for kind, module in chosen.items():
        module.setup("fit")
        batches = list(module.train_dataloader())
        assert {batch.seed_type for batch in batches} == {kind} and module.num_nodes == len(both.types.nodes_of(kind))  # type: ignore[union-attr]
        assert torch.cat([batch[kind].input_id for batch in batches]).numel() == {"author": 7, "paper": 6}[kind]
        module.teardown("fit")


def test_features_that_are_nan_are_found_before_the_first_step(tmp_path: Path) -> None:
    graph = typed_graph_of_widths().with_seeds("paper")
    graph.types.node_arrays["author"]["x"][3] = torch.nan
    lgd.save_shards(graph, lgd.Partition(torch.zeros(22).int(), 1), tmp_path / "shards")
    data = lgd.PartitionedDataModule(tmp_path / "shards", batch_size=4, sampler=lgd.NeighborSampler([2]))
    data.setup("fit")
    with pytest.raises(ValueError, match=r"x of node 3 of type 'author' is NaN or infinite\. Repair it, or switch"):
        next(iter(data.train_dataloader()))
    data.on_exception(ValueError())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"time": "year", "seed_time": "time"}, "neither edges nor nodes of the graph have it"),
        ({"seed_time": "at"}, "'paper' have no 'at'"),
    ],
)
def test_times_that_are_not_there_are_refused(saved_types: Path, more: dict[str, Any], message: str) -> None:
    sampler = lgd.TemporalSampler([2, 2], **({"time": "time"} | more))
    data = lgd.PartitionedDataModule(saved_types / "one", sampler=sampler)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")
    data.on_exception(ValueError())


def test_all_that_trees_see_is_evaluated_as_on_one_host(saved_types: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is said of how: in batches as large as those of training, or smaller."""
    graph, found, sizes = typed_graph_of_papers(300), [], []
    options: dict[str, Any] = {"sampler": lgd.TemporalSampler([4, 3], "time"), "batch_size": 16}
    for most in (None, 5, "whole"):
        data: Any = lgd.PartitionedDataModule(saved_types / "one", **options)
        if most == "whole":
            data = lgd.PartitionedDataModule(graph, **options)
        elif most is not None:
            monkeypatch.setattr(ShardHome, "_fits", lambda self, seeds, sampler: len(seeds) <= 5)
        pl.seed_everything(0, verbose=False)
        testing = trainer(1)
        (tested,) = testing.test(HeteroSAGE(list(graph.types.edge_types)), data, verbose=False)
        found.append(tested["test_acc"])
        sizes.append(len(testing.test_dataloaders))
    assert found[0] > 0 and found == pytest.approx([found[0]] * 3)
    num_tested = graph.with_seeds("paper").split("test").numel()
    assert sizes[:2] == [-(-num_tested // 16), -(-num_tested // 4)]


def test_shards_are_not_taken_for_a_graph(saved_types: Path) -> None:
    with pytest.raises(ValueError, match=r"share-00000 is one shard of a graph.* with PartitionedDataModule"):
        lgd.Graph.open(saved_types / "shards" / "share-00000")
    with pytest.raises(FileNotFoundError, match=r"it holds shards of one\. Train on them with PartitionedDataModule"):
        lgd.Graph.open(saved_types / "shards")
    with pytest.raises(RuntimeError, match=r"before its ranks have met: give the data module to trainer\.fit"):
        lgd.PartitionedDataModule(saved_types / "shards").train_dataloader()


def test_nobody_cuts_shards_again(tmp_path: Path) -> None:
    graph, report = lgd.communities(400, 4, num_features=8), lgd.RunReport()
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 1, 0), tmp_path / "shards")
    data = lgd.PartitionedDataModule(tmp_path / "shards", sampler=lgd.NeighborSampler([3, 3]), batch_size=16)
    fit_with_report(tmp_path, 1, lgd.LocalSGDStrategy(lgd.EverySteps(2)), [report], data, max_epochs=1)
    assert report.table and logged(tmp_path, "partition/cut_ratio") == []


def test_ranks_share_the_places_of_each_split(tmp_path: Path) -> None:
    whole = lgd.Graph(GRAPH.indptr, GRAPH.indices, GRAPH.node_arrays, {})
    lgd.save_shards(whole, lgd.RandomPartitioner()(whole, 2, seed=0), tmp_path / "shards")
    check_that_ranks_share_places(tmp_path / "shards")


def test_a_shard_names_nodes_as_the_graph_did(tmp_path: Path) -> None:
    graph, node = spoilt("y", -1)
    lgd.save_shards(graph, lgd.Partition(torch.zeros(60, dtype=torch.int32), 1), tmp_path / "shards")
    for is_on in (True, False):
        loading = lgd.Loading(num_threads=0, check_values=is_on)
        data = lgd.PartitionedDataModule(tmp_path / "shards", sampler=lgd.NeighborSampler([2]), loading=loading)
        data.setup("fit")
        with pytest.raises(ValueError, match=f"y of node {node} is -1") if is_on else nullcontext():
            next(iter(data.train_dataloader()))
        data.teardown("fit")


@pytest.mark.parametrize("boundary", [lgd.Fetch(), None], ids=repr)
def test_shards_keep_what_the_whole_graph_keeps(boundary: Any, tmp_path: Path) -> None:
    whole = lgd.Partition(torch.zeros(300, dtype=torch.int32), 1)
    lgd.save_shards(stored_as(torch.bfloat16), whole, tmp_path / "shares")
    options: dict[str, Any] = {} if boundary is None else {"boundary": boundary}
    data = lgd.PartitionedDataModule(tmp_path / "shares", sampler=lgd.NeighborSampler([4, 3]), batch_size=50, **options)
    data.trainer = trainer(1, precision="bf16-mixed")
    data.setup("fit")
    for loader in (data.train_dataloader(), data.predict_dataloader()):
        batch = next(iter(loader))
        assert (batch.x.dtype, batch.y.dtype, batch.bytes.dtype) == (torch.bfloat16, torch.float32, torch.int8)
    data.teardown("fit")


def test_copies_have_the_same_batches(tmp_path: Path) -> None:
    graph, whole = small_graph(), lgd.RandomPartitioner()
    split = lgd.split_edges(graph)
    lgd.save_shards(graph, whole(graph, 1, 0), tmp_path / "shards")
    lgd.save_shards(split, whole(split.graph, 1, 0), tmp_path / "link_shards")
    check_copies(lgd.PartitionedDataModule(tmp_path / "shards", batch_size=30))
    check_copies(lgd.LinkDataModule(tmp_path / "link_shards", batch_size=500))


# What is refused: by a data module when it is made, and by all ranks when a fit starts.


@dataclass(frozen=True)
class Another(Boundary):
    """One of a user's own, which does not take shards."""

    def around(self, graph: lgd.Graph, residents: Tensor, edges_into: Any, seed: int) -> list[Tensor]:
        return [graph.halo(residents)]


BOTH = "sampled by NeighborSampler or TemporalSampler"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("without types", {"sampler": lgd.ShadowSampler([4, 4], num_hops=2)}, "got ShadowSampler"),
    ("without types", {"boundary": lgd.Fetch(), "sampler": lgd.WholePartSampler(2)}, "got WholePartSampler"),
    ("without types", {"loading": lgd.Loading(sample_on="auto")}, 'sample_on must be "cpu" for shards'),
    ("without types", {"boundary": lgd.Auto(5)}, r"boundary must be Isolated\(\).* for shards, got Auto\(bytes=5"),
    ("without types", {"boundary": Another()}, r"Halo\(\), Exchange\(\) or Fetch\(\) .*, got Another\(\)"),
    ("without types", {"task": "paper"}, r"task \('paper'\) is for a graph with types"),
    ("types", {"boundary": lgd.Fetch(), "sampler": lgd.ShadowSampler([4, 4], num_hops=2)}, f"{BOTH}, got Shadow"),
    ("types", {"global_batching": lgd.GlobalBatching(sampler=lgd.LadiesSampler([9, 9]))}, f"{BOTH}, got Ladies"),
    ("types", {"boundary": lgd.Exchange()}, r"it takes sampler=WholePartSampler\(num_hops\)"),
    ("types", {"sampler": lgd.NeighborSampler({("a", "to", "b"): [3, 3]})}, r"the edge type \('a', 'to', 'b'\), and"),
    ("types", {"sampler": lgd.NeighborSampler([4, 3], weight="edge_weight")}, "draws from graphs without types"),
    ("types", {"task": "papers"}, r"task must be one of \['paper', 'author', 'venue', 'word'\], got 'papers'"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_cannot_work_is_refused(saved: Path, saved_types: Path, kind: str, options: Any, message: str) -> None:
    folder, defaults = (saved_types / "shards", OPTIONS_OF_TYPES) if kind == "types" else (saved / "shares", OPTIONS)
    with pytest.raises(ValueError, match=message):
        lgd.PartitionedDataModule(folder, **(defaults | options))


def start(rank: int, world_size: int, folder: str, way: str | None, options: dict[str, Any]) -> None:
    strategy: Any = lgd.GrappaStrategy(**PATIENCE)
    if way is not None:
        strategy = lgd.LLCGStrategy(lgd.EverySteps(2), correction=lgd.Correction(way=way), **PATIENCE)  # type: ignore[arg-type]
    data = lgd.PartitionedDataModule(folder.format(rank=rank), **(OPTIONS | options))
    trainer(world_size, strategy, fast_dev_run=True).fit(Mistaken(12, 4), data)


def check_refused(num_ranks: int, folder: Path, message: str, way: str | None = None, **options: Any) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(start, num_ranks, str(folder), way, options)


WHOLE_PARTS = {"boundary": lgd.Exchange(), "sampler": lgd.WholePartSampler(2)}


@pytest.mark.parametrize(
    ("num_ranks", "way", "options", "message"),
    [
        (3, "sliced", {}, "2 shards, which 3 ranks cannot hold evenly"),
        (2, "rank0", {}, 'use way="sliced"'),
        (2, None, {"boundary": lgd.Halo(bytes=10)}, "has no room for a single node"),
        (4, None, WHOLE_PARTS, "takes one rank for each shard, and 4 ranks hold the 2 shards of"),
    ],
)
def test_fits_that_cannot_be_are_refused(saved: Path, num_ranks: int, way: Any, options: Any, message: str) -> None:
    check_refused(num_ranks, saved / "shares", message, way, **options)


def test_shards_of_two_divisions_are_refused(tmp_path: Path) -> None:
    graph = lgd.communities(200)
    for number in range(2):
        assignment = ((torch.arange(graph.num_nodes) + number) % 2).int()
        lgd.save_shards(graph, lgd.Partition(assignment, 2), tmp_path / f"division-{number}")
    message = r"ranks \[1\] are not of the graph of rank 0, or of another division of it"
    check_refused(2, tmp_path / "division-{rank}", message)


def test_a_shard_without_training_nodes_is_refused(tmp_path: Path) -> None:
    graph = typed_graph_of_widths()  # of whose nodes the last one is of another type
    lgd.save_shards(graph, uneven_partition(graph, 2), tmp_path / "shards")
    with pytest.raises(RankError, match=r"Shard 1 of .* has no training nodes for rank 1 of 2") as caught:
        run_ranks(start, 2, str(tmp_path / "shards"), None, {})
    assert all("has no training nodes" in failure for failure in caught.value.failures.values())


@pytest.mark.slow
def test_any_data_module_has_a_class_path(tmp_path: Path) -> None:
    graph = lgd.communities(2000)
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, seed=0), tmp_path / "shares")
    config = (EXAMPLES / "configs" / "llcg.yaml").read_text()
    data = f"data: {{class_path: lightning_gnn_dist.PartitionedDataModule, init_args: {{graph: {tmp_path}/shares}}}}\n"
    (tmp_path / "shares.yaml").write_text(re.sub(r"data:\n.*?(?=trainer:)", data, config, flags=re.DOTALL))
    options = [f"--trainer.logger.init_args.save_dir={tmp_path}", "--trainer.max_epochs=1", *SMALL[1:]]
    run_ranks(command, 2, "fit", f"--config={tmp_path}/shares.yaml", *options)
    assert logged_rows(tmp_path / "llcg" / "version_0")[-1] > 0.15
    layered = [f"--output={tmp_path}/logits.npy", *options]
    run_ranks(command, 2, "predict", f"--config={tmp_path}/shares.yaml", *layered)
    assert np.load(tmp_path / "logits.npy").shape == (2000, 8)
