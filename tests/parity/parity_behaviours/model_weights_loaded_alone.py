"""Loading weights into the model alone is taken over: nothing brings the old ones back"""

from __future__ import annotations

import copy

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        start = copy.deepcopy(side.model.state_dict())
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        side.model.load_state_dict(start)
        side.train(optimizer, range(3, 5))

    compare(make, script)
