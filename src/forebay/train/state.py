"""The state of a run that a checkpoint holds besides the weights, and random number generators."""

from __future__ import annotations

import os
import random
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators, those of all CUDA devices included."""
    random.seed(seed)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Let torch use deterministic algorithms only, and raise where there is none.

    Must run before the first use of CUDA: cuBLAS reads its workspace setting once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that training on ``device`` draws from."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set what :func:`rng_state` returned; a generator of a kind of device that it lacks stays as it is."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    optimizer_state: dict[str, Any],
    scheduler_state: dict[str, Any],
) -> None:
    """Continue an optimizer and its schedule.

    Moments, step counts and the position in the schedule come from the checkpoint. Learning rate, decay and
    betas stay what this run's configuration says, so a changed setting takes effect; unchanged ones give the
    same bits.
    """
    configured = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(optimizer_state)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    scheduler.last_epoch = scheduler_state["last_epoch"]
    scheduler._step_count = scheduler_state["_step_count"]
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
