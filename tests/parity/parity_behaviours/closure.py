"""A closure runs once, with gradients enabled, and its loss is returned"""

from __future__ import annotations

import torch

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        calls, returned = [], []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                calls.append((step, torch.is_grad_enabled()))
                optimizer.zero_grad()
                loss = side.loss(step)
                loss.backward()
                return loss

            returned.append(optimizer.step(closure))
        return {"closure calls (step, gradients enabled)": calls, "what step(closure) returned": returned}

    compare(make, script)
