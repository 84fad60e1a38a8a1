"""Ranks that die, stand still and come back. The others go on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.callbacks.averaged_rounds import AveragedRounds
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.elastic.membership import SIGN, waits
from tests.extensions.elastic.elastic_fitting import AWAITED, TIMEOUT_SECONDS, TWO, Fate, come_back, train
from tests.extensions.links.link_model import LinkSAGE, held
from tests.python_server import fast_python
from tests.ranks import RankError, run_ranks, start_ranks
from tests.sage import SAGE
from tests.strategies.fitting import Net, State, differs, fit, state_of

torchft = pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")

MOMENTS = {"outer": lgd.Outer(momentum=0.8, adaptive=True), "average_optimizer": True}
Means = dict[str, Any] | None
MOMENTUM = {"outer": lgd.Outer(momentum=0.5, nesterov=True)}


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize(
    ("fate", "means"),
    [
        (Fate(0, "step"), None),
        (Fate(1, "step"), None),
        (Fate(2, "validation"), None),
        (Fate(0, "meeting"), None),
        (Fate(2, "meeting"), None),
        (Fate(1, "step"), MOMENTS),
    ],
    ids=lambda value: f"{value.rank}-{value.where}" if isinstance(value, Fate) else "moments" if value else "",
)
def test_when_a_rank_is_killed_the_others_go_on(tmp_path: Path, fate: Fate, means: Means) -> None:
    with start_ranks(train, 3, str(tmp_path), 6, fate, None, means) as ranks:
        results = ranks.results(may_die={fate.rank})
    assert results[fate.rank] is None
    one, two = (result for result in results if result is not None)
    assert differs(one.state, two.state) == 0.0
    assert one.rounds == two.rounds == 6 and one.steps == two.steps
    assert one.members[0] == two.members[0] == 3 and one.members[-1] == two.members[-1] == 2
    # One round, the silence, a new group; nobody waits for an answer of the dead.
    assert max(one.seconds[2:] + two.seconds[2:]) < TIMEOUT_SECONDS
    assert (tmp_path / "saved" / "last.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize("means", [None, MOMENTS], ids=["None", "moments"])
def test_a_rank_that_stood_still_catches_up(tmp_path: Path, means: Means) -> None:
    (tmp_path / AWAITED).touch()
    first, second, third = run_ranks(train, 3, str(tmp_path), 20, Fate(1, "step", signal.SIGSTOP), None, means)
    assert differs(first.state, second.state) == differs(first.state, third.state) == 0.0
    assert 2 in first.members and first.members[-1] == second.members[-1] == 3
    assert first.rounds == second.rounds == 20 and len(second.members) < 20  # it missed some


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize(("from_file", "means"), [(False, MOMENTS), (True, MOMENTUM)])
def test_a_rank_that_comes_back_is_healed_and_takes_part(tmp_path: Path, from_file: bool, means: Means) -> None:
    rounds = 32
    (tmp_path / AWAITED).touch()
    with start_ranks(train, 3, str(tmp_path), rounds, Fate(1), None, means) as ranks:
        while not (tmp_path / TWO).exists():  # the others have met without it
            time.sleep(0.1)
        ckpt_path = str(tmp_path / "saved" / "last.ckpt") if from_file else None
        (second,) = run_ranks(come_back, 1, 1, str(tmp_path), rounds, ckpt_path, means)
        first, _, third = ranks.results(may_die={1})
    assert differs(first.state, second.state) == differs(first.state, third.state) == 0.0
    assert first.steps == second.steps and second.rounds == rounds
    assert 2 in first.members and first.members[-1] == 3 and len(second.members) < rounds - 3


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
def test_a_run_goes_on_from_a_checkpoint_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(train, 3, str(tmp_path), 2)
    path = str(tmp_path / "saved" / "last.ckpt")
    saved = torch.load(path, weights_only=True)
    first, second = run_ranks(train, 2, str(tmp_path), 4, Fate(), path)
    assert first.rounds == 4 and len(first.members) == 2 and first.members == second.members
    assert first.steps == second.steps > saved["global_step"]
    assert differs(first.state, second.state) == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
def test_a_rank_that_is_told_to_end_leaves_after_a_meeting(tmp_path: Path) -> None:
    first, second, third = run_ranks(train, 3, str(tmp_path), 6, Fate(0, "step", signal.SIGTERM))
    assert first.rounds == 2 and second.rounds == third.rounds == 6  # in its third round, before the end of the epoch
    assert differs(second.state, third.state) == 0.0 and second.members == third.members == [3, 3, 3, 2, 2, 2]


def share_a_graph(rank: int, world_size: int, folder: str, fate: Fate) -> tuple[list[int], list[int], float, State]:
    class Sharing(SAGE):
        seeds: list[int] = []  # noqa: RUF012
        members: list[int] = []  # noqa: RUF012

        def on_train_epoch_start(self) -> None:
            self.seeds.append(self.trainer.strategy.loader.loader.num_seeds)  # type: ignore[attr-defined]
            self.members.append(len(self.trainer.strategy.state.batches_of_ranks))  # type: ignore[attr-defined]

        def training_step(self, batch: Any) -> Tensor:
            if self.current_epoch == fate_round and fate.rank == rank:
                os.kill(os.getpid(), fate.signal)
            return super().training_step(batch)

    fate_round = 2
    graph, sampler = lgd.communities(600, 4, num_features=32, noise=2.0), lgd.NeighborSampler([4, 4])
    options: dict[str, Any] = {"sampler": sampler, "batch_size": 8, "loading": lgd.Loading(num_threads=0)}
    options |= {"partitioner": lgd.RandomPartitioner(), "holding": lgd.Holding(cache_dir=folder)}
    data = lgd.PartitionedDataModule(graph, **options)
    module = Sharing(32, 4, lr=0.03)
    peers = lgd.Elastic(patience=60, timeout=TIMEOUT_SECONDS, ranks=world_size)
    strategy = lgd.TMAStrategy(lgd.EverySteps(5), peers=peers, weights="nodes")
    trainer = fit(rank, strategy, module, devices=1, train=data, max_epochs=6)
    return module.seeds, module.members, float(trainer.callback_metrics["accuracy"]), state_of(module)


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
def test_the_part_of_a_dead_rank_is_dealt_to_the_others(tmp_path: Path) -> None:
    with start_ranks(share_a_graph, 3, str(tmp_path), Fate(0)) as ranks:
        _, one, two = ranks.results(may_die={0})
    num_train = int(lgd.communities(600, 4, num_features=32, noise=2.0).node_arrays["train_mask"].sum())
    assert one[1] == two[1] == [3, 3, 3, 2, 2, 2]
    assert one[0][2] + two[0][2] < num_train  # the third had its share
    assert one[0][-1] + two[0][-1] == num_train
    assert one[2] == two[2] > 0.5  # both evaluate on everything
    assert differs(one[3], two[3]) == 0.0


def share_links(rank: int, world_size: int, folder: str, fate: Fate) -> tuple[Counter[Any], float, State]:
    class Judging(LinkSAGE):
        def training_step(self, batch: Any) -> Tensor:
            if self.current_epoch == 1 and fate.rank == rank:
                os.kill(os.getpid(), fate.signal)
            return super().training_step(batch)

        def on_validation_start(self) -> None:
            self.judged.clear()

    options: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "loading": lgd.Loading(num_threads=0)}
    options |= {"sampler": lgd.NeighborSampler([4, 4]), "holding": lgd.Holding(cache_dir=folder), "batch_size": 32}
    peers = lgd.Elastic(patience=60, timeout=TIMEOUT_SECONDS, ranks=world_size)
    module, data = Judging(8), lgd.LinkDataModule(small_split(), **options)
    trainer = fit(rank, lgd.TMAStrategy(lgd.EverySteps(4), peers=peers), module, devices=1, train=data, max_epochs=4)
    targets = Counter(target for batch in module.judged for target in batch)
    return targets, float(trainer.callback_metrics["mrr"]), state_of(module)


def small_split() -> lgd.LinkSplit:
    return lgd.split_edges(lgd.communities(300, 4, num_features=8), negatives=60)


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
def test_those_who_remain_judge_all_held_edges(tmp_path: Path) -> None:
    with start_ranks(share_links, 3, str(tmp_path), Fate(0)) as ranks:
        _, one, two = ranks.results(may_die={0})
    assert one[0] == two[0] == held(small_split(), "val")
    assert one[1] == two[1] > 0
    assert differs(one[2], two[2]) == 0.0


def wait_in_vain(rank: int, world_size: int, sign: str) -> None:
    os.environ[SIGN] = sign
    fit(rank, lgd.TMAStrategy(lgd.EverySeconds(0.2), peers=lgd.Elastic(patience=2)), Net(), devices=1)


def test_without_a_quorum_a_rank_gives_up_and_the_launcher_sees_it_wait(lighthouse: None, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    with start_ranks(wait_in_vain, 1, str(sign)) as ranks:
        while not waits(sign):
            time.sleep(0.02)
        with pytest.raises(RankError, match=r"No quorum in 2 seconds: fewer ranks are alive than the lighthouse at h"):
            ranks.results()
    assert not waits(sign)


class Taught(Net):
    """With a copy that no gradient reaches, and that every rank moves its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(4, 8).requires_grad_(False)

    def on_train_batch_start(self, *args: Any) -> None:
        for own, other in zip(self.teacher.parameters(), self.layers[0].parameters(), strict=True):
            own.data.lerp_(other.data, 0.5)


