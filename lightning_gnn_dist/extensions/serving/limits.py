"""What a server does at most, whatever is asked."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnn_dist.rules import Count, Positive, check_fields


@dataclass(frozen=True)
class Limits:
    """What a server does at most.

    Args:
        nodes: Nodes whose rows a request may ask for.
        new_nodes: New nodes that a request may bring.
        edges: Edges that it may bring, with those of the graph into the same nodes of the graph.
        links: The best links that it may ask for, of all its nodes together.
        bytes: How large its body may be.
        seconds: How long it may take to come, and then to be answered.
        waiting: How many requests may wait.
    """

    nodes: Count = 1000
    new_nodes: Count = 1000
    edges: Count = 100_000
    links: Count = 10_000
    bytes: Count = 1 << 20
    seconds: Positive = 5.0
    waiting: Count = 256

    def __post_init__(self) -> None:
        check_fields(self)
