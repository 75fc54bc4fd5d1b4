"""What the user writes into a weight between steps is what the next step starts from"""

from __future__ import annotations

import torch

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer()
        for step in range(4):
            side.train(optimizer, range(step, step + 1))
            with torch.no_grad():
                for param in side.model.parameters():
                    if param.dim() == 2:
                        param.mul_(0.9)
                side.model.blocks[1][1].weight[::2] = 0.05

    compare(make, script)
