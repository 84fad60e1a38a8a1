"""A wire between two network namespaces that is as slow and as long as asked for, where the kernel has no netem.

    sudo python benchmarks/relay.py --verify                                  # 100 Mbit/s, a round trip of 20 ms
    sudo python benchmarks/relay.py --verify --rate 1000 --round_trip 5 --loss 0.0001
    sudo RATE=100 ROUND_TRIP=20 benchmarks/two_hosts.sh ...                   # torchrun on two hosts at its ends

Each end is a TUN device, ``cable``. This process reads packets from one and writes them to the other: each direction
sends one packet after the other at the rate, drops what would wait longer than the queue, loses packets at random, and
delivers the rest half a round trip later. ``--verify`` measures the wire by connections of TCP: the round trip when it
is idle, the rate of bytes in both directions at once and one by one, and the share of a core that the relay takes.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEVICE = "cable"
MTU = 9000  # a seventh of the packets of 1500, which is what the relay's time goes into
QUEUE_SECONDS = 0.1
_NEW_TUN, _TUN, _PLAIN = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI
ADDRESSES = "10.78.0.1", "10.78.0.2"
PORT = 29400
SECONDS = 5.0


class Direction:
    """Packets on their way from one end to the other.

    Args:
        source: Where they are read.
        target: Where they are written.
        options: Rate in Mbit/s, round trip in ms, share that is lost.
    """

    def __init__(self, source: int, target: int, options: argparse.Namespace) -> None:
        self.source, self._target = source, target
        self._seconds_of_byte = 8 / (options.rate * 1e6)
        self._delay, self._loss = options.round_trip / 2000, options.loss
        self._is_free = 0.0
        self._under_way = deque[tuple[float, bytes]]()

    def take(self) -> None:
        """Read what has come."""
        while True:
            try:
                packet = os.read(self.source, MTU + 64)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins = max(now, self._is_free)
            if begins - now > QUEUE_SECONDS:
                continue
            self._is_free = begins + len(packet) * self._seconds_of_byte
            if not self._loss or random.random() >= self._loss:
                self._under_way.append((self._is_free + self._delay, packet))

    def give(self) -> float:
        """Write what is due; return the seconds until the next is."""
        while self._under_way:
            wait = self._under_way[0][0] - time.monotonic()
            if wait > 0:
                return wait
            os.write(self._target, self._under_way.popleft()[1])
        return 1.0


def relay(hosts: list[str], addresses: list[str], options: argparse.Namespace) -> None:
    """Make the ends, and pass packets on until this process is ended."""
    ends = [tun(host, address) for host, address in zip(hosts, addresses, strict=True)]
    directions = [Direction(a, b, options) for a, b in (ends, ends[::-1])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        wait = min(direction.give() for direction in directions)
        readable, _, _ = select.select(ends, [], [], wait)
        for direction in directions:
            if direction.source in readable:
                direction.take()


def tun(host: str, address: str) -> int:
    """Make a TUN device in a namespace, with an address; return where its packets are read and written."""
    with open(f"/var/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"This process may not enter {host}: the relay needs root.")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _NEW_TUN, struct.pack("16sH22x", DEVICE.encode(), _TUN | _PLAIN))
    ip("address", "add", f"{address}/24", "dev", DEVICE)
    ip("link", "set", DEVICE, "mtu", str(MTU), "up")
    return end


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


# The check of the wire by itself.


def verify(options: argparse.Namespace) -> None:
    with two_hosts(options) as (hosts, process):
        idle = float(ends_of(hosts, "echo")[0])
        alone = float(ends_of(hosts, "one way")[1])
        before, start = cpu_seconds(process.pid), time.monotonic()
        rates = [float(said) for said in ends_of(hosts, "both ways")]
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - start)
    print("| | asked for | found |\n|---|---|---|")
    print(f"| round trip when idle, ms | {options.round_trip:g} | {idle:.1f} |")
    print(f"| bytes one way, Mbit/s | {options.rate:g} | {alone:.1f} |")
    print(f"| bytes each way, both at once, Mbit/s | {options.rate:g} | {min(rates):.1f} |")
    print(f"| cores that the relay takes then | | {share:.2f} |")
    if abs(idle - options.round_trip) > 1 + 0.1 * options.round_trip:
        raise SystemExit(f"The round trip is {idle:.1f} ms, not {options.round_trip:g}.")
    if not options.loss and alone < 0.9 * options.rate:
        raise SystemExit(f"The wire carries {alone:.1f} Mbit/s, not {options.rate:g}: this machine is too busy for it.")


@contextmanager
def two_hosts(options: argparse.Namespace) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """Two namespaces joined by the relay, which are gone behind the block."""
    hosts = [f"relay{os.getpid()}-{end}" for end in (1, 2)]
    settings = [f"--{name}={getattr(options, name)}" for name in ("rate", "round_trip", "loss")]
    process = None
    try:
        for host in hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        command = [sys.executable, __file__, *hosts, *settings, "--addresses", *ADDRESSES]
        process = subprocess.Popen(command)
        shown = ["ip", "-n", hosts[1], "link", "show", DEVICE, "up"]
        while not subprocess.run(shown, check=False, capture_output=True).stdout:
            if process.poll() is not None:
                raise SystemExit("The relay has ended: see what it says.")
            time.sleep(0.05)
        yield hosts, process
    finally:
        if process is not None:
            process.terminate()
            process.wait()
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], check=False)


def ends_of(hosts: list[str], what: str) -> list[str]:
    """Run one end of a connection on each host; return what they print."""
    commands = [
        ["ip", "netns", "exec", host, sys.executable, __file__, "--end", str(end), "--what", what]
        for end, host in enumerate(hosts)
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return [process.communicate()[0] for process in running]


def end_of(number: int, what: str) -> None:
    """Be an end: 0 calls, and prints the round trip or what it receives; 1 answers, and prints what it receives."""
    with connected(number) as wire:
        if what == "echo":
            print(echo(wire, asks=number == 0))
        elif what == "one way":
            print(0.0 if number == 0 and send(wire) else receive(wire))
        elif os.fork():  # both at once: this process receives, the other sends
            print(receive(wire))
            os.wait()
        else:
            send(wire)
            os._exit(0)


def connected(number: int) -> socket.socket:
    if number == 1:
        with socket.create_server((ADDRESSES[1], PORT)) as server:
            wire, _ = server.accept()
            return wire
    while True:
        try:
            wire = socket.create_connection((ADDRESSES[1], PORT), timeout=30)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return wire
        except ConnectionRefusedError:
            time.sleep(0.05)


def echo(wire: socket.socket, *, asks: bool, times: int = 50) -> float:
    """Milliseconds of a round trip, the median."""
    found = []
    for _ in range(times):
        start = time.monotonic()
        if asks:
            wire.sendall(b"?")
        wire.recv(1)
        if not asks:
            wire.sendall(b"!")
        found.append(1000 * (time.monotonic() - start))
    return sorted(found)[times // 2]


def send(wire: socket.socket) -> bool:
    """Send for some seconds, and say that this is all."""
    content, deadline = bytes(1 << 16), time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        wire.sendall(content)
    wire.shutdown(socket.SHUT_WR)
    return True


def receive(wire: socket.socket) -> float:
    """Receive all; return the Mbit/s of its second half, when TCP has found its pace."""
    marks = [(time.monotonic(), 0)]
    while content := wire.recv(1 << 20):
        marks.append((time.monotonic(), marks[-1][1] + len(content)))
    (start, first), (stop, last) = marks[len(marks) // 2], marks[-1]
    return (last - first) * 8 / 1e6 / (stop - start)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("hosts", nargs="*", help="two network namespaces")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s, in each direction")
    parser.add_argument("--round_trip", type=float, default=20.0, help="ms")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    parser.add_argument("--addresses", nargs=2, default=ADDRESSES, help="of the two ends")
    parser.add_argument("--verify", action="store_true", help="measure the wire by itself")
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verify:
        verify(options)
    elif options.end is not None:
        end_of(options.end, options.what)
    else:
        relay(options.hosts, options.addresses, options)


if __name__ == "__main__":
    main()
