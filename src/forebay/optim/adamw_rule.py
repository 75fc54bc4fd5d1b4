"""AdamW as an update rule: moments in fp32, bf16 or 8 bits, fp32 masters for low-precision weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.host import kernels
from forebay.optim import device_update, low_precision
from forebay.optim.device_update import GroupValues, StepScalars
from forebay.optim.kernel_rule import KernelRule
from forebay.optim.layout import Segment
from forebay.optim.low_precision import MOMENTS, Noise
from forebay.optim.update_rule import Field, StepContext, master_field


class AdamWRule(KernelRule):
    """AdamW (Loshchilov and Hutter, 2019).

    Args:
        device: where chunks are updated.
        state_dtype: of the moments, one of ``low_precision.STATE_DTYPES``. 8-bit moments have no host kernel.
    """

    name = "AdamW"
    needs_all_moments = True
    is_capturable = True

    def __init__(self, device: torch.device, state_dtype: str = "fp32") -> None:
        super().__init__()
        self._state_dtype = state_dtype
        self.host_algorithm = None if state_dtype == "8bit" else kernels.Algorithm.ADAMW
        self._scalars = StepScalars(device, stochastic=state_dtype != "fp32")
        self._values: list[GroupValues] = []
        self._captured_values: list[GroupValues] = []

    def fields(self, param_dtype: torch.dtype) -> dict[str, Field]:
        """See :meth:`UpdateRule.fields`."""
        return {
            **low_precision.moment_fields(self._state_dtype),
            **master_field(param_dtype),
            **low_precision.scale_fields(self._state_dtype),
        }

    def _add_rows(self, segments: Sequence[Segment]) -> None:
        self._scalars.extend([(segment.param, segment.start >> 32) for segment in segments])

    def begin_step(self, context: StepContext) -> bool:
        """See :meth:`UpdateRule.begin_step`."""
        if context.capturing:
            # The graph reads lr and weight_decay from where before_launch writes them; reading a tensor lr here would
            # wait for the device.
            self._values = [_group_values(group | {"lr": 0.0, "weight_decay": 0.0}) for group in context.groups]
            self._captured_values = self._values
        else:
            self._values = [_group_values(group) for group in context.groups]
        if self._segments:
            inputs = [
                (*self._row_inputs(segment, context.group_of), float(context.grads[segment.param] is not None))
                for segment in self._segments
            ]
            self._scalars.advance(inputs, context.skip, capturing=context.capturing)
        return True

    def _row_inputs(self, segment: Segment, group_of: Sequence[int]) -> tuple[float, ...]:
        values = self._values[group_of[segment.param]]
        return values.lr, values.weight_decay, values.beta1, values.beta2

    def before_launch(self, groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]) -> None:
        """See :meth:`UpdateRule.before_launch`."""
        self._values = [_group_values(group) for group in groups]
        for number, (captured, values) in enumerate(zip(self._captured_values, self._values, strict=True)):
            for name in ("beta1", "beta2", "eps", "maximize"):
                if getattr(captured, name) != getattr(values, name):
                    raise ValueError(
                        f"{name} of group {number} was {getattr(captured, name)} when the step was captured and is "
                        f"{getattr(values, name)} now; lr and weight_decay may change between launches of a graph, for "
                        "others capture the step again"
                    )
        if self._segments:
            self._scalars.before_launch([self._row_inputs(segment, group_of) for segment in self._segments])

    def _update_segment(
        self,
        row: int,
        segment: Segment,
        weight: torch.Tensor,
        grad: torch.Tensor,
        fields: dict[str, torch.Tensor],
        context: StepContext,
    ) -> None:
        device_update.adamw(
            weight,
            grad,
            fields,
            self._scalars.rows[row],
            self._values[context.group_of[segment.param]],
            context.grad_scale,
            context.skip,
            Noise(self._scalars.keys[row], segment.start) if self._state_dtype != "fp32" else None,
        )

    def set_hyper(self, hyper: kernels.Hyper, group: Mapping[str, Any]) -> None:
        """See :meth:`KernelRule.set_hyper`."""
        values = _group_values(group)
        hyper.lr, hyper.weight_decay, hyper.eps = values.lr, values.weight_decay, values.eps
        hyper.beta1, hyper.beta2, hyper.maximize = values.beta1, values.beta2, values.maximize

    @property
    def moments(self) -> tuple[str, ...]:
        """See :attr:`UpdateRule.moments`."""
        return MOMENTS

    @property
    def steps(self) -> torch.Tensor:
        """See :attr:`KernelRule.steps`."""
        return self._scalars.steps

    def entry_of(self, step: torch.Tensor) -> dict[str, Any]:
        """See :meth:`KernelRule.entry_of`."""
        return {"step": step}

    def step_in(self, entry: Mapping[str, Any]) -> float:
        """See :meth:`KernelRule.step_in`."""
        return float(entry.get("step", 0))

    def set_scalars(self, row: int, values: Mapping[str, Any] | None) -> None:
        """See :meth:`UpdateRule.set_scalars`."""
        super().set_scalars(row, values)
        if values is not None:
            self._scalars.most_steps = max(self._scalars.most_steps, int(self.step_in(values)))

    def read_moment(self, fields: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """See :meth:`UpdateRule.read_moment`; 8-bit moments are given in fp32, on the CPU."""
        if self._state_dtype != "8bit":
            return fields[name]
        return low_precision.load_moment({key: field.cpu() for key, field in fields.items()}, name)

    def write_moment(self, fields: Mapping[str, torch.Tensor], name: str, values: torch.Tensor | None) -> None:
        """See :meth:`UpdateRule.write_moment`."""
        if values is None:
            values = torch.zeros(fields[name].numel())
        low_precision.store_moment(fields, name, values, None)


def _group_values(group: Mapping[str, Any]) -> GroupValues:
    beta1, beta2 = group["betas"]
    return GroupValues(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        maximize=bool(group["maximize"]),
    )
