"""Loading weights into a bf16 model alone is taken over by the fp32 masters too"""

from __future__ import annotations

import copy

import torch

from . import Maker
from .common import MasterAdamW, Side, compare, linear_loss


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        start = copy.deepcopy(side.model.state_dict())
        optimizer = side.optimizer(lr=0.1)
        for step in range(4):
            if step == 2:
                side.model.load_state_dict(start)
                if isinstance(optimizer, MasterAdamW):
                    for param, master in zip(optimizer.models, optimizer.masters, strict=True):
                        master.copy_(param.detach())
            optimizer.zero_grad()
            linear_loss(side.model).backward()
            optimizer.step()

    compare(make, script, dtype=torch.bfloat16, masters=True)
