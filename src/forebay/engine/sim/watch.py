"""Watches torch operations on the compute lane, so that their accesses are checked like the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WatchMode(TorchDispatchMode):
    """Reports every tensor that an operation reads or writes to ``report(tensor, is_write, label)``.

    ``before(label, tensors)`` is called first, once per operation. Views touch no data and are not reported.
    """

    def __init__(
        self,
        before: Callable[[str, list[torch.Tensor]], None],
        report: Callable[[torch.Tensor, bool, str], None],
    ) -> None:
        super().__init__()
        self._before = before
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the accesses of one operation, then run it."""
        kwargs = kwargs or {}
        label = str(func)
        touched = list(_touched(func._schema, args, kwargs))
        if touched and not _is_view(func._schema):
            self._before(label, [tensor for tensor, _ in touched])
            for tensor, is_write in touched:
                self._report(tensor, is_write, label)
        result = func(*args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_"):
            # With a dispatch mode active torch does not count these writes, as it does without one.
            torch.autograd.graph.increment_version([tensor for tensor, is_write in touched if is_write])
        # A fresh result is written by this operation; one that aliases an input was reported above.
        if not _is_view(func._schema):
            inputs = {t.untyped_storage()._cdata for t, _ in touched}
            for tensor in _tensors(result):
                if tensor.untyped_storage()._cdata not in inputs:
                    self._report(tensor, True, label)
        return result


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _touched(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, is_write


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
