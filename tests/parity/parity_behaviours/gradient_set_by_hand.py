"""Gradients that the user sets, without any backward, are used"""

from __future__ import annotations

from . import Maker
from .common import Side, compare, direction


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()
        for step in range(3):
            for number, param in enumerate(side.model.parameters()):
                param.grad = direction(param, 100 * step + number)
            optimizer.step()

    compare(make, script)
