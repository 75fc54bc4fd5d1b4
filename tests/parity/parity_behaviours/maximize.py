"""maximize=True goes up the gradient"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        side.train(side.optimizer(maximize=True), range(4))

    compare(make, script)
