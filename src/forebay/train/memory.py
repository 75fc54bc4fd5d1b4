"""What a run needs on each tier, and a refusal before anything is allocated when it cannot fit.

The figures are lower bounds: weights, gradients and optimizer state are exact, activations are the least that
autograd keeps. A run that is refused would have failed; one that is not may still run out of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.host.limits import limits
from forebay.train.model import parameter_bytes

DEVICE = "device"
PINNED = "pinned"
PAGEABLE = "pageable"
HOST = "host"  # pinned and pageable together

Plan = dict[str, dict[str, int]]
"""Bytes per tier and purpose."""


class DoesNotFitError(ValueError):
    """The run needs more memory than there is; the message lists both and what lowers the need."""


def activation_lower_bound_bytes(
    model: Any, *, num_tokens: int, num_layers: int, hidden_size: int, full_recompute: bool
) -> int:
    """Return the least that a forward pass keeps for backward, without the logits.

    With full recomputation that is each layer's input. Without it, the output of every linear layer: what
    follows (attention, the activation function, a normalisation) saves it. Fused experts are not counted.
    """
    item_bytes: int = next(model.parameters()).element_size()
    if full_recompute:
        return num_tokens * num_layers * hidden_size * item_bytes
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return num_tokens * sum(m.out_features for m in linears) * item_bytes


def logits_bytes(*, num_tokens: int, vocab_size: int, item_bytes: int) -> int:
    """Return what the loss holds at its peak: the logits, their fp32 log-softmax and its gradient."""
    return num_tokens * vocab_size * (item_bytes + 4 + 4)


def plan_run(
    model: Any, optimizer_plan: Mapping[str, Mapping[str, int]], *, num_tokens: int, full_recompute: bool
) -> Plan:
    """Add up what training ``model`` needs.

    Args:
        model: on any device, meta included; not touched.
        optimizer_plan: bytes per tier and purpose of the optimizer.
        num_tokens: of one micro-batch.
        full_recompute: whether every layer's forward is run again in backward.
    """
    text_config = model.config.get_text_config()
    item_bytes = next(model.parameters()).element_size()
    trained_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    activations = activation_lower_bound_bytes(
        model,
        num_tokens=num_tokens,
        num_layers=text_config.num_hidden_layers,
        hidden_size=text_config.hidden_size,
        full_recompute=full_recompute,
    )
    plan: Plan = {
        DEVICE: {
            "weights": parameter_bytes(model),
            "gradients": trained_bytes,
            "activations": activations,
            "logits": logits_bytes(num_tokens=num_tokens, vocab_size=text_config.vocab_size, item_bytes=item_bytes),
        }
    }
    for tier, purposes in optimizer_plan.items():
        target = plan.setdefault(str(tier), {})
        for purpose, num_bytes in purposes.items():
            target[purpose] = target.get(purpose, 0) + num_bytes
    return plan


def needed_device_bytes(plan: Plan, *, num_micro_batches: int) -> int:
    """Return the device tier's least peak.

    Backward makes gradients while it drops activations, so with one micro-batch only the larger of the two
    counts; with several, the first one's gradients are there during the second one's forward.
    """
    purposes = dict(plan[DEVICE])
    gradients = purposes.pop("gradients")
    forward = purposes.pop("activations") + purposes.pop("logits")
    passing = gradients + forward if num_micro_batches > 1 else max(gradients, forward)
    return sum(purposes.values()) + passing


def available_bytes(device: torch.device) -> tuple[int | None, int]:
    """Return the free bytes of the device tier and of host memory.

    The first is None without a GPU: both tiers are host memory then.
    """
    host = limits(pinned=False)[0].available_bytes
    if device.type != "cuda":
        return None, host
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has reserved and not given out can be used as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free, host


@dataclass(frozen=True)
class Lever:
    """A setting that lowers what a tier needs.

    Attributes:
        tier: ``DEVICE`` or ``HOST``.
        setting: what to change, with its present value.
        saved_bytes: the most it can save there. Default None: depends on the value.
        moves: whether the other tier needs that much more. Default False.
    """

    tier: str
    setting: str
    saved_bytes: int | None = None
    moves: bool = False


def host_bytes(plan: Plan) -> int:
    """Return what the host holds, pinned or not."""
    return sum(sum(plan.get(tier, {}).values()) for tier in (PINNED, PAGEABLE))


def check_fits(
    plan: Plan,
    *,
    device_name: str,
    device_available: int | None,
    host_available: int,
    num_micro_batches: int,
    levers: Sequence[Lever] = (),
) -> None:
    """Compare a plan with what there is.

    Args:
        plan: from :func:`plan_run`.
        device_name: for the message.
        device_available: free bytes of the device; None when both tiers are host memory.
        host_available: free bytes of host memory.
        num_micro_batches: in a global batch.
        levers: what may lower the need; the message lists those that help.

    Raises:
        DoesNotFitError: listing needed and available bytes of each tier, and the settings that help.
    """
    device_needed, host_needed = needed_device_bytes(plan, num_micro_batches=num_micro_batches), host_bytes(plan)
    host_purposes: Counter[str] = Counter()
    for tier in (PINNED, PAGEABLE):
        host_purposes.update(plan.get(tier, {}))
    if device_available is None:
        total = device_needed + host_needed
        short = {DEVICE: total - host_available, HOST: total - host_available}
        lines = [
            f"  host memory, which is the device tier too: needs at least {_gib(total)} GiB, "
            f"{_gib(host_available)} GiB available",
            f"    device tier: {_purposes(plan[DEVICE])}",
            f"    host tier: {_purposes(host_purposes)}",
        ]
    else:
        short = {DEVICE: device_needed - device_available, HOST: host_needed - host_available}
        lines = [
            f"  {device_name}: needs at least {_gib(device_needed)} GiB, {_gib(device_available)} GiB available "
            f"({_purposes(plan[DEVICE])})",
            f"  host memory: needs at least {_gib(host_needed)} GiB, {_gib(host_available)} GiB available "
            f"({_purposes(host_purposes)})",
        ]
    if max(short.values()) <= 0:
        return
    both_short = min(short.values()) > 0
    helpful = [
        lever
        for lever in levers
        if short[lever.tier] > 0
        and not (lever.moves and both_short)
        # One that saves next to nothing of what is missing only distracts.
        and (lever.saved_bytes is None or lever.saved_bytes > 0.02 * short[lever.tier])
    ]
    settings = [
        f"    {lever.setting}" + ("" if lever.saved_bytes is None else f": saves up to {_gib(lever.saved_bytes)} GiB")
        for lever in helpful
    ]
    lines = ["this run does not fit; nothing has been allocated", *lines, "  what lowers the need:"]
    raise DoesNotFitError("\n".join([*lines, *dict.fromkeys(settings)]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _purposes(purposes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in purposes.items() if size) or "nothing"
