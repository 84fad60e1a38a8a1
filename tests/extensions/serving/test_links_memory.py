"""Questions for the best links read the rows of all receivers where they lie, in bounded memory."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_gnn_dist import Graph, LinkDataModule, LinkSplit, through_layers
from lightning_gnn_dist.extensions.links import ranking as known_module
from lightning_gnn_dist.extensions.links.best_links import links_of
from lightning_gnn_dist.extensions.links.ranking import Known, KnownBySender, held_links
from lightning_gnn_dist.extensions.passes.row_table import Room, RowTable
from lightning_gnn_dist.extensions.serving.links import LinkAnswerer, Ranked
from lightning_gnn_dist.extensions.serving.question import Limits
from lightning_gnn_dist.graph import rows
from lightning_gnn_dist.graph.rows import Lookup
from tests.extensions.links.test_best_links import film_split, known, plain_split
from tests.extensions.serving.test_links import quiet
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.ranks import run_ranks

COUNT, WIDTH = 60_000, 64


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, WIDTH)

    def layers(self) -> Any:
        return [lambda batch: self.linear(batch.x)]

    def forward(self, batch: Any) -> Tensor:
        found, (sender, receiver) = through_layers(self, batch), batch.edge_label_index
        return (found[sender] * found[receiver]).sum(1)


@pytest.mark.parametrize("lies_in", ["ram", "file"])
def test_a_run_of_rows_is_what_was_written(lies_in: str) -> None:
    ids, written = torch.tensor([2, 5, 6, 7, 8, 11]), torch.arange(12.0).double().view(6, 2)
    table = RowTable(ids, written, Room(1 << 20 if lies_in == "ram" else 0, None))
    table.write(ids.flip(0), written.flip(0))
    assert table.is_file == (lies_in == "file")
    found, again = table.take_run(ids[1:5]), table.take_run(ids[1:5])
    assert found.equal(written[1:5]) and found.equal(table.take(ids[1:5]))
    assert (found.data_ptr() == again.data_ptr()) == (lies_in == "ram")  # not copied


@pytest.mark.parametrize("typed", [False, True])
def test_what_is_left_out_by_sender_is_that_by_receiver(typed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split: LinkSplit = film_split() if typed else plain_split()
    names: Any = ("edges", "val", "test") if typed else ("edges", "val", "self")
    links, graph = links_of(split, names), split.graph
    number = None if links.ends.target_type is None else links.ends.target_type.number
    of_all = Known(graph, lambda ids: ids, number, held_links(split, links.ends, names), True, "self" in names)
    monkeypatch.setattr(rows, "EDGES_PER_PIECE", 5)
    monkeypatch.setattr(known_module, "EDGES_PER_PIECE", 3)
    by_sender = KnownBySender(of_all, graph)
    senders = torch.arange(links.ends.senders.start, links.ends.senders.stop)[1::3]
    scores = torch.zeros(len(senders), len(links.ends.receivers))
    receivers = torch.arange(links.ends.receivers.start, links.ends.receivers.stop)
    by_sender.of(senders, torch.empty(2, 0).long()).leave_out_(scores, Lookup(senders), receivers)
    for sender, row in zip(senders.tolist(), scores, strict=True):
        wanted = {r for s, r in known(split, *names) if s == sender - links.ends.senders.start}
        assert set((row == -math.inf).nonzero().view(-1).tolist()) == wanted


def measured(rank: int, world_size: int) -> dict[str, int]:
    """The memory that a question takes where all rows take 15 MB, in RAM or in a file."""
    give_back_at_once()
    torch.manual_seed(0)
    one_way = torch.randint(0, COUNT, (2, 1000))
    edges, x = torch.cat([one_way, one_way.flip(0)], 1), torch.randn(COUNT, 2)
    data, found = LinkDataModule(LinkSplit(Graph.from_edge_index(edges, COUNT, {"x": x}), {})), dict[str, int]()
    for name, megabytes in (("ram", 128), ("file", 16)):
        how = Ranked("dot", ("edges", "self"), megabytes << 20)
        served = LinkAnswerer(quiet(), Wide(), data, Limits(), 1000, how)
        served.warm_up()
        assert served._ranking.receivers.is_file == (name == "file")
        question = served.form.read({"nodes": [3, 17]})
        served.answers([question])
        with Peak("VmRSS") as peak:
            for _ in range(20):
                served.answers([question])
        found[name] = peak.added_bytes
    return found


@reads_memory
@pytest.mark.slow
def test_a_question_takes_scores_and_no_copy_of_all_rows() -> None:
    (found,) = run_ranks(measured, 1)
    assert found["ram"] < 8 << 20 and found["file"] < 12 << 20
