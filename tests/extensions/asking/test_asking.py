"""Ranks answer each other at any time, and nothing of the connections is left, however they end."""

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gnn_dist.extensions.asking import asking
from lightning_gnn_dist.extensions.asking.asking import Asking, Message
from lightning_gnn_dist.extensions.asking.turns import Inquiry, Steps, answered, at_once, take_turn, together
from lightning_gnn_dist.wire.channel import open_channel
from lightning_gnn_dist.wire.collectives import traffic
from tests.ranks import join, run_ranks, start_ranks

DOUBLE, MAYBE, WAIT = range(3)
asked, may_answer = threading.Event(), threading.Event()  # by a question to wait, in each rank


def open_ends() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            count += "socket" in os.readlink(entry)
    return count


def answer(kind: int, question: Message) -> Message:
    if kind == MAYBE and float(question[0]) < 0:
        raise ValueError("this is refused")
    if kind == WAIT:
        asked.set()
        assert may_answer.wait(60)
    return [2 * tensor for tensor in question]


def connect(rank: int, world_size: int) -> Asking:
    join(rank, world_size)
    return Asking(open_channel(world_size), answer)


def asked_unequally(rank: int, world_size: int) -> tuple[list[list[float]], float, int, int]:
    """Rank ``r`` asks ``r`` times, in two threads at once, and then closes."""
    join(rank, world_size)
    channel = open_channel(world_size)
    before = threading.active_count(), open_ends()
    ends, found = Asking(channel, answer), []
    sent = traffic.bytes_sent

    def ask() -> None:
        for number in range(rank):
            question: Message = [torch.full((3 + number,), 10.0 * rank, dtype=torch.float64), torch.empty(0, 2)]
            mine = [question if other != (rank + 1) % world_size else None for other in range(world_size)]
            answers, own = ends.ask(DOUBLE, mine, lambda: "own")
            assert own == "own" and answers[rank] is None and answers[(rank + 1) % world_size] is None
            found.extend(a[0].tolist() for a in answers if a is not None and a[1].shape == (0, 2))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.close()
    after = threading.active_count(), open_ends()
    return found, traffic.bytes_sent - sent, after[0] - before[0], after[1] - before[1]


def test_ranks_ask_unequally_often_and_leave_nothing() -> None:
    for rank, (found, sent, threads, sockets) in enumerate(run_ranks(asked_unequally, 4)):
        assert sorted(found) == sorted([20.0 * rank] * (3 + number) for number in range(rank) for _ in range(4))
        assert (sent > 0, threads, sockets) == (True, 0, 0)


def bereft(rank: int, world_size: int, how: str) -> tuple[list[str], int, int]:
    """What a rank says when rank 1 does not answer, and the threads and sockets that are left."""
    ends = connect(rank, world_size)
    if how == "late":
        ends._seconds = 1.0
        for end in ends._asked.values():
            end.settimeout(1.0)
    threads = threading.active_count() - world_size + 1
    dist.barrier()  # all are connected
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    question: list[Message | None] = [[torch.tensor(2.5)] if other == 1 else None for other in range(world_size)]
    said: list[str] = []
    while rank != 1 and len(said) < 2:
        try:
            ends.ask(DOUBLE if how == "killed" else WAIT, question, lambda: None)
        except RuntimeError as error:
            said.append(str(error))
    if how == "late":
        dist.barrier()  # the others have given up
        may_answer.set()
    ends.abort()
    left = [end for end in ends._asked.values() if end.fileno() >= 0]
    return said, threading.active_count() - threads, len(left)


@pytest.mark.parametrize(("how", "words"), [("killed", "it has ended"), ("late", "within 1 s")])
def test_a_rank_that_does_not_answer_is_named(how: str, words: str) -> None:
    with start_ranks(bereft, 3, how) as ranks:
        results = ranks.results(may_die={1})
    for rank in (0, 2):
        (text, again), threads, sockets = results[rank]
        assert text == again and text.startswith("Rank 1 did not answer") and words in text
        assert (threads, sockets) == (0, 0)


