"""Parameters that are frozen at first train once they are unfrozen, with step counts of their own"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        side.model.blocks[0].requires_grad_(False)
        optimizer = side.optimizer()
        side.train(optimizer, range(2))
        side.model.blocks[0].requires_grad_(True)
        side.train(optimizer, range(2, 5))

    compare(make, script)
