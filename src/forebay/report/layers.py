"""Where a step is in its model: the forward and the backward of each layer, seen through hooks.

The hooks are torch's global ones, so they work for any model without knowing it, and they are gone after the block.
None changes the graph: backward is seen through hooks on the tensors that go into a layer and come out of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Begin = Callable[[str], Callable[[], None]]
"""Called with a label where something begins; returns what is to be called where it ends."""


def find_layers(root: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that are shown, with their names: the members of module lists, and what is in none.

    Of nested lists the outermost counts. A module outside of all lists is shown if it has parameters of its own.
    """
    layers: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(module, nn.ModuleList) or next(child.parameters(recurse=False), None) is not None:
                layers[child] = path
            else:
                visit(child, path)

    visit(root, "")
    return layers


class LayerWatch:
    """Follows forward and backward through a model.

    Args:
        begin: is told of each begin.
        found: is called with each model that is seen for the first time, before its forward.
    """

    def __init__(self, begin: Begin, found: Callable[[nn.Module], None]) -> None:
        self._begin = begin
        self._found = found
        self._roots: set[nn.Module] = set()
        self._layers: dict[nn.Module, str] = {}
        self._modules: dict[nn.Module, str] = {}  # all of them
        self._open: list[tuple[nn.Module, Callable[[], None] | None]] = []
        self._whole = _Section(begin, "backward")  # of a model
        self._part = _Section(begin, "backward")  # of the layer that its backward is in

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch all models in the block."""
        before = register_module_forward_pre_hook(self._before)
        # Also after an exception, else the modules it left would stay open.
        after = register_module_forward_hook(self._after, with_kwargs=True, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        in_backward = _in_backward()
        if not self._open and not in_backward and module not in self._modules:
            self._roots.add(module)
            self._layers.update(find_layers(module))
            self._modules.update({part: name for name, part in module.named_modules()})
            self._found(module)
        end = None
        if in_backward:
            # Recomputation: of a layer, or of its parts one by one where only the layer's forward() is run again.
            if not self._open and module in self._modules:
                end = self._begin(f"recompute {self._modules[module]}".rstrip())
        elif module in self._layers:
            end = self._begin(f"forward {self._layers[module]}")
        elif module in self._roots:
            end = self._begin("forward")
            self._whole = _Section(self._begin, "backward")
        self._open.append((module, end))

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # Keyword arguments and output; torch leaves the former out when the forward raised.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        _, end = self._open.pop()
        if end is None:
            return
        end()
        if torch.is_grad_enabled() and not _in_backward():
            label = f"backward {self._layers.get(module, '')}"
            self._watch_backward(module, label, [*_differentiable(args), *_differentiable(kwargs)], output)

    def _watch_backward(self, module: nn.Module, label: str, inputs: list[torch.Tensor], output: Any) -> None:
        outputs = _differentiable(output)
        # Where no gradient leaves a module, its backward ends with its last parameter's.
        ends = inputs or [param for param in module.parameters() if param.requires_grad]
        if not outputs or not ends:
            return
        whole = self._whole
        this = whole if module in self._roots else _Section(self._begin, label)

        def begins(grad: torch.Tensor) -> None:
            # The last layer's output is the model's, and hooks of one tensor run in the order of their making: without
            # this the layer would begin before the whole that it is a part of.
            whole.begin()
            # Where one layer ends the one below begins, at the same tensor, whose hooks say the latter first.
            if self._part is not this:
                self._part.end()
            if this is not whole:
                self._part = this
                this.begin()

        def finished(grads: Any) -> None:
            handle.remove()
            if this is whole:
                self._part.end()
            this.end()

        for tensor in outputs:
            tensor.register_hook(begins)
        handle = torch.autograd.graph.register_multi_grad_hook(ends, finished, mode="all")


class _Section:
    """Something that begins and ends once, however often it is told to."""

    def __init__(self, begin: Begin, label: str) -> None:
        self._begin = begin
        self._label = label
        self._end: Callable[[], None] | None = None
        self._done = False

    def begin(self) -> None:
        if self._end is None and not self._done:
            self._end = self._begin(self._label)

    def end(self) -> None:
        if self._end is not None:
            self._end()
            self._end, self._done = None, True


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, also in its lists, tuples and mappings, that gradients go through."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _differentiable(item)]
