"""Gradients of several backwards, in numbers that change from step to step, are summed"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()
        for step, num_micro in enumerate((3, 3, 1, 2)):
            optimizer.zero_grad()
            for micro in range(num_micro):
                (side.loss(step, micro) / num_micro).backward()
            optimizer.step()

    compare(make, script)
