"""A long run in which every step differs from the one before, for tests with delays on all lanes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tiny import batch, loss_of, weights
from torch import nn

MAX_NORMS = (None, 0.05, 0.3, 100.0)  # always clips, clips sometimes, never


def irregular_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    *,
    interrupt: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Train, and return the losses and the weights.

    Which steps accumulate, clip and at what norm, have a NaN, are left out, or are followed by a look at the weights
    is drawn from a fixed seed. ``interrupt`` is called between any two of a step's phases.
    """
    chance = random.Random(0)
    device = next(model.parameters()).device
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=chance.random() < 0.8)
        for micro in range(chance.choice([1, 1, 1, 2, 3])):
            interrupt()
            loss = loss_of(model, batch(10 * step + micro, device))
            interrupt()
            loss.backward()
        interrupt()
        if chance.random() < 0.05:
            next(model.parameters()).grad[0, 0] = float("nan")
        max_norm = chance.choice(MAX_NORMS)
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        interrupt()
        if chance.random() < 0.95:
            optimizer.step()
        if chance.random() < 0.1:
            optimizer.synchronize()
            loss = loss + sum(param.detach().float().sum() for param in model.parameters()) * 1e-3
        losses.append(loss.detach())
    optimizer.synchronize()
    return torch.stack(losses), weights(model)
