"""Which parameter a piece of memory belongs to, so that traces can say what a copy carries."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

MOST_NAMES = 2  # in a label; the rest is counted


def label_of(what: str, names: Sequence[str]) -> str:
    """Return ``"WHAT of NAME, NAME + 3 more"``."""
    shown = ", ".join(names[:MOST_NAMES])
    rest = len(names) - MOST_NAMES
    return f"{what} of {shown}" + (f" + {rest} more" if rest > 0 else "")


def shortened(label: str) -> str:
    """Return a label ``"WHAT of NAME, NAME, ..."`` with only its first names; others as they are."""
    what, of, names = label.partition(" of ")
    return label_of(what, names.split(", ")) if of else label


class MemoryNames:
    """Names address ranges.

    Weights and state stay where they are, so they are looked up at the end. Gradients come and go, so a copy of one is
    named when it is enqueued, and its host memory keeps the name.
    """

    def __init__(self) -> None:
        self._names: dict[torch.Tensor, str] = {}
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []
        self._host_labels: dict[int, str] = {}

    def add_model(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters."""
        # A model's own names are better than an optimizer's, which may be numbers.
        self._names.update({param: name for name, param in model.named_parameters()})
        self._starts = []

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn what an optimizer calls its parameters, and where it holds their state."""
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{i} of group {number}" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                self._names.setdefault(param, name)
        self._ranges = list(_state_ranges(getattr(optimizer, "placed", None), self._names))
        self._starts = []

    def note_copy(self, host: torch.Tensor, device: torch.Tensor) -> int:
        """Take note of a copy that is enqueued; return what :meth:`label` is to be asked with."""
        address = host.data_ptr()
        if self.label(address) is None:
            at = device.data_ptr()
            weights = (("weight", param, name) for param, name in self._names.items())
            grads = (("gradient", p.grad, name) for p, name in self._names.items() if p.grad is not None)
            for what, tensor, name in itertools.chain(weights, grads):
                if tensor.data_ptr() <= at < tensor.data_ptr() + tensor.nbytes:
                    self._host_labels[address] = f"{what} of {name}"
                    break
        return address

    def label(self, address: int) -> str | None:
        """Return what the host memory at ``address`` holds, None if nobody knows."""
        if address in self._host_labels:
            return self._host_labels[address]
        if not self._starts:
            self._ranges.sort()
            self._starts = [start for start, _, _ in self._ranges]
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ranges[index][1]:
            return self._ranges[index][2]
        return None

    def parameter_at(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """Return the name of the first parameter that one of ``tensors`` is a part of."""
        for tensor in tensors:
            for param, name in self._names.items():
                if param.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    return name
        return None


def _state_ranges(placed: Any, names: dict[torch.Tensor, str]) -> Iterable[tuple[int, int, str]]:
    """Yield start, end and label of the state of each chunk of a ``PlacedState``; nothing for other optimizers."""
    if placed is None:
        return
    for share in placed.shares.values():
        for state in share.chunks:
            owners = dict.fromkeys(names[placed.params[segment.param]] for segment in state.chunk.segments)
            start = state.region.data_ptr()
            yield start, start + state.num_bytes, label_of("state", list(owners))
