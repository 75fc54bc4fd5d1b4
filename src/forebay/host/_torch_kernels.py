"""The host updates in plain torch, for where the native library was not built.

The arithmetic is the native one up to the rounding of single operations (torch fuses fewer multiply-adds); what the
kernels promise otherwise holds here too: separate outputs, skipping, masters, reproducible stochastic rounding.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forebay.host.kernels import Hyper, Segment

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.split_master``."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16  # wraps around like unsigned arithmetic, NaN aside
    remainder = bits - (upper << 16)
    nan = master.isnan()
    upper = torch.where(nan, (bits >> 16) | 0x40, upper)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.masked_fill_(nan, 0).to(torch.int16)


def join(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """See ``kernels.join_master``."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _random_bits(segment: Segment, step: float) -> torch.Tensor:
    """Return the native kernel's 32 random bits of each element, as int64."""
    index = torch.arange(segment.first_element, segment.first_element + segment.param.numel())
    (step_bits,) = struct.unpack("<I", struct.pack("<f", step))
    key = _mix(_mix(segment.seed) ^ step_bits)
    out = torch.empty_like(index)
    for upper in torch.unique(index >> 32).tolist():
        here = (index >> 32) == upper
        block_key = _mix(key ^ upper)
        x = (index[here] & _MASK32) ^ (block_key & _MASK32)
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
        x ^= block_key >> 32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
        out[here] = x ^ (x >> 16)
    return out


def _store_state(out: torch.Tensor | None, old: torch.Tensor, new: torch.Tensor, random16: torch.Tensor | None) -> None:
    target = (old if out is None else out).view(-1)
    if random16 is None:
        target.copy_(new)
        return
    bits = new.view(torch.int32)
    rounded = torch.where(new.isnan(), (bits >> 16) | 0x40, (bits + random16.to(torch.int32)) >> 16)
    target.view(torch.int16).copy_(rounded.to(torch.int16))


def _store_weight(segment: Segment, new: torch.Tensor) -> None:
    param = (segment.param if segment.param_out is None else segment.param_out).view(-1)
    if segment.master is None:
        param.copy_(new)
        return
    master = (segment.master if segment.master_out is None else segment.master_out).view(-1)
    if master.dtype == torch.int16:
        upper, remainder = split(new)
        param.copy_(upper)
        master.copy_(remainder)
    else:
        master.copy_(new)
        param.copy_(new)


def _weight(segment: Segment) -> torch.Tensor:
    if segment.master is None:
        source = segment.param
    elif segment.master.dtype == torch.int16:
        return join(segment.param.view(-1), segment.master.view(-1))
    else:
        source = segment.master
    return source.view(-1).to(torch.float32, copy=True)


def _update_segment(algorithm: str, segment: Segment, hyper: Hyper, grad_scale: float, step: float) -> None:
    g = segment.grad.view(-1).to(torch.float32) * (-grad_scale if hyper.maximize else grad_scale)
    p = _weight(segment)
    m, v = (
        None if state is None else state.view(-1).to(torch.float32, copy=True)
        for state in (segment.exp_avg, segment.exp_avg_sq)
    )
    if algorithm in ("ADAM", "SGD") and hyper.weight_decay != 0:
        g = g.add(p, alpha=hyper.weight_decay)
    if algorithm in ("ADAMW", "LION"):
        p.mul_(1 - hyper.lr * hyper.weight_decay)
    if algorithm in ("ADAM", "ADAMW"):
        assert m is not None
        assert v is not None
        from_grad = 1 - hyper.beta1 >= 0.5
        m.copy_((g if from_grad else m) + (g - m) * (-hyper.beta1 if from_grad else 1 - hyper.beta1))
        v.mul_(hyper.beta2).add_((g * (1 - hyper.beta2)) * g)
        denominator = (v.sqrt() / (1 - hyper.beta2 ** (step + 1)) ** 0.5).add_(hyper.eps)
        p.addcdiv_(m, denominator, value=-hyper.lr / (1 - hyper.beta1 ** (step + 1)))
    elif algorithm == "LION":
        assert m is not None
        direction = (m * hyper.beta1).add_(g, alpha=1 - hyper.beta1)
        p.add_(torch.where(direction.isnan(), direction, direction.sign()), alpha=-hyper.lr)
        m.mul_(hyper.beta2).add_(g, alpha=1 - hyper.beta2)
    else:
        if hyper.momentum == 0:
            m = None
        elif segment.step is not None and step == 0:
            m = g.clone()
        else:
            assert m is not None
            m.mul_(hyper.momentum).add_(g, alpha=1 - hyper.dampening)
        if m is not None:
            g = g.add(m, alpha=hyper.momentum) if hyper.nesterov else m
        p.add_(g, alpha=-hyper.lr)

    random = None
    if segment.exp_avg is not None and segment.exp_avg.dtype == torch.bfloat16:
        random = _random_bits(segment, step)
    if m is not None and segment.exp_avg is not None:
        _store_state(segment.exp_avg_out, segment.exp_avg, m, None if random is None else random >> 16)
    if v is not None and segment.exp_avg_sq is not None:
        _store_state(segment.exp_avg_sq_out, segment.exp_avg_sq, v, None if random is None else random & 0xFFFF)
    _store_weight(segment, p)


@torch.no_grad()
def update(
    algorithm: str,
    segments: Sequence[Segment],
    hyper: Hyper,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> bool:
    """Do what ``forebay_update`` does. Returns False when ``found_inf`` skipped the update."""
    if found_inf is not None and found_inf.item() != 0:
        return False
    scale = 1.0 if grad_scale is None else grad_scale.item()
    # All steps are read before any is written: segments of one tensor may share theirs.
    steps = [0.0 if segment.step is None else segment.step.item() for segment in segments]
    for segment, step in zip(segments, steps, strict=True):
        _update_segment(algorithm, segment, segment.hyper or hyper, scale, step)
    for segment, step in zip(segments, steps, strict=True):
        if segment.step is not None:
            (segment.step if segment.step_out is None else segment.step_out).fill_(step + 1)
    return True


@torch.no_grad()
def resolve(
    algorithm: str,
    segments: Sequence[Segment],
    hyper: Hyper,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> bool | None:
    """Do what ``forebay_resolve`` does. Returns True for an update made again, False for a skipped one, else None."""
    if found_inf is not None and found_inf.item() != 0:
        for segment in segments:
            for name in ("param", "master", "exp_avg", "exp_avg_sq", "step"):
                output = getattr(segment, f"{name}_out")
                if output is not None:
                    output.copy_(getattr(segment, name))
        return False
    if grad_scale is None or grad_scale.item() == 1.0:
        return None
    return update(algorithm, segments, hyper, grad_scale, None)


def stream_bandwidth(destination: torch.Tensor, source: torch.Tensor, repeats: int) -> float:
    """See ``kernels.stream_bandwidth``; in place when both tensors are the same."""
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        if source is destination:
            destination.add_(1)
        else:
            destination.copy_(source)
        best = max(best, 2 * destination.nbytes / (time.perf_counter() - start))
    return best
