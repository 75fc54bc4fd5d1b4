"""SGD and Lion as one Triton kernel: every byte of state, gradient and weight is read and written once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from forebay.optim.device_momentum import MomentumValues
from forebay.optim.triton_update import load_master, master_of, store_master

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _momentum_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    grad_ptr,
    moment_ptr,
    low_ptr,  # remainder or fp32 master
    step_ptr,
    grad_scale_ptr,
    skip_ptr,
    num_elements,
    minus_lr,
    decay,  # Lion: what the weight is multiplied by; SGD: weight decay added to the gradient
    beta1,
    beta1_complement,
    beta2,
    beta2_complement,
    MASTER: tl.constexpr,  # see master_of
    IS_LION: tl.constexpr,
    HAS_MOMENT: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    SCALE: tl.constexpr,
    SKIP: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if SKIP:  # noqa: SIM102 - this test is made at compile time
        if tl.load(skip_ptr) != 0:
            return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_elements
    grad = tl.load(grad_ptr + index, inside, other=0).to(tl.float32)
    if SCALE:
        grad = grad * tl.load(grad_scale_ptr)
    if MAXIMIZE:
        grad = -grad
    value = load_master(weight_ptr, low_ptr, index, inside, MASTER)
    if IS_LION:
        moment = tl.load(moment_ptr + index, inside, other=0)
        mixed = moment * beta1 + grad * beta1_complement
        direction = tl.where(mixed < 0, -1.0, tl.where(mixed > 0, 1.0, mixed))
        tl.store(moment_ptr + index, moment * beta2 + grad * beta2_complement, inside)
        value = value * decay + direction * minus_lr
    else:
        if HAS_DECAY:
            grad = grad + value * decay
        if HAS_MOMENT:
            moment = tl.load(moment_ptr + index, inside, other=0)
            moment = tl.where(tl.load(step_ptr) == 0, grad, moment * beta1 + grad * beta2_complement)
            tl.store(moment_ptr + index, moment, inside)
            grad = grad + moment * beta1 if NESTEROV else moment
        value = value + grad * minus_lr
    store_master(weight_ptr, low_ptr, index, inside, value, MASTER)


def momentum(
    weight: torch.Tensor,
    grad: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    moment: torch.Tensor | None,
    step: torch.Tensor,
    values: MomentumValues,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update one segment in place; see :func:`forebay.optim.device_momentum.momentum`."""
    kind, low = master_of(fields, weight)
    num_elements = weight.numel()
    _momentum_kernel[(triton.cdiv(num_elements, _BLOCK),)](
        weight,
        grad,
        moment if moment is not None else weight,
        low,
        step,
        grad_scale if grad_scale is not None else step,
        skip if skip is not None else step,
        num_elements,
        -values.lr,
        1 - values.lr * values.weight_decay if values.is_lion else values.weight_decay,
        values.beta1,
        1 - values.beta1,
        values.beta2,
        1 - values.beta2,
        MASTER=kind,
        IS_LION=values.is_lion,
        HAS_MOMENT=moment is not None and (values.is_lion or values.beta1 != 0),
        HAS_DECAY=values.weight_decay != 0,
        NESTEROV=values.nesterov,
        SCALE=grad_scale is not None,
        SKIP=skip is not None,
        MAXIMIZE=values.maximize,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # see triton_update.py
    )
