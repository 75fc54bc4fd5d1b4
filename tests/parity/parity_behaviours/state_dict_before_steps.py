"""state_dict() of an optimizer that has made no step has no state, and can be loaded"""

from __future__ import annotations

from . import Maker
from .common import Side, compare, moments


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        saved = side.optimizer().state_dict()
        optimizer = side.optimizer(lr=1.0)
        optimizer.load_state_dict(saved)
        side.train(optimizer, range(3))
        return {"the state": moments(saved), "params": [group["params"] for group in saved["param_groups"]]}

    compare(make, script)
