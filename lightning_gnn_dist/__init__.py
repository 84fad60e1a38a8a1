"""Train graph neural networks on partitioned graphs with PyTorch Lightning.

graph -> partition -> residency -> sample -> batch -> local step -> meeting -> correct -> evaluate

A folder imports only from those above it, and no two on one line import each other.

gone.py             what the release before had, and what to use in its place
checks.py           what a user may pass, and one wording of refusals; no decision about training
answers.py          what is answered to arguments that there are not
names.py            what the core asks for by a name; no extension is imported before
short_names.py      what Lightning knows by a name
joint.py            what folders ask of each other without importing each other, as Protocols; no code that runs
wire/  graph/       what ranks say to each other, and who is there; nothing about graphs or models
                    the whole graph in RAM or mapped: CSR, arrays, saved files; no partition, no batch
partition/  engine/ every node in exactly one chunk, one partitioner a file; nothing about ranks
                    the loops that draw: kernels, their torch twins, random numbers; neither PyG nor Lightning
prepare/  sampling/ files become saved graphs and shards in bounded memory; no training
                    one sampler a file: seeds of many batches in, samples out; no features
batches/            a sample becomes a batch, in time: gathering, buffers, devices, loaders; no parts
layers/             models by their layers: on a batch, or each layer once for all nodes, shared by the ranks
boundary/           the edges that leave a part: nodes that come along, and what else knows of those outside
data/  rounds/      what a rank reads: residency, coverage, parts, data modules; no strategy
                    what strategies share: start, refusals, clock, meeting, drift, averages; no data module
strategies/         what ranks exchange, and when: one method a file
callbacks/          what a user may watch a training by, and the record that a run leaves
cli/                the command `lightning-gnn-dist`; the one place that prints
extensions/         what a user may pass, a folder each, which nothing above imports: ranks that may die, learned rows
"""

import ast
import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lightning_gnn_dist.answers import answers_unknown_names, did_you_mean
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.names import FOLDER, imported, is_there
from lightning_gnn_dist.short_names import tell_lightning

