"""What a batch counts for: the pairs it asks for, whatever the number of their ends."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from lightning_gnn_dist.rounds.correction_gradients import average_gradient_, mean_gradient
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.graph_fitting import fit


class Products(pl.LightningModule):
    """Looks at features alone, so that slices see what the whole batch sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).double()

    def training_step(self, batch: Any) -> Tensor:
        sender, receiver = self.layers(batch.x)[batch.edge_label_index]
        logits = (sender * receiver).sum(1)
        return functional.binary_cross_entropy_with_logits(logits, batch.edge_label.double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def link_data(**options: Any) -> lgd.LinkDataModule:
    graph = lgd.communities(120, 4, num_features=12, mean_degree=6.0, seed=3)
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    cut = lgd.Partition((torch.arange(120) > 80).int(), 2)
    split = lgd.split_edges(graph, 0.1, 0.1, negatives=5)
    return lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2]), batch_size=40, partitioner=cut, **options)


def link_gradients(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Of a global batch by slices, of the whole of it by hand, and what counts there are."""
    data, module = link_data(global_batching=lgd.GlobalBatching(batch_size=51), num_negatives=2), Products()
    found: list[Any] = []

    class Watch(lgd.LLCGStrategy):
        def end_round(self) -> None:
            super().end_round()
            if not found:
                (own,) = data.correction_batches(0, stop=1)
                gradient, targets = mean_gradient(self.meeting.fit, [own])
                average_gradient_(self.meeting.fit, gradient, targets)
                (whole,) = data.correction_batches(0, stop=1, sliced=False)
                expected = torch.autograd.grad(module.training_step(whole), list(module.parameters()))
                found.extend((gradient, list(expected), [int(targets), own.edge_label.numel(), own.batch_size]))

    fit(Watch.as_published(lgd.EverySteps(1), **PATIENCE), module, data, world_size, max_epochs=1, limit_val_batches=0)
    return found[0], found[1], found[2]


@pytest.mark.filterwarnings("ignore:.*validation_step")
def test_slices_of_links_give_the_gradient_of_the_whole_batch() -> None:
    for sliced, whole, (counted, targets, ends) in run_ranks(link_gradients, 2):
        assert counted == targets in (3 * 25, 3 * 26) and ends != targets
        assert max(float((left - right).abs().max()) for left, right in zip(sliced, whole, strict=True)) < 1e-14
