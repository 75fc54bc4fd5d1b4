"""The options of an optimizer with placed state, and the memory they lead to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from forebay.engine import get_engine
from forebay.optim import cost_model, layout
from forebay.optim.adamw_rule import AdamWRule
from forebay.optim.chunk_state import region_bytes
from forebay.optim.graph_hypers import GRAPH_HYPERS_BYTES
from forebay.optim.host_share import CONTROL_BYTES
from forebay.optim.kernel_rule import KernelRule
from forebay.optim.layout import Chunk, ParamSpec, Placement
from forebay.optim.low_precision import STATE_DTYPES
from forebay.optim.spares import weight_bytes, with_spares
from forebay.optim.update_rule import UpdateRule

PLACEMENTS = ("auto", "streamed", "host")
# About 16 Mi elements: a chunk of bf16 parameters has 160 MiB of state, which copies at full speed. Not a power
# of two, because the host kernel reads several fields that are then this far apart, and streams whose addresses
# differ by a power of two evict each other from the first-level cache (measured on Zen 4, see docs/log.md).
DEFAULT_CHUNK_ELEMENTS = 16 * 2**20 - 9 * 1024
CALIBRATED = "calibrated"
NUM_STREAM_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an optimizer with placed state; :class:`forebay.AdamW` says what each means."""

    offload_fraction: float = 0.0
    placement: str = "auto"
    host_share: float | str | None = None
    overlap: bool = True
    staging_gib: float = 0.0
    pinned: bool = True
    skip_nonfinite: bool = False
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS
    early_updates: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise ValueError(
                f"offload_fraction must be between 0.0 and 1.0, got {self.offload_fraction}: it is the share of "
                "the optimizer state that is held on the host"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.placement!r}; choose one of {', '.join(PLACEMENTS)}")
        if isinstance(self.host_share, str):
            if self.host_share != CALIBRATED:
                raise ValueError(
                    f"unknown host_share {self.host_share!r}; give a number between 0.0 and 1.0, or {CALIBRATED!r} to "
                    "divide by what this machine is measured to do"
                )
        elif self.host_share is not None and not 0.0 <= self.host_share <= 1.0:
            raise ValueError(
                f"host_share must be between 0.0 and 1.0, got {self.host_share}: it is the part of what is offloaded "
                "that the host updates"
            )
        if self.host_share is not None and self.placement != "auto":
            raise ValueError(
                f"host_share={self.host_share!r} divides what is offloaded, as placement={self.placement!r} does; "
                "give one of them"
            )
        if not self.staging_gib >= 0.0:
            raise ValueError(f"staging_gib must not be negative, got {self.staging_gib}")
        if self.chunk_elements < 4096:
            raise ValueError(f"chunk_elements must be at least 4096, got {self.chunk_elements}")

    def host_share_of(self, rule: UpdateRule, device: torch.device, params: Sequence[torch.Tensor]) -> float:
        """Return the share of the offloaded part of ``params`` that the host updates when training on ``device``.

        Raises:
            ValueError: if the host is to update what it has no kernel for.
        """
        has_kernel = isinstance(rule, KernelRule) and rule.host_algorithm is not None
        if self.host_share is None and self.placement != "auto":
            share = 1.0 if self.placement == "host" else 0.0
        elif self.host_share is not None and not isinstance(self.host_share, str):
            share = self.host_share
        elif not has_kernel or (self.host_share is None and device.type == "cpu"):
            share = 0.0
        else:
            rates = cost_model.calibrated(get_engine(device)) if self.host_share == CALIBRATED else cost_model.H200
            share = cost_model.best_host_share(cost_model.element_bytes(params, rule), rates, overlap=self.overlap)
        if share > 0 and self.offload_fraction > 0 and not has_kernel:
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
    host_share: float | str | None = None,
    overlap: bool = True,
    pinned: bool = True,
    state_dtype: str = "fp32",
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    early_updates: bool = False,
) -> dict[str, dict[str, int]]:
    """Return the bytes a :class:`forebay.AdamW` with these options will hold, per tier and purpose.

    Args:
        params: parameters, on any device, ``meta`` included; nothing is allocated.
        device: the device that will train.
        offload_fraction: see :class:`forebay.AdamW`, as for the other arguments.
    """
    options = Options(
        offload_fraction=offload_fraction,
        placement=placement,
        host_share=host_share,
        overlap=overlap,
        pinned=pinned,
        chunk_elements=chunk_elements,
        early_updates=early_updates,
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
    add_bytes(plan, copied, "other", CONTROL_BYTES + GRAPH_HYPERS_BYTES if on_host else 0)
    add_bytes(plan, "device", "other", GRAPH_HYPERS_BYTES if on_host else 0)
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
        host_share=options.host_share_of(rule, device, params),
        chunk_elements=options.chunk_elements,
        first_param=first_param,
    )
    # Where there is no state (plain SGD on fp32 weights) there is nothing to offload.
    chunks = [c if region_bytes(c, rule) else dataclasses.replace(c, placement=Placement.DEVICE) for c in chunks]
    # Without overlap nothing is sent during backward.
    return with_spares(chunks, rule) if options.early_updates and options.overlap else chunks
