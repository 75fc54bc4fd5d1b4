"""Moments in bf16 or 8 bits, stored with stochastic rounding.

Rounding to nearest would lose every change that is smaller than half a step of the stored value: an ``exp_avg_sq``
that changes by a thousandth a step would never move. Rounding up with a probability equal to the part cut off keeps
it right on average. The random bits are a hash of parameter, element and update count, so a run can be repeated, and
neither placement nor how a tensor is cut changes a bit.

8-bit moments are scaled by the largest magnitude of 128 elements and companded before they are cut to an integer:
``exp_avg`` by a square root, ``exp_avg_sq`` by a fourth root. That spends codes evenly on orders of magnitude
(down to 1/16129 and 1/4e9 of the largest) with nothing but IEEE operations. Block-wise state is from Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization" (2022), who use a table instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from forebay.optim.update_rule import Field

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_DTYPES = ("fp32", "bf16", "8bit")
BLOCK = 128
SCALE = "_scale"  # suffix of the field with the scales of a block-wise one


@dataclasses.dataclass(frozen=True)
class Noise:
    """Where a segment's random bits come from.

    Attributes:
        key: int64 (1,) on the device, differs between parameters and updates.
        first_element: of the segment in its parameter.
    """

    key: torch.Tensor
    first_element: int


def moment_fields(state_dtype: str) -> dict[str, Field]:
    """Return the fields of both moments in one of ``STATE_DTYPES``; the scales are in :func:`scale_fields`."""
    dtypes = {
        "fp32": (torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.bfloat16),
        "8bit": (torch.int8, torch.uint8),
    }[state_dtype]
    return {name: Field(dtype) for name, dtype in zip(MOMENTS, dtypes, strict=True)}


def scale_fields(state_dtype: str) -> dict[str, Field]:
    """Return the fields with the scales of blocks; none unless ``state_dtype`` has blocks."""
    return {name + SCALE: Field(torch.float32, BLOCK) for name in MOMENTS} if state_dtype == "8bit" else {}


def load_moment(fields: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a moment in fp32: a new tensor, or the stored one where it is fp32."""
    stored = fields[name]
    if name + SCALE not in fields:
        return stored.float()
    scale = fields[name + SCALE].repeat_interleave(BLOCK)[: stored.numel()]
    root = stored.float().abs() / (127 if stored.dtype is torch.int8 else 255)
    magnitude = root * root
    if stored.dtype is torch.uint8:
        return magnitude * magnitude * scale
    return torch.where(stored < 0, -(magnitude * scale), magnitude * scale)


def store_moment(
    fields: Mapping[str, torch.Tensor], name: str, values: torch.Tensor, random16: torch.Tensor | None
) -> None:
    """Store a moment.

    Args:
        fields: of the segment.
        name: of the moment.
        values: fp32; any dtype and device where ``random16`` is None.
        random16: int64, 16 random bits for each element, for stochastic rounding; None rounds to nearest, which gives
            back exactly what :func:`load_moment` returned.
    """
    stored = fields[name]
    if name + SCALE in fields:
        codes, scale = _quantize(values.float(), stored.dtype, random16)
        stored.copy_(codes)
        fields[name + SCALE].copy_(scale)
    elif stored.dtype is torch.bfloat16 and random16 is not None:
        bits = values.view(torch.int32)
        rounded = torch.where(values.isnan(), (bits >> 16) | 0x40, (bits + random16.to(torch.int32)) >> 16)
        stored.view(torch.int16).copy_(rounded.to(torch.int16))
    else:
        stored.copy_(values)


def _quantize(
    values: torch.Tensor, dtype: torch.dtype, random16: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_elements = values.numel()
    magnitude = values.abs()
    # A block that has met a NaN or an infinity must not look finite afterwards: its scale is infinite.
    padded = torch.nn.functional.pad(magnitude.nan_to_num(nan=torch.inf, posinf=torch.inf), (0, -num_elements % BLOCK))
    scale = padded.view(-1, BLOCK).amax(1)
    whole = scale.repeat_interleave(BLOCK)[:num_elements]
    ratio = torch.where(whole > 0, magnitude / whole, 0.0)
    # In double precision, because torch's fp32 square root on the CPU is not always the nearest value.
    root = ratio.double().sqrt().float()
    noise = 0.5 if random16 is None else random16.float() / 65536
    if dtype is torch.int8:
        codes = (root * 127 + noise).floor().clamp(max=127).nan_to_num()
        return torch.where(values < 0, -codes, codes).to(dtype), scale
    root = root.double().sqrt().float()
    codes = (root * 255 + noise).floor().clamp(max=255).nan_to_num()
    # A second moment of zero beside a first one that is not would make a step of any size.
    return torch.where(magnitude > 0, codes.clamp(min=1), codes).to(dtype), scale


def random_bits(noise: Noise, num_elements: int) -> torch.Tensor:
    """Return 32 random bits for each element, as int64; the host kernel's (``native/src/rules.h``)."""
    mask = 0xFFFFFFFF
    key0, key1 = noise.key & mask, noise.key >> 32 & mask
    index = torch.arange(num_elements, device=noise.key.device) + noise.first_element
    bits = (index & mask) ^ key0
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & mask
    bits = bits ^ key1
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & mask
    return bits ^ (bits >> 16)


def mix_keys(values: torch.Tensor) -> torch.Tensor:
    """Hash int64 values one by one, as the host kernel does (SplitMix64's finalizer, Steele et al., 2014)."""

    def xor_shifted(x: torch.Tensor, num_bits: int) -> torch.Tensor:
        return x ^ (x >> num_bits & ((1 << (64 - num_bits)) - 1))  # a logical shift

    def signed(constant: int) -> int:
        return constant - (1 << 64) if constant >> 63 else constant

    x = values + signed(0x9E3779B97F4A7C15)
    x = xor_shifted(x, 30) * signed(0xBF58476D1CE4E5B9)
    x = xor_shifted(x, 27) * signed(0x94D049BB133111EB)
    return xor_shifted(x, 31)
