"""What training on a graph costs that nobody here can hold: a trillion edges on 64 hosts, by formulas.

    python benchmarks/cost_model.py                          # the tables of cost_model.md
    python benchmarks/cost_model.py --cut 0.3 --gbit 100     # every assumption is an option
    python benchmarks/cost_check.py DIRECTORY                # the formulas against runs of four processes

Letters: P hosts, B seeds a batch and rank, M bytes of the model, S correction steps, c chance that a neighbour lies on
another host. A ring sends 2 (P - 1) / P of M for an all-reduce. The constants are those of scale.md and sampling.md.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
SCATTERED = ("LLCG", "DDP, global sampling")
STRATEGIES = ("local SGD", "TMA", *SCATTERED[:1], "Grappa", *SCATTERED[1:])
RMAT_HALF = 0.76  # of the edges fall on the half of the nodes whose bit is 0
EXACT_DEGREES = 400  # larger ones are their mean


@dataclass(frozen=True)
class Measured:
    """What one core takes, from scale.md and sampling.md of this folder.

    Args:
        scan_ns: Reading an edge that another host owns, when a host makes its own share; both passes.
        sort_ns: Preparing an edge that is kept: dealt, sorted, written.
        partition_ns: ``StreamingPartitioner``, an edge.
        partition_bytes: The same, a node.
        sample_ns: Drawing an edge from a part.
        gather_ns: Copying a row of 64 numbers to float32.
        draw_ns: Drawing an edge across shares, with all that is sorted for it.
        train_ns: A step, for each node of its batch.
    """

    scan_ns: float = 85.0
    sort_ns: float = 270.0
    partition_ns: float = 190.0
    partition_bytes: float = 13.0
    sample_ns: float = 28.0
    gather_ns: float = 48.0
    draw_ns: float = 540.0
    train_ns: float = 580.0


@dataclass(frozen=True)
class Setting:
    """The graph, the hosts, and how they train.

    Args:
        nodes: N.
        edges: As stored: an undirected edge is two.
        features: Numbers of a node.
        feature_bytes: Of each of them.
        other_bytes: A node's label, masks and number.
        train_share: Nodes to train on.
        hosts: P, each with one rank.
        gbit: Of every host's link, a second and direction.
        exchange_ms: Until an exchange of nothing is over.
        cut: c.
        fanouts: Neighbours drawn in each hop.
        batch_size: B.
        bulk: Batches that are sampled together.
        local_steps: Steps of a round.
        round_seconds: Of a round of TMA.
        correction_steps: S.
        anchor_steps: Batches of the anchor of LLCG.
        model_bytes: M.
    """

    nodes: float = 1e10
    edges: float = 1e12
    features: int = 64
    feature_bytes: float = 2
    other_bytes: float = 19
    train_share: float = 0.01
    hosts: int = 64
    gbit: float = 10
    exchange_ms: float = 3
    cut: float = 0.91
    fanouts: tuple[int, ...] = (15, 10)
    batch_size: int = 1024
    bulk: int = 4
    local_steps: int = 16
    round_seconds: float = 30
    correction_steps: int = 1
    anchor_steps: int = 4
    model_bytes: float = 5e5

    @property
    def id_bytes(self) -> int:
        return 4 if self.nodes < 2**31 else 8

    @property
    def row_bytes(self) -> float:
        """Of all arrays of a node."""
        return self.features * self.feature_bytes + self.other_bytes

    @property
    def steps(self) -> int:
        """Of a pass, on each rank."""
        return math.ceil(self.nodes * self.train_share / self.hosts / self.batch_size)


@dataclass(frozen=True)
class Degrees:
    """How many nodes have how many neighbours."""

    counts: Column
    degrees: Column

    @classmethod
    def of(cls, degrees: NDArray[np.int64]) -> Degrees:
        """Those of a graph."""
        found, counts = np.unique(degrees, return_counts=True)
        return cls(counts.astype(float), found.astype(float))

    @classmethod
    def rmat(cls, nodes: float, edges: float) -> Degrees:
        """Those of an R-MAT graph made undirected, of any size: of ``L`` bits, nodes with k ones are alike."""
        bits = round(math.log2(nodes))
        counts, found = [], []
        for ones in range(bits + 1):
            mean = edges * RMAT_HALF ** (bits - ones) * (1 - RMAT_HALF) ** ones
            many = float(math.comb(bits, ones))
            if mean > EXACT_DEGREES / 2:
                counts.append(np.array([many]))
                found.append(np.array([mean]))
            else:
                counts.append(many * _poisson(mean))
                found.append(np.arange(EXACT_DEGREES, dtype=float))
        return cls(np.concatenate(counts), np.concatenate(found))

    @classmethod
    def full(cls, nodes: float, edges: float) -> Degrees:
        """All alike. Where that is above the fan-outs, batches are as large as they can be."""
        return cls(np.array([nodes]), np.array([edges / nodes]))

    def thinned(self, share: float) -> Degrees:
        """Of a part that holds each neighbour with this chance; a mean for each node."""
        return Degrees(self.counts, self.degrees * share)


@dataclass(frozen=True)
class Batch:
    """What is sampled around ``seeds`` of a rank, in the mean.

    Args:
        nodes: Nodes first met in each hop, the seeds first; their rows are fetched.
        edges: Drawn in each hop, by the nodes met in the hop before.
        union: Distinct nodes of a bulk for each of its batches, as a share of all nodes of the batch.
    """

    nodes: tuple[float, ...]
    edges: tuple[float, ...]
    union: float = 1.0

    @classmethod
    def around(cls, seeds: float, degrees: Degrees, fanouts: tuple[int, ...], bulk: int = 1) -> Batch:
        """Seeds at random; a neighbour is any node, with a chance in proportion to its degree, or who was met before.

        Edges go both ways: from every node but the seeds one of its edges leads back to where it was met.
        """
        counts, total = degrees.counts, float((degrees.counts * degrees.degrees).sum())
        new = np.full_like(counts, seeds / float(counts.sum()))  # the chance to be met in this hop
        met, nodes, edges = new.copy(), [seeds], []
        for fanout in fanouts:
            drawn = np.minimum(degrees.degrees, fanout)
            edges.append(float((counts * new * drawn).sum()))
            back = float((counts * new * drawn / np.maximum(degrees.degrees, 1)).sum()) if edges[1:] else 0.0
            new = (1 - met) * -np.expm1(-(edges[-1] - back) * degrees.degrees / total)
            met = met + new
            nodes.append(float((counts * new).sum()))
        union = float((counts * -np.expm1(bulk * np.log1p(-np.minimum(met, 1 - 1e-12)))).sum())
        return cls(tuple(nodes), tuple(edges), union / (bulk * sum(nodes)))


def ring(num_bytes: float, hosts: int) -> float:
    """What a host sends for an all-reduce."""
    return 2 * num_bytes * (hosts - 1) / hosts


def remote(setting: Setting, hops: int, *, own_seeds: bool) -> list[float]:
    """The chance that a node lies on another host, for the seeds and every hop."""
    here, chances = 1.0 if own_seeds else 1 / setting.hosts, []
    others = max(setting.hosts - 1, 1)
    for _ in range(hops + 1):
        chances.append(1 - here)
        here = here * (1 - setting.cut) + (1 - here) * setting.cut / others
    return chances


def sampling_bytes(setting: Setting, batch: Batch, *, own_seeds: bool, bulk: int) -> float:
    """What a host sends for a batch that is sampled across shares: ids, numbers of edges, edges; ids and rows."""
    chances, hops = remote(setting, len(batch.edges), own_seeds=own_seeds), len(batch.edges)
    asked = sum(
        away * (nodes * (setting.id_bytes + 4) + edges * setting.id_bytes)
        for away, nodes, edges in zip(chances, batch.nodes, batch.edges, strict=False)
    )
    rows = sum(away * nodes for away, nodes in zip(chances, batch.nodes, strict=True))
    announced = (setting.hosts - 1) * (hops * (16 + 8 / bulk) + 8 / bulk)
    return asked + rows * batch.union * (8 + setting.row_bytes) + announced


@dataclass(frozen=True)
class Epoch:
    """A pass over the training nodes on every host: bytes it sends, and seconds by what they are spent on."""

    num_bytes: float
    computing: float
    sending: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.computing + self.sending + self.waiting


def epoch(strategy: str, setting: Setting, degrees: Degrees, measured: Measured) -> Epoch:
    """What a strategy costs in a pass. Parts are sampled in the background, shares are not."""
    part = Batch.around(setting.batch_size, degrees.thinned(1 - setting.cut), setting.fanouts)
    local = max(_training(part, measured), _making(part, measured.sample_ns, measured.gather_ns))
    model, steps, rounds = ring(setting.model_bytes, setting.hosts), setting.steps, setting.steps / setting.local_steps
    hops = len(setting.fanouts)
    if strategy == "TMA":
        rounds = max(1.0, steps * local / setting.round_seconds)
    if strategy in ("local SGD", "TMA"):
        return _epoch(setting, rounds * model, steps * local, rounds)
    if strategy == "Grappa":
        return _epoch(setting, steps * model, steps * local, steps)
    bulk = setting.bulk if strategy != "LLCG" else 1
    whole = Batch.around(setting.batch_size, degrees, setting.fanouts, bulk)
    sampled = sampling_bytes(setting, whole, own_seeds=strategy != "LLCG", bulk=bulk)
    busy = _training(whole, measured) + _making(whole, measured.draw_ns, measured.gather_ns)
    exchanges = 4 * hops + 3  # lengths, headers, nodes, counts and edges of a hop; ids and rows of a bulk
    if strategy == "DDP, global sampling":
        return _epoch(setting, steps * (model + sampled), steps * busy, steps * (1 + exchanges / bulk))
    batches = setting.correction_steps + setting.anchor_steps
    sent = rounds * ((setting.correction_steps + 4) * model + batches * sampled)
    own = setting.anchor_steps * local  # the own gradient that the anchor is compared with
    computing = steps * local + rounds * (batches * busy + own)
    return _epoch(setting, sent, computing, rounds * (setting.correction_steps + 4 + batches * exchanges))


def memory(setting: Setting) -> dict[str, float]:
    """Bytes of a host."""
    nodes, edges = setting.nodes / setting.hosts, setting.edges / setting.hosts
    return {
        "share on disk": nodes * (8 + setting.row_bytes) + edges * setting.id_bytes,
        "part in RAM": nodes * (8 + setting.row_bytes + 4) + (1 - setting.cut) * edges * 4,
        "ids of all training nodes (LLCG)": 8 * setting.nodes * setting.train_share,
        "model, gradient, Adam, drift": 5 * setting.model_bytes,
        "making the share of a range, in RAM": 2e9 + 16 * nodes,
        "making the share of an assignment, in RAM": 2e9 + 16 * nodes + setting.nodes * (4 + setting.id_bytes),
        "making the share, on disk beside it": 8 * edges,
    }


def preparation(setting: Setting, measured: Measured) -> dict[str, float]:
    """Seconds of one core, or of a disk or link."""
    per_host = setting.edges / setting.hosts
    raw = 2 * setting.id_bytes * setting.edges / 2  # an undirected edge is read once
    link = setting.gbit * 1e9 / 8
    return {
        "each host reads all edges, keeps and sorts its own": 1e-9
        * (measured.scan_ns * setting.edges / 2 + measured.sort_ns * per_host),
        "the same, reading twice over its link": 2 * raw / link,
        "one host sorts all": 1e-9 * measured.sort_ns * setting.edges,
        "one host streams over all to cut them": 1e-9 * measured.partition_ns * setting.edges,
    }


def _training(batch: Batch, measured: Measured) -> float:
    return 1e-9 * measured.train_ns * sum(batch.nodes)


def _making(batch: Batch, edge_ns: float, row_ns: float) -> float:
    return 1e-9 * (edge_ns * sum(batch.edges) + row_ns * sum(batch.nodes))


def _epoch(setting: Setting, num_bytes: float, computing: float, exchanges: float) -> Epoch:
    return Epoch(num_bytes, computing, num_bytes * 8e-9 / setting.gbit, exchanges * setting.exchange_ms / 1e3)


def _poisson(mean: float) -> Column:
    found = np.arange(EXACT_DEGREES, dtype=float)
    logs = np.concatenate([[0.0], np.log(found[1:]).cumsum()])
    chances: Column = np.exp(found * math.log(max(mean, 1e-300)) - mean - logs)
    return chances


def report(setting: Setting, measured: Measured) -> str:
    """The tables."""
    lines = ["| on each host | GB |", "|---|---|"]
    lines += [f"| {what} | {size / 1e9:,.3g} |" for what, size in memory(setting).items()]
    lines += ["", "| preparing | hours |", "|---|---|"]
    lines += [f"| {what} | {seconds / 3600:,.1f} |" for what, seconds in preparation(setting, measured).items()]
    kinds = {"R-MAT": Degrees.rmat, "at most": Degrees.full}
    for kind, degrees in ((kind, make(setting.nodes, setting.edges)) for kind, make in kinds.items()):
        batch = Batch.around(setting.batch_size, degrees, setting.fanouts)
        lines += ["", f"{kind}: {sum(batch.nodes):,.0f} nodes and {sum(batch.edges):,.0f} edges a batch.", ""]
        lines += [
            "| strategy | GB sent a host | s computing | s sending | s waiting | s in all |",
            "|---|---|---|---|---|---|",
        ]
        for strategy in STRATEGIES:
            cost = epoch(strategy, setting, degrees, measured)
            figures = [cost.computing, cost.sending, cost.waiting, cost.seconds]
            lines.append(f"| {strategy} | {cost.num_bytes / 1e9:,.2f} | {' | '.join(f'{f:,.0f}' for f in figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in (Setting, Measured):
        for name, default in kind().__dict__.items():
            many = {"nargs": "+"} if isinstance(default, tuple) else {}
            of = type(default[0]) if isinstance(default, tuple) else type(default)
            parser.add_argument(f"--{name.replace('_', '-')}", type=of, default=default, **many)  # type: ignore[arg-type]
    options = vars(parser.parse_args())
    options["fanouts"] = tuple(options["fanouts"])
    print(report(*(kind(**{name: options[name] for name in kind().__dict__}) for kind in (Setting, Measured))))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
