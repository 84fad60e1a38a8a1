"""Train graph neural networks on partitioned graphs with PyTorch Lightning.

graph -> partition -> residency -> sample -> batch -> local step -> meeting -> evaluate

graph/              the whole graph: in-neighbour CSR and per-node arrays, in RAM or memory-mapped
partition/          every node in exactly one part
residency.py        which chunks a rank holds, and when that changes
checks.py           what a user may give, and one wording of refusals
coverage.py         how much of each neighbourhood a rank sees, and the weights that follow
surroundings.py     nodes from elsewhere that come along
parts.py            what a rank holds, copied into RAM
cut.py              all of these decisions together, for any number of ranks
sampling/           seeds of many batches in, many batches out
loader.py           the next batches are sampled and gathered while this one trains
part_loader.py      the next part is read while this one trains
placement.py        where they are sampled: in RAM, or on the device that trains
global_batches.py   batches of the whole graph, for corrections
data_checks.py      what data modules may be given
part_module.py      what a rank reads, batches out
datamodule.py       PartitionedDataModule: nodes to classify
links.py            edges held back, and the false ones they compete with
link_module.py      LinkDataModule: edges to predict
ranking.py          how high edges rank
collectives.py      the only module that talks to the other ranks; counts every byte
rounds.py           when a round is over
elastic.py          membership: ranks may die and come back
launcher.py         starts such ranks on one machine
scattered/          a graph that no host holds: shares of it, asked for by all ranks
strategies/         what ranks exchange, and when
row_file.py         a file of rows that all ranks write
layers.py           one layer, batch by batch, within a budget
inference.py        rows of all nodes, one layer at a time
record.py           what a run leaves behind of itself
callbacks/          what a user may watch a training by
pictures/           runs drawn side by side
cli/                the command `lightning-gnn-dist`
"""

from lightning_gnn_dist.callbacks.data_figures import DataFigures
from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe
from lightning_gnn_dist.callbacks.predictions import PredictionWriter
from lightning_gnn_dist.callbacks.preemption import PreemptionCheckpoint
from lightning_gnn_dist.callbacks.report import RunReport
from lightning_gnn_dist.coverage import Coverage, coverage_mean
from lightning_gnn_dist.datamodule import PartitionedDataModule
from lightning_gnn_dist.elastic import Elastic
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.out_of_core import prepare_graph
from lightning_gnn_dist.graph.quantize import quantize_rows
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.inference import predict_by_layer
from lightning_gnn_dist.link_module import LinkDataModule
from lightning_gnn_dist.links import LinkSplit, split_edges
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner
from lightning_gnn_dist.ranking import LinkRanking
from lightning_gnn_dist.residency import Fixed, Held, Redeal, Residency, Rotate
from lightning_gnn_dist.rounds import EveryPass, EverySeconds, EverySteps, RoundClock, RoundProgress
from lightning_gnn_dist.sampling.base import BatchKey, Sample, Sampler
from lightning_gnn_dist.sampling.cluster import ClusterSampler
from lightning_gnn_dist.sampling.device import DeviceSampler
from lightning_gnn_dist.sampling.fastgcn import FastGCNSampler
from lightning_gnn_dist.sampling.ladies import LadiesSampler
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.shadow import ShadowSampler
from lightning_gnn_dist.sampling.walk import RandomWalkSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.scattered.datamodule import ScatteredDataModule
from lightning_gnn_dist.scattered.prepare import prepare_share
from lightning_gnn_dist.scattered.share import save_shares
from lightning_gnn_dist.strategies.base import RoundStrategy
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from lightning_gnn_dist.strategies.names import register
from lightning_gnn_dist.strategies.tma import TMAStrategy

register()

__version__ = "0.1.0"

__all__ = [
    "BatchKey",
    "ClusterSampler",
    "Coverage",
    "DataFigures",
    "DeviceSampler",
    "DiscrepancyProbe",
    "Elastic",
    "EveryPass",
    "EverySeconds",
    "EverySteps",
    "FastGCNSampler",
    "Fixed",
    "Graph",
    "GrappaStrategy",
    "Held",
    "LLCGStrategy",
    "LadiesSampler",
    "LinkDataModule",
    "LinkRanking",
    "LinkSplit",
    "LocalSGDStrategy",
    "MatrixSampler",
    "MetisPartitioner",
    "NeighborSampler",
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
    "ScatteredDataModule",
    "ShadowSampler",
    "StreamingPartitioner",
    "SuperNodePartitioner",
    "TMAStrategy",
    "WholePartSampler",
    "communities",
    "coverage_mean",
    "predict_by_layer",
    "prepare_graph",
    "prepare_share",
    "quantize_rows",
    "save_shares",
    "split_edges",
]
