"""copy.deepcopy of model and optimizer gives a pair that trains by itself, as the first one would have"""

from __future__ import annotations

import copy

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        first, (side.model, copied) = side.model, copy.deepcopy((side.model, optimizer))
        side.train(copied, range(3, 5))
        untouched = {name: value.clone() for name, value in first.state_dict().items()}
        side.model, second = first, side.model
        side.train(optimizer, range(3, 6))
        side.model = second
        return {
            "the first model's weights": untouched,
            "and after training on": {name: value.clone() for name, value in first.state_dict().items()},
        }

    compare(make, script)
