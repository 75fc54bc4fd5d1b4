"""Parameters that are frozen stay as they are, beside others that train"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        side.model.blocks[0].requires_grad_(False)
        side.train(side.optimizer(), range(4))

    compare(make, script)
