"""optimizer.state[param] has step, exp_avg and exp_avg_sq, in the parameter's shape, of every updated parameter"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        keys = ("step", "exp_avg", "exp_avg_sq")
        named = dict(side.model.named_parameters())
        return {"state": {name: {key: optimizer.state[p].get(key) for key in keys} for name, p in named.items()}}

    compare(make, script)
