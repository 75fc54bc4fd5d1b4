"""Finds out what a torch optimizer class keeps per element, and whether it may be applied to pieces of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

_NUM_STEPS = 3
_SIDE = 16  # of the square tensor that is updated whole, flat and in two pieces
_LR = 1e-2
_CUT = 96  # where it is cut; not in the middle, or pieces could be alike


@dataclasses.dataclass(frozen=True)
class StateSchema:
    """What an optimizer keeps for a parameter.

    Attributes:
        fields: dtype of each state tensor that has a value for each element.
        scalar_devices: device of each other state tensor, such as ``step``.
        defaults: the hyperparameters of a group that sets none.
    """

    fields: dict[str, torch.dtype]
    scalar_devices: dict[str, torch.device]
    defaults: dict[str, Any]


def inspect(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
) -> StateSchema:
    """Run an optimizer for some steps on a few elements, whole and in pieces, and compare.

    Args:
        optimizer_class: any ``torch.optim.Optimizer``.
        arguments: its keyword arguments.
        group: what a parameter group sets besides.
        device: where it will run.

    Returns:
        What it keeps.

    Raises:
        ValueError: if it is not elementwise (cutting or flattening a tensor changes its result), needs a closure, or
            keeps tensors that are neither scalars nor shaped like the parameter; also what the class itself raises
            for its arguments.
    """
    name = optimizer_class.__name__
    group = dict(group)
    if "lr" in group or "lr" in arguments:
        # A learning rate of zero would hide all differences.
        group["lr"] = group.get("lr", arguments.get("lr")) or _LR
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(_SIDE * _SIDE, generator=generator).to(device) for _ in range(1 + _NUM_STEPS)]
        whole = _run(optimizer_class, arguments, group, [value.view(_SIDE, _SIDE) for value in values])
        pieces = [
            _run(optimizer_class, arguments, group, [value[part].clone() for value in values])
            for part in (slice(0, _CUT), slice(_CUT, None))
        ]
    state = whole.state
    fields = {key: value.dtype for key, value in state.items() if _is_field(value)}
    keeps_whole = "use forebay.HybridDeviceOptimizer, which keeps tensors whole"
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and key not in fields and value.numel() != 1:
            raise ValueError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape {(_SIDE, _SIDE)}: its "
                f"state is not elementwise, so a tensor cannot be updated in pieces; {keeps_whole}"
            )
    compared = {"weights": (whole.weight, [piece.weight for piece in pieces])}
    compared |= {key: (state[key], [piece.state.get(key, state[key][:0]) for piece in pieces]) for key in fields}
    for what, (expected, parts) in compared.items():
        actual = torch.cat([part.flatten() for part in parts])
        if actual.shape != expected.flatten().shape or not torch.allclose(
            expected.flatten().float(), actual.float(), rtol=1e-5, atol=1e-7
        ):
            raise ValueError(
                f"{name} is not elementwise: its {what} come out differently when a tensor is updated in pieces; "
                f"{keeps_whole}"
            )
    scalars = {k: v.device for k, v in state.items() if isinstance(v, torch.Tensor) and k not in fields}
    return StateSchema(fields, scalars, whole.defaults)


@dataclasses.dataclass
class _Outcome:
    weight: torch.Tensor
    state: dict[str, Any]
    defaults: dict[str, Any]


def _is_field(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (_SIDE, _SIDE)


def _run(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    group: Mapping[str, Any],
    values: list[torch.Tensor],
) -> _Outcome:
    weight = torch.nn.Parameter(values[0].clone())
    optimizer = optimizer_class([{**group, "params": [weight]}], **arguments)
    for grad in values[1:]:
        weight.grad = grad.clone()
        try:
            optimizer.step()
        except TypeError as error:
            raise ValueError(
                f"{optimizer_class.__name__}.step() cannot be called without a closure ({error}); such optimizers "
                "cannot be offloaded"
            ) from error
    return _Outcome(weight.detach(), dict(optimizer.state[weight]), dict(optimizer.defaults))
