"""What blocks of the pages that learn links take for granted."""

from typing import Any

import torch

import lightning_gnn_dist as lgd
from tests.extensions.links.link_model import LinkSAGE
from tests.test_readme import as_pyg


class Encoder(LinkSAGE):
    def encode(self, batch: Any) -> torch.Tensor:
        return batch.x @ torch.ones(8, 16)


def link_batch() -> Any:
    split, few = lgd.split_edges(lgd.Graph.from_pyg(as_pyg()), negatives=3), lgd.Loading(num_threads=0)
    data = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([3, 3]), loading=few)
    return next(iter(data.train_dataloader()))


SCOPE = {"LinkSAGE": LinkSAGE, "Encoder": Encoder, "link_batch": link_batch}
