"""Digests of tensors: equal bits give equal digests, and it takes one pass over them where they are."""

from __future__ import annotations

from typing import Any

import torch

_PIECE_ELEMENTS = 2**22  # digested at a time, so that the copy to int64 stays small
# An odd multiplier whose products differ in their high bits: the golden ratio's, as in Fibonacci hashing (Knuth, The
# Art of Computer Programming, volume 3, section 6.4).
_MULTIPLIER = -7046029254386353131


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits that depend on every bit of ``tensor`` and on its place.

    Sums of integers modulo 2**64, which come out the same in any order of adding, hence on any device.

    Args:
        tensor: of any dtype and shape.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE_ELEMENTS):
        piece = words[start : start + _PIECE_ELEMENTS].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + piece.numel(), device=tensor.device)
        factors = (places * _MULTIPLIER) ^ (places << 29)
        total[0] += piece.sum()
        total[1] += (piece * (factors | 1)).sum()
    first, second = (value % 2**64 for value in total.tolist())
    return f"{first:016x}{second:016x}"


def state_digests(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digest of each value in an optimizer's state dict, by ``"PARAMETER / KEY"``, in the dict's order."""
    saved: dict[str, Any] = optimizer.state_dict()
    names: dict[int, str] = {}
    for group in saved["param_groups"]:
        given = group.get("param_names") or [str(number) for number in group["params"]]
        names.update(zip(group["params"], given, strict=True))
    return {
        f"{names[number]} / {key}": tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)
        for number, entry in sorted(saved["state"].items())
        for key, value in entry.items()
    }
