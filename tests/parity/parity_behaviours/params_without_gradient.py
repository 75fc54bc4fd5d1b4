"""A parameter without a gradient in a step is left alone in it: no decay, no step count"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()

        def drop(step: int) -> None:
            if step % 2:
                for param in side.model.blocks[step // 2 % 2].parameters():
                    param.grad = None

        side.train(optimizer, range(5), between=drop)

    compare(make, script)
