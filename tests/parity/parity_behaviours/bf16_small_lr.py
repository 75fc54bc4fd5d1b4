"""bf16 weights follow updates much smaller than their spacing, as with fp32 copies"""

from __future__ import annotations

import torch

from . import Differs, Maker
from .common import Side, compare, linear_loss

# Masters that differ by an fp32 rounding in each of 8 steps round to different bf16 values for about 8 * 2**-24 /
# 2**-9 of the elements, 0.02%; without masters most weights stay where they were.
NUM_STEPS, MOST_DIFFERENT = 8, 0.01


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        optimizer = side.optimizer(lr=1e-4)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            linear_loss(side.model).backward()
            optimizer.step()

    ours, torchs = compare(make, script, dtype=torch.bfloat16, masters=True)
    different = torch.cat(
        [(a != b).flatten() for a, b in zip(ours.model.parameters(), torchs.model.parameters(), strict=True)]
    )
    share = different.float().mean().item()
    if share > MOST_DIFFERENT:
        raise Differs(f"{share:.0%} of the bf16 weights are not where fp32 masters take them")
