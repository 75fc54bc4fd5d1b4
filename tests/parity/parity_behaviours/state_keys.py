"""optimizer.state is empty before the first step, and then has the updated parameters and no others"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        side.model.blocks[0].requires_grad_(False)
        optimizer = side.optimizer()
        before = len(optimizer.state)
        side.train(optimizer, range(2))
        named = side.model.named_parameters()
        return {
            "entries before the first step": before,
            "parameters that have state": {name: param in optimizer.state for name, param in named},
            "the number of entries": len(optimizer.state),
        }

    compare(make, script)
