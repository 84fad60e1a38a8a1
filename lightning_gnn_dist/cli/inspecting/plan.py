"""What ``inspect --plan`` prints: memory, disk, wire and time of a graph that is not there yet, by formulas.

batch of a rank   = nodes that fan-outs reach from its seeds, as if neighbours were drawn at random from its part
seconds of a step = the longer of the layers' time, by a probe of this machine, and the time that making a batch takes
sent for a model  = 2 (hosts - 1) / hosts of it, as in a ring
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.cli.inspecting.columns import in_columns
from lightning_gnn_dist.cli.inspecting.nodes import Speed
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import bytes_per_node
from lightning_gnn_dist.homes.memory import Needs
from lightning_gnn_dist.layers.budget import free_bytes
from lightning_gnn_dist.layers.reach import Reach
from lightning_gnn_dist.partition import kaminpar, metis
from lightning_gnn_dist.partition.advice import bytes_of_part
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY

# Of one core, from the measurements in benchmarks/: scale.md, partitioners.md, sampling.md.
PREPARE, DRAW, COPY = 500e-9, 28e-9, 0.75e-9  # seconds: an edge that is prepared, one that is drawn, a number of a row
CUT = {"MetisPartitioner": 1.7e-6, "KaMinParPartitioner": 0.8e-6, "StreamingPartitioner": 0.19e-6}  # an edge
OF_STREAMING, OF_PREPARING, OF_LIBRARIES = 13, 24, 350_000_000  # bytes: a node, a node, a process
OF_ASKING = 9  # bytes: a node that another host has, its number and how many neighbours it has
ROUND, BACKWARD, SLICES = 16, 3, 1.5  # local steps; steps in forward passes; LLCG's calls for each local step
MODELS = {  # sent in a step
    "GrappaStrategy()": 1.0,
    "GrappaStrategy(reducer=Rounded(8))": 0.3,
    f"LocalSGDStrategy(EverySteps({ROUND}))": 1 / ROUND,
    f"LLCGStrategy(EverySteps({ROUND}))": 2 / ROUND,
}
FEW = 0.2  # of the computing, which the wire may take


@dataclass(frozen=True)
class Plan:
    """A graph that is not there yet, and the hosts that are to train on it.

    Attributes:
        nodes: Nodes.
        edges: Edges as stored: one that goes both ways counts twice.
        features: Numbers of a node.
        bytes: Of each of them: 1, 2, 4 or 8.
        train: Share of the nodes to train on.
        cut: Share of the edges between parts.
        hosts: Hosts.
        ranks: Ranks of each host.
        memory: Of a host, in GB; 0 for what is free here.
    """

    nodes: float
    edges: float
    features: float = 128
    bytes: float = 4
    train: float = 0.1
    cut: float = 0.3
    hosts: float = 1
    ranks: float = 1
    memory: float = 0

    @classmethod
    def of(cls, words: Sequence[str]) -> Plan:
        """Return the plan that ``nodes=1e9 edges=2e10 ...`` describe."""
        names, given = [field.name for field in fields(cls)], dict[str, float]()
        for word in words:
            name, _, value = word.partition("=")
            try:
                given[name] = float(value)
            except ValueError:
                name = ""
            if name not in names:
                raise ValueError(f"--plan takes {', '.join(names)}, each with a number, nodes=1e9; got {word!r}.")
        if missing := [name for name in ("nodes", "edges") if name not in given]:
            raise ValueError(f"--plan lacks {missing[0]}: write --plan nodes=1e9 edges=2e10.")
        plan = cls(**given)
        plan._check()
        return plan

    def _check(self) -> None:
        for name in ("nodes", "edges", "features", "hosts", "ranks"):
            value = getattr(self, name)
            if not (1 <= value < 1e15 and value == int(value)):
                raise ValueError(f"--plan takes {name} as a whole number of at least 1, got {name}={value:g}.")
        if self.bytes not in _KINDS:
            raise ValueError(f"--plan takes bytes=1, 2, 4 or 8 for each number of a node, got bytes={self.bytes:g}.")
        if not 0 < self.train <= 1 or not 0 <= self.cut < 1 or not 0 <= self.memory < math.inf:
            raise ValueError(
                "--plan takes train more than 0 and at most 1, cut from 0 and less than 1, memory in GB, got "
                f"train={self.train:g}, cut={self.cut:g}, memory={self.memory:g}."
            )

    @property
    def parts(self) -> float:
        return self.hosts * self.ranks

    @property
    def room(self) -> float:
        return self.memory * 1e9 or free_bytes()


_KINDS = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def planned(options: argparse.Namespace) -> str:
    """Return the tables, and what they advise."""
    plan = Plan.of(options.plan)
    steps = math.ceil(plan.nodes * plan.train / plan.parts / options.batch_size)
    batch, seconds = batch_of(plan, options), step_of(plan, options)
    title = (
        f"{plan.nodes:,.0f} nodes, {plan.edges:,.0f} edges, {plan.features:.0f} numbers of {plan.bytes:.0f} bytes a "
        f"node, {plan.train:.2g} of the nodes to train on, hosts: {plan.hosts:.0f}, ranks of each: {plan.ranks:.0f}."
        + (f" Assumed: {plan.cut:.0%} of the edges lie between parts." if plan.parts > 1 else "")
    )
    speed = (
        f"\nA pass has {steps:,} steps of {options.batch_size:,} seeds on each rank, whose batches reach at most "
        f"{batch.nodes[-1]:,.0f} nodes. At {options.bandwidth:g} Gbit/s:"
    )
    sent = list(_strategies(plan, options, steps, seconds))
    rows = [(name, in_bytes(size), f"{wire:,.3g} s", _told(total)) for name, size, wire, total in sent]
    strategies = in_columns([("", "sent by a host in a pass", "seconds of it", "a pass"), *rows], str.ljust)
    advice = [*_about_memory(plan, options), _about_wire(plan, sent, steps * seconds)]
    ends = [f"- {sentence}" for sentence in advice]
    return "\n".join([title, "", *in_columns(list(_memory(plan, options)), str.ljust), speed, *strategies, "", *ends])


def batch_of(plan: Plan, options: argparse.Namespace) -> Reach:
    """Return the nodes and edges of a batch of a rank, hop by hop."""
    held, degree = plan.nodes / plan.parts, plan.edges / plan.nodes
    new = met = min(float(options.batch_size), held)
    nodes, edges = [met], list[float]()
    for fanout in options.fanout:
        drawn = new * min(fanout, degree)
        new = (held - met) * -math.expm1(-drawn / held)
        met += new
        nodes.append(met)
        edges.append(drawn + (edges[-1] if edges else 0.0))
    return Reach([math.ceil(each) for each in nodes], [math.ceil(each) for each in edges])


def step_of(plan: Plan, options: argparse.Namespace) -> float:
    """Return the seconds of a step: making the next batch goes on meanwhile, on another core."""
    batch = batch_of(plan, options)
    trained = BACKWARD * Speed.measured().of(batch, int(plan.features), options.width)
    return max(trained, DRAW * batch.edges[-1] + COPY * batch.nodes[-1] * plan.features)


def model_bytes(plan: Plan, options: argparse.Namespace) -> float:
    """Return what GraphSAGE takes: two weights a layer, in float32."""
    return float(8 * options.width * (plan.features + (len(options.fanout) - 1) * options.width))


def part_bytes(plan: Plan, parts: float, *, halo: bool = False) -> float:
    """Return what one of so many parts takes in RAM; with a halo of one hop, at most."""
    share = plan.cut if parts > 1 else 0.0
    nodes, edges, cut = plan.nodes / parts, (1 - share) * plan.edges / parts, share * plan.edges / parts
    if halo:
        nodes, edges = min(plan.nodes, nodes + cut), edges + cut
    return float(bytes_of_part(_skeleton(plan), torch.tensor(nodes), torch.tensor(edges)))


def _skeleton(plan: Plan) -> Graph:
    """A graph of one node with the planned arrays, to ask what a row takes."""
    arrays = {"x": torch.zeros(1, int(plan.features), dtype=_KINDS[int(plan.bytes)]), "y": torch.zeros(1).long()}
    masks = {f"{split}_mask": torch.tensor([split == "train"]) for split in ("train", "val", "test")}
    return Graph(torch.zeros(2).long(), torch.zeros(0).int(), arrays | masks)


def host_bytes(
    plan: Plan, options: argparse.Namespace, *, halo: bool = False, per_host: bool = False, on_shards: bool = False
) -> float:
    """Return what all ranks of a host take in a fit. On shards nobody lists all nodes."""
    part = int(part_bytes(plan, plan.hosts if per_host else plan.parts, halo=halo))
    batches = 2 * Loading().bulk_size * batch_of(plan, options).nodes[-1] * bytes_per_node(_skeleton(plan))
    lists, ranks = 0 if on_shards else 4 * int(plan.nodes), int(plan.ranks)
    held, mapped = (lists, part) if per_host else (part + lists, 0)
    return ranks * OF_LIBRARIES + Needs(held, held, batches, mapped).of_host(ranks)


def saved_bytes(plan: Plan) -> float:
    """Return what a saved graph takes on disk."""
    size = 4 if plan.nodes < 2**31 else 8
    return float((plan.nodes + 1) * 8 + plan.edges * size + plan.nodes * bytes_per_node(_skeleton(plan)))


def _memory(plan: Plan, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The rows of the table of disk, memory and time, with its head."""
    partitioner = type(default_partitioner(int(plan.edges), int(plan.room), is_told=False)).__name__
    of_edges = {"MetisPartitioner": metis.BYTES_PER_EDGE, "KaMinParPartitioner": kaminpar.BYTES_PER_EDGE}
    cutting = of_edges.get(partitioner, 0) * plan.edges or OF_STREAMING * plan.nodes
    yield "", "disk", "memory of a host", "one core"
    yield (
        "prepare",
        f"{in_bytes(saved_bytes(plan))}, {in_bytes(8 * plan.edges)} more meanwhile",
        in_bytes(DEFAULT_MEMORY + OF_PREPARING * plan.nodes),
        _told(PREPARE * plan.edges),
    )
    if plan.parts > 1:
        yield f"cut, {partitioner}()", "", in_bytes(cutting), _told(CUT[partitioner] * plan.edges)
        yield (
            "prepare, all ranks together",
            f"{in_bytes(saved_bytes(plan) / plan.hosts)} on each",
            in_bytes(plan.ranks * DEFAULT_MEMORY + OF_PREPARING * plan.nodes / plan.hosts),
            _told(PREPARE * plan.edges / plan.parts),
        )
    yield "train", "", in_bytes(host_bytes(plan, options)), ""
    if plan.parts > 1:
        yield "train, with Halo(1)", "", f"at most {in_bytes(host_bytes(plan, options, halo=True))}", ""
    if plan.hosts > 1:
        yield "train, on shards", "", in_bytes(host_bytes(plan, options, on_shards=True)), ""
    if plan.ranks > 1:
        yield 'train, Holding(per="host")', "", in_bytes(host_bytes(plan, options, per_host=True)), ""


