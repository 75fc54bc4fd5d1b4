"""Tensors that fill one range of memory, seen as that range."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, without gaps and overlaps, in any dimension order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shaped(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return flat ``memory`` with the shape and strides of the dense tensor ``like``.

    Equal strides keep element-wise kernels on the same code path as for the original, so results agree bit for
    bit.
    """
    return memory.as_strided(like.shape, like.stride())
