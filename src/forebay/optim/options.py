"""The options of an optimizer with placed state, and the memory they lead to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from forebay.optim import layout
from forebay.optim.adamw_rule import AdamWRule
from forebay.optim.chunk_state import region_bytes
from forebay.optim.host_share import CONTROL_BYTES
from forebay.optim.layout import Chunk, ParamSpec, Placement
from forebay.optim.low_precision import STATE_DTYPES
from forebay.optim.spares import weight_bytes, with_spares
from forebay.optim.update_rule import UpdateRule

PLACEMENTS = ("auto", "streamed", "host")
# About 16 Mi elements: a chunk of bf16 parameters has 160 MiB of state, which copies at full speed. Not a power
# of two, because the host kernel reads several fields that are then this far apart, and streams whose addresses
# differ by a power of two evict each other from the first-level cache (measured on Zen 4, see docs/log.md).
DEFAULT_CHUNK_ELEMENTS = 16 * 2**20 - 9 * 1024
# Copies and host updates run side by side; see docs/log.md for the measurement this share comes from.
_AUTO_HOST_SHARE = 0.33
NUM_STREAM_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an optimizer with placed state; :class:`forebay.AdamW` says what each means."""

    offload_fraction: float
    placement: str
    host_share: float | None
    overlap: bool
    staging_gib: float
    pinned: bool
    skip_nonfinite: bool
    chunk_elements: int
    early_updates: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise ValueError(
                f"offload_fraction must be between 0.0 and 1.0, got {self.offload_fraction}: it is the share of "
                "the optimizer state that is held on the host"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.placement!r}; choose one of {', '.join(PLACEMENTS)}")
        if self.host_share is not None and not 0.0 <= self.host_share <= 1.0:
            raise ValueError(
                f"host_share must be between 0.0 and 1.0, got {self.host_share}: it is the part of what is offloaded "
                "that the host updates"
            )
        if self.host_share is not None and self.placement != "auto":
            raise ValueError(
                f"host_share={self.host_share} divides what is offloaded, which placement={self.placement!r} does too; "
                "give one of them"
            )
        if not self.staging_gib >= 0.0:
            raise ValueError(f"staging_gib must not be negative, got {self.staging_gib}")
        if self.chunk_elements < 4096:
            raise ValueError(f"chunk_elements must be at least 4096, got {self.chunk_elements}")

    def host_share_of(self, rule: UpdateRule, device: torch.device) -> float:
        """Return the share of the offloaded part that is updated on the host when training on ``device``.

        Raises:
            ValueError: if the host is to update what it has no kernel for.
        """
        auto = _AUTO_HOST_SHARE if device.type != "cpu" and rule.host_algorithm is not None else 0.0
        share = {"auto": auto, "streamed": 0.0, "host": 1.0}[self.placement]
        if self.host_share is not None:
            share = self.host_share
        if share > 0 and self.offload_fraction > 0 and rule.host_algorithm is None:
            raise ValueError(
                f"{rule.name} has no host kernel, so its state cannot be updated on the host; use "
                "placement='streamed', which updates it on the device"
            )
        return share


def check_state_dtype(state_dtype: str) -> None:
    """Raise ValueError, with the choices, for an unknown dtype of the moments."""
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"unknown state_dtype {state_dtype!r}; choose one of {', '.join(STATE_DTYPES)}")


def add_bytes(plan: dict[str, dict[str, int]], tier: str, purpose: str, num_bytes: int) -> None:
    """Add bytes to a memory plan; nothing where there are none."""
    if num_bytes:
        plan[tier][purpose] = plan[tier].get(purpose, 0) + num_bytes


def plan_memory(
    params: Iterable[torch.Tensor],
    *,
    device: torch.device | str = "cuda",
    offload_fraction: float = 0.0,
    placement: str = "auto",
    host_share: float | None = None,
    overlap: bool = True,
    pinned: bool = True,
    state_dtype: str = "fp32",
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    early_updates: bool = True,
) -> dict[str, dict[str, int]]:
    """Return the bytes a :class:`forebay.AdamW` with these options will hold, per tier and purpose.

    Args:
        params: parameters, on any device, ``meta`` included; nothing is allocated.
        device: the device that will train.
        offload_fraction: see :class:`forebay.AdamW`, as for the other arguments.
    """
    options = Options(
        offload_fraction, placement, host_share, overlap, 0.0, pinned, False, chunk_elements, early_updates
    )
    check_state_dtype(state_dtype)
    rule = AdamWRule(torch.device("cpu"), state_dtype)  # it updates nothing here
    chunks = divide_params(list(params), options, rule, torch.device(device), 0)
    by_placement = {p: [chunk for chunk in chunks if chunk.placement is p] for p in Placement}
    state = {p: sum(region_bytes(chunk, rule) for chunk in own) for p, own in by_placement.items()}
    copied = "pinned" if pinned else "pageable"
    plan: dict[str, dict[str, int]] = {"device": {}, "pinned": {}, "pageable": {}}

    add_bytes(plan, "device", "optimizer_state", state[Placement.DEVICE])
    add_bytes(plan, copied, "optimizer_state", state[Placement.STREAMED])
    streamed = [region_bytes(chunk, rule) for chunk in by_placement[Placement.STREAMED]]
    add_bytes(
        plan,
        "device",
        "staging",
        max(streamed, default=0) * min(NUM_STREAM_SLOTS if overlap else 1, len(streamed)),
    )
    add_bytes(plan, "pageable", "optimizer_state", state[Placement.HOST])
    on_host = by_placement[Placement.HOST]
    weights = sum(weight_bytes(chunk) for chunk in on_host)
    add_bytes(plan, copied, "weights", weights)
    add_bytes(plan, copied, "gradients", weights)
    add_bytes(plan, copied, "other", CONTROL_BYTES if on_host else 0)
    spared = [chunk for chunk in on_host if chunk.has_spare]
    add_bytes(plan, "pageable", "spares", sum(region_bytes(chunk, rule) for chunk in spared))
    add_bytes(plan, copied, "spares", sum(weight_bytes(chunk) for chunk in spared))
    return plan


def divide_params(
    params: Sequence[torch.Tensor], options: Options, rule: UpdateRule, device: torch.device, first_param: int
) -> list[Chunk]:
    """Divide parameters, the first of which is number ``first_param``, into chunks for training on ``device``."""
    chunks = layout.divide(
        [ParamSpec(param.numel(), param.dtype) for param in params],
        offload_fraction=options.offload_fraction,
        host_share=options.host_share_of(rule, device),
        chunk_elements=options.chunk_elements,
        first_param=first_param,
    )
    # Without overlap nothing is sent during backward.
    return with_spares(chunks, rule) if options.early_updates and options.overlap else chunks
