"""LazyAdam against torch's Adam and SparseAdam."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_gnn_dist import LazyAdam
from lightning_gnn_dist.extensions.elastic.living_peers import refuse_states
from lightning_gnn_dist.extensions.tables import growing_rows
from lightning_gnn_dist.extensions.tables.exchange import Touches
from lightning_gnn_dist.extensions.tables.growing_rows import GrowingRows
from lightning_gnn_dist.rounds.own_states import states_of


def nets() -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Embedding(40, 4, sparse=True), nn.Linear(4, 3)])
    return made, copy.deepcopy(made)


def loss_of(net: nn.ModuleList, ids: Tensor) -> Tensor:
    loss: Tensor = net[1](net[0](ids)).square().sum()
    return loss


def test_each_kind_of_gradient_steps_as_with_torch() -> None:
    ours, theirs = nets()
    groups = [{"params": ours[1].parameters(), "weight_decay": 0.1}, {"params": ours[0].parameters()}]
    optimizer = LazyAdam(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
    adam = torch.optim.Adam(theirs[1].parameters(), weight_decay=0.1, **settings)  # type: ignore[arg-type]
    sparse = torch.optim.SparseAdam(theirs[0].parameters(), **settings)  # type: ignore[arg-type]
    for step in range(12):
        ids = torch.randint(0, 30, (0 if step == 5 else 7,))
        for net, steppers in ((ours, [optimizer]), (theirs, [adam, sparse])):
            net.zero_grad()
            loss_of(net, ids).backward()
            for stepper in steppers:
                stepper.step()
    assert torch.equal(ours[1].weight, theirs[1].weight)
    assert torch.equal(ours[0].weight, theirs[0].weight)
    assert torch.equal(ours[0].weight[30:], nets()[0][0].weight[30:])
    state = optimizer.state[ours[0].weight]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"] and int(state["step"]) == 12


def test_its_state_is_saved_and_restored() -> None:
    ours, others = nets()
    first, second = LazyAdam(ours.parameters()), LazyAdam(others.parameters())
    for _ in range(2):
        first.zero_grad()
        loss_of(ours, torch.tensor([1, 1, 3])).backward()
        first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        others.load_state_dict(ours.state_dict())
    for net, stepper in ((ours, first), (others, second)):
        net.zero_grad()
        stepper.step(lambda net=net: loss_of(net, torch.tensor([2])).backward())  # type: ignore[misc]
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), others.parameters(), strict=True))


def test_decay_of_rows_is_refused() -> None:
    net, _ = nets()
    loss_of(net, torch.tensor([1])).backward()
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 with sparse gradients: .* a group of their own"):
        LazyAdam(net.parameters(), weight_decay=0.1).step()


def test_elastic_ranks_refuse_tables() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has sparse gradients, and with peers=Elastic\(\) .*sparse=False"):
        refuse_states(module := nets()[0], states_of(module))


# Who puts together the rows that ranks have touched is known with two waits.


OF_RANKS = [[0, 2, 3, 7, 8], [], [2, 3, 4, 8, 9, 11], [3, 7]]


@pytest.mark.gpu
def test_the_host_waits_for_the_number_of_ids_and_for_counts() -> None:
    notes = pytest.importorskip("pretend", reason="only pretended devices count how often the host waits").notes
    of_ranks = [torch.tensor(ids, dtype=torch.int64, device="cuda") for ids in OF_RANKS]
    notes.clear()
    touches = Touches(of_ranks)
    for rank in range(4):
        touches.of_home(rank), [touches.sent(rank, home) for home in range(4)]
    assert sum(times for (kind, _, _), times in notes.items() if kind == "sync") == 2, notes


# Rows that become more and more, against a dictionary.


@pytest.mark.parametrize("least_bytes", [0, growing_rows._LEAST_BYTES])
def test_rows_are_those_of_a_dictionary(least_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_rows, "_LEAST_BYTES", least_bytes)
    rows, known, counts = GrowingRows(), {}, dict[int, int]()
    rows.declare("row", torch.zeros(1, 2))
    rows.declare("count", torch.full((1,), 5))
    chance = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(300, (30,), generator=chance).unique()
        is_new = rows.slots(ids) < 0
        assert is_new.tolist() == [row not in known for row in ids.tolist()]
        made = torch.randn(int(is_new.sum()), 2, generator=chance)
        rows.add(ids[is_new], {"row": made})
        known |= dict(zip(ids[is_new].tolist(), made, strict=True))
        slots = rows.slots_with(ids)
        rows.put("count", slots, rows.take("count", slots) + 1)
        counts |= {row: counts.get(row, 5) + 1 for row in ids.tolist()}
    ids, slots = rows.by_id()
    assert ids.tolist() == sorted(known)
    assert torch.equal(rows.take("row", slots), torch.stack([known[row] for row in sorted(known)]))
    assert rows.take("count", slots).tolist() == [counts[row] for row in sorted(known)]
    some, slots = rows.in_ranges([(10, 40), (40, 40), (250, 260)])
    assert some.tolist() == [row for row in sorted(known) if 10 <= row < 40 or 250 <= row < 260]
    assert torch.equal(rows.slots(some), slots)
    assert len(rows.all_of("row")) == len(rows) == len(known)
