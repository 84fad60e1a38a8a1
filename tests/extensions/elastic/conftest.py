"""The lighthouse, by which elastic ranks find each other."""

from collections.abc import Iterator

import pytest

from lightning_gnn_dist.extensions.elastic.membership import LIGHTHOUSE
from tests.extensions.elastic.elastic_fitting import HEARTBEAT_SECONDS


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torchft.coordination import LighthouseServer

    heartbeat = int(1000 * HEARTBEAT_SECONDS)
    waits = {"join_timeout_ms": 60_000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": heartbeat}
    server = LighthouseServer(bind="[::]:0", min_replicas=2, **waits)
    monkeypatch.setenv(LIGHTHOUSE, server.address())
    yield
    server.shutdown()