def failed(rank: int, world_size: int) -> list[str]:
    """What is said where rank 1 refuses, asked again for what it can, and after the end."""
    ends, said = connect(rank, world_size), []

    def ask(kinds: list[int]) -> str:
        question: list[Message | None] = [[torch.tensor([float(kind)])] for kind in kinds]
        try:
            return str([None if a is None else a[0].tolist() for a in ends.ask(MAYBE, question, lambda: None)[0]])
        except RuntimeError as error:
            return str(error)

    said = [ask([1, -1, 1]), ask([2, 2, 2])]
    ends.close()
    return [*said, ask([1, 1, 1])]


def test_what_a_rank_cannot_answer_is_said_where_it_was_asked() -> None:
    for rank, (refused, fine, closed) in enumerate(run_ranks(failed, 3)):
        assert fine == str([None if other == rank else [4.0] for other in range(3)])
        assert closed == "The connections to other ranks were closed."
        if rank != 1:
            assert refused == f"Rank 1 cannot answer rank {rank}: ValueError: this is refused"


def interrupted(rank: int, world_size: int) -> str:
    """What a question says after one whose answer nobody has read."""
    ends = connect(rank, world_size)
    question: list[Message | None] = [[torch.ones(1)] for _ in range(world_size)]
    with suppress(KeyboardInterrupt):
        ends.ask(DOUBLE, question, _interrupt)
    try:
        ends.ask(DOUBLE, question, lambda: None)
    except RuntimeError as error:
        return str(error)
    finally:
        ends.close()
    return ""


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_answers_are_never_mixed_up() -> None:
    assert run_ranks(interrupted, 2) == ["An earlier question to other ranks was not ended."] * 2


def aborted(rank: int, world_size: int) -> str:
    """What a question of rank 0 in the background says when the rank aborts, before there is an answer."""
    ends, said = connect(rank, world_size), []

    def ask() -> None:
        try:
            ends.ask(WAIT, [None, [torch.tensor(2.0)]], lambda: None)
        except RuntimeError as error:
            said.append(str(error))

    if rank == 1:
        assert asked.wait(60)
        dist.barrier()  # rank 0 aborts
        dist.barrier()  # it has been woken
        may_answer.set()
        ends.abort()
        return ""
    asking_thread = threading.Thread(target=ask)
    asking_thread.start()
    dist.barrier()
    ends._end()
    asking_thread.join()
    dist.barrier()
    ends.abort()
    return said[0]


def test_an_abort_wakes_who_waits() -> None:
    said, _ = run_ranks(aborted, 2)
    assert "did not answer" in said


def visited(rank: int, world_size: int) -> bool:
    """A stranger that connects while ranks do is turned away."""
    connected, create = [], socket.create_server

    def create_server(*args: object, **options: object) -> socket.socket:
        listener = create(*args, **options)  # type: ignore[arg-type]
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(b"x" * 24)
        connected.append(stranger)
        return listener

    asking.socket.create_server = create_server  # type: ignore[assignment]
    ends = connect(rank, world_size)
    answers, _ = ends.ask(DOUBLE, [[torch.ones(1)] if other != rank else None for other in range(2)], lambda: None)
    ends.close()
    stranger = connected[-1]
    with stranger:
        return answers[1 - rank] is not None and stranger.recv(1) == b""


def test_strangers_are_turned_away() -> None:
    assert run_ranks(visited, 2) == [True, True]


# What several pieces of work ask goes in one exchange.


def adding(*numbers: int) -> Steps[int]:
    """Asks for one number after the other, and adds up the answers."""
    total = 0
    for number in numbers:
        (answer,) = yield [number]
        total += answer
    return total


def test_several_pieces_ask_at_once_until_each_is_done() -> None:
    questions_asked: list[list[int]] = []

    def doubled(questions: list[int]) -> list[int]:
        questions_asked.append(questions)
        return [2 * number for number in questions]

    work = together([adding(1, 2, 3), at_once(7), adding(), adding(10)])
    assert answered(work, doubled) == [12, 7, 0, 20]
    assert questions_asked == [[1, 10], [2], [3]]


def test_work_is_given_up_where_nobody_answers() -> None:
    lock = threading.Lock()

    def holding() -> Steps[None]:
        with lock:
            yield [1]

    def nobody(questions: list[Any]) -> list[Any]:
        raise ConnectionError

    works: list[Inquiry[Any]] = [Inquiry(holding()), Inquiry(adding(1, 2))]
    assert lock.locked()
    with pytest.raises(ConnectionError):
        take_turn(works, nobody)
    assert not lock.locked()
