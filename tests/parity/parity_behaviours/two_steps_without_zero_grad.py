"""A second step() uses the same gradients again; without zero_grad() the next backward adds to them"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()
        for step in range(3):
            side.loss(step).backward()
            optimizer.step()
            optimizer.step()

    compare(make, script)