def teach(rank: int, world_size: int) -> State:
    torch.manual_seed(rank)
    module, elastic = Taught(), lgd.Elastic(patience=60, timeout=TIMEOUT_SECONDS, ranks=world_size)
    fit(rank, lgd.TMAStrategy(lgd.EverySteps(3), peers=elastic), module, devices=1)
    return state_of(module)


def test_what_needs_no_gradient_is_equal_after_a_meeting_too(lighthouse: None) -> None:
    first, second = run_ranks(teach, 2)
    assert differs(first, second) == 0.0


def see_other_labels(rank: int, world_size: int) -> None:
    graph = lgd.communities(600, 4, num_features=32)
    graph.node_arrays["y"] = graph.node_arrays["y"].roll(rank, 0)
    peers = lgd.Elastic(patience=60, timeout=TIMEOUT_SECONDS, ranks=world_size)
    strategy = lgd.TMAStrategy(lgd.EverySteps(5), peers=peers)
    data = lgd.PartitionedDataModule(graph, partitioner=lgd.RandomPartitioner(), loading=lgd.Loading(num_threads=0))
    fit(rank, strategy, SAGE(32, 4), devices=1, train=data)


def test_ranks_with_other_labels_are_told_when_they_join(lighthouse: None) -> None:
    with pytest.raises(RankError, match=r"Ranks \[1\] have other features, labels or further arrays than rank 0"):
        run_ranks(see_other_labels, 2)


