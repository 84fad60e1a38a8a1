"""Who does not come to the start is named by those who do, in the time that was stated."""

import atexit
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from packaging.version import Version

from lightning_gnn_dist import GrappaStrategy, Launch, LocalSGDStrategy, TMAStrategy
from lightning_gnn_dist.wire import addresses
from lightning_gnn_dist.wire.launching.roll_call import RUN, Roll
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, fit

SECONDS = 1.5
HERE = "127.0.0.1"


def come_together(folder: Path, rank: int, num_ranks: int) -> None:
    """However long each takes to get there, these ranks call the roll at once."""
    call = Roll.call

    def when_all_are_here(roll: Roll) -> Any:
        (folder / str(rank)).touch()
        while len(list(folder.iterdir())) < num_ranks:
            time.sleep(0.01)
        return call(roll)

    Roll.call = when_all_are_here  # type: ignore[method-assign]


def come_or_stay_away(
    rank: int, world_size: int, absent: set[int], strategy: Any, folder: Path
) -> tuple[str, float] | None:
    if rank in absent:
        return None
    come_together(folder, rank, world_size - len(absent))
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        fit(rank, strategy(launch=Launch(start_timeout=timedelta(seconds=SECONDS))), Net(), devices=world_size)
    return str(caught.value), time.monotonic() - start


MISSING = [
    (2, {1}, "Of 2 ranks, rank 1 did not start within 1.5 s (here: 0 on ", LocalSGDStrategy),
    (3, {1, 2}, "Of 3 ranks, ranks [1, 2] did not start within 1.5 s (here: 0 on ", GrappaStrategy),
    (2, {0}, "Of 2 ranks, rank 0 did not start within 1.5 s (nobody answers at 127.0.0.1:", TMAStrategy),
]
SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in MISSING[1:]]


@pytest.mark.parametrize(("world_size", "absent", "named", "strategy"), [MISSING[0], *SLOWLY])
def test_missing_ranks_are_named_in_time(world_size, absent, named, strategy, tmp_path) -> None:
    outcomes = run_ranks(come_or_stay_away, world_size, absent, strategy, tmp_path)
    assert [rank for rank, outcome in enumerate(outcomes) if outcome is None] == sorted(absent)
    messages, seconds = zip(*filter(None, outcomes), strict=True)
    assert all(message.startswith(named) and "start_timeout" in message for message in messages)
    assert SECONDS <= max(seconds) < SECONDS + 60  # rank 0 waits so long; who came a little later, a little less


served: list[Any] = []  # by rank 0, until all have returned


def call_twice(rank: int, world_size: int, *, comes_late: bool) -> bool:
    if comes_late:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # the host of rank 0 has just come
    port = int(os.environ["MASTER_PORT"])
    for _ in range(2):
        served.append(Roll("127.0.0.1", port, rank, world_size, timedelta(seconds=60)).call())
    return None not in served


@pytest.mark.parametrize("comes_late", [False, True])
def test_the_roll_is_called_anew_each_time_also_of_a_host_that_comes_later(comes_late: bool) -> None:
    assert run_ranks(partial(call_twice, comes_late=comes_late), 3) == [True] * 3


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_port_of_another_program_is_named(is_silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not is_silent:  # it answers as a web server does to what it cannot read
            threading.Thread(target=hang_up_on_all, args=(server,), daemon=True).start()
        with pytest.raises(TimeoutError, match=rf"another program has port {port} at 127.0.0.1, .* by MASTER_PORT"):
            Roll("127.0.0.1", port, 1, 2, timedelta(seconds=0.2)).call()


def hang_up_on_all(server: socket.socket) -> None:
    with suppress(OSError):  # the server is closed at the end
        while True:
            server.accept()[0].close()


def test_a_port_that_is_held_is_given_to_nobody_else() -> None:
    with addresses.held_port() as port, ExitStack() as others:
        assert port not in {others.enter_context(addresses.held_port()) for _ in range(100)}
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind((HERE, port))
        store = addresses.serve_store(HERE, port, timedelta(seconds=60))  # of who was told the port
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HERE, port))
        assert store.port == port


def test_one_rank_waits_for_nobody() -> None:
    assert Roll("nowhere", 1, 0, 1, timedelta(seconds=1)).call() is not None


def threads_of_gloo() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def leave(rank: int, world_size: int, strategy: Any) -> tuple[bool, list[str]]:
    """Whether there were any before, and those that are left: what has ended is listed for a moment longer."""
    trainer = fit(rank, strategy(), Net(), devices=world_size)
    had_threads = bool(threads_of_gloo())
    atexit._run_exitfuncs()
    assert trainer.state.finished  # and is still held, as at the end of a script
    deadline = time.monotonic() + 20
    while (left := threads_of_gloo()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return had_threads, left


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
@pytest.mark.parametrize(
    "strategy",
    [LocalSGDStrategy, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (GrappaStrategy, DDPStrategy))],
)
def test_no_thread_of_gloo_outlives_the_interpreter(strategy: Any) -> None:
    """One that does may abort the process after its work: it holds tensors that belong to the interpreter."""
    had_threads, left = zip(*run_ranks(leave, 2, strategy), strict=True)
    if not all(had_threads) and Version(torch.__version__) < Version("2.13"):
        pytest.skip("gloo's threads have no names in this torch")
    assert all(had_threads) and left == ([], [])


