"""zero_grad(set_to_none=False) fills the same gradients with zeros, and a step with zeros decays weights and moments"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer = side.optimizer()
        side.train(optimizer, range(2))
        before = [param.grad for param in side.model.parameters()]
        optimizer.zero_grad(set_to_none=False)
        params = list(side.model.parameters())
        kept = [param.grad is grad for param, grad in zip(params, before, strict=True)]
        zero = [param.grad is not None and not param.grad.any().item() for param in params]
        optimizer.step()
        side.loss(5).backward()
        optimizer.step()
        return {"gradients that are the same tensors": kept, "gradients that are zero": zero}

    compare(make, script)