def saves(**options: Any) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(**options)], "enable_checkpointing": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2}, "devices=2: every rank is a process of its own"),
        (saves(), "enable_version_counter=False"),
        (saves(dirpath="somewhere"), "enable_version_counter=False"),
        ({"callbacks": [AveragedRounds()]}, "WeightAveraging keeps weights"),
    ],
)
def test_what_needs_the_others_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"devices": 1} | options
    with pytest.raises(ValueError, match=message):
        fit(0, lgd.TMAStrategy(lgd.EverySeconds(1), peers=lgd.Elastic()), Net(), **options)


def test_a_rank_without_a_lighthouse_is_told_how_to_start() -> None:
    with pytest.raises(ValueError, match="lightning-gnn-dist elastic --ranks 4"):
        fit(0, lgd.TMAStrategy(lgd.EverySeconds(1), peers=lgd.Elastic()), Net(), devices=1)


# The launcher of elastic ranks: who dies is told, who is left goes on, nobody stays behind.


LAUNCH = ["-m", "lightning_gnn_dist", "elastic"]


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a launcher, whose ranks may read in the file ``said`` what it has told so far."""
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}  # as users have it
    command, errors = [fast_python(), *LAUNCH, *arguments], subprocess.PIPE
    with (cwd / "said").open("w") as said:
        done = subprocess.run(command, cwd=cwd, env=environment, stdout=said, stderr=errors, text=True, timeout=600)
    done.stdout = (cwd / "said").read_text()
    return done


def python(code: str, program: str = sys.executable) -> list[str]:
    return ["--", program, "-c", code]


DIE_ONCE = """
import os, pathlib, signal, time
rank = os.environ["LIGHTNING_GNN_DIST_RANK"]
assert os.environ["TORCHFT_LIGHTHOUSE"].startswith("http")
pathlib.Path(f"here-{rank}").touch()
while len(list(pathlib.Path(".").glob("here-*"))) < 3: time.sleep(0.05)
if rank == "1" and not pathlib.Path("died").exists():
    pathlib.Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1": pathlib.Path("again").touch()
while not pathlib.Path("again").exists(): time.sleep(0.05)
"""


@pytest.mark.slow
def test_who_died_is_told_and_started_again_when_asked(tmp_path: Path) -> None:
    done = launch("--ranks", "3", "--restarts", "1", *python(DIE_ONCE), cwd=tmp_path)
    assert "Rank 1 was killed by SIGKILL; 2 of 3 are alive." in done.stdout
    assert "Rank 1 is started again." in done.stdout
    assert "torchft::" not in done.stdout + done.stderr  # its log lines can crash the launcher
    assert done.returncode == 0


LATE = """
import os, pathlib, sys, time
rank, folder = os.environ["LIGHTNING_GNN_DIST_RANK"], pathlib.Path(".")
if rank == "0":
    pathlib.Path(os.environ["LIGHTNING_GNN_DIST_SIGN"]).write_text("waits")
    (folder / "waits").touch()
    time.sleep(600)
