"""Its state dict loads into plain torch.optim.AdamW, and training goes on from there"""

from __future__ import annotations

import torch

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        plain = torch.optim.AdamW(side.model.parameters(), lr=1.0)
        plain.load_state_dict(optimizer.state_dict())
        side.train(plain, range(3, 6))
        return {"the learning rate": plain.param_groups[0]["lr"]}

    compare(make, script)
