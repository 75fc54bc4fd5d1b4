"""Groups have values of their own, and keys that only the user knows, which stay and are saved"""

from __future__ import annotations

from . import Maker
from .common import LR, Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        blocks = list(side.model.blocks.parameters())
        rest = [side.model.embedding.weight, side.model.head.weight]
        optimizer = side.optimizer(
            [
                {"params": rest, "lr": LR / 4, "lr_mult": 0.25, "tag": "outer"},
                {"params": blocks, "betas": (0.8, 0.95), "lr_mult": 1.0, "tag": "blocks"},
            ]
        )
        side.train(optimizer, range(4))
        keys = ("lr", "betas", "lr_mult", "tag")
        live = [[group.get(key) for key in keys] for group in optimizer.param_groups]
        saved = [[group.get(key) for key in keys] for group in optimizer.state_dict()["param_groups"]]
        return {"lr, betas and extra keys of the groups": live, "the same in the state dict": saved}

    compare(make, script)
