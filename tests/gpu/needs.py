"""What tests of devices need, and are skipped without."""

from importlib.util import find_spec

import pytest
import torch

COUNTS_WAITS = "only pretended devices count how often the host waits"


def need_devices(count: int) -> None:
    if count > torch.cuda.device_count():
        pytest.skip(f"fewer than {count} CUDA devices")


def need_counts() -> None:
    if find_spec("pretend") is None:
        pytest.skip(COUNTS_WAITS)
