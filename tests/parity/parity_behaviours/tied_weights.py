"""A weight used twice in the model is updated once, by the sum of its gradients"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        side.train(side.optimizer(), range(4))

    compare(make, script, tied=True)
