"""Rules with arithmetic of forebay's own, on the device and in a host kernel."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forebay.host import kernels
from forebay.optim.chunk_state import ChunkState, flat
from forebay.optim.layout import Chunk, Segment
from forebay.optim.update_rule import StepContext, UpdateRule

if TYPE_CHECKING:
    from forebay.engine import Engine


class KernelRule(UpdateRule):
    """A rule with arithmetic of forebay's own, the same on the device and in the host kernel.

    All that a segment has beside its fields is the number of its updates.

    Attributes:
        host_algorithm: the host kernel; None if the state is of a kind that it does not take.
    """

    host_algorithm: kernels.Algorithm | None

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def register(self, chunk: Chunk) -> int:
        """See :meth:`UpdateRule.register`."""
        first_row = len(self._segments)
        self._segments += chunk.segments
        self._add_rows(chunk.segments)
        return first_row

    @abc.abstractmethod
    def _add_rows(self, segments: Sequence[Segment]) -> None:
        """Make room for what is counted for each of ``segments``."""

    def update(self, state: ChunkState, region: torch.Tensor, context: StepContext, engine: Engine) -> None:
        """See :meth:`UpdateRule.update`."""
        segments = zip(state.chunk.segments, state.segment_fields(region), strict=True)
        for row, (segment, fields) in enumerate(segments, state.first_row):
            grad = context.grads[segment.param]
            if grad is None:
                continue
            weight = flat(context.params[segment.param], segment)
            engine.declare(f"{self.name} on the device", reads=[grad], writes=[weight, *fields.values()])
            self._update_segment(row, segment, weight, grad[segment.start : segment.stop], fields, context)

    @abc.abstractmethod
    def _update_segment(
        self,
        row: int,
        segment: Segment,
        weight: torch.Tensor,
        grad: torch.Tensor,
        fields: dict[str, torch.Tensor],
        context: StepContext,
    ) -> None:
        """Update one segment in place on the compute lane; ``weight`` and ``grad`` are its own parts, flat."""

    @abc.abstractmethod
    def set_hyper(self, hyper: kernels.Hyper, group: Mapping[str, Any]) -> None:
        """Write a group's hyperparameters to where the host kernel reads them."""

    @property
    @abc.abstractmethod
    def steps(self) -> torch.Tensor:
        """The number of updates of each segment, by row, fp32 on the device."""

    @abc.abstractmethod
    def entry_of(self, step: torch.Tensor) -> dict[str, Any]:
        """Return what a state dict says of a segment with so many updates, beside its moments."""

    @abc.abstractmethod
    def step_in(self, entry: Mapping[str, Any]) -> float:
        """Return the number of updates that an entry of a state dict stands for."""

    def kept(self, row: int) -> tuple[str, ...] | None:
        """See :meth:`UpdateRule.kept`."""
        return self.moments if self.steps[row] != 0 else None

    def scalars(self, row: int) -> dict[str, Any]:
        """See :meth:`UpdateRule.scalars`."""
        return self.entry_of(self.steps[row].cpu())

    def set_scalars(self, row: int, values: Mapping[str, Any] | None) -> None:
        """See :meth:`UpdateRule.set_scalars`."""
        self.steps[row] = 0.0 if values is None else self.step_in(values)


def kernel_rule(rule: UpdateRule) -> KernelRule:
    """Return ``rule`` as one with a host kernel; for what the host updates, of which ``Options`` lets no other pass."""
    assert isinstance(rule, KernelRule), rule.name
    return rule
