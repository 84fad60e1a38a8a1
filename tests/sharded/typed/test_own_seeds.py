"""Corrections of a typed graph in shards whose seeds their owners deal: by hand, and no rank knows all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn_dist import (
    BatchKey,
    Correction,
    EverySteps,
    GlobalBatching,
    Graph,
    LLCGStrategy,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    save_shards,
)
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.global_batches import _PASSES
from lightning_gnn_dist.engine.rng import Purpose, permutation
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.sharded.typed.graphs import in_order_of_shards
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

SEED, BATCH, ROUND, SAMPLER = 5, 40, 3, NeighborSampler([4, 3])


def corrected(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[str]]:
    """What a rank has of six batches of a round that begin in the middle of a pass, and the lists of nodes it keeps."""
    deal = GlobalBatching(deal="own", batch_size=BATCH)
    data = PartitionedDataModule(f"{folder}/shards", sampler=SAMPLER, batch_size=16, seed=SEED, global_batching=deal)
    found: list[Any] = []

    class Look(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            found.extend(map(contents, data.correction_batches(ROUND, start=2, stop=8)))
            found.append(list(data._home.graph()._splits))

    types = Graph.open(f"{folder}/whole").types
    assert types is not None
    strategy = LLCGStrategy(EverySteps(2), correction=Correction(2), **PATIENCE)
    fitting = trainer(world_size, strategy, limit_val_batches=0, callbacks=[Look()])
    fitting.fit(HeteroSAGE(list(types.edge_types)), data)
    return found[:-1], found[-1]


def dealt(own: Tensor, num_all: int, rank: int, number: int) -> Tensor:
    """Where the seeds of a rank in a batch of the round stand among its own ones."""
    in_pass = num_all // BATCH
    turn, within = divmod(number, in_pass)
    order = permutation(len(own), (SEED + Purpose.CORRECTIONS) * 2 + rank, ROUND * _PASSES + turn)
    return order[within * len(own) // in_pass : (within + 1) * len(own) // in_pass]


def test_owners_deal_their_own_seeds(tmp_path: Path) -> None:
    graph = typed_graph_of_papers(300)
    partition = Partition((torch.arange(graph.num_nodes) * 7 % 5 // 3).to(torch.int32), 2)
    save_shards(graph, partition, tmp_path / "shards")
    whole = in_order_of_shards(graph, partition)
    whole.save(tmp_path / "whole")
    of_type, papers = whole.types.nodes_of("paper"), whole.types.node_arrays["paper"]
    owner = partition.assignment[papers["n_id"] + graph.types.nodes_of("paper").start]
    own = [(papers["train_mask"] & (owner == rank)).nonzero().view(-1) for rank in range(2)]
    num_all = sum(map(len, own))
    assert num_all // BATCH >= 2 and len(own[0]) != len(own[1])
    for rank, (found, lists) in enumerate(run_ranks(corrected, 2, str(tmp_path))):
        assert lists == []
        for number, ours in zip(range(2, 8), found, strict=True):
            at = dealt(own[rank], num_all, rank, number)
            key = BatchKey(SEED + Purpose.CORRECTIONS, ROUND, number)
            (sample,) = SAMPLER.sample_bulk(whole, [own[rank][at] + of_type.start], [key])
            expected = contents(assemble(whole, sample, all_labels=False))
            before = len(own[0]) if rank else 0
            check_same([ours], [expected | {"paper input_id": before + at}])
