"""The arguments of HybridDeviceOptimizer: parameter groups, and classes with the options that each takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

# Keys of a parameter group that are no options.
_NO_OPTIONS = ("params", "param_names")


class OptimizerClass:
    """An optimizer class, and those of the user's keyword arguments that it takes.

    Args:
        role: the argument that named the class, for errors.
        cls: the class.
        kwargs: what the user gave; may hold arguments that only the other class of the pair takes.
        device: where the parameters that it updates live.

    Attributes:
        kwargs: the arguments that this class takes.
        defaults: the options of a parameter group that sets none.

    Raises:
        TypeError: ``cls`` is no optimizer class.
        ValueError: it needs a closure, or (from the class itself) a value is out of range.
    """

    def __init__(self, role: str, cls: type[Optimizer], kwargs: Mapping[str, Any], device: torch.device) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise TypeError(
                f"{role} must be a subclass of torch.optim.Optimizer, got {cls!r}; pass the class itself, such as "
                "torch.optim.AdamW, not an instance or a factory"
            )
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{role}={cls.__name__} evaluates a closure several times within a step, which cannot be split "
                "between two devices; choose a class whose step() works without one, such as torch.optim.AdamW"
            )
        self.role = role
        self.cls = cls
        parameters = inspect.signature(cls).parameters.values()
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.accepted = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "params"]
        self.kwargs = {key: value for key, value in kwargs.items() if self.takes(key)}
        # A matrix, since some classes take nothing else (torch.optim.Muon).
        self.defaults: dict[str, Any] = self.build([torch.zeros(1, 1, device=device)]).defaults

    def takes(self, key: str) -> bool:
        """Return whether the constructor takes the argument ``key``."""
        return self._takes_any or key in self.accepted

    def build(self, params: Iterable[Any]) -> Optimizer:
        """Return an instance for ``params``, tensors or groups."""
        constructor: Any = self.cls
        instance: Optimizer = constructor(params, **self.kwargs)
        return instance

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to hand on of a user's group: everything, user-defined keys included.

        Left out is what the class itself fixes for its groups (``decoupled_weight_decay`` of
        ``torch.optim.AdamW``): a group loaded from another class's state dict may say otherwise.
        """
        fixed = {key for key in self.defaults if not self.takes(key)}
        return {key: value for key, value in group.items() if key not in _NO_OPTIONS and key not in fixed}

    def state_after_zero_gradient(self, like: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that one step with a zero gradient makes for a zero tensor like ``like``."""
        probe = torch.zeros_like(like)
        probe.grad = torch.zeros_like(probe)
        optimizer = self.build([{"params": [probe], **options}])
        optimizer.step()
        return dict(optimizer.state.get(probe, {}))


def merged_defaults(classes: Iterable[OptimizerClass], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group defaults of a pair of classes.

    An option that both have with different values, and that the user did not give, is left out: each class
    keeps its own (``weight_decay`` is 0 in Adam and 0.01 in AdamW).
    """
    merged: dict[str, Any] = {}
    disputed = set()
    for optimizer_class in classes:
        for key, value in optimizer_class.defaults.items():
            if key in merged and key not in kwargs and merged[key] != value:
                disputed.add(key)
            if key not in merged or optimizer_class.takes(key):
                merged[key] = value
    return {key: value for key, value in merged.items() if key not in disputed}


def check_kwargs(classes: Iterable[OptimizerClass], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that neither class takes."""
    classes = list(classes)
    for key in kwargs:
        if not any(optimizer_class.takes(key) for optimizer_class in classes):
            names = " nor ".join(f"{c.role}={c.cls.__name__}" for c in classes)
            valid = sorted({name for c in classes for name in c.accepted})
            raise ValueError(
                f"unknown argument {key!r}: neither {names} takes it; valid arguments are {', '.join(valid)}"
            )


def check_group(group: Mapping[str, Any], fraction: float) -> None:
    """Raise ValueError for an option that a step split between two devices cannot honour."""
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not possible here: the update runs on copies that autograd does not see; use "
            "the plain optimizer class, or differentiable=False"
        )
    if group.get("capturable") and fraction > 0:
        raise ValueError(
            f"capturable=True needs all state on the device, but offload_fraction={fraction} updates a part on the "
            "CPU; use capturable=False, or offload_fraction=0.0"
        )


def check_fraction(fraction: float) -> None:
    """Raise ValueError for a fraction outside [0, 1]."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(
            f"offload_fraction must be between 0.0 and 1.0, got {fraction}: it is the share of the parameters' "
            "elements whose optimizer state is kept and updated on the host, so use 0.0 for none and 1.0 for all"
        )


def named(params: Iterable[Any]) -> Iterator[tuple[str | None, Any]]:
    """Yield (name, parameter) of a group's ``params``, named or not."""
    for param in params:
        yield param if isinstance(param, tuple) else (None, param)


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return the groups that ``params`` means to ``torch.optim.Optimizer``, with lists that can be read again."""
    if isinstance(params, torch.Tensor):
        raise TypeError(
            "params is a single tensor; give a list of parameters, [param], or of groups, [{'params': [param]}]"
        )
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    copied = []
    for group in groups:
        own = group["params"]
        # A set has no order to offload in; torch says so.
        listed = [own] if isinstance(own, torch.Tensor) else own if isinstance(own, set) else list(own)
        copied.append({**group, "params": listed})
    return copied
