"""step() without any gradient changes nothing and counts nothing, before and after other steps"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        returned = [optimizer.step()]
        side.train(optimizer, range(2))
        optimizer.zero_grad()
        returned.append(optimizer.step())
        side.train(optimizer, range(2, 4))
        return {"what step() returned": returned}

    compare(make, script)
