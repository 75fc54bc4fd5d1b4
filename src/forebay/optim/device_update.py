"""AdamW on the device, for state that lives there or visits.

One arithmetic, three implementations: the host kernel in ``native/``, a Triton kernel on CUDA, one launch per
segment, and torch operations elsewhere. Each is the same IEEE operations in the same order, so neither where a
parameter is updated nor how it is cut into segments and chunks changes a bit of the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from forebay.host import kernels
from forebay.optim.low_precision import Noise, load_moment, mix_keys, random_bits, store_moment

_NUM_INPUTS = 5
_MOST_STEPS = 2**24  # fp32 counts no further


@dataclasses.dataclass(frozen=True)
class GroupValues:
    """The hyperparameters of a parameter group in one step.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled weight decay.
        beta1, beta2: decay rates of the moments.
        eps: term added to the denominator.
        maximize: go up the gradient.
    """

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    maximize: bool


class StepScalars:
    """The numbers of a step that differ between segments, computed on the device without a synchronisation.

    Args:
        device: where the rows live.
        stochastic: make keys for stochastic rounding.

    Attributes:
        steps: fp32 (num_segments,), how many updates each segment has had, like ``step`` in torch's AdamW.
        most_steps: no entry of ``steps`` is larger; whoever writes to ``steps`` sets it.
        rows: fp32 (num_segments, 3): ``1 - lr * weight_decay``, ``lr / bias_correction1`` and
            ``1 / sqrt(bias_correction2)``.
        keys: int64 (num_segments,), the keys of this step's random bits; empty unless ``stochastic``.
    """

    def __init__(self, device: torch.device, *, stochastic: bool) -> None:
        self.steps = torch.zeros(0, dtype=torch.float32, device=device)
        self.rows = torch.zeros(0, 3, dtype=torch.float32, device=device)
        self.keys = torch.zeros(0, dtype=torch.int64, device=device)
        self._stochastic = stochastic
        self._seeds: list[tuple[int, int]] = []
        self._seeds_on_device = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(0, _NUM_INPUTS, dtype=torch.float64, device=device)
        self._last: list[tuple[float, ...]] | None = None
        self._captured: list[tuple[float, ...]] | None = None
        self.most_steps = 0

    def extend(self, seeds: Sequence[tuple[int, int]]) -> None:
        """Add rows, each with the seed of its parameter and its first element's index divided by 2**32."""
        self._seeds += seeds
        self.steps = torch.cat((self.steps, self.steps.new_zeros(len(seeds))))
        self.rows = torch.cat((self.rows, self.rows.new_zeros(len(seeds), 3)))
        if self._stochastic:
            self._seeds_on_device = torch.tensor(self._seeds).to(self.steps.device)
        self._inputs = self._inputs.new_zeros(len(self._seeds), _NUM_INPUTS)
        self._last = self._captured = None

    def advance(self, inputs: list[tuple[float, ...]], skip: torch.Tensor | None, *, capturing: bool = False) -> None:
        """Count a step and fill ``rows``.

        Args:
            inputs: per segment: lr, weight_decay, beta1, beta2, and 1.0 if it is updated in this step else 0.0.
            skip: fp32 scalar on the device; nonzero means that this step updates nothing.
            capturing: the step goes into a CUDA graph; its launches read what :meth:`before_launch` wrote last.
        """
        if capturing:
            self._captured = inputs
            self.most_steps = _MOST_STEPS  # launches are not counted here
        else:
            self._write(inputs)
            self.most_steps = min(self.most_steps + 1, _MOST_STEPS)
        lr, weight_decay, beta1, beta2, active = self._inputs.unbind(1)
        if self._stochastic:
            seeds, upper = self._seeds_on_device.unbind(1)
            step_bits = self.steps.view(torch.int32).to(torch.int64)
            self.keys = mix_keys(mix_keys(mix_keys(seeds) ^ step_bits) ^ upper)
        self.steps += active if skip is None else active * (skip == 0)
        # Double precision, because in fp32 1 - beta2**step would lose half its digits at the first steps.
        powers = _powers(torch.stack((beta1, beta2)), self.steps.to(torch.int64), self.most_steps.bit_length())
        self.rows[:, 0] = 1 - lr * weight_decay
        self.rows[:, 1] = lr / (1 - powers[0])
        self.rows[:, 2] = 1 / (1 - powers[1]).sqrt()

    def before_launch(self, inputs: Sequence[tuple[float, ...]]) -> None:
        """Write lr, weight_decay, beta1 and beta2 of each segment for launches of the step that was captured."""
        assert self._captured is not None
        self._write([(*own, captured[-1]) for own, captured in zip(inputs, self._captured, strict=True)])

    def _write(self, inputs: list[tuple[float, ...]]) -> None:
        if inputs != self._last:
            # Pinned memory of torch's own is not used again before the copy is done. From pageable memory torch
            # would block until the device is idle.
            staged = torch.tensor(inputs, dtype=torch.float64, pin_memory=self.steps.is_cuda)
            self._inputs.copy_(staged, non_blocking=True)
            self._last = inputs


