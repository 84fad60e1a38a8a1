"""The texts of refusals: of each odd value of each argument of everything public."""

import os
import re
from collections.abc import Iterator

from tests.arguments import World
from tests.golden.place import Place
from tests.golden.runs import Run
from tests.golden.tally import Tally
from tests.test_arguments_contract import all_verdicts


def refusals(tally: Tally, place: Place) -> None:
    os.chdir(place.own)
    for case, argument, odd, verdict, text in all_verdicts(World(place.own)):
        said = re.sub(r"/new\d+", "/<new>", f"{verdict}: {text}")  # numbered by calls that may come and go
        tally.say(f"{case}({argument}={odd})", said)


def runs() -> Iterator[Run]:
    yield Run("refusals", refusals)
