"""A group with weight_decay=0 is not decayed, beside one that is"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        params = list(side.model.parameters())
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.5},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        side.train(side.optimizer(groups), range(4))

    compare(make, script)