def _powers(bases: torch.Tensor, exponents: torch.Tensor, num_bits: int) -> torch.Tensor:
    # By squaring, as the host kernel does: two libraries' pow need not agree in the last bit.
    result = torch.ones_like(bases)
    for bit in range(num_bits):
        result = torch.where(exponents >> bit & 1 == 1, result * bases, result)
        bases = bases * bases
    return result


def lerp_constants(beta1: float) -> tuple[bool, float]:
    """Return whether the first moment is interpolated from the gradient's end, and the weight, as torch.lerp does."""
    from_grad = 1 - beta1 >= 0.5
    return from_grad, -beta1 if from_grad else 1 - beta1


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    row: torch.Tensor,
    values: GroupValues,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    noise: Noise | None = None,
) -> None:
    """Update one segment in place.

    Args:
        weight: flat parameter elements, bf16, fp16 or fp32.
        grad: flat gradient, any floating dtype, same length.
        fields: both moments as in :mod:`forebay.optim.low_precision`, plus ``remainder`` (int16) for a bf16
            weight or ``master`` (fp32) for an fp16 one.
        row: fp32 (3,), this segment's row of :class:`StepScalars`.
        values: the group's hyperparameters; lr and weight_decay are taken from ``row`` instead.
        grad_scale: fp32 scalar on the device that multiplies the gradient, or None for 1.
        skip: fp32 scalar on the device; nonzero leaves everything untouched. None for never.
        noise: for moments that are not fp32.
    """
    if weight.is_cuda:
        from forebay.optim import triton_update

        triton_update.adamw(weight, grad, fields, row, values, grad_scale, skip, noise)
        return
    g = to_descend(grad, grad_scale, maximize=values.maximize)
    decay, step_size, inverse_sqrt_correction2 = row.unbind()
    exp_avg, exp_avg_sq = load_moment(fields, "exp_avg"), load_moment(fields, "exp_avg_sq")
    value = read_master(weight, fields) * decay
    from_grad, weight_of_difference = lerp_constants(values.beta1)
    new_avg = (g if from_grad else exp_avg) + (g - exp_avg) * weight_of_difference
    new_avg_sq = exp_avg_sq * values.beta2 + (g * (1 - values.beta2)) * g
    # torch's fp32 square root on the CPU is not always the nearest value; rounded from double precision it is.
    root = new_avg_sq.double().sqrt().float()
    value -= step_size * new_avg / (root * inverse_sqrt_correction2 + values.eps)
    bits = None if noise is None else random_bits(noise, weight.numel())
    with restored_if(skip, [weight, *fields.values()]):
        store_moment(fields, "exp_avg", new_avg, None if bits is None else bits >> 16)
        store_moment(fields, "exp_avg_sq", new_avg_sq, None if bits is None else bits & 0xFFFF)
        write_master(weight, fields, value)


def to_descend(grad: torch.Tensor, grad_scale: torch.Tensor | None, *, maximize: bool) -> torch.Tensor:
    """Return a gradient in fp32, scaled, and turned around if it is to be climbed."""
    g = grad.to(torch.float32)
    if grad_scale is not None:
        g = g * grad_scale
    return -g if maximize else g


@contextlib.contextmanager
def restored_if(skip: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give ``tensors`` the values that they had before the block where ``skip``, a device scalar, is not zero."""
    before = [tensor.clone() for tensor in tensors] if skip is not None else []
    yield
    if skip is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(skip == 0, tensor, old))


def read_master(weight: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the fp32 value of a segment's weight, as a new tensor or (fp32 without a master) the weight."""
    if "remainder" in fields:
        return kernels.join_master(weight, fields["remainder"])
    return fields.get("master", weight)


def write_master(weight: torch.Tensor, fields: Mapping[str, torch.Tensor], value: torch.Tensor) -> None:
    """Store the fp32 ``value`` as a segment's weight and master."""
    if "remainder" in fields:
        upper, remainder = kernels.split_master(value)
        weight.copy_(upper)
        fields["remainder"].copy_(remainder)
        return
    if "master" in fields:
        fields["master"].copy_(value)
    weight.copy_(value)


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fp32 2-norm of all gradients together, on the device, without a synchronisation."""
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms), 2)
