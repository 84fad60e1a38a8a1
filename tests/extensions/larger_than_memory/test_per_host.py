"""Ranks of a host hold one part between them, and deal its seeds among them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Correction,
    Elastic,
    EverySteps,
    Exchange,
    Graph,
    GrappaStrategy,
    Halo,
    Holding,
    Isolated,
    LinkDataModule,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    Sweep,
    TMAStrategy,
    WholePartSampler,
    citations,
    communities,
    split_edges,
)
from lightning_gnn_dist.extensions.larger_than_memory.shared_parts import SharedPartReader, Shelf, check_holders
from lightning_gnn_dist.homes.parts import Holder, PartReader
from lightning_gnn_dist.wire.collectives import traffic
from tests.conftest import module_of
from tests.data_fitting import trainer, trainer_on_hosts
from tests.every_strategy import PATIENCE, every_strategy
from tests.memory import reads_memory
from tests.pages import ROOT
from tests.ranks import join, run_ranks, start_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.weighted_fitting import grappa
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

HOSTS, RATE, TOLERANCE = 2, 0.3, 1e-12
LONELY = 3  # a training node, the only one of host 1 in some fits
Seen = list[tuple[Tensor, bool]]  # the seeds of each batch, and whether it is a filler


def graph(lonely: bool = False) -> Graph:
    made = communities(240, 4, num_features=8, train_share=0.4, seed=1)
    made.node_arrays["x"] = made.node_arrays["x"].double()
    if lonely:
        mask = made.node_arrays["train_mask"]
        mask &= chunks().assignment == 0
        mask[LONELY] = True
    return made


def chunks() -> Partition:
    """A part of a third of the nodes for host 1."""
    return Partition(torch.arange(240).remainder(3).eq(0).int(), HOSTS)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)]).double()
        self.seen: Seen = []
        self.sent: list[float] = []  # to other hosts, before each batch

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append((batch.n_id[: batch.batch_size].clone(), batch.is_filler))
        rows = self(batch.x, batch.edge_index)[: batch.batch_size]
        return functional.cross_entropy(rows, batch.y[: batch.batch_size])

    def on_train_batch_start(self, *_: Any) -> None:
        self.sent.append(traffic.bytes_between_hosts)

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


def data_of(source: Graph | None = None, **options: Any) -> PartitionedDataModule:
    defaults: dict[str, Any] = {
        "partitioner": chunks(),
        "sampler": NeighborSampler([-1, -1]),
        "batch_size": 9,
        "seed": 3,
        "holding": Holding(per="host"),
        "boundary": Isolated(),
        "coverage": None,
    }
    return PartitionedDataModule(graph() if source is None else source, **(defaults | options))


def by_steps() -> LocalSGDStrategy:
    return LocalSGDStrategy(EverySteps(3), **PATIENCE)


Place = tuple[int, int, int]  # the rank, how many ranks, how many hosts


def trained(
    place: tuple[int, int, int],
    strategy: Any,
    path: Any = None,
    data: PartitionedDataModule | None = None,
    module: Model | None = None,
    **options: Any,
) -> tuple[State, Seen]:
    module = Model() if module is None else module
    runner = trainer_on_hosts(*place, strategy, **({"max_epochs": 3, "limit_val_batches": 0} | options))
    runner.fit(module, data_of() if data is None else data, ckpt_path=path)
    return state_of(module), module.seen


# The reference.


class ByHand:
    """One model on the edges within a host's part."""

    def __init__(self, source: Graph) -> None:
        self.model, host = Model(), chunks().assignment
        index = torch.stack([source.indices.long(), torch.arange(240).repeat_interleave(source.indptr.diff())])
        self.source, self.index = source, index[:, host[index[0]] == host[index[1]]]

    def gradient(self, seeds: Tensor) -> list[Tensor]:
        rows, labels = self.model(self.source.node_arrays["x"], self.index)[seeds], self.source.node_arrays["y"][seeds]
        return [*torch.autograd.grad(functional.cross_entropy(rows, labels), [*self.model.parameters()])]

    def go(self, gradient: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, slope in zip(self.model.parameters(), gradient, strict=True):
                parameter -= RATE * slope


def grappa_by_hand(source: Graph, ranks: list[Seen]) -> State:
    """Every step goes down the mean loss of the seeds of all ranks that learn in it."""
    one = ByHand(source)
    for batches in zip(*ranks, strict=True):
        seeds = torch.cat([seeds for seeds, is_filler in batches if not is_filler])
        one.go(one.gradient(seeds))
    return state_of(one.model)


def local_sgd_by_hand(source: Graph, ranks: list[Seen], steps: int = 3) -> State:
    """Each rank goes three steps, and their mean is where all go on."""
    replicas = [ByHand(source) for _ in ranks]
    for start in range(0, len(ranks[0]), steps):
        for replica, batches in zip(replicas, ranks, strict=True):
            for seeds, _ in batches[start : start + steps]:
                replica.go(replica.gradient(seeds))
        states = [state_of(replica.model) for replica in replicas]
        mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
        for replica in replicas:
            replica.model.load_state_dict(mean)
    return state_of(replicas[0].model)


def llcg_by_hand(source: Graph, ranks: list[Seen], steps: int = 3) -> State:
    """After each mean all go two steps along the mean loss of a batch of the whole graph, of which each has a slice."""
    replicas, one = [ByHand(source) for _ in ranks], ByHand(source)
    one.index = torch.stack([source.indices.long(), torch.arange(240).repeat_interleave(source.indptr.diff())])
    for start in range(0, len(ranks[0]), steps + 2):
        for replica, batches in zip(replicas, ranks, strict=True):
            for seeds, _ in batches[start : start + steps]:
                replica.go(replica.gradient(seeds))
        states = [state_of(replica.model) for replica in replicas]
        one.model.load_state_dict({name: torch.stack([each[name] for each in states]).mean(0) for name in states[0]})
        for number in range(start + steps, start + steps + 2):
            one.go(one.gradient(torch.cat([batches[number][0] for batches in ranks])))
        for replica in replicas:
            replica.model.load_state_dict(state_of(one.model))
    return state_of(one.model)


def passes(seen: Seen, count: int) -> Iterator[Tensor]:
    """The seeds of each pass that are learned from."""
    size = len(seen) // count
    for number in range(count):
        of_pass = seen[number * size : (number + 1) * size]
        yield torch.cat([seeds[:0] if is_filler else seeds for seeds, is_filler in of_pass])


# The laws.


def alike(rank: int, world_size: int) -> list[tuple[State, Seen]]:
    place = rank, world_size, HOSTS
    return [
        trained(place, make(), data=data_of(holding=Holding(per=per)))
        for make in (grappa, by_steps)
        for per in ("rank", "host")
    ]


def test_with_one_rank_on_each_host_nothing_changes() -> None:
    for of_rank in run_ranks(alike, HOSTS):
        for (one, seen), (other, also_seen) in (of_rank[:2], of_rank[2:]):
            assert differs(one, other) == 0
            assert all(a.equal(b) for (a, _), (b, _) in zip(seen, also_seen, strict=True))


def on_two_hosts(rank: int, world_size: int) -> list[tuple[State, Seen]]:
    place = rank, world_size, HOSTS
    lonely = {"data": data_of(graph(lonely=True))}
    return [trained(place, grappa()), trained(place, by_steps()), trained(place, grappa(), **lonely)]


def test_two_ranks_of_each_host_learn_from_its_seeds_as_by_hand() -> None:
    found = run_ranks(on_two_hosts, 4)
    references = [grappa_by_hand, local_sgd_by_hand, grappa_by_hand]
    for number, reference in enumerate(references):
        source = graph(lonely=number == 2)
        ranks = [of_rank[number][1] for of_rank in found]
        expected = reference(source, ranks)
        assert all(differs(of_rank[number][0], expected) < TOLERANCE for of_rank in found)
    for host in range(HOSTS):
        own = (graph().node_arrays["train_mask"] & (chunks().assignment == host)).nonzero().view(-1)
        first, second = (list(passes(of_rank[0][1], 3)) for of_rank in found[2 * host : 2 * host + 2])
        for both in map(torch.cat, zip(first, second, strict=True)):
            assert both.sort().values.equal(own)  # each seed once, on one of the two
        assert not first[0].sort().values.equal(first[1].sort().values)  # dealt anew in every pass
    fillers = [[is_filler for _, is_filler in of_rank[2][1]] for of_rank in found]
    assert all(fillers[3]) and not all(fillers[2]) and not any(fillers[0] + fillers[1])


def with_every_strategy(rank: int, world_size: int) -> dict[str, tuple[State, float]]:
    place, how = (rank, world_size, HOSTS), {"sampler": WholePartSampler(2), "batch_size": 10**9}
    off: Any = {"correction": None, "drift": None, "outer": None, "average_optimizer": False, "weights": "uniform"}
    made = every_strategy() | {"uncorrected": lambda: LLCGStrategy(EverySteps(3), **off, **PATIENCE)}
    found = {}
    for name, make in made.items():
        module = Model()
        trained(place, make(), data=data_of(**how), module=module, max_epochs=2)
        found[name] = state_of(module), module.sent[-1] - module.sent[0]
    return found


def test_all_strategies_take_it_also_with_whole_parts() -> None:
    """Each rank computes the whole part for its share of the seeds."""
    found = run_ranks(with_every_strategy, 4)
    first, *others = [{name: state for name, (state, _) in of_rank.items()} for of_rank in found]
    assert all(differs(other[name], first[name]) == 0 for other in others for name in first)
    assert differs(first["tma"], first["local_sgd"]) == differs(first["uncorrected"], first["local_sgd"]) == 0
    assert differs(first["llcg"], first["local_sgd"]) > 1e-4
    one = ByHand(graph())
    for _ in range(2):  # passes of one step each
        one.go(one.gradient(graph().split("train")))
    assert differs(first["grappa"], state_of(one.model)) < TOLERANCE
    alone = run_ranks(with_every_strategy, HOSTS)
    numbers = 8 * 2 * HOSTS  # a number that each of two further ranks tells the two hosts
    for name in first:
        of_four, of_two = (sum(of_rank[name][1] for of_rank in ranks) for ranks in (found, alone))
        assert of_two > 3000 and of_four - of_two == numbers * (5 if name == "grappa" else 10)


def typed(rank: int, world_size: int) -> State:
    papers = typed_graph_of_papers().to_pyg()
    for kind in papers.node_types:
        papers[kind].x = papers[kind].x.double()
    torch.manual_seed(0)
    module = HeteroSAGE(papers.edge_types).double()
    data = data_of(Graph.from_pyg(papers, time="time"), partitioner=RandomPartitioner(), task="paper", batch_size=999)
    runner = trainer_on_hosts(rank, world_size, HOSTS, grappa(), max_epochs=3, limit_val_batches=0)
    runner.fit(module, data)
    assert runner.global_step == 3
    return state_of(module)


def test_ranks_of_a_host_share_a_part_with_types() -> None:
    """A pass is one step here, so two ranks of a host learn what one does, but for the order of sums."""
    of_two, of_four = (run_ranks(typed, num_ranks) for num_ranks in (HOSTS, 2 * HOSTS))
    assert all(differs(state, of_two[0]) < TOLERANCE for state in of_four)


class SavesOnce(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def stops_and_goes_on(rank: int, world_size: int, path: Path) -> tuple[State, State, int]:
    place, how = (rank, world_size, HOSTS), {"holding": Holding(Redeal(6), per="host"), "partitioner": None}
    whole, _ = trained(place, grappa(), data=data_of(**how), callbacks=[SavesOnce(path)])
    data = data_of(**how)
    resumed, _ = trained(place, grappa(), path, data=data)
    return whole, resumed, data.part(rank // 2, HOSTS, 2).num_nodes


def test_a_run_whose_parts_change_goes_on_in_mid_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for whole, resumed, num_nodes in run_ranks(stops_and_goes_on, 4, tmp_path / "mid.ckpt"):
        assert differs(whole, resumed) == 0 and 0 < num_nodes < 240
    assert not [*tmp_path.glob("parts-*")]


def corrected() -> LLCGStrategy:
    correction = Correction.as_published(2)
    off: dict[str, Any] = {"drift": None, "outer": None, "average_optimizer": False, "weights": "uniform"}
    return LLCGStrategy(EverySteps(3), correction=correction, **off, **PATIENCE)


def in_rounds(rank: int, world_size: int, folder: Path) -> list[tuple[State, Seen, State]]:
    """Four rounds, and the last two of them again."""
    place, found = (rank, world_size, HOSTS), []
    for name, make in (("llcg", corrected), ("tma", lambda: TMAStrategy(EverySteps(3), **PATIENCE))):
        fits = []
        for path in (None, folder / f"{name}-epoch=1.ckpt"):
            saver = ModelCheckpoint(folder, filename=name + "-{epoch}", save_top_k=-1, enable_version_counter=False)
            how: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": [saver]}
            fits.append(trained(place, make(), path, **how))
        (whole, seen), (again, _) = fits
        found.append((whole, seen, again))
    return found


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_rounds_on_hosts_are_those_by_hand_and_go_on(tmp_path: Path) -> None:
    """One host has twice the nodes of the other, and four ranks one mean."""
    found = run_ranks(in_rounds, 4, tmp_path)
    for number, reference in enumerate((llcg_by_hand, local_sgd_by_hand)):
        expected = reference(graph(), [of_rank[number][1] for of_rank in found])
        for whole, _, again in (of_rank[number] for of_rank in found):
            assert differs(whole, expected) < TOLERANCE and differs(whole, again) == 0


def as_told(rank: int, world_size: int) -> None:
    join(rank, world_size)
    with pytest.raises(ValueError, match=r"num_nodes=1 hosts of devices=2 ranks.*\[\(0, 0\), \(0, 0\)\]"):
        check_holders(Holder(0, 1, 0, 2), world_size)  # each takes itself for the first of its host


def test_a_launcher_that_does_not_say_who_shares_a_host_is_refused() -> None:
    run_ranks(as_told, 2)


def test_ranks_that_may_die_are_refused() -> None:
    pytest.importorskip("torchft")
    with pytest.raises(ValueError, match=r'Holding\(per="host"\) takes hosts whose number stays: leave per out'):
        trainer(1, TMAStrategy(peers=Elastic())).fit(Model(), data_of())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: data_of(boundary=Exchange(), sampler=WholePartSampler(2)),
            r'boundary=Exchange\(\) exchanges rows between ranks with a part each, and per="host"',
        ),
        (
            lambda: LinkDataModule(split_edges(graph()), holding=Holding(per="host")),
            r'Holding\(per="host"\) is for nodes as seeds: leave per out of a LinkDataModule',
        ),
        (lambda: Holding(per="node"), r"per must be"),
    ],
    ids=["Exchange", "links", "another word"],
)
def test_what_needs_a_part_for_each_rank_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# The part of a host lies in memory once, however many ranks hold it; whoever dies, the others have it.


