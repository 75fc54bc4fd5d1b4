"""Parameters of a module that a forward does not use are left alone in that step"""

from __future__ import annotations

from torch import nn

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer, block = side.optimizer(), side.model.blocks[1]
        for step in range(5):
            side.model.blocks[1] = nn.Identity() if step % 2 else block
            side.train(optimizer, range(step, step + 1))

    compare(make, script)
