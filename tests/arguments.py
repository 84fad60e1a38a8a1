"""What the contract of arguments needs: a valid call of everything public, odd values, and which of them are right."""

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN

import lightning_gnn_dist as lgd
import lightning_gnn_dist as package
from lightning_gnn_dist.checks import Rule
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.partition.partition_report import PartitionReport
from lightning_gnn_dist.rounds.clock import RoundProgress
from tests.extensions import MISSING, brought
from tests.pages import public

LATE = {kind.__name__: kind for kind in (Data, HeteroData, PartitionReport)}  # loaded late
HUGE = 10**5000  # too long for str() and repr()
LONG = "y" * 10_000
ODD: dict[str, Any] = {
    "None": None,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "2**70": 2**70,
    "huge": HUGE,
    "1j": 1j,
    "half": Fraction(1, 2),
    "zero byte": "a\0b",
    "x": "x",
    "empty": "",
    "long": LONG,
    "bytes": b"x",
    "[]": [],
    "[None]": [None],
    "[0.5]": [0.5],
    "[-1]": [-1],
    "['x']": ["x"],
    "{}": {},
    "{1: 2}": {1: 2},
    "True": True,
    "object": object(),
    "a class": None,  # that of the valid value
    "np.int64": np.int64(3),
    "np.float64": np.float64(1.5),
    "array": np.array([0.5, 2.5]),
    "tensor": torch.tensor([0.5, 2.5]),
    "lambda": lambda: None,
}

# Values of these arguments, beside those that follow from their types, mean something.
RIGHT: dict[str, set[str]] = {
    **{name: {"0"} for name in ("seed", "epoch", "batch", "super_epoch", "rank", "part", "index", "start", "stop")},
    **{name: {"0"} for name in ("num_own", "round_idx", "cache_bytes", "weight_decay", "homophily", "noise")},
    **{name: {"0"} for name in ("mean_degree", "val", "test", "slack", "decay")},
    "prefix": {"empty"},
    "drop": {"[]"},
    "failed_ranks": {"[]"},
    "hits": {"[]"},
    "node_arrays": {"{}"},
    "held_arrays": {"{}"},
    "edge_arrays": {"{}"},
    "beside": {"{}"},
    "kinds": {"{}"},
    "num_neighbors": {"[-1]"},  # all
    "losses": {"tensor"},
    "fingerprint": {"empty"},  # of a graph that nobody asks for it
    "num_senders": {"0"},
}
RIGHT_OF: dict[tuple[str, str], set[str]] = {
    ("Correction", "optimizer"): {"a class"},  # called with parameters, later
    ("Correction", "lr"): {"a class", "1.5", "np.int64", "np.float64"},
    ("sample_bulk", "seeds"): set(),
}
# Classes that only say what others are like, or hold what the package itself puts there.
NO_CONSTRUCTORS = {
    "Boundary",
    "GraphTypes",
    "Held",
    "Partitioner",
    "Residency",
    "RoundClock",
    "RoundProgress",
    "Sample",
    "Sampler",
    "BatchKey",
}
# Methods that Lightning or the package calls, never a user.
NOT_FOR_USERS = {
    *("batches_of_round", "peers_of", "of_steps"),
    *("weigh", "weight_of_rows", "begin_state", "meet", "restore_extra_state", "hooks", "steps_of_round"),
    *("importance", "scales", "check_fits", "around", "extra", "meeting_hooks", "of_types", "check_graph"),
    *("check_beside", "check_data", "check_in_fit", "check_settings", "check_shard", "partitioner", "suits", "wrap"),
    *("ask", "begin_training", "check_before_ranks", "node_columns", "of_graph", "of_steps", "places_of"),
    *("agree", "begin", "bounds", "check_nodes", "check_plan", "finish", "part", "target"),
    *("count", "held", "num_chunks", "sweep", "turns", "weights"),
}


