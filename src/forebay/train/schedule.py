"""The learning rate over the steps of a run."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

Style = Literal["cosine", "linear", "constant"]


def learning_rate_factor(
    step: int, *, warmup_steps: int, decay_steps: int, min_factor: float, style: Style = "cosine"
) -> float:
    """Return the learning rate of a step as a share of the peak.

    Rises linearly so that step ``warmup_steps - 1`` has the peak, then falls so that step ``decay_steps - 1``
    and all later ones have the minimum. A warm-up longer than the decay is finished first. No step has rate 0
    unless the minimum is 0.

    Args:
        step: from 0.
        warmup_steps: 0 for none.
        decay_steps: the step count at which the minimum is reached, warm-up included.
        min_factor: the minimum as a share of the peak. Not used by ``"constant"``.
        style: ``"cosine"``, ``"linear"`` or ``"constant"``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if style == "constant":
        return 1.0
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, decay_steps - warmup_steps))
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if style == "cosine" else 1.0 - progress
    return min_factor + (1.0 - min_factor) * falling


def check_schedule(*, lr: float, min_lr: float, warmup_steps: int, decay_steps: int, style: str) -> None:
    """Check the arguments of :func:`build_scheduler`.

    Raises:
        ValueError: for an unknown style, ``min_lr`` above ``lr``, or a negative number of steps.
    """
    if style not in get_args(Style):
        raise ValueError(f"unknown learning-rate decay {style!r}; choose one of {', '.join(get_args(Style))}")
    if lr <= 0 or not 0 <= min_lr <= lr:
        raise ValueError(f"optimizer.lr={lr} and optimizer.min_lr={min_lr}: need 0 <= min_lr <= lr and lr > 0")
    if warmup_steps < 0 or decay_steps < 1:
        raise ValueError(
            f"optimizer.lr_warmup_iters={warmup_steps} must not be negative, and the decay of {decay_steps} steps must "
            "be positive"
        )


def build_scheduler(
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    decay_steps: int,
    style: Style = "cosine",
) -> LambdaLR:
    """Return a torch scheduler; call its ``step()`` after each optimizer step.

    Args:
        optimizer: its groups' ``lr`` are the peaks and keep their ratios.
        lr: the peak that ``min_lr`` is a share of.
        min_lr: the minimum.
        warmup_steps: linear warm-up.
        decay_steps: when the minimum is reached, warm-up included.
        style: how the rate falls.

    Raises:
        ValueError: see :func:`check_schedule`.
    """
    check_schedule(lr=lr, min_lr=min_lr, warmup_steps=warmup_steps, decay_steps=decay_steps, style=style)

    def factor(step: int) -> float:
        return learning_rate_factor(
            step,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            min_factor=min_lr / lr,
            style=style,
        )

    return LambdaLR(optimizer, factor)
