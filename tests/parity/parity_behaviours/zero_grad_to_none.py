"""zero_grad() sets the gradients of all parameters, small ones included, to None"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(2))
        optimizer.zero_grad(set_to_none=True)
        gone = [param.grad is None for param in side.model.parameters()]
        side.train(optimizer, range(2, 4))
        return {"gradients that are None": gone}

    compare(make, script)
