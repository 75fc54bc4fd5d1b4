"""torch's learning rate schedulers, chained, drive the update"""

from __future__ import annotations

from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        warmup = LinearLR(optimizer, 0.1, total_iters=2)
        scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 4)], milestones=[2])
        rates = []
        for step in range(5):
            side.train(optimizer, range(step, step + 1))
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return {"the learning rates": rates}

    compare(make, script)
