"""Held links are ranked by rows that layers compute for all nodes as by those of sampled neighbourhoods."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Evaluation, GrappaStrategy, through_layers
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.links.test_link_datamodule import FEATURES, module_of, small_split
from tests.link_model import LinkSAGE
from tests.ranks import run_ranks


class Links(LinkSAGE):
    """Ranks links by embeddings of layers; with ``blocks`` by those of sampled neighbourhoods, as it always was."""

    def __init__(self, by_layers: bool) -> None:
        torch.manual_seed(0)
        super().__init__(FEATURES)
        self.by_layers = by_layers
        self.kinds: set[str] = set()

    def layers(self) -> Any:
        def layer(batch: Any, is_last: bool) -> Tensor:
            (block,) = batch.blocks
            x = self.convs[is_last]((batch.x, batch.x[: block.num_dst]), block.adj)
            return x if is_last else x.relu()

        return [lambda batch: layer(batch, False), lambda batch: layer(batch, True)]

    def forward(self, batch: Any) -> Tensor:
        self.kinds.add(type(batch).__name__)
        if not self.by_layers:
            return super().forward(batch)
        x, (sender, receiver) = through_layers(self, batch), batch.edge_label_index
        scores: Tensor = self.decoder(x[sender] * x[receiver]).squeeze(1)
        return scores

    def validation_step(self, batch: Any) -> None:
        self.ranking.update(self(batch), batch.edge_label)
        self.log_dict(dict(self.ranking), batch_size=int(batch.edge_label.sum()))

    test_step = validation_step


def rank_links(rank: int, world_size: int) -> list[Any]:
    strategy: Any = GrappaStrategy(**PATIENCE) if world_size > 1 else "auto"
    found = []
    for by_layers in (False, True):
        module = Links(by_layers)
        data = module_of(small_split(), evaluation=Evaluation(batch_size=5))
        (metrics,) = trainer(world_size, copy.deepcopy(strategy)).test(module, data, verbose=False)
        found.append((metrics, module.kinds))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_links_rank_as_before(world_size: int) -> None:
    expected = rank_links(0, 1)[0][0]
    for (before, _), (metrics, kinds) in run_ranks(rank_links, world_size) if world_size > 1 else [rank_links(0, 1)]:
        assert before == pytest.approx(expected, abs=1e-6)
        assert metrics == pytest.approx(expected, abs=1e-6)
        assert kinds == {"SeedBatch"}
