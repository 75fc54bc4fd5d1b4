"""For bf16 parameters state is fp32, when saved and after loading, as that of torch on fp32 copies"""

from __future__ import annotations

import copy

import torch

from . import Maker
from .common import Side, compare, linear_loss, moments


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        for _ in range(3):
            optimizer.zero_grad()
            linear_loss(side.model).backward()
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        linear_loss(side.model).backward()
        optimizer.step()
        after = moments(optimizer.state_dict())
        kinds = {number: str(entry["exp_avg_sq"].dtype) for number, entry in after.items()}
        return {"the saved state": moments(saved), "the state after loading": after, "the dtype of exp_avg_sq": kinds}

    compare(make, script, dtype=torch.bfloat16, masters=True)