@dataclass(frozen=True)
class Case:
    """One public function and what it is called with."""

    name: str
    function: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    hints: Mapping[str, Any]

    def arguments(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [name for name, p in inspect.signature(self.function).parameters.items() if p.kind not in kinds]

    def call(self, **odd: Any) -> Any:
        return self.function(**self.valid() | odd)

    def value(self, argument: str, odd: str) -> Any:
        """The odd value; in the place of a class that of the valid value."""
        if odd != "a class":
            return ODD[odd]
        usual = self.valid().get(argument, inspect.signature(self.function).parameters[argument].default)
        return object if usual is None or usual is inspect.Parameter.empty else type(usual)

    def right(self, argument: str) -> set[str]:
        """The odd values that may pass."""
        found = right_of_type(self.hints.get(argument, object)) | RIGHT.get(argument, set())
        of_extensions = {key: odd for more in brought("arguments") for key, odd in more.RIGHT_OF.items()}
        return (RIGHT_OF | of_extensions).get((self.name, argument), found)


def right_of_type(hint: Any) -> set[str]:
    """What a type alone makes right."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(right_of_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return {"0"} if 0 in get_args(hint) else set()
    if get_origin(hint) is Annotated:
        kind, rule = get_args(hint)
        found = right_of_type(kind)
        return {odd for odd in found | {"0"} if passes(rule, ODD[odd])} if isinstance(rule, Rule) else found
    if hint in (None, type(None)):
        return {"None"}
    return {
        bool: {"True"},
        int: {"np.int64"},
        float: {"1.5", "np.int64", "np.float64"},
        str: {"x", "long", "zero byte"},
    }.get(hint, {"x"} if hint is Path else set())


def passes(rule: Rule, value: Any) -> bool:
    """Whether a rule of an annotation lets a value pass."""
    try:
        rule.check(value=value)
    except ValueError:
        return False
    return True


class Layered(pl.LightningModule):
    """The smallest module that predict_by_layer takes."""

    def layers(self) -> list[Any]:
        return [lambda batch: batch.x[: batch.batch_size]]


class World:
    """Values for valid calls, made once; files in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, count()
        self.graph = lgd.communities(60, 2, num_features=4)
        self.data = Data(edge_index=self.graph.indices.long().expand(2, -1), num_nodes=60)
        self.partition = lgd.RandomPartitioner()(self.graph, 2, 0)
        self.module = lgd.PartitionedDataModule(
            self.graph, batch_size=8, partitioner=lgd.RandomPartitioner(), loading=lgd.Loading(num_threads=0)
        )
        self.graph.save(folder / "graph")
        (folder / "arrays").mkdir()
        np.save(folder / "arrays" / "edge_index.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
        np.save(folder / "arrays" / "num_nodes.npy", np.array(4))
        for place, name, array in (("nodes/a", "num_nodes", 4), ("edges/a__to__a", "edge_index", [[0, 1], [1, 2]])):
            (folder / "typed" / place).mkdir(parents=True)
            np.save(folder / "typed" / place / name, np.array(array))
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        self.trainer = pl.Trainer(accelerator="cpu", **quiet)

    def new(self, suffix: str = "") -> Path:
        return self.folder / f"new{next(self._number)}{suffix}"


def cases(world: World) -> Iterator[Case]:
    """Everything public: constructors, functions and methods."""
    valid = valid_calls(world)
    instances = instances_of(world)
    for name, thing in public().items():
        if not inspect.isclass(thing):
            yield Case(name, thing, valid[name], get_type_hints(thing))
            continue
        if name not in NO_CONSTRUCTORS:
            hints = get_type_hints(thing if is_dataclass(thing) else thing.__init__, include_extras=True)
            yield Case(name, thing, valid.get(name, dict), hints)
        for method in methods_of(thing) if name not in NO_CONSTRUCTORS else ():
            bound = getattr(instances.get(f"{name}.{method}", instances[name])(), method)
            call = valid.get(f"{name}.{method}", valid.get(method))
            if call is None and MISSING:  # of an extension, tried with another that is not there
                continue
            assert call is not None, f"{name}.{method} is public: give it a valid call in valid_calls()."
            hints = get_type_hints(bound, localns=LATE)
            yield Case(f"{name}.{method}", bound, call, hints)
    yield Case("BatchKey", _sampled_with(world), lambda: {"seed": 1, "epoch": 1, "batch": 1}, get_type_hints(BatchKey))


def _sampled_with(world: World) -> Callable[..., Any]:
    def sample(seed: int, epoch: int, batch: int) -> Any:
        return lgd.NeighborSampler([2]).sample_bulk(world.graph, [torch.arange(3)], [BatchKey(seed, epoch, batch)])

    return sample


def methods_of(thing: type) -> list[str]:
    """Its public methods with arguments that this package has defined, and nobody else before it."""
    found = []
    for name in dir(thing):
        owners = [level for level in thing.__mro__ if name in vars(level)]
        ours = [level.__module__.startswith(package.__name__) for level in owners]
        if (name.startswith("_") and name != "__call__") or name in NOT_FOR_USERS or not owners or not all(ours):
            continue
        attribute = inspect.getattr_static(thing, name)
        if not isinstance(attribute, types.FunctionType | classmethod | staticmethod):
            continue
        if set(inspect.signature(getattr(thing, name)).parameters) - {"self"}:
            found.append(name)
    return found


def instances_of(world: World) -> dict[str, Callable[[], Any]]:
    """An object of each class that has methods: what its constructor makes of a valid call, unless it is listed."""
    valid = valid_calls(world)
    made: dict[str, Callable[[], Any]] = {
        name: (lambda name=name, thing=thing: thing(**valid.get(name, dict)())) for name, thing in public().items()
    }
    for more in brought("arguments"):
        made |= more.instances(world)
    return made | {
        "Graph": lambda: world.graph,
        "Graph.with_seeds": lambda: lgd.citations(100, 1),
        "PartitionedDataModule": lambda: world.module,
        "Partition": lambda: world.partition,
    }


Calls = dict[str, Callable[[], dict[str, Any]]]


def valid_calls(world: World) -> Calls:
    """Arguments that are needed, by name of the function, or of the method alone where all of that name are alike."""
    found = _of_samplers() | _of_classes(world) | _of_graphs(world) | _of_functions(world) | _of_methods(world)
    for more in brought("arguments"):
        found |= more.calls(world)
    return found


def _of_samplers() -> Calls:
    sampler = lgd.NeighborSampler([3, 2])
    return {
        "ClusterSampler": lambda: {"num_hops": 2},
        "DeviceSampler": lambda: {"sampler": sampler},
        **dict.fromkeys(("FastGCNSampler", "LadiesSampler"), lambda: {"num_nodes": [8]}),
        "NeighborSampler": lambda: {"num_neighbors": [3, 2]},
        "RandomWalkSampler": lambda: {"num_hops": 2, "visits": 1},
        "ShadowSampler": lambda: {"num_neighbors": [3], "num_hops": 2},
        "TemporalSampler": lambda: {"num_neighbors": [3, 2], "time": "y"},  # classes are times like any numbers
        "WholePartSampler": lambda: {"num_hops": 2},
    }


def _of_classes(world: World) -> Calls:
    return {
        "EverySeconds": lambda: {"seconds": 1.0},
        "EverySteps": lambda: {"steps": 4},
        "LazyAdam": lambda: {"params": [torch.nn.Parameter(torch.ones(2))]},
        "OwnedEmbedding": lambda: {"num_embeddings": 6, "embedding_dim": 2},
        "OneShard": lambda: {"index": 0, "num_shards": 2},
        "Partition": lambda: {"assignment": torch.tensor([0, 1], dtype=torch.int32), "num_parts": 4},
        "PartitionedDataModule": lambda: {"graph": world.graph},
        "PredictionWriter": lambda: {"path": "predicted.npy"},
        "Redeal": lambda: {"num_supernodes": 8},
        "SuperNodePartitioner": lambda: {"num_supernodes": 8},
        "Sweep": lambda: {"chunks": 2, "of": 8},
    }


def _of_graphs(world: World) -> Calls:
    none, edge_index = torch.empty(0, dtype=torch.int64), torch.tensor([[0, 1], [1, 0]])
    return {
        "Graph": lambda: {"indptr": torch.tensor([0, 0]), "indices": none},
        "Graph.from_edge_index": lambda: {"edge_index": edge_index, "num_nodes": 5},
        "Graph.from_pyg": lambda: {"data": world.data},
        "Graph.halo": lambda: {"nodes": torch.arange(4)},
        "Graph.induced": lambda: {"nodes": torch.arange(4)},
        "Graph.open": lambda: {"path": world.folder / "graph"},
        "Graph.save": lambda: {"path": world.new()},
        "Graph.split": lambda: {"name": "train"},
        "Graph.with_seeds": lambda: {"node_type": "paper"},
        "Partition.nodes": lambda: {"part": 0},
        "Partition.report": lambda: {"graph": world.graph},
    }


def _of_functions(world: World) -> Calls:
    graph, arrays = world.graph, world.folder / "arrays"
    model, trainer = Layered(), world.trainer
    timed = lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 9, {"time": torch.arange(9)})
    return {
        "citations": lambda: {"num_papers": 200, "num_fields": 1, "mean_degree": 2.0},
        "communities": lambda: {"num_nodes": 40, "num_classes": 1, "num_features": 2, "mean_degree": 2.0},
        "coverage_mean": lambda: {"losses": torch.ones(2), "batch": Data(batch_size=2)},
        "inductive_graph": lambda: {"graph": graph},
        "layers_of": lambda: {"gnn": GCN(4, 4, 2)},
        "predict_by_layer": lambda: {"trainer": trainer, "model": model, "graph": graph, "path": world.new(".npy")},
        "prepare_graph": lambda: {"source": arrays, "out": world.new()},
        "reorder_graph": lambda: {"graph": graph, "partition": world.partition, "path": world.new()},
        "save_shards": lambda: {"graph": graph, "partition": world.partition, "folder": world.new()},
        "split_by_time": lambda: {"graph": timed},
        "through_layers": lambda: {"module": model, "batch": Data(torch.ones(3, 2))},
    }


def _of_methods(world: World) -> Calls:
    graph, seeds = world.graph, torch.arange(4)
    chunked = lgd.Graph(graph.indptr, graph.indices, graph.node_arrays | {"chunk": world.partition.assignment})
    return {
        "as_published": dict,
        "diloco": dict,
        "__call__": lambda: {"graph": graph, "num_parts": 2, "seed": 0},
        "anchor_batches": lambda: {"round_idx": 0},
        "correction_batches": lambda: {"round_idx": 0},
        "is_over": lambda: {"progress": RoundProgress(0, 1, 2)},
        "local_steps": lambda: {"round_idx": 1},
        "only": lambda: {"nodes": [3, 1]},
        "order": lambda: {"graph": chunked, "seeds": seeds, "seed": 0, "epoch": 0},
        "part": lambda: {"rank": 0, "num_parts": 2},
        "partition": lambda: {"num_parts": 2},
        "parts_of_ranks": lambda: {"num_ranks": 2},
        "sample_bulk": lambda: {"graph": chunked, "seeds": [seeds], "keys": [BatchKey(0, 0, 0)]},
    }
