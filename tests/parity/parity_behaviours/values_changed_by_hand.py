"""lr, betas and weight_decay that the user changes in a group hold from the next step on"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()

        def change(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] = 0.1 * step
                group["betas"] = (0.9 - 0.1 * step, 0.99)

        side.train(optimizer, range(4), between=change)

    compare(make, script)
