"""The address at which the other ranks of a run can reach this one, and at which it then listens alone."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress

import torch

from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.collectives import INTERFACE, keeps_on_host

_HERE = "127.0.0.1"
_LONGEST = 48  # letters of an address
_ADDRESS_OF = 0x8915  # Linux's request for the address of an interface


def address_for_others(channel: Channel) -> str:
    """Return this rank's address: that of the interface that the user names, or that on the way to rank 0. Collective.

    Rank 0 may know itself by an address that nobody else can reach: it then takes the one that leads to another rank.
    """
    own = _HERE if keeps_on_host() else _of_interface() or _towards(os.environ.get("MASTER_ADDR", _HERE))
    row = torch.frombuffer(bytearray(own.encode().ljust(_LONGEST)), dtype=torch.uint8)
    rows = channel.exchange([row[None]] * channel.size, [1] * channel.size)
    known = [row.numpy().tobytes().decode().strip() for row in rows]
    outside = [address for address in known if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    return _towards(outside[0]) if outside and own not in outside else own


def _towards(host: str) -> str:
    """The address of this host on the way to another; nothing is sent."""
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(place)
                return str(way.getsockname()[0])
    return _HERE


def _of_interface() -> str:
    """The address of the interface that the user has named for gloo, or "" where that is not known."""
    name = os.environ.get(INTERFACE, "").split(",")[0]
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24]) if name else ""
    return ""