WIDTH = 256
share_of_pages: Any = module_of(ROOT / "benchmarks" / "host_memory.py").share_of_pages


def large_graph() -> Graph:
    return communities(8000, 4, num_features=WIDTH, train_share=0.1, seed=0)


def data_of_large(source: Graph, **options: Any) -> PartitionedDataModule:
    how: dict[str, Any] = {"partitioner": RandomPartitioner(), "sampler": NeighborSampler([2, 2]), "seed": 1}
    return PartitionedDataModule(source, **(how | options))


class Looks(pl.LightningModule):
    """Looks where the features of its part are, once all ranks have read all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 2)
        self.share = 0.0

    def training_step(self, batch: Any) -> Tensor:
        if not self.share:
            x = self.trainer.datamodule._home.running_part().node_arrays["x"]  # type: ignore[attr-defined]
            x.sum()
            self.trainer.strategy.barrier()
            self.share = share_of_pages(x) / x.nbytes
            self.trainer.strategy.barrier()
        return self.linear(batch.x)[: batch.batch_size].square().mean()

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def looked(rank: int, world_size: int) -> float:
    module, data = (
        Looks(),
        data_of_large(large_graph(), holding=Holding(Sweep(chunks=1, of=2), per="host"), batch_size=32),
    )
    how = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    trainer_on_hosts(rank, world_size, 1, GrappaStrategy(**PATIENCE), **how).fit(module, data)
    return module.share


@reads_memory
def test_a_host_has_its_part_once() -> None:
    for num_ranks in (2, 4):
        assert 0.5 < sum(run_ranks(looked, num_ranks)) < 1.2


def readers(made: Graph, folder: Path, num_members: int, **options: Any) -> tuple[PartReader, SharedPartReader]:
    """What reads parts of host 1 of two by itself, and for all ranks."""
    home = data_of_large(made, **options)._home
    own = home._reader(1, 2)  # type: ignore[attr-defined]
    return own, SharedPartReader(**vars(own), folder=folder, num_members=num_members)


@pytest.mark.parametrize("made", [large_graph, lambda: citations(6000)], ids=["plain", "typed"])
def test_a_part_that_is_mapped_is_the_part_that_was_read(made: Any, tmp_path: Path) -> None:
    how = {"holding": Holding(Redeal(6), per="host"), "boundary": Halo(1)}
    own, shared = readers(made(), tmp_path, 2, **how)
    before = None
    for super_epoch in range(2):
        expected = own.read(super_epoch)
        for found in (shared.read(super_epoch, before), shared.read(super_epoch, before)):
            assert found.graph.node_arrays.keys() == expected.graph.node_arrays.keys()
            for name, array in expected.graph.arrays.items():
                assert found.graph.arrays[name].equal(array), name
            assert found.graph.split("train").equal(expected.graph.split("train"))
        before = found
    assert not [each for each in tmp_path.iterdir() if each.suffix != ".lock"]  # all have read both


def dies_or_reads(rank: int, world_size: int, folder: Path) -> int:
    _, shared = readers(large_graph(), folder, world_size)
    if rank == 0:
        object.__setattr__(shared, "_write", lambda *_: ((folder / "begun").touch(), time.sleep(60)))
    else:
        while not (folder / "begun").exists():
            time.sleep(0.01)
    return shared.read(0).graph.num_nodes


def test_if_the_rank_that_reads_a_part_dies_another_reads_it(tmp_path: Path) -> None:
    with start_ranks(dies_or_reads, 2, tmp_path) as ranks:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        ranks._processes[0].kill()
        assert ranks.results(may_die={0})[1] > 0


def hidden(rank: int, world_size: int) -> None:
    join(rank, world_size)
    if rank == 1:
        Path.is_dir = lambda self: False  # type: ignore[method-assign,assignment]  # another /tmp
    with pytest.raises(ValueError, match=r"rank 1 does not see .*parts-.* let TMPDIR name a folder"):
        Shelf(Holder(0, 1, rank, 2))


def test_ranks_of_a_host_that_see_other_files_are_refused() -> None:
    run_ranks(hidden, 2)
