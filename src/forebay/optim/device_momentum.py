"""SGD and Lion on the device: the host kernel's operations in its order, so that both give the same bits.

As for AdamW, there is a Triton kernel on CUDA and torch operations elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from forebay.optim.device_update import read_master, restored_if, to_descend, write_master


@dataclasses.dataclass(frozen=True)
class MomentumValues:
    """The hyperparameters of a parameter group in one step, each for the rules that have it.

    Attributes:
        is_lion: Lion, not SGD.
        lr: learning rate.
        weight_decay: decoupled for Lion, added to the gradient for SGD.
        beta1: of Lion, the weight of the old moment in the update; of SGD, the momentum, 0 for none.
        beta2: of Lion, the decay of the moment; of SGD, the dampening.
        nesterov: of SGD.
        maximize: go up the gradient.
    """

    is_lion: bool
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    nesterov: bool
    maximize: bool


def momentum(
    weight: torch.Tensor,
    grad: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    moment: torch.Tensor | None,
    step: torch.Tensor,
    values: MomentumValues,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update one segment in place by SGD or Lion.

    Args:
        weight: flat parameter elements, bf16, fp16 or fp32.
        grad: flat gradient, any floating dtype, same length.
        fields: ``remainder`` (int16) for a bf16 weight or ``master`` (fp32) for an fp16 one.
        moment: fp32, same length; None for SGD without momentum.
        step: fp32 scalar on the device, updates made so far: SGD's first makes the moment the gradient.
        values: the group's hyperparameters.
        grad_scale: fp32 scalar on the device that multiplies the gradient, or None for 1.
        skip: fp32 scalar on the device; nonzero leaves everything untouched. None for never.
    """
    if weight.is_cuda:
        from forebay.optim import triton_momentum

        triton_momentum.momentum(weight, grad, fields, moment, step, values, grad_scale, skip)
        return
    g = to_descend(grad, grad_scale, maximize=values.maximize)
    value = read_master(weight, fields)
    if values.is_lion:
        assert moment is not None
        mixed = moment * values.beta1 + g * (1 - values.beta1)
        # Zero stays zero and NaN stays NaN.
        direction = torch.where(mixed < 0, -1.0, torch.where(mixed > 0, 1.0, mixed))
        new_moment: torch.Tensor | None = moment * values.beta2 + g * (1 - values.beta2)
        value = value * (1 - values.lr * values.weight_decay) + direction * -values.lr
    else:
        if values.weight_decay:
            g = g + value * values.weight_decay
        new_moment = None
        if moment is not None and values.beta1:
            new_moment = torch.where(step == 0, g, moment * values.beta1 + g * (1 - values.beta2))
            g = g + new_moment * values.beta1 if values.nesterov else new_moment
        value = value + g * -values.lr
    kept = [weight, *fields.values()] + ([] if moment is None else [moment])
    with restored_if(skip, kept):
        if moment is not None and new_moment is not None:
            moment.copy_(new_moment)
        write_master(weight, fields, value)
