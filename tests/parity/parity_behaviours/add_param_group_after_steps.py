"""A group added after some steps trains from then on, with its own values and step counts"""

from __future__ import annotations

from . import Maker
from .common import LR, Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer(side.model.blocks.parameters())
        side.train(optimizer, range(2))
        side.model.zero_grad()
        outer = [side.model.embedding.weight, side.model.head.weight]
        optimizer.add_param_group({"params": outer, "lr": LR / 2, "weight_decay": 0.0})
        side.train(optimizer, range(2, 5))
        return {"the groups' learning rates": [group["lr"] for group in optimizer.param_groups]}

    compare(make, script)
