"""The AdamW update as one Triton kernel: every byte of state, gradient and weight is read and written once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from forebay.optim.device_update import GroupValues, lerp_constants
from forebay.optim.low_precision import BLOCK, SCALE, Noise

_STATE_BLOCK = BLOCK  # of 8-bit state
_NUM_ROWS = 16  # of that many elements in a program
_MOMENT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


# Shifts are logical and products wrap in unsigned arithmetic, as in native/src/rules.h.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _random_bits(key_ptr, index):  # type: ignore[no-untyped-def]
    key = tl.load(key_ptr)
    bits = index.to(tl.uint32) ^ key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = bits ^ (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load_moment(ptr, scale_ptr, index, inside, block, block_inside, KIND: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    stored = tl.load(ptr + index, inside, other=0).to(tl.float32)
    if KIND == 2:
        scale = tl.load(scale_ptr + block, block_inside, other=0)[:, None]
        root = tl.div_rn(tl.abs(stored), 127.0 if SIGNED else 255.0)
        magnitude = root * root
        if SIGNED:
            magnitude = magnitude * scale
            stored = tl.where(stored < 0, -magnitude, magnitude)
        else:
            stored = magnitude * magnitude * scale
    return stored


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_moment(  # type: ignore[no-untyped-def]
    ptr, scale_ptr, index, inside, block, block_inside, value, random16, KIND: tl.constexpr, SIGNED: tl.constexpr
):
    if KIND == 0:
        tl.store(ptr + index, value, inside)
    elif KIND == 1:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = tl.where(value != value, (bits >> 16) | 0x40, (bits + random16) >> 16)
        tl.store(ptr + index, rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True), inside)
    else:
        magnitude = tl.abs(value)
        known = tl.where(magnitude == magnitude, magnitude, float("inf"))
        scale = tl.max(tl.where(inside, known, 0.0), axis=1)
        whole = tl.broadcast_to(scale[:, None], magnitude.shape)
        ratio = tl.where(whole > 0, tl.div_rn(magnitude, whole), 0.0)
        root = tl.sqrt_rn(ratio)
        noise = random16.to(tl.float32) / 65536.0
        most: tl.constexpr = 127.0 if SIGNED else 255.0
        if not SIGNED:
            root = tl.sqrt_rn(root)
        code = tl.floor(root * most + noise)
        code = tl.where(code != code, 0.0, tl.where(code > most, most, code))
        # As in low_precision.py: no second moment is rounded to zero.
        code = tl.where(value < 0, -code, code) if SIGNED else tl.where((magnitude > 0) & (code < 1), 1.0, code)
        tl.store(ptr + index, code.to(tl.int32).to(ptr.dtype.element_ty), inside)
        tl.store(scale_ptr + block, scale, block_inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_master(weight_ptr, low_ptr, index, inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the fp32 value of weights; see :func:`master_of`."""
    if MASTER == 1:
        upper = tl.load(weight_ptr + index, inside, other=0).to(tl.int16, bitcast=True).to(tl.int32)
        value = ((upper << 16) + tl.load(low_ptr + index, inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif MASTER == 2:
        value = tl.load(low_ptr + index, inside, other=0)
    else:
        value = tl.load(weight_ptr + index, inside, other=0)
    return value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def store_master(weight_ptr, low_ptr, index, inside, value, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the fp32 value of weights as weight and master."""
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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    low_ptr,  # remainder or fp32 master
    exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr,
    row_ptr,
    key_ptr,
    grad_scale_ptr,
    skip_ptr,
    num_elements,
    first_element,
    lerp_weight,
    beta2,
    beta2_complement,
    eps,
    MASTER: tl.constexpr,  # see master_of
    FROM_GRAD: tl.constexpr,
    SCALE: tl.constexpr,
    SKIP: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MOMENT: tl.constexpr,  # 0 fp32, 1 bf16, 2 8-bit
    NUM_ROWS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    if SKIP:  # noqa: SIM102 - this test is made at compile time
        if tl.load(skip_ptr) != 0:
            return
    decay = tl.load(row_ptr)
    step_size = tl.load(row_ptr + 1)
    inverse_sqrt_correction2 = tl.load(row_ptr + 2)
    block = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    block_inside = block * STATE_BLOCK < num_elements
    index = block[:, None] * STATE_BLOCK + tl.arange(0, STATE_BLOCK)[None, :]
    inside = index < num_elements
    grad = tl.load(grad_ptr + index, inside, other=0).to(tl.float32)
    if SCALE:
        grad = grad * tl.load(grad_scale_ptr)
    if MAXIMIZE:
        grad = -grad
    exp_avg = _load_moment(exp_avg_ptr, exp_avg_scale_ptr, index, inside, block, block_inside, MOMENT, True)
    exp_avg_sq = _load_moment(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, index, inside, block, block_inside, MOMENT, False)
    value = load_master(weight_ptr, low_ptr, index, inside, MASTER)
    value = value * decay
    difference = (grad - exp_avg) * lerp_weight
    exp_avg = (grad if FROM_GRAD else exp_avg) + difference
    exp_avg_sq = exp_avg_sq * beta2 + (grad * beta2_complement) * grad
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_sqrt_correction2 + eps
    value = value - tl.div_rn(step_size * exp_avg, denominator)
    bits = index.to(tl.uint32)
    if MOMENT > 0:
        bits = _random_bits(key_ptr, first_element + index)
    _store_moment(exp_avg_ptr, exp_avg_scale_ptr, index, inside, block, block_inside, exp_avg, bits >> 16, MOMENT, True)
    _store_moment(
        exp_avg_sq_ptr,
        exp_avg_sq_scale_ptr,
        index,
        inside,
        block,
        block_inside,
        exp_avg_sq,
        bits & 0xFFFF,
        MOMENT,
        False,
    )
    store_master(weight_ptr, low_ptr, index, inside, value, MASTER)


def master_of(fields: Mapping[str, torch.Tensor], weight: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return ``MASTER`` (0 none, 1 remainder, 2 fp32) and what holds it, or where there is none, any tensor."""
    if "remainder" in fields:
        return 1, fields["remainder"]
    return (2, fields["master"]) if "master" in fields else (0, weight)


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    row: torch.Tensor,
    values: GroupValues,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    noise: Noise | None = None,
) -> None:
    """Update one segment in place; see :func:`forebay.optim.device_update.adamw`."""
    kind, low = master_of(fields, weight)
    num_elements = weight.numel()
    from_grad, lerp_weight = lerp_constants(values.beta1)
    _adamw_kernel[(triton.cdiv(num_elements, _NUM_ROWS * _STATE_BLOCK),)](
        weight,
        grad,
        fields["exp_avg"],
        fields["exp_avg_sq"],
        low,
        fields.get("exp_avg" + SCALE, row),
        fields.get("exp_avg_sq" + SCALE, row),
        row,
        noise.key if noise is not None else row,
        grad_scale if grad_scale is not None else row,
        skip if skip is not None else row,
        num_elements,
        noise.first_element if noise is not None else 0,
        lerp_weight,
        values.beta2,
        1 - values.beta2,
        values.eps,
        MASTER=kind,
        FROM_GRAD=from_grad,
        SCALE=grad_scale is not None,
        SKIP=skip is not None,
        MAXIMIZE=values.maximize,
        MOMENT=_MOMENT_KINDS[fields["exp_avg"].dtype],
        NUM_ROWS=_NUM_ROWS,
        STATE_BLOCK=_STATE_BLOCK,
        num_warps=8,
        # Triton compiles a variant for each alignment of its arguments, and which products ptxas fuses into the
        # following sum differs between them: results would depend on how tensors are cut.
        enable_fp_fusion=False,
    )
