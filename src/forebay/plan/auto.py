"""``optimizer.optimizer_offload_fraction=auto``: the least fraction at which a run fits the GPU that is there."""

from __future__ import annotations

from forebay.config.resolve import Resolved
from forebay.plan import profile as profiles
from forebay.plan.model import describe
from forebay.plan.native import NativePlanner
from forebay.plan.options import CONTEXT_BYTES, GIB, Budget
from forebay.plan.plan import without_auto
from forebay.plan.solver import Solver, choice_of
from forebay.train.memory import available_bytes
from forebay.train.prepare import resolve_device

_KEY = "optimizer.optimizer_offload_fraction"


def choose_fraction(resolved: Resolved, *, available_gpu_bytes: int | None = None) -> str:
    """Put a number in the place of ``auto``, and return in words which and why.

    Micro-batch, recomputation and placement stay as configured. Whether the host has room is checked where every run
    is checked, before it allocates.

    Args:
        resolved: changed in place; the number's source is ``auto``.
        available_gpu_bytes: what torch may allocate. Default None: what is free on ``train.device`` now.

    Raises:
        ValueError: without a GPU, where both tiers are the same memory; or when the model cannot be described.
    """
    config = without_auto(resolved.config)
    if available_gpu_bytes is None:
        available_gpu_bytes, _ = available_bytes(resolve_device(config.train.device))
    if available_gpu_bytes is None:
        raise ValueError(
            f"{_KEY}=auto: without a GPU both tiers are the same memory, and offloading frees nothing; give a number"
        )
    model = describe(config)
    num_layers = len(model.layers)
    planner = NativePlanner(model, config, profiles.load("h200"))  # memory is asked for, which no rate changes
    # The context is there by now, and not in what is free.
    budget = Budget(available_gpu_bytes + CONTEXT_BYTES)
    solver = Solver(planner, config, budget, "native", num_layers=num_layers, num_stage_layers=num_layers)
    choice = choice_of(config, num_layers)
    choice = type(choice)(
        choice.micro_batch,
        placement=config.optimizer.optimizer_offload_placement,
        staging_gib=config.optimizer.optimizer_staging_gib,
        recompute_layers=choice.recompute_layers,
    )
    fraction = solver.least_fraction(choice)
    resolved.config.optimizer.optimizer_offload_fraction = fraction
    resolved.sources[_KEY] = "auto"
    without = planner.estimate(choice).gpu_peak_bytes
    return (
        f"{_KEY}=auto: {fraction:g}; without offload the peak would be {without / GIB:.1f} GiB, and torch may use "
        f"{budget.usable_gpu_bytes / GIB:.1f} GiB"
    )
