"""Imported by the server that ranks are forked from: what each of them would load anew is loaded once.

That is all that the package exports, compiled kernels and those that each process compiles anew, the code that
torch_geometric writes for a layer, and what Lightning finds out in its first fit. All but the first are found in a
thread that ends here, so that no rank inherits the scratch memory of another's samples.
"""

import gc
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GINConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.storage.mapped import all_maps, libc
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.partition_report import PartitionReport
from tests.extensions import brought
from tests.memory import compile_reader
from tests.ranks import quieten
from tests.sage import SAGE

PAGE_BYTES = 1 << 21
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1

# With a GPU, a process that has computed gradients has threads for its devices, and no fork of it could compute any.
TRAINS = not torch.cuda.is_available()


def fit() -> None:
    graph = lgd.communities(60, 2, num_features=4, train_share=0.5)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([2, 2]), loading=lgd.Loading(num_threads=0))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **quiet)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        trainer.fit(SAGE(4, 2), data)


def write_code_of_layers() -> None:
    GATConv(1, 1), GCNConv(1, 1), GINConv(nn.Identity())


def train_on_a_part() -> None:
    graph = lgd.communities(60, 2, num_features=4, train_share=0.5)
    with tempfile.TemporaryDirectory() as folder:
        parts = cached_partition(graph, lgd.MetisPartitioner(), 2, 0, folder)
    PartitionReport.of(graph, parts.assignment, 2)
    data = lgd.PartitionedDataModule(
        graph, partitioner=parts, sampler=lgd.NeighborSampler([2, 2]), loading=lgd.Loading(num_threads=0)
    )
    own = lgd.PartitionedDataModule(
        data.part(0, 2), sampler=lgd.NeighborSampler([2, 2]), loading=lgd.Loading(num_threads=0)
    )
    with torch.random.fork_rng(devices=[]):
        module = SAGE(4, 2)
    for batch in (*own.train_dataloader(), *data.val_dataloader(), *data.correction_batches(0, stop=1)):
        loss = module.training_step(batch)
        if TRAINS:
            loss.backward()


def make_batches_of_all_kinds() -> None:
    """By types, and of extensions: each has loops of its own."""
    typed = lgd.citations(200, 2, seed=1)
    few: dict[str, Any] = {"batch_size": 9, "loading": lgd.Loading(num_threads=0)}
    modules: list[Any] = [lgd.PartitionedDataModule(typed, sampler=lgd.NeighborSampler([2, 2]), **few)]
    for data in (*modules, *(data for more in brought("warm") for data in more.data_modules(typed, few))):
        next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))
        data.teardown("fit")


def gather_into_large_pages() -> None:
    """Keep this process in large pages: the fork of a rank copies a table of pages, and took as long as all it did.

    Systems other than Linux, and its versions before 6.1, cannot; ranks then take longer to start.
    """
    for found in all_maps():
        if found.inode == 0 and found.sizes["Anonymous"]:
            for page in range(
                -(-found.start // PAGE_BYTES) * PAGE_BYTES, found.end // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES
            ):
                libc().madvise(page, PAGE_BYTES, COLLAPSE)


lgd._import_all()
quieten()
work = (compile_reader, write_code_of_layers, train_on_a_part, make_batches_of_all_kinds, *([fit] if TRAINS else []))
with ThreadPoolExecutor(1) as thread:
    for each in work:
        thread.submit(each).result()
gc.enable()
gc.collect()
gather_into_large_pages()
