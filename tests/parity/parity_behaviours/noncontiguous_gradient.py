"""Gradients whose memory is laid out unlike the weight's are understood"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> None:
        def transpose(step: int) -> None:
            for param in side.model.parameters():
                if param.dim() == 2:
                    # The factor tells this gradient from the one that backward made.
                    param.grad = (param.grad.t().contiguous() * (step + 1)).t()

        side.train(side.optimizer(), range(4), between=transpose)

    compare(make, script)
