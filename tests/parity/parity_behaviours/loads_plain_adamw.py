"""A state dict of plain torch.optim.AdamW loads, and training goes on from there"""

from __future__ import annotations

import torch

from . import Maker
from .common import LR, Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        plain = torch.optim.AdamW(side.model.parameters(), lr=LR, weight_decay=0.1)
        side.train(plain, range(3))
        optimizer = side.optimizer(lr=1.0)
        optimizer.load_state_dict(plain.state_dict())
        side.train(optimizer, range(3, 6))
        return {"the learning rate": optimizer.param_groups[0]["lr"]}

    compare(make, script)
