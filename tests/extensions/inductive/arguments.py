"""Valid calls of what judges on another graph."""

from collections.abc import Callable
from typing import Any

from tests.arguments import Calls, World

RIGHT_OF: dict[tuple[str, str], set[str]] = {}


def instances(world: World) -> dict[str, Callable[[], Any]]:
    return {}


def calls(world: World) -> Calls:
    return {"on": lambda: {"graph": world.graph}}
