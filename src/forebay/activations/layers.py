"""Finds the layers of a model: the list of its decoder layers, or what patterns name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn


def find_layers(
    model_or_layers: nn.Module | Sequence[nn.Module], patterns: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Return layers by module path, in the order in which the model registers them.

    Args:
        model_or_layers: a model, an ``nn.ModuleList`` of layers, or a sequence of layers.
        patterns: paths of the layers in the model, such as ``"model.layers.*"`` or ``"model.layers.*.mlp"``. A
            ``*`` stands for anything within one word of the path. Default None: the children of the largest
            ``nn.ModuleList`` that is inside no other, by parameters: the decoder layers of any causal language
            model of ``transformers``.

    Raises:
        ValueError: if there are no layers, or a pattern names none.
    """
    if not isinstance(model_or_layers, nn.Module):
        found = {str(index): layer for index, layer in enumerate(model_or_layers)}
        if patterns is not None:
            raise ValueError("module path patterns need the model whose modules they name, got a list of layers")
        if not found:
            raise ValueError("the list of layers is empty; give the model, or at least one of its layers")
        wrong = [type(layer).__name__ for layer in found.values() if not isinstance(layer, nn.Module)]
        if wrong:
            raise ValueError(f"layers must be nn.Module objects, got {wrong[0]}")
        return found
    if patterns is not None:
        return _matching(model_or_layers, [patterns] if isinstance(patterns, str) else list(patterns))
    return _largest_list(model_or_layers)


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    unused = set(patterns)
    found = {}
    for path, module in model.named_modules():
        matching = {pattern for pattern in patterns if path and _matches(path, pattern)}
        unused -= matching
        if matching:
            found[path] = module
    if unused:
        examples = [path for path, _ in model.named_modules() if path][:8]
        raise ValueError(
            f"no module of {type(model).__name__} has a path like {sorted(unused)[0]!r}; its paths begin with "
            f"{', '.join(examples)}. A * stands for one word of the path, as in 'model.layers.*.mlp'"
        )
    return found


def _matches(path: str, pattern: str) -> bool:
    words, wanted = path.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatch.fnmatchcase, words, wanted))


def _largest_list(model: nn.Module) -> dict[str, nn.Module]:
    # Not `named_modules`, which would go on into each list: experts are lists of modules too, inside a layer.
    lists: list[tuple[str, nn.ModuleList]] = []
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if isinstance(module, nn.ModuleList) and len(module):
            lists.append((path, module))
        else:
            pending += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of layers; give the layers themselves, or their module paths "
            "as in layers='blocks.*'"
        )
    path, largest = max(lists, key=lambda found: sum(param.numel() for param in found[1].parameters()))
    return {f"{path}.{name}" if path else name: child for name, child in largest.named_children()}
