"""Fits in the precisions of GPUs equal loops by hand on the same batches, with a scaler of their own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource, stream_to
from lightning_gnn_dist.extensions.larger_than_memory.placement import PlacedSource, Placement, Sizes, release
from tests.batch_contents import check_same, contents
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.golden.device import computing
from tests.golden.runs import Job, jobs
from tests.gpu.needs import need_counts, need_devices
from tests.gpu.test_every_run import check_alike, do, name_of
from tests.gpu.test_every_run import shared as shared
from tests.gpu.test_waits import Net
from tests.loaders import over
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.typed_sage import typed_graph_of_papers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")]
STEPS, ROUNDS, LR = 3, 4, 0.1
STRATEGIES: dict[str, Callable[[], Any]] = every_strategy(STEPS) | {
    "llcg": lambda: lgd.LLCGStrategy(
        lgd.EverySteps(STEPS), correction=None, drift=None, outer=None, weights="uniform", **PATIENCE
    )
}
# How far from the loop by hand a weight may be: real kernels sum in any order, and a lower precision rounds coarser.
PRECISIONS = {"32-true": 1e-5, "bf16-mixed": 1e-2, "16-mixed": 2e-3}
LOW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Batch = dict[str, Any]


class Seen(pl.LightningModule):
    """Keeps the batches that it is trained on, in RAM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(12, 8), SAGEConv(8, 4)])
        self.seen: list[Batch] = []

    def training_step(self, batch: Any) -> Tensor:
        names = ("x", "edge_index", "y")
        self.seen.append({name: batch[name].cpu() for name in names} | {"batch_size": batch.batch_size})
        return loss(self.convs, self.seen[-1], self.device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def loss(convs: Any, batch: Batch, device: Any) -> Tensor:
    x, edges, labels = (batch[name].to(device) for name in ("x", "edge_index", "y"))
    x = convs[1](convs[0](x, edges).relu(), edges)[: batch["batch_size"]]
    return functional.cross_entropy(x, labels[: batch["batch_size"]])


def fitted(rank: int, world_size: int, name: str, precision: Any) -> tuple[list[Batch], list[Tensor], float]:
    data = lgd.PartitionedDataModule(small_graph(), sampler=lgd.NeighborSampler([4, 4]), batch_size=8, coverage=None)
    module = Seen()
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision, "limit_val_batches": 0}
    run = trainer(world_size, STRATEGIES[name](), max_epochs=ROUNDS, **options)
    run.fit(module, data)
    scaler = getattr(run.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    return module.seen, [weight.detach().cpu() for weight in module.parameters()], scale


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_is_a_loop_by_hand(name: str, num_ranks: int, precision: str) -> None:
    need_devices(num_ranks)
    found = run_ranks(fitted, num_ranks, name, precision)
    batches = list(zip(*(seen for seen, _, _ in found), strict=True))
    assert len(batches) >= STEPS * ROUNDS
    by_hand = with_gradients if name == "grappa" else with_weights
    expected, expected_scale = by_hand(batches, precision)
    for _, weights, scale in found:
        assert scale == expected_scale
        for ours, theirs in zip(weights, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0.0, atol=PRECISIONS[precision])


class ByHand:
    """One rank: a model, and a scaler of its own where gradients are float16."""

    def __init__(self, precision: str) -> None:
        self.model, self.low = Seen().cuda(), LOW.get(precision)
        self.weights = list(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
        self.optimizer = torch.optim.SGD(self.weights, lr=LR)

    def differentiate(self, batch: Batch) -> list[Tensor]:
        with torch.autocast("cuda", self.low, enabled=self.low is not None):
            found = loss(self.model.convs, batch, "cuda")
        return list(torch.autograd.grad(self.scaler.scale(found), self.weights))

    def step(self, gradients: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def ended(self) -> tuple[list[Tensor], float]:
        return [weight.detach().cpu() for weight in self.weights], self.scaler.get_scale()


def with_gradients(batches: list[tuple[Batch, ...]], precision: str) -> tuple[list[Tensor], float]:
    """Each step with the mean of the gradients of all ranks."""
    hand = ByHand(precision)
    for of_ranks in batches:
        gradients = zip(*map(hand.differentiate, of_ranks), strict=True)
        hand.step([torch.stack(each).mean(0) for each in gradients])
    return hand.ended()


def with_weights(batches: list[tuple[Batch, ...]], precision: str) -> tuple[list[Tensor], float]:
    """Steps of each rank alone, and the mean of all weights after every few."""
    hands = [ByHand(precision) for _ in batches[0]]
    for number, of_ranks in enumerate(batches, 1):
        for hand, batch in zip(hands, of_ranks, strict=True):
            hand.step(hand.differentiate(batch))
        if number % STEPS == 0:
            for copies in zip(*(hand.weights for hand in hands), strict=True):
                mean = torch.stack([each.detach() for each in copies]).mean(0)
                for each in copies:
                    each.data.copy_(mean)
    return hands[0].ended()


# On a device batches are those of RAM, wherever edges and rows lie, and making them never stops the training.


CUDA = torch.device("cuda", 0)
ROOMS = {"all": (1.0, 1.0), "edges, some rows": (1.0, 0.3), "edges": (1.0, 0.0), "some rows": (0.0, 0.4)}
ROOMS["nothing"] = (0.0, 0.0)


def budget(graph: lgd.Graph, place: str) -> int:
    """Bytes that make a plan of a graph."""
    sizes, (edges, rows) = Sizes.of(graph), ROOMS[place]
    return int(edges * sizes.edges + rows * sizes.rows)


def graph_of(kind: str, num_nodes: int = 6000) -> lgd.Graph:
    plain = lgd.communities(num_nodes, 4, num_features=128, mean_degree=10.0, train_share=0.5, seed=2)
    x = plain.node_arrays["x"]
    arrays = {"float32": {"x": x}, "bfloat16": {"x": x.bfloat16()}}
    edges = {"edge_attr": torch.randn(plain.num_edges, 3, generator=torch.Generator().manual_seed(0))}
    return lgd.Graph(plain.indptr, plain.indices, plain.node_arrays | arrays[kind], edges)


def batches_of(graph: lgd.Graph, sampler: Any, placement: Placement | None, seeds: Tensor) -> Any:
    """Two passes, of which each batch is looked at after those that follow it were begun."""
    source = GraphSource(graph, sampler, all_labels=False)
    if placement is not None:
        source = PlacedSource(graph, sampler, placement=placement, stream=stream_to(CUDA), all_labels=False)
    loader = over(source, seeds, -(-len(seeds) // 400), seed=0, bulk_size=2, num_threads=2)
    weight = torch.randn(256, 256, device="cpu" if placement is None else CUDA)
    for _ in range(2):
        for batch in loader:
            for _ in range(3 if placement else 0):
                weight = (weight @ weight).tanh()  # the training stream is behind
            yield contents(batch.to("cpu"))
    loader.close()


@pytest.mark.parametrize("place", ROOMS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_batches_are_those_of_ram(kind: str, place: str) -> None:
    graph, sampler = graph_of(kind), lgd.NeighborSampler([6, 4])
    placement = Placement(CUDA, "auto", budget(graph, place), samplers=(sampler,), batch_size=400)
    check_same(*(batches_of(graph, sampler, at, graph.split("train")) for at in (placement, None)))
    assert (placement.crossing.asked > 0) == (place not in ("all", "nothing"))
    assert (placement.crossing.num_bytes > 0) == (place != "all")
    release(graph)


@pytest.mark.parametrize("place", ["all", "some rows"])
def test_samplers_and_types_that_are_drawn_in_ram(place: str) -> None:
    for graph, sampler in (
        (graph_of("float32"), lgd.ShadowSampler([4], num_hops=1)),
        (typed_graph_of_papers(), lgd.NeighborSampler([4, 3])),
    ):
        nodes = graph.types.nodes_of(graph.types.node_types[0])
        seeds = torch.arange(nodes.start, min(nodes.stop, nodes.start + 400))
        placement = Placement(CUDA, "auto", budget(graph, place), samplers=(sampler,))
        check_same(*(batches_of(graph, sampler, at, seeds) for at in (placement, None)))
        assert placement.crossing.hits > 0
        release(graph)


class Counts(pl.Callback):
    """Keeps how often the host waited where rows are brought, in the second epoch."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.waits = notes, 0

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.notes.clear()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        found = ((times, place) for (kind, _, place), times in self.notes.items() if kind == "sync")
        self.waits = sum(times for times, place in found if "rows_on_device" in place)


@pytest.mark.parametrize(("place", "most"), [("some rows", 0), ("edges, some rows", 1), ("edges", 1)])
def test_bringing_rows_waits_once_a_bulk_for_ids_and_never_else(place: str, most: int) -> None:
    need_counts()
    from pretend import notes

    graph = lgd.communities(4000, 4, num_features=16, train_share=0.6)
    loading = lgd.Loading(sample_on="auto", device_bytes=budget(graph, place), bulk_size=4)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([5, 5]), batch_size=64, loading=loading)
    counts = Counts(notes)
    trainer(1, callbacks=[counts], limit_val_batches=0, accelerator="gpu").fit(Net(), data)
    bulks = -(-len(graph.split("train")) // 64) // 4
    assert most * bulks // 2 <= counts.waits <= most * (bulks + 3)


# A fit that is stopped on one kind of device and goes on on another ends as one that never left its CPUs.


CHANGES = [("gpu", "cpu"), ("cpu", "gpu")]
FEW = ["local_sgd_outer_8", "llcg_persistent", "tma", "grappa_8", "local_sgd/history", "local_sgd/owned"]
FEW += [f"grappa/{name}" for name in ("exchange", "1_rank", "typed", "shards", "mid_epoch")]
FEW += ["llcg/sparse", "llcg/typed_owned"]
SOME = jobs(lambda name: name.removeprefix("resumed/") in FEW)
MORE = jobs(lambda name: name.startswith("resumed/") and name.removeprefix("resumed/") not in FEW)


@pytest.mark.parametrize("job", [*SOME, *(pytest.param(job, marks=pytest.mark.slow) for job in MORE)], ids=name_of)
def test_a_fit_goes_on_on_another_device(job: Job, shared: Path, tmp_path: Path) -> None:
    need_devices(job.num_ranks)
    with computing(precision="64-true", dropout="0"):  # each device draws its own
        for half, accelerator, keep in (
            ("first", "cpu", "stopped on cpu"),
            ("second", "cpu", "never changed"),
            ("second", "gpu", "to gpu"),
            ("first", "gpu", "stopped on gpu"),
            ("second", "cpu", "to cpu"),
        ):
            with computing(accelerator=accelerator, half=half):  # in processes of its own
                do(job, shared, tmp_path / keep)
    shutil.rmtree(shared / "own")
    for changed in ("to gpu", "to cpu"):
        check_alike(job, tmp_path / "never changed", tmp_path / changed)


class Scheduled(Seen):
    """Halves its learning rate after each epoch, or round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


OF_DEVICES = {"gpu": "16-mixed", "cpu": "bf16-mixed"}  # a CPU has no 16-mixed, and so no scale of gradients


def rate_after(rank: int, world_size: int, name: str, accelerator: str, path: Path) -> float:
    """Fit two epochs, or go on up to the fourth; return the learning rate at the end."""
    data, resumes = lgd.PartitionedDataModule(small_graph(), batch_size=16), path.exists()
    where: dict[str, Any] = {"accelerator": accelerator, "precision": OF_DEVICES[accelerator], "limit_val_batches": 0}
    run = trainer(world_size, every_strategy()[name](), max_epochs=4 if resumes else 2, **where)
    run.fit(Scheduled(), data, ckpt_path=path if resumes else None)
    run.save_checkpoint(path)
    rate: float = run.optimizers[0].param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize(("first", "second"), CHANGES)
@pytest.mark.parametrize("name", every_strategy())
def test_a_schedule_goes_on_with_or_without_a_scale(name: str, first: str, second: str, tmp_path: Path) -> None:
    for accelerator, epochs in ((first, 2), (second, 4)):
        (rate,) = run_ranks(rate_after, 1, name, accelerator, tmp_path / "stopped.ckpt")
        assert rate == LR * 0.5**epochs


def one_after_the_other(rank: int, world_size: int) -> str:
    for accelerator in ("gpu", "cpu"):
        data = lgd.PartitionedDataModule(small_graph(), batch_size=64)
        options: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 1, "limit_val_batches": 0}
        run = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), **options)
        try:
            run.fit(SAGE(12, 4), data)
        except RuntimeError as error:
            return f"{accelerator}: {error}"
    return ""


def test_a_fit_on_a_cpu_is_refused_in_a_process_of_a_fit_on_a_gpu() -> None:
    (said,) = run_ranks(one_after_the_other, 1)
    assert said.startswith("cpu: This process is in a group (nccl) of an earlier fit on GPUs")
    assert said.endswith("run it in another process.")
