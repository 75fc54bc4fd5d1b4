"""The AdamW update as one Triton kernel: every byte of state, gradient and weight is read and written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from forebay.optim.device_update import GroupValues, lerp_constants

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    low_ptr,  # remainder or fp32 master
    row_ptr,
    grad_scale_ptr,
    skip_ptr,
    num_elements,
    lerp_weight,
    beta2,
    beta2_complement,
    eps,
    MASTER: tl.constexpr,  # 0 none, 1 remainder, 2 fp32
    FROM_GRAD: tl.constexpr,
    SCALE: tl.constexpr,
    SKIP: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if SKIP:  # noqa: SIM102 - this test is made at compile time
        if tl.load(skip_ptr) != 0:
            return
    decay = tl.load(row_ptr)
    step_size = tl.load(row_ptr + 1)
    sqrt_correction2 = tl.load(row_ptr + 2)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_elements
    grad = tl.load(grad_ptr + index, inside, other=0).to(tl.float32)
    if SCALE:
        grad = grad * tl.load(grad_scale_ptr)
    if MAXIMIZE:
        grad = -grad
    exp_avg = tl.load(exp_avg_ptr + index, inside, other=0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + index, inside, other=0)
    if MASTER == 1:
        upper = tl.load(weight_ptr + index, inside, other=0).to(tl.int16, bitcast=True).to(tl.int32)
        value = ((upper << 16) + tl.load(low_ptr + index, inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif MASTER == 2:
        value = tl.load(low_ptr + index, inside, other=0)
    else:
        value = tl.load(weight_ptr + index, inside, other=0)
    value = value * decay
    difference = (grad - exp_avg) * lerp_weight
    exp_avg = (grad if FROM_GRAD else exp_avg) + difference
    exp_avg_sq = exp_avg_sq * beta2 + (grad * beta2_complement) * grad
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), sqrt_correction2) + eps
    value = value - tl.div_rn(step_size * exp_avg, denominator)
    tl.store(exp_avg_ptr + index, exp_avg, inside)
    tl.store(exp_avg_sq_ptr + index, exp_avg_sq, inside)
    if MASTER == 1:
        bits = value.to(tl.int32, bitcast=True)
        nan = value != value
        rounded = (bits + 0x8000) >> 16
        low = tl.where(nan, 0, bits - (rounded << 16))
        rounded = tl.where(nan, (bits >> 16) | 0x40, rounded)
        tl.store(weight_ptr + index, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(low_ptr + index, low.to(tl.int16), inside)
    else:
        if MASTER == 2:
            tl.store(low_ptr + index, value, inside)
        tl.store(weight_ptr + index, value.to(weight_ptr.dtype.element_ty), inside)


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    row: torch.Tensor,
    values: GroupValues,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update one segment in place; see :func:`forebay.optim.device_update.adamw`."""
    low: Any = fields.get("remainder", fields.get("master"))
    kind = 1 if "remainder" in fields else 2 if "master" in fields else 0
    num_elements = weight.numel()
    from_grad, lerp_weight = lerp_constants(values.beta1)
    _adamw_kernel[(triton.cdiv(num_elements, _BLOCK),)](
        weight,
        grad,
        fields["exp_avg"],
        fields["exp_avg_sq"],
        low if low is not None else weight,
        row,
        grad_scale if grad_scale is not None else row,
        skip if skip is not None else row,
        num_elements,
        lerp_weight,
        values.beta2,
        1 - values.beta2,
        values.eps,
        MASTER=kind,
        FROM_GRAD=from_grad,
        SCALE=grad_scale is not None,
        SKIP=skip is not None,
        MAXIMIZE=values.maximize,
        BLOCK=_BLOCK,
        num_warps=8,
        # Triton compiles a variant for each alignment of its arguments, and which products ptxas fuses into the
        # following sum differs between them: results would depend on how tensors are cut.
        enable_fp_fusion=False,
    )
