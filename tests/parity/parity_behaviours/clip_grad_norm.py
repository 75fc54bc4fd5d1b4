"""torch.nn.utils.clip_grad_norm_ between backward and step takes effect, whether it bites or not"""

from __future__ import annotations

from torch import nn

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        norms = []

        def clip(step: int) -> None:
            # The size of the gradient matters to AdamW only where it changes between steps.
            norms.append(nn.utils.clip_grad_norm_(side.model.parameters(), (1e9, 0.01, 1e9, 0.3)[step]))

        side.train(optimizer, range(4), between=clip)
        return {"the norms": norms}

    compare(make, script)