while not (folder / "waits").exists(): time.sleep(0.05)
sys.exit(143 if rank == "1" else 0)
"""


@pytest.mark.slow
def test_who_waits_in_vain_is_ended(tmp_path: Path) -> None:
    done = launch("--ranks", "4", "--restarts", "1", *python(LATE), cwd=tmp_path)
    assert "Rank 0 came back too late to take part: it is ended." in done.stdout
    assert re.search(r"Rank 0 was killed by SIGKILL; \d of 4 are alive and \d have finished", done.stdout)
    assert "Rank 1 was told to end by SIGTERM; " in done.stdout and "started again" not in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("code", "how"), [(3, "ended with exit code 3"), (143, "was told to end by SIGTERM")])
def test_if_nobody_finishes_the_launcher_fails(code: int, how: str, tmp_path: Path) -> None:
    done = launch("--ranks", "2", *python(f"import sys; sys.exit({code})"), cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.count(how) == 2


STANDS_STILL = """
import os, pathlib, signal, time
sign = pathlib.Path(os.environ["LIGHTNING_GNN_DIST_SIGN"])
sign.touch()
pid = pathlib.Path("pid")
if os.environ["LIGHTNING_GNN_DIST_RANK"] == "1":
    pid.with_name("draft").write_text(str(os.getpid()))
    pid.with_name("draft").rename(pid)
    os.kill(os.getpid(), signal.SIGSTOP)
signs = lambda: len(list(sign.parent.glob("rank-*")))
while signs() < 2: time.sleep(0.05)
while signs() == 2: sign.touch(); time.sleep(0.2)
while "1 of 2 are alive" not in pathlib.Path("said").read_text(): time.sleep(0.05)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_who_stands_still_is_ended_when_too_few_are_left(tmp_path: Path) -> None:
    done = launch("--ranks", "2", "--heartbeat", "1", "--grace", "4", *python(STANDS_STILL), cwd=tmp_path)
    assert "Rank 1 stands still for 5 s, and too few are left without it: it is ended." in done.stdout
    assert "Rank 1 was killed by SIGKILL; 1 of 2 are alive." in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, *LAUNCH, "--ranks", "2", "--grace", "5", *python(code)], cwd=tmp_path)
    while len(pids := list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(240) == 128 + number
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


DIE_AFTER_A_ROUND = """
import os, pathlib, runpy, signal, sys, threading, time

def die_after_a_round():
    while not list(pathlib.Path("checkpoints").glob("*.ckpt")): time.sleep(0.1)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["LIGHTNING_GNN_DIST_RANK"] == "0":
    threading.Thread(target=die_after_a_round, daemon=True).start()
"""


@pytest.mark.slow
def test_the_example_survives_a_death(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "strategies.py"
    kill = DIE_AFTER_A_ROUND + f"sys.argv = [{str(example)!r}, 'elastic']\n"
    kill += f"sys.path.insert(0, {str(example.parent)!r})\n"  # as for any script
    kill += f"runpy.run_path({str(example)!r}, run_name='__main__')"
    done = launch("--ranks", "3", *python(kill, fast_python()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Rank 0 was killed by SIGKILL; 2 of 3 are alive." in done.stdout
    (accuracy,) = re.findall(r"accuracy\D+(0\.\d+)", done.stdout)[-1:]  # of the test
    assert float(accuracy) > 0.6
    # Those of the last rounds, and perhaps one that the dead rank alone knew of.
    names = [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")]
    assert "last.ckpt" in names and 2 <= len(names) <= 3


def test_a_command_is_needed() -> None:
    with pytest.raises(SystemExit, match="Say what each rank runs"):
        main(["elastic", "--ranks", "2"])


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no program 'pyhton' that ranks could run"):
        main(["elastic", "--ranks", "2", "--", "pyhton", "train.py"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--restarts", "-1", "must be at least 0, got -1"),
        ("--heartbeat", "0", "must be a number of seconds, more than 0, got 0"),
        ("--heartbeat", "nan", "must be a number of seconds, more than 0, got nan"),
        ("--grace", "-5", "must be a number of seconds, more than 0, got -5"),
    ],
)
def test_useless_options_are_refused(capsys: pytest.CaptureFixture[str], option: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit):
        main(["elastic", "--ranks", "2", f"{option}={value}", "--", sys.executable, "train.py"])
    assert message in capsys.readouterr().err
