"""pickle of model and optimizer gives a pair that trains on as the first one would have"""

from __future__ import annotations

import pickle

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        side.model, optimizer = pickle.loads(pickle.dumps((side.model, optimizer)))
        side.train(optimizer, range(3, 6))

    compare(make, script)