def meet_as_another_run(rank: int, world_size: int) -> str | None:
    """Rank 2 has the port and rank number of this run, and another key."""
    if rank == 2:
        os.environ[RUN] = "another"
    port, place = int(os.environ["MASTER_PORT"]), min(rank, 1)
    try:
        served.append(Roll("127.0.0.1", port, place, 2, timedelta(seconds=60)).call())
    except ValueError as error:
        return str(error)
    return None


def test_another_run_at_the_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, "mine")
    first, second, stranger = run_ranks(meet_as_another_run, 3)
    assert first is None and second is None
    assert stranger is not None and "is where another run meets" in stranger and "MASTER_PORT" in stranger


def meet_twice_as_one(rank: int, world_size: int) -> str | None:
    port = int(os.environ["MASTER_PORT"])
    try:
        served.append(Roll("127.0.0.1", port, min(rank, 1), 2, timedelta(seconds=60)).call())
    except RuntimeError as error:
        return str(error)
    return None


def test_a_rank_that_is_already_there_is_refused() -> None:
    first, *others = run_ranks(meet_twice_as_one, 3)
    assert first is None
    (refused,) = [outcome for outcome in others if outcome]
    assert "Rank 1 is already at 127.0.0.1:" in refused


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"Port {port} at 127.0.0.1 is taken"):
            Roll("127.0.0.1", port, 0, 2, timedelta(seconds=60)).call()


def listening_addresses() -> set[str]:
    """Where this process accepts connections, of IPv4 and IPv6, as the kernel writes them."""
    handles = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            handles.add(os.readlink(entry))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in handles}


def listen(rank: int, world_size: int, strategy: Any) -> set[str]:
    fit(rank, strategy(), Net(), devices=world_size)
    return listening_addresses()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads ports from /proc")
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_one_host_listen_to_it_alone(world_size: int) -> None:
    assert run_ranks(listen, world_size, GrappaStrategy) == [{"0100007F"}] * world_size


def test_an_interface_that_the_user_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with addresses.kept_on_host(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with addresses.kept_on_host(True):
        assert os.environ.get("GLOO_SOCKET_IFNAME") in ("lo", "lo0")
    with addresses.kept_on_host(False):
        assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("address", "num_hosts", "environment", "expected"),
    [
        ("127.0.0.1", 1, {}, True),
        ("localhost", 1, {}, True),
        ("127.0.0.1", 2, {}, False),
        ("192.0.2.7", 1, {}, False),
        ("192.0.2.7", 1, {"SLURM_NNODES": "1"}, True),
        ("192.0.2.7", 1, {"GROUP_WORLD_SIZE": "2"}, False),
    ],
)
def test_what_is_one_host(address, num_hosts, environment, expected, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Roll(address, 1, 0, 2, timedelta(seconds=1), num_hosts).on_one_host is expected


class Stops(Net):
    """Raises StopIteration in one place."""

    place = ""

    def training_step(self, batch: Any) -> Any:
        if self.place == "step":
            next(iter([]))
        return super().training_step(batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.place == "transfer":
            next(iter([]))
        return batch

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.place == "optimizer":
            next(iter([]))


@pytest.mark.parametrize("place", ["step", "transfer", "optimizer"])
@pytest.mark.parametrize("strategy", [LocalSGDStrategy, GrappaStrategy])
def test_a_stop_iteration_that_is_not_the_loaders_is_an_error(strategy: Any, place: str) -> None:
    net = Stops()
    net.place = place
    with pytest.raises(RuntimeError, match="StopIteration was raised while a batch was used"):
        fit(0, strategy(), net, devices=1)


def refused_lazy(rank: int, world_size: int) -> None:
    for strategy in (LocalSGDStrategy(), GrappaStrategy()):
        module = Net()
        module.lazy = torch.nn.LazyLinear(3)
        with pytest.raises(ValueError, match=r"^lazy.weight has no shape yet .* draw other weights at its first batch"):
            fit(rank, strategy, module, devices=world_size)


def test_lazy_layers_are_refused_where_each_rank_would_draw_them() -> None:
    run_ranks(refused_lazy, 2)


def test_a_process_without_a_device_of_its_own_is_told_why() -> None:
    environment = LightningEnvironment()
    environment.local_rank = lambda: 1  # type: ignore[method-assign]
    strategy = GrappaStrategy()
    strategy.cluster_environment, strategy.parallel_devices = environment, [torch.device("cpu")]
    with pytest.raises(ValueError, match=r"local rank 1, and the trainer has 1 device\(s\): .*GrappaStrategy, RayDDP"):
        strategy._configure_launcher()