def _strategies(
    plan: Plan, options: argparse.Namespace, steps: int, seconds: float
) -> Iterator[tuple[str, float, float, float]]:
    """Yield the name of each strategy, bytes that a host sends in a pass, their seconds, and those of the pass."""
    model = 2 * (plan.hosts - 1) / plan.hosts * model_bytes(plan, options)
    in_a_step = {name: models * model for name, models in MODELS.items()}
    if plan.hosts > 1:
        batch, row = batch_of(plan, options), bytes_per_node(_skeleton(plan))
        rows = plan.ranks * plan.cut * (batch.nodes[-1] - batch.nodes[0]) * (row + OF_ASKING)
        in_a_step["GrappaStrategy(), boundary=Fetch()"] = model + rows
    for name, size in in_a_step.items():
        sent = steps * size
        wire = sent * 8 / (options.bandwidth * 1e9)
        yield name, sent, wire, wire + steps * seconds * (SLICES if name.startswith("LLCG") else 1)


def _about_memory(plan: Plan, options: argparse.Namespace) -> Iterator[str]:
    takes, where = host_bytes(plan, options), "A host" if plan.memory else "This host"
    if takes <= plan.room:
        yield f"{where} has {in_bytes(plan.room)} of memory for the {in_bytes(takes)} that its ranks take."
        return
    beside = takes - plan.ranks * part_bytes(plan, plan.parts)  # which more hosts do not make less
    ways = []
    if plan.ranks > 1 and (once := host_bytes(plan, options, per_host=True)) <= plan.room:
        ways.append(f'hold one part for all ranks of a host, Holding(per="host"), which takes {in_bytes(once)}')
    if plan.bytes > 2:
        ways.append("save features as float16")
    if plan.room > beside:
        ways.append(f"take {math.ceil(plan.hosts * (takes - beside) / (plan.room - beside)):,} hosts")
        ways.append(f"hold some chunks at a time, Holding(Sweep(bytes={_rounded((plan.room - beside) / plan.ranks)}))")
    told = "; or ".join(ways) if ways else "take hosts of more memory"
    yield f"{where} has {in_bytes(plan.room)} of memory, and its ranks take {in_bytes(takes)}: {told}."


def _about_wire(plan: Plan, sent: Sequence[tuple[str, float, float, float]], computing: float) -> str:
    if plan.hosts == 1:
        return "Nothing goes over a wire: GrappaStrategy() loses nothing."
    for name, _, wire, _ in sent[:2]:
        if wire <= FEW * computing:
            return (
                f"{name}: gradients at every step, which the wire carries in {wire / computing:.0%} of the computing."
            )
    return (
        f"Gradients at every step, in 8 bits, take {sent[1][2] / computing:.1f} times as long as the computing: meet "
        f"rarely, {sent[2][0]} on super-nodes, or {sent[3][0]} where accuracy falls short."
    )


def _rounded(size: float) -> str:
    digits = 10 ** max(0, int(math.log10(max(size, 1))) - 1)
    return str(int(size // digits * digits))


def _told(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2g} s"
