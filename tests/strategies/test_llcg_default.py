"""A round of LLCG as it is by default, against one by hand."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.by_hand import agreement, decay_by_hand
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import Remembering, data_module, fit, model, small_graph

RANKS, STEPS, ROUNDS = 3, 3, 3
RATE = 0.001  # small: shifts then change little from round to round, and fade more slowly


class Plain(SAGE):
    """In float64."""

    def __init__(self) -> None:
        super().__init__(12, 4, blocks=False)
        self.double()

    def logits(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def forward(self, batch: Any) -> Tensor:
        return self.logits(batch.x, batch.edge_index)[: batch.batch_size]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=RATE)


def plain() -> Plain:
    torch.manual_seed(0)
    return Plain()


def double_graph() -> tuple[lgd.Graph, lgd.Partition]:
    """A graph, and parts of 44, 133 and 223 nodes."""
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    return graph, lgd.Partition((torch.arange(400).sqrt() / 20 * RANKS).int(), RANKS)


def in_rounds(rank: int, world_size: int, settings: list[tuple[Any, int]]) -> list[State]:
    """The ends of fits by a reducer, with so many local steps in a round."""
    found = []
    for reducer, steps in settings:
        graph, partition = double_graph()
        data = lgd.PartitionedDataModule(
            graph,
            partitioner=partition,
            sampler=lgd.WholePartSampler(2),
            batch_size=10**6,
            boundary=lgd.Isolated(),
            global_batching=lgd.GlobalBatching(batch_size=10**6, sampler=lgd.NeighborSampler([-1, -1])),
        )
        module = plain()
        strategy = lgd.LLCGStrategy(lgd.EverySteps(steps), reducer=reducer, **PATIENCE)
        fit(strategy, module, data, world_size, max_epochs=ROUNDS, limit_val_batches=0)
        state = {name: value for name, value in state_of(module).items() if not name.startswith("accuracy")}
        found.append(state)
    return found


def by_hand(steps: int = STEPS) -> State:
    """Local steps that are shifted, a mean with momentum, moments averaged, one correction step for ten, an anchor.

    The shift of a rank fades the more slowly the less it has changed.
    """
    corrections, (graph, partition) = math.ceil(steps / 10), double_graph()
    x, y, train = (graph.node_arrays[name] for name in ("x", "y", "train_mask"))
    edges = torch.stack([graph.indices.long(), torch.arange(400).repeat_interleave(graph.degrees())])

    def gradient(net: Plain, nodes: Tensor) -> list[Tensor]:
        place = torch.full((400,), -1).index_put((nodes,), torch.arange(len(nodes)))
        inside = place[edges][:, (place[edges] >= 0).all(0)]
        logits = net.logits(x[nodes], inside)[train[nodes]]
        return list(torch.autograd.grad(functional.cross_entropy(logits, y[nodes][train[nodes]]), net.parameters()))

    def step(adam: torch.optim.Adam, gradients: list[Tensor]) -> None:
        for parameter, each in zip(adam.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = each
        adam.step()

    everyone, parts = torch.arange(400), [partition.nodes(rank) for rank in range(RANKS)]
    share = [int(train[nodes].sum()) / int(train.sum()) for nodes in parts]
    mean, nets = plain(), [plain() for _ in parts]
    adams = [torch.optim.Adam(net.parameters(), lr=RATE) for net in nets]
    corrector = torch.optim.Adam(mean.parameters(), lr=RATE / corrections**0.75)
    speed = [torch.zeros_like(p) for p in mean.parameters()]
    old, decays = list[Tensor](), [0.8] * RANKS

    def shifts_now() -> list[list[Tensor]]:
        whole = gradient(mean, everyone)
        return [[a - b for a, b in zip(whole, gradient(mean, nodes), strict=True)] for nodes in parts]

    shifts = shifts_now()
    for _ in range(ROUNDS):
        for net, nodes, adam, shift, decay in zip(nets, parts, adams, shifts, decays, strict=True):
            net.load_state_dict(mean.state_dict())
            for number in range(steps):
                step(adam, [g + decay**number * s for g, s in zip(gradient(net, nodes), shift, strict=True)])
        ends = [list(net.parameters()) for net in nets]
        ways = [
            (parameter - sum(w * end[place] for w, end in zip(share, ends, strict=True))).detach()
            for place, parameter in enumerate(mean.parameters())
        ]
        momentum, old = 0.8 * agreement(ways, old) ** 4, ways
        for place, (parameter, way) in enumerate(zip(mean.parameters(), ways, strict=True)):
            speed[place] = momentum * speed[place] + way
            parameter.data -= speed[place]
            states = [adam.state[list(net.parameters())[place]] for net, adam in zip(nets, adams, strict=True)]
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = sum(w * state[moment] for w, state in zip(share, states, strict=True))
                for state in states:
                    state[moment] = whole.clone()
            corrector.state[parameter] = copy.deepcopy(states[0])
        for _ in range(corrections):
            step(corrector, gradient(mean, everyone))
        before, shifts = shifts, shifts_now()
        decays = [decay_by_hand(then, now) for then, now in zip(before, shifts, strict=True)]
    return state_of(mean)


def test_a_round_is_that_by_hand() -> None:
    expected, longer = by_hand(), by_hand(12)
    for exact, long in run_ranks(in_rounds, RANKS, [(None, STEPS), (None, 12)]):
        assert max(float((exact[name] - expected[name]).abs().max()) for name in exact) < 1e-12
        assert max(float((long[name] - longer[name]).abs().max()) for name in exact) < 1e-11


def calls(rank: int, world_size: int) -> list[float]:
    """How often a rank calls the step in the second round, of ten local steps."""
    counted = []
    for drift in (lgd.Drift(), lgd.Drift(anchor_steps=1)):
        strategy = lgd.LLCGStrategy(lgd.EverySteps(10), drift=drift, **PATIENCE)
        trainer = fit(strategy, model(), data_module(), world_size, max_epochs=2, limit_val_batches=0)
        counted.append(float(trainer.callback_metrics["round/gradients"]) / world_size)
    return counted


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_round_calls_the_step_for_two_anchors_and_a_correction() -> None:
    assert run_ranks(calls, 2) == [[10 + 4 + 4 + 1, 10 + 1 + 1 + 1]] * 2


# Law 7: a run of LLCG that was stopped and resumed ends where the other ends.


PLAIN: dict[str, Any] = {"drift": None, "average_optimizer": False, "outer": None}


def resumed(rank: int, world_size: int, folder: str, kind: type[SAGE], options: dict[str, Any]) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(kind, dropout=0.5)
        torch.manual_seed(rank)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        strategy = lgd.LLCGStrategy(lgd.EverySteps(4, growth=1.5, limit=8), **options, **PATIENCE)
        settings = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 4, "limit_val_batches": 0}
        fit(strategy, module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(SAGE, PLAIN | {"correction": lgd.Correction.as_published(2)}, marks=pytest.mark.slow),
        pytest.param(SAGE, {"drift": lgd.Drift("ranks"), "correction": None}, marks=pytest.mark.slow),
        (SAGE, {"drift": lgd.Drift("global"), "correction": lgd.Correction(0.5, lr="local")}),
        pytest.param(SAGE, {"correction": lgd.Correction(optimizer="persistent")}, marks=pytest.mark.slow),
        pytest.param(Remembering, {}, marks=pytest.mark.slow),
    ],
    ids=["paper", "ranks", "global", "persistent", "buffers"],
)
def test_a_resumed_run_ends_with_the_same_weights(kind: type[SAGE], options: dict[str, Any], tmp_path: Path) -> None:
    for whole, again in run_ranks(resumed, 2, str(tmp_path), kind, options):
        assert differs(whole, again) == 0.0


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second round on, and ``again`` when a run is resumed."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.convs[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.convs[0], optimizer, lr=0.001)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.again and trainer.current_epoch > 1:
            self.make_trainable(module.convs[0])


class TrainsWhatIsNotFrozen(SAGE):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def resumed_after_unfreezing(rank: int, world_size: int, folder: str, again: bool) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(TrainsWhatIsNotFrozen)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        settings = {"enable_checkpointing": True, "callbacks": [saver, Unfreeze(again)]}
        fit(lgd.LLCGStrategy(lgd.EverySteps(2), **PATIENCE), module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_resuming_needs_what_was_unfrozen(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"shifts 6 parameters .* trains 3 .* at the latest in on_train_start"):
        run_ranks(resumed_after_unfreezing, 2, str(tmp_path), False)
    for whole, again in run_ranks(resumed_after_unfreezing, 2, str(tmp_path), True):
        assert differs(whole, again) == 0.0
