"""Fits in the precisions of GPUs equal loops by hand on the same batches, with a scaler of their own."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    GrappaStrategy,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    TMAStrategy,
)
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")]
STEPS, ROUNDS, LR = 3, 4, 0.1
STRATEGIES: dict[str, Callable[[], Any]] = {
    "grappa": lambda: GrappaStrategy(**PATIENCE),
    "local_sgd": lambda: LocalSGDStrategy(EverySteps(STEPS), **PATIENCE),
    "tma": lambda: TMAStrategy(EverySteps(STEPS), **PATIENCE),
    "llcg": lambda: LLCGStrategy(
        EverySteps(STEPS), correction=None, drift=None, outer=None, weights="uniform", **PATIENCE
    ),
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
    data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([4, 4]), batch_size=8, coverage=None)
    module = Seen()
    run = trainer(
        world_size, STRATEGIES[name](), accelerator="gpu", precision=precision, max_epochs=ROUNDS, limit_val_batches=0
    )
    run.fit(module, data)
    scaler = getattr(run.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    return module.seen, [weight.detach().cpu() for weight in module.parameters()], scale


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_is_a_loop_by_hand(name: str, num_ranks: int, precision: str) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip("fewer than two CUDA devices")
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