# The one list of public names. Each is imported when it is first asked for: torch, PyG and Lightning take seconds,
# and few programs need all.
if TYPE_CHECKING:
    from lightning_gnn_dist.boundary.boundary import Auto as Auto
    from lightning_gnn_dist.boundary.boundary import Fetch as Fetch
    from lightning_gnn_dist.boundary.boundary import Halo as Halo
    from lightning_gnn_dist.boundary.boundary import Isolated as Isolated
    from lightning_gnn_dist.boundary.coverage import Coverage as Coverage
    from lightning_gnn_dist.boundary.coverage import coverage_mean as coverage_mean
    from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe as DiscrepancyProbe
    from lightning_gnn_dist.callbacks.predictions import PredictionWriter as PredictionWriter
    from lightning_gnn_dist.callbacks.run_report import RunReport as RunReport
    from lightning_gnn_dist.data.datamodule import PartitionedDataModule as PartitionedDataModule
    from lightning_gnn_dist.extensions.elastic.living_peers import Elastic as Elastic
    from lightning_gnn_dist.extensions.exchange.exchange import Exchange as Exchange
    from lightning_gnn_dist.extensions.history.history import History as History
    from lightning_gnn_dist.extensions.inductive.inductive import inductive_graph as inductive_graph
    from lightning_gnn_dist.extensions.larger_than_memory.chunks import Sweep as Sweep
    from lightning_gnn_dist.extensions.links.link_datamodule import LinkDataModule as LinkDataModule
    from lightning_gnn_dist.extensions.links.link_split import LinkSplit as LinkSplit
    from lightning_gnn_dist.extensions.links.link_split import split_edges as split_edges
    from lightning_gnn_dist.extensions.links.ranking import LinkRanking as LinkRanking
    from lightning_gnn_dist.extensions.passes.prediction import predict_by_layer as predict_by_layer
    from lightning_gnn_dist.extensions.ready_made.layers import layers_of as layers_of
    from lightning_gnn_dist.extensions.rounded.reducers import Overlapped as Overlapped
    from lightning_gnn_dist.extensions.rounded.reducers import Rounded as Rounded
    from lightning_gnn_dist.extensions.shards.divide import save_shards as save_shards
    from lightning_gnn_dist.extensions.subgraphs.shadow import ShadowSampler as ShadowSampler
    from lightning_gnn_dist.extensions.subgraphs.walk import RandomWalkSampler as RandomWalkSampler
    from lightning_gnn_dist.extensions.tables.lazy_adam import LazyAdam as LazyAdam
    from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding as OwnedEmbedding
    from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler as TemporalSampler
    from lightning_gnn_dist.extensions.temporal.time_split import split_by_time as split_by_time
    from lightning_gnn_dist.graph.graph import Graph as Graph
    from lightning_gnn_dist.graph.synthetic import citations as citations
    from lightning_gnn_dist.graph.synthetic import communities as communities
    from lightning_gnn_dist.homes.residency import Fixed as Fixed
    from lightning_gnn_dist.homes.residency import Holding as Holding
    from lightning_gnn_dist.homes.residency import Redeal as Redeal
    from lightning_gnn_dist.homes.residency import Rotate as Rotate
    from lightning_gnn_dist.homes.settings import Evaluation as Evaluation
    from lightning_gnn_dist.homes.settings import GlobalBatching as GlobalBatching
    from lightning_gnn_dist.homes.settings import Loading as Loading
    from lightning_gnn_dist.layers.through_layers import through_layers as through_layers
    from lightning_gnn_dist.partition.base import Partition as Partition
    from lightning_gnn_dist.partition.metis import MetisPartitioner as MetisPartitioner
    from lightning_gnn_dist.partition.random import RandomPartitioner as RandomPartitioner
    from lightning_gnn_dist.partition.streaming import StreamingPartitioner as StreamingPartitioner
    from lightning_gnn_dist.partition.supernode import SuperNodePartitioner as SuperNodePartitioner
    from lightning_gnn_dist.prepare.prepare_graph import prepare_graph as prepare_graph
    from lightning_gnn_dist.rounds.clock import EveryPass as EveryPass
    from lightning_gnn_dist.rounds.clock import EverySeconds as EverySeconds
    from lightning_gnn_dist.rounds.clock import EverySteps as EverySteps
    from lightning_gnn_dist.rounds.drift import Drift as Drift
    from lightning_gnn_dist.rounds.launching import Launch as Launch
    from lightning_gnn_dist.rounds.means import Outer as Outer
    from lightning_gnn_dist.sampling.cluster import ClusterSampler as ClusterSampler
    from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler as FastGCNSampler
    from lightning_gnn_dist.sampling.layer_wise import LadiesSampler as LadiesSampler
    from lightning_gnn_dist.sampling.neighbor import NeighborSampler as NeighborSampler
    from lightning_gnn_dist.sampling.whole import WholePartSampler as WholePartSampler
    from lightning_gnn_dist.strategies.correction import Correction as Correction
    from lightning_gnn_dist.strategies.grappa import GrappaStrategy as GrappaStrategy
    from lightning_gnn_dist.strategies.llcg import LLCGStrategy as LLCGStrategy
    from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy as LocalSGDStrategy
    from lightning_gnn_dist.strategies.tma import TMAStrategy as TMAStrategy

__version__ = "0.1.0"


def _listed() -> dict[str, str]:
    """Return the module of each name of the list above, which is read here as type checkers read it.

    Without those whose extension was taken out.
    """
    source = ast.parse(inspect.getsource(sys.modules[__name__]))
    names = next(statement for statement in source.body if isinstance(statement, ast.If))
    imports = [line for line in names.body if isinstance(line, ast.ImportFrom)]
    found = {alias.name: str(line.module) for line in imports for alias in line.names}
    return {name: module for name, module in found.items() if not module.startswith(FOLDER) or is_there(module)}


_DEFINED_IN = _listed()

if not TYPE_CHECKING:  # to a type checker, they would say that there are no names, or any
    __all__ = sorted(_DEFINED_IN)

    def __getattr__(name):
        if said := way_out(name):
            raise ImportError(said)  # of an AttributeError `from ... import` would tell nothing
        if name not in _DEFINED_IN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, _DEFINED_IN)}")
        try:
            module = import_module(_DEFINED_IN[name])
            value = answers_unknown_names(getattr(module, name))
        except AttributeError as error:  # Python would say that there is no such name, and not why
            raise ImportError(f"{_DEFINED_IN[name]} could not be imported: {error}") from error
        setattr(module, name, value)  # where pickle looks for a function
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*_DEFINED_IN, *(name for name in globals() if name.startswith("__"))]


def _import_all() -> None:
    for name, module in _DEFINED_IN.items():
        if imported(f"{module}:"):
            getattr(sys.modules[__name__], name)


tell_lightning(_import_all)
