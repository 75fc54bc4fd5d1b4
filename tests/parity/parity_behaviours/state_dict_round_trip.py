"""state_dict() goes through torch.save with weights_only=True, loads at another fraction, and training goes on"""

from __future__ import annotations

import copy
import io

import torch

from . import Maker
from .common import Side, compare, moments


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": side.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        side.train(optimizer, range(10, 12))  # what comes after saving must not be in the file
        file.seek(0)
        saved = torch.load(file, weights_only=True, map_location="cpu")
        observed = copy.deepcopy(moments(saved["optimizer"]))  # loading may use the same tensors
        side.model = side.new_model()
        optimizer = side.optimizer(other_fraction=True, lr=1.0)
        side.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        side.train(optimizer, range(3, 6))
        return {"the saved state": observed}

    compare(make, script)
