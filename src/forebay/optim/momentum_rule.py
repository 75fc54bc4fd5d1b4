"""SGD and Lion as update rules: one moment at most, fp32, and fp32 masters for low-precision weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.host import kernels
from forebay.optim.device_momentum import MomentumValues, momentum
from forebay.optim.kernel_rule import KernelRule
from forebay.optim.layout import Segment
from forebay.optim.update_rule import Field, StepContext, master_field


class MomentumRule(KernelRule):
    """SGD, with or without momentum, or Lion.

    Args:
        is_lion: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) and not SGD.
        has_moment: whether there is a moment; without one SGD keeps nothing but masters.
        device: where chunks are updated.
    """

    def __init__(self, *, is_lion: bool, has_moment: bool, device: torch.device) -> None:
        super().__init__()
        self.name = "Lion" if is_lion else "SGD"
        self.host_algorithm = kernels.Algorithm.LION if is_lion else kernels.Algorithm.SGD
        self._is_lion = is_lion
        self._moment = ("exp_avg" if is_lion else "momentum_buffer") if has_moment else None
        self._steps = torch.zeros(0, device=device)
        self._active: torch.Tensor | None = None
        self._last_active: list[bool] = []
        self._values: list[MomentumValues] = []

    def fields(self, param_dtype: torch.dtype) -> dict[str, Field]:
        """See :meth:`UpdateRule.fields`."""
        return {**({} if self._moment is None else {self._moment: Field(torch.float32)}), **master_field(param_dtype)}

    def _add_rows(self, segments: Sequence[Segment]) -> None:
        self._steps = torch.cat((self._steps, self._steps.new_zeros(len(segments))))

    def begin_step(self, context: StepContext) -> bool:
        """See :meth:`UpdateRule.begin_step`."""
        self._values = [self._group_values(group) for group in context.groups]
        return True

    def _group_values(self, group: Mapping[str, Any]) -> MomentumValues:
        beta1, beta2 = group["betas"] if self._is_lion else (group["momentum"], group["dampening"])
        return MomentumValues(
            is_lion=self._is_lion,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=float(beta1),
            beta2=float(beta2),
            nesterov=bool(group.get("nesterov", False)),
            maximize=bool(group["maximize"]),
        )

    def _update_segment(
        self,
        row: int,
        segment: Segment,
        weight: torch.Tensor,
        grad: torch.Tensor,
        fields: dict[str, torch.Tensor],
        context: StepContext,
    ) -> None:
        momentum(
            weight,
            grad,
            {name: field for name, field in fields.items() if name != self._moment},
            fields[self._moment] if self._moment is not None else None,
            self._steps[row],
            self._values[context.group_of[segment.param]],
            context.grad_scale,
            context.skip,
        )

    def end_step(self, context: StepContext) -> None:
        """See :meth:`UpdateRule.end_step`."""
        if not self._segments:
            return
        active = [context.grads[segment.param] is not None for segment in self._segments]
        if self._active is None or active != self._last_active:
            self._active = torch.tensor(active, dtype=torch.float32).to(self._steps.device)
            self._last_active = active
        self._steps += self._active if context.skip is None else self._active * (context.skip == 0)

    def set_hyper(self, hyper: kernels.Hyper, group: Mapping[str, Any]) -> None:
        """See :meth:`KernelRule.set_hyper`."""
        values = self._group_values(group)
        hyper.lr, hyper.weight_decay, hyper.maximize = values.lr, values.weight_decay, values.maximize
        if self._is_lion:
            hyper.beta1, hyper.beta2 = values.beta1, values.beta2
        else:
            hyper.momentum, hyper.dampening, hyper.nesterov = values.beta1, values.beta2, values.nesterov

    @property
    def steps(self) -> torch.Tensor:
        """See :attr:`KernelRule.steps`."""
        return self._steps

    @property
    def moments(self) -> tuple[str, ...]:
        """See :attr:`UpdateRule.moments`."""
        return () if self._moment is None else (self._moment,)

    def entry_of(self, step: torch.Tensor) -> dict[str, Any]:
        """See :meth:`KernelRule.entry_of`; like the usual classes, these keep no count of their updates."""
        return {}

    def step_in(self, entry: Mapping[str, Any]) -> float:
        """See :meth:`KernelRule.step_in`: whether there was a first update is all that matters."""
        return float(self._moment is None or self._moment in entry)
