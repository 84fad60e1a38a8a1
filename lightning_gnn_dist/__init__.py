"""Train graph neural networks on partitioned graphs with PyTorch Lightning.

graph -> partition -> residency -> sample -> batch -> local step -> meeting -> correct -> evaluate

A folder imports only from those above it, and no two on one line import each other.

checks.py           what a user may pass, and one wording of refusals; no decision about training
joint.py            what folders ask of each other without importing each other, as Protocols; no code that runs
wire/  graph/       what ranks say to each other, and who is there; nothing about graphs or models
                    the whole graph in RAM or mapped: CSR, arrays, saved files; no partition, no batch
partition/  engine/ every node in exactly one chunk, one partitioner a file; nothing about ranks
                    the loops that draw: kernels, their torch twins, random numbers; neither PyG nor Lightning
prepare/  sampling/ files become saved graphs and shards in bounded memory; no training
                    one sampler a file: seeds of many batches in, samples out; no features
batches/            a sample becomes a batch, in time: gathering, buffers, devices, loaders; no parts
layers/             models by their layers: on a batch, or each layer once for all nodes, shared by the ranks
boundary/           the edges that leave a part: nodes that come along, rows that ranks send each other in every layer
data/  rounds/      what a rank reads: residency, coverage, parts, data modules; no strategy
                    what strategies share: start, refusals, clock, meeting, drift, averages; no data module
sharded/  strategies/  a graph that no host holds: rows fetched from their owners, its data module
                    what ranks exchange, and when: one method a file
callbacks/          what a user may watch a training by, and the record that a run leaves
pictures/           runs drawn side by side
cli/                the command `lightning-gnn-dist`; the one place that prints
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_gnn_dist.strategies.names import tell_lightning

if TYPE_CHECKING:
    from lightning_gnn_dist.batches.loading import Loading
    from lightning_gnn_dist.boundary.auto import Auto
    from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch, Halo, History, Isolated
    from lightning_gnn_dist.boundary.coverage import Coverage, coverage_mean
    from lightning_gnn_dist.callbacks.data_figures import DataFigures
    from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe
    from lightning_gnn_dist.callbacks.predictions import PredictionWriter
    from lightning_gnn_dist.callbacks.preemption import PreemptionCheckpoint
    from lightning_gnn_dist.callbacks.run_report import RunReport
    from lightning_gnn_dist.data.datamodule import PartitionedDataModule
    from lightning_gnn_dist.data.link_datamodule import LinkDataModule
    from lightning_gnn_dist.data.link_ranking import LinkRanking
    from lightning_gnn_dist.data.links import LinkSplit, split_edges
    from lightning_gnn_dist.data.temporal.split import split_by_time
    from lightning_gnn_dist.engine.sample import BatchKey, Sample
    from lightning_gnn_dist.graph.convert import quantize_rows
    from lightning_gnn_dist.graph.graph import Graph
    from lightning_gnn_dist.graph.synthetic import citations, communities
    from lightning_gnn_dist.graph.typed.types import GraphTypes
    from lightning_gnn_dist.homes.residency import Fixed, Held, Holding, Redeal, Residency, Rotate
    from lightning_gnn_dist.homes.settings import Evaluation, GlobalBatching
    from lightning_gnn_dist.layers.prediction import predict_by_layer
    from lightning_gnn_dist.layers.ready_made import layers_of, on_blocks
    from lightning_gnn_dist.layers.through_layers import through_layers
    from lightning_gnn_dist.partition.base import Partition, Partitioner
    from lightning_gnn_dist.partition.metis import MetisPartitioner
    from lightning_gnn_dist.partition.random import RandomPartitioner
    from lightning_gnn_dist.partition.streaming import StreamingPartitioner
    from lightning_gnn_dist.partition.supernode import SuperNodePartitioner
    from lightning_gnn_dist.prepare.divide import save_shards
    from lightning_gnn_dist.prepare.one_shard import OneShard
    from lightning_gnn_dist.prepare.prepare_graph import prepare_graph
    from lightning_gnn_dist.rounds.clock import (
        AdaptiveSteps,
        EveryPass,
        EverySeconds,
        EverySteps,
        RoundClock,
        RoundProgress,
    )
    from lightning_gnn_dist.rounds.drift import Drift
    from lightning_gnn_dist.rounds.launching.launch import Launch
    from lightning_gnn_dist.rounds.means.outer import Outer
    from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
    from lightning_gnn_dist.rounds.rows.lazy_adam import LazyAdam
    from lightning_gnn_dist.rounds.rows.owned_embedding import OwnedEmbedding
    from lightning_gnn_dist.sampling.base import Sampler
    from lightning_gnn_dist.sampling.cluster import ClusterSampler
    from lightning_gnn_dist.sampling.device import DeviceSampler
    from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler
    from lightning_gnn_dist.sampling.matrix import MatrixSampler
    from lightning_gnn_dist.sampling.neighbor import NeighborSampler
    from lightning_gnn_dist.sampling.pagerank.sampler import PageRankSampler
    from lightning_gnn_dist.sampling.shadow import ShadowSampler
    from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
    from lightning_gnn_dist.sampling.walk import RandomWalkSampler
    from lightning_gnn_dist.sampling.whole import WholePartSampler
    from lightning_gnn_dist.strategies.correction import Correction
    from lightning_gnn_dist.strategies.grappa import GrappaStrategy
    from lightning_gnn_dist.strategies.llcg import LLCGStrategy
    from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
    from lightning_gnn_dist.strategies.tma import TMAStrategy
    from lightning_gnn_dist.wire.elastic import Elastic

__version__ = "0.1.0"

__all__ = [
    "AdaptiveSteps",
    "Auto",
    "BatchKey",
    "Boundary",
    "ClusterSampler",
    "Correction",
    "Coverage",
    "DataFigures",
    "DeviceSampler",
    "DiscrepancyProbe",
    "Drift",
    "Elastic",
    "Evaluation",
    "EveryPass",
    "EverySeconds",
    "EverySteps",
    "Exchange",
    "FastGCNSampler",
    "Fetch",
    "Fixed",
    "GlobalBatching",
    "Graph",
    "GraphTypes",
    "GrappaStrategy",
    "Halo",
    "Held",
    "History",
    "Holding",
    "Isolated",
    "LLCGStrategy",
    "LadiesSampler",
    "Launch",
    "LazyAdam",
    "LinkDataModule",
    "LinkRanking",
    "LinkSplit",
    "Loading",
    "LocalSGDStrategy",
    "MatrixSampler",
    "MetisPartitioner",
    "NeighborSampler",
    "OneShard",
    "Outer",
    "OwnedEmbedding",
    "PageRankSampler",
    "Partition",
    "PartitionedDataModule",
    "Partitioner",
    "PredictionWriter",
    "PreemptionCheckpoint",
    "RandomPartitioner",
    "RandomWalkSampler",
    "Redeal",
    "Residency",
    "Rotate",
    "RoundClock",
    "RoundProgress",
    "RoundStrategy",
    "RunReport",
    "Sample",
    "Sampler",
    "ShadowSampler",
    "StreamingPartitioner",
    "SuperNodePartitioner",
    "TMAStrategy",
    "TemporalSampler",
    "WholePartSampler",
    "citations",
    "communities",
    "coverage_mean",
    "layers_of",
    "on_blocks",
    "predict_by_layer",
    "prepare_graph",
    "quantize_rows",
    "save_shards",
    "split_by_time",
    "split_edges",
    "through_layers",
]

_DEFINED_IN = {  # imported when first asked for: torch, PyG and Lightning take seconds, and few programs need all
    "AdaptiveSteps": "rounds.clock",
    "Auto": "boundary.auto",
    "BatchKey": "engine.sample",
    "Boundary": "boundary.boundary",
    "ClusterSampler": "sampling.cluster",
    "Correction": "strategies.correction",
    "Coverage": "boundary.coverage",
    "DataFigures": "callbacks.data_figures",
    "DeviceSampler": "sampling.device",
    "DiscrepancyProbe": "callbacks.discrepancy",
    "Drift": "rounds.drift",
    "Elastic": "wire.elastic",
    "Evaluation": "homes.settings",
    "EveryPass": "rounds.clock",
    "EverySeconds": "rounds.clock",
    "EverySteps": "rounds.clock",
    "Exchange": "boundary.boundary",
    "FastGCNSampler": "sampling.layer_wise",
    "Fetch": "boundary.boundary",
    "Fixed": "homes.residency",
    "GlobalBatching": "homes.settings",
    "Graph": "graph.graph",
    "GraphTypes": "graph.typed.types",
    "GrappaStrategy": "strategies.grappa",
    "Halo": "boundary.boundary",
    "Held": "homes.residency",
    "History": "boundary.boundary",
    "Holding": "homes.residency",
    "Isolated": "boundary.boundary",
    "LLCGStrategy": "strategies.llcg",
    "LadiesSampler": "sampling.layer_wise",
    "Launch": "rounds.launching.launch",
    "LazyAdam": "rounds.rows.lazy_adam",
    "LinkDataModule": "data.link_datamodule",
    "LinkRanking": "data.link_ranking",
    "LinkSplit": "data.links",
    "Loading": "batches.loading",
    "LocalSGDStrategy": "strategies.local_sgd",
    "MatrixSampler": "sampling.matrix",
    "MetisPartitioner": "partition.metis",
    "NeighborSampler": "sampling.neighbor",
    "OneShard": "prepare.one_shard",
    "Outer": "rounds.means.outer",
    "OwnedEmbedding": "rounds.rows.owned_embedding",
    "PageRankSampler": "sampling.pagerank.sampler",
    "Partition": "partition.base",
    "PartitionedDataModule": "data.datamodule",
    "Partitioner": "partition.base",
    "PredictionWriter": "callbacks.predictions",
    "PreemptionCheckpoint": "callbacks.preemption",
    "RandomPartitioner": "partition.random",
    "RandomWalkSampler": "sampling.walk",
    "Redeal": "homes.residency",
    "Residency": "homes.residency",
    "Rotate": "homes.residency",
    "RoundClock": "rounds.clock",
    "RoundProgress": "rounds.clock",
    "RoundStrategy": "rounds.round_strategy",
    "RunReport": "callbacks.run_report",
    "Sample": "engine.sample",
    "Sampler": "sampling.base",
    "ShadowSampler": "sampling.shadow",
    "StreamingPartitioner": "partition.streaming",
    "SuperNodePartitioner": "partition.supernode",
    "TMAStrategy": "strategies.tma",
    "TemporalSampler": "sampling.temporal.sampler",
    "WholePartSampler": "sampling.whole",
    "citations": "graph.synthetic",
    "communities": "graph.synthetic",
    "coverage_mean": "boundary.coverage",
    "layers_of": "layers.ready_made",
    "on_blocks": "layers.ready_made",
    "predict_by_layer": "layers.prediction",
    "prepare_graph": "prepare.prepare_graph",
    "quantize_rows": "graph.convert",
    "save_shards": "prepare.divide",
    "split_by_time": "data.temporal.split",
    "split_edges": "data.links",
    "through_layers": "layers.through_layers",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_DEFINED_IN[name]}"
    try:
        value = getattr(import_module(module), name)
    except AttributeError as error:  # Python would say that there is no such name, and not why
        raise ImportError(f"{module} could not be imported: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _import_all() -> None:
    for name in __all__:
        __getattr__(name)


tell_lightning(_import_all)
