"""What an optimizer is to the placements: which state an element has, and how a chunk is updated on the device.

The shares move state and know nothing of what is in it; a rule updates a chunk wherever its region happens to
be on the device, and says whether a host kernel can do the same.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forebay.optim.layout import ALIGNMENT, Chunk

if TYPE_CHECKING:
    from forebay.engine import Engine
    from forebay.optim.chunk_state import ChunkState

_MASTER_FIELD = {
    torch.float32: None,
    torch.bfloat16: ("remainder", torch.int16),
    torch.float16: ("master", torch.float32),
}
PARAM_DTYPES = tuple(_MASTER_FIELD)
MASTER_FIELDS = ("remainder", "master")


@dataclasses.dataclass(frozen=True)
class Field:
    """One kind of state.

    Attributes:
        dtype: of its values.
        block: elements of the parameter that share one value.
    """

    dtype: torch.dtype
    block: int = 1

    def __post_init__(self) -> None:
        assert ALIGNMENT % self.block == 0, "blocks would reach over the end of a segment"

    def num_values(self, num_elements: int) -> int:
        """Return how many values ``num_elements`` elements have."""
        return -(-num_elements // self.block)


def master_field(param_dtype: torch.dtype) -> dict[str, Field]:
    """Return the field that makes a parameter's weights fp32: ``remainder``, ``master`` or (fp32) none."""
    master = _MASTER_FIELD[param_dtype]
    return {} if master is None else {master[0]: Field(master[1])}


@dataclasses.dataclass
class StepContext:
    """What one step works with.

    Attributes:
        params: all parameters, by number.
        grads: their gradients, flat and contiguous; None where a parameter has none in this step.
        groups: the parameter groups.
        group_of: each parameter's group.
        grad_scale: fp32 (1,) on the device, multiplies every gradient; None for 1.
        skip: fp32 (1,) on the device, nonzero to update nothing; None for never.
        limit_bytes: device memory that state may use for visits during the update.
        capturing: the step goes into a CUDA graph.
    """

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    groups: Sequence[dict[str, Any]]
    group_of: Sequence[int]
    grad_scale: torch.Tensor | None
    skip: torch.Tensor | None
    limit_bytes: int
    capturing: bool = False


class UpdateRule(abc.ABC):
    """An optimizer's state and arithmetic.

    Attributes:
        name: of the optimizer, for messages.
        needs_all_moments: whether a state dict must have all :attr:`moments` for a parameter it has.
        is_capturable: whether a step can go into a CUDA graph.
    """

    name: str
    needs_all_moments: bool = False
    is_capturable: bool = False

    @abc.abstractmethod
    def fields(self, param_dtype: torch.dtype) -> dict[str, Field]:
        """Return the state of a parameter of ``param_dtype``, master included, in the order of a region."""

    @abc.abstractmethod
    def register(self, chunk: Chunk) -> int:
        """Take note of a chunk that is updated on the device; return the row of its first segment."""

    @abc.abstractmethod
    def begin_step(self, context: StepContext) -> bool:
        """Prepare the update of all chunks; return False when nothing is to be updated in this step."""

    @abc.abstractmethod
    def update(self, state: ChunkState, region: torch.Tensor, context: StepContext, engine: Engine) -> None:
        """Update a chunk on the compute lane, its state being in ``region`` on the device."""

    def end_step(self, context: StepContext) -> None:  # noqa: B027 - most rules have nothing to do
        """Take note that all chunks have been updated."""

    def before_launch(self, groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]) -> None:
        """Enqueue, for the graph of a captured step, a write of the groups' current hyperparameters.

        Raises:
            ValueError: for one that has changed since, and which the graph holds as a constant.
        """
        raise AssertionError(f"{self.name} is not capturable")

    # What a state dict has

    @property
    @abc.abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors, shaped like the parameter, in a state dict."""

    @abc.abstractmethod
    def kept(self, row: int) -> tuple[str, ...] | None:
        """Return which of the moments a segment has; None if it was never updated."""

    @abc.abstractmethod
    def scalars(self, row: int) -> dict[str, Any]:
        """Return what a segment has beside its fields, such as ``step``."""

    @abc.abstractmethod
    def set_scalars(self, row: int, values: Mapping[str, Any] | None) -> None:
        """Set what :meth:`scalars` and :meth:`kept` return.

        Args:
            row: the segment's number.
            values: the parameter's entry of a state dict, moments included; None if it was never updated.
        """

    def read_moment(self, fields: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return a moment of a segment, live where it is stored as it is."""
        return fields[name]

    def write_moment(self, fields: Mapping[str, torch.Tensor], name: str, values: torch.Tensor | None) -> None:
        """Store a moment of a segment; None for zero."""
        if values is None:
            fields[name].zero_()
        else:
            fields[name].copy_(values)
