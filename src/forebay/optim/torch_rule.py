"""Any torch optimizer with elementwise state as an update rule: its own code runs on the pieces.

A chunk has an instance of the class. Its parameters are fp32 stand-ins for the segments: their memory, gradients
and state are put in place before its step, and taken out after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forebay.optim.chunk_state import ChunkState, flat
from forebay.optim.device_update import read_master, write_master
from forebay.optim.elementwise import StateSchema
from forebay.optim.layout import Chunk
from forebay.optim.update_rule import Field, StepContext, UpdateRule, master_field

if TYPE_CHECKING:
    from forebay.engine import Engine

_NOT_HYPERPARAMETERS = ("params", "param_names")


@dataclasses.dataclass
class _Row:
    """A segment's stand-in.

    Attributes:
        param: the number of its parameter.
        stand_in: the parameter that the chunk's instance knows; empty between steps.
        kept: in which fields it has state; None if it was never updated.
        scalars: what it has beside them.
        instance: of its chunk.
    """

    param: int
    stand_in: torch.nn.Parameter
    kept: tuple[str, ...] | None = None
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)
    instance: _Instance | None = None


@dataclasses.dataclass
class _Instance:
    """A chunk's optimizer.

    Attributes:
        optimizer: it.
        group_of: the user's group -> its own.
        num_seen: the user's changes of hyperparameters that it has taken over, see :class:`_Group`.
    """

    optimizer: torch.optim.Optimizer
    group_of: dict[int, int]
    num_seen: int


@dataclasses.dataclass
class _Group:
    """The hyperparameters of one of the user's groups.

    Attributes:
        known: their values after the last step.
        changes: each value that the user changed since the first step, with the number of the change.
    """

    known: dict[str, Any] = dataclasses.field(default_factory=dict)
    changes: dict[str, tuple[int, Any]] = dataclasses.field(default_factory=dict)


class TorchRule(UpdateRule):
    """A ``torch.optim.Optimizer`` class.

    Args:
        optimizer_class: the class; its state must be elementwise, see :mod:`forebay.optim.elementwise`.
        arguments: its keyword arguments.
        device: where chunks are updated.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], device: torch.device
    ) -> None:
        self.name = optimizer_class.__name__
        self._class = optimizer_class
        self._arguments = dict(arguments)
        self._device = device
        self._fields: dict[str, Field] = {}
        self._scalar_devices: dict[str, torch.device] = {}
        self._rows: list[_Row] = []
        self._groups: list[_Group] = []
        self._num_changes = 0

    def add_schema(self, schema: StateSchema) -> None:
        """Make room for what a group keeps.

        Raises:
            ValueError: if chunks were laid out without that room.
        """
        new = {name: Field(dtype) for name, dtype in schema.fields.items() if name not in self._fields}
        if new and self._rows:
            raise ValueError(
                f"the new group makes {self.name} keep {', '.join(new)}, for which the state allocated so far has no "
                "room; add all groups before the first step"
            )
        self._fields |= new
        self._scalar_devices |= schema.scalar_devices

    def fields(self, param_dtype: torch.dtype) -> dict[str, Field]:
        """See :meth:`UpdateRule.fields`."""
        return {**self._fields, **master_field(param_dtype)}

    def register(self, chunk: Chunk) -> int:
        """See :meth:`UpdateRule.register`."""
        first_row = len(self._rows)
        self._rows += [_Row(segment.param, torch.nn.Parameter(self._nothing())) for segment in chunk.segments]
        return first_row

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, device=self._device)

    def begin_step(self, context: StepContext) -> bool:
        """See :meth:`UpdateRule.begin_step`; ``skip`` takes a synchronisation, since torch's counters are Python's."""
        if context.skip is not None and bool(context.skip.item()):
            return False
        self._groups += [_Group() for _ in context.groups[len(self._groups) :]]
        for values, group in zip(context.groups, self._groups, strict=True):
            for key, value in values.items():
                if key not in _NOT_HYPERPARAMETERS and not (key in group.known and _same(group.known[key], value)):
                    self._num_changes += 1
                    group.changes[key] = (self._num_changes, value)
                    group.known[key] = _copied(value)
        return True

    def update(self, state: ChunkState, region: torch.Tensor, context: StepContext, engine: Engine) -> None:
        """See :meth:`UpdateRule.update`."""
        rows = self._rows[state.first_row : state.first_row + len(state.chunk.segments)]
        weights = [flat(context.params[segment.param], segment) for segment in state.chunk.segments]
        grads = []
        for segment in state.chunk.segments:
            grad = context.grads[segment.param]
            grads.append(None if grad is None else grad[segment.start : segment.stop])
        fields = state.segment_fields(region)
        is_new = rows[0].instance is None
        for row, weight, grad, own in zip(rows, weights, grads, fields, strict=True):
            if grad is not None:
                engine.declare(f"{self.name} on the device", reads=[grad], writes=[weight, *own.values()])
            # Constructors may make state in the size of the parameter, whether it has a gradient or not.
            if grad is not None or is_new:
                row.stand_in.data = read_master(weight, own)
            if grad is not None:
                # A copy, because some classes write to their gradients.
                row.stand_in.grad = grad.to(torch.float32, copy=True)
                if context.grad_scale is not None:
                    row.stand_in.grad.mul_(context.grad_scale)
        instance = rows[0].instance or self._make_instance(rows, context)
        self._push_changes(instance)
        for row, own in zip(rows, fields, strict=True):
            kept = {name: own[name] for name in row.kept or ()}
            instance.optimizer.state[row.stand_in].update(row.scalars | kept)
        instance.optimizer.step()
        for row, weight, grad, own in zip(rows, weights, grads, fields, strict=True):
            self._take_state(instance, row, own, is_updated=grad is not None)
            if grad is not None and row.stand_in.data.data_ptr() != weight.data_ptr():
                write_master(weight, own, row.stand_in.data)
            # Stand-ins hold no memory between steps.
            row.stand_in.grad = None
            row.stand_in.data = self._nothing()

    def _take_state(
        self, instance: _Instance, row: _Row, fields: Mapping[str, torch.Tensor], *, is_updated: bool
    ) -> None:
        entry = instance.optimizer.state[row.stand_in]
        kept = []
        for name in self._fields:
            value = entry.pop(name, None)
            if value is not None:
                kept.append(name)
                if value.data_ptr() != fields[name].data_ptr():
                    # Made in this step, or of a class that makes a new tensor in each.
                    fields[name].copy_(value.reshape(-1))
        row.scalars = dict(entry)
        if is_updated or kept:
            row.kept = tuple(kept)

    def _make_instance(self, rows: list[_Row], context: StepContext) -> _Instance:
        members: dict[int, list[torch.nn.Parameter]] = {}
        for row in rows:
            members.setdefault(context.group_of[row.param], []).append(row.stand_in)
        groups = []
        for number, stand_ins in members.items():
            values = {k: v for k, v in context.groups[number].items() if k not in _NOT_HYPERPARAMETERS}
            groups.append({**values, "params": stand_ins})
        optimizer = self._class(groups, **self._arguments)
        group_of = {number: position for position, number in enumerate(members)}
        instance = _Instance(optimizer, group_of, self._num_changes)
        for row in rows:
            row.instance = instance
        return instance

    def _push_changes(self, instance: _Instance) -> None:
        # Only what the user changed: some classes count in their groups, each instance for itself.
        for number, position in instance.group_of.items():
            for key, (change, value) in self._groups[number].changes.items():
                if change > instance.num_seen:
                    instance.optimizer.param_groups[position][key] = value
        instance.num_seen = self._num_changes

    def end_step(self, context: StepContext) -> None:
        """See :meth:`UpdateRule.end_step`: what the class itself changed in its groups becomes visible to the user."""
        done: set[int] = set()
        for row in self._rows:
            number = context.group_of[row.param]
            if number in done or row.instance is None or context.grads[row.param] is None:
                continue
            done.add(number)
            own = row.instance.optimizer.param_groups[row.instance.group_of[number]]
            known = self._groups[number].known
            for key, value in own.items():
                if key not in _NOT_HYPERPARAMETERS and not (key in known and _same(known[key], value)):
                    context.groups[number][key] = value
                    known[key] = _copied(value)

    @property
    def moments(self) -> tuple[str, ...]:
        """See :attr:`UpdateRule.moments`."""
        return tuple(self._fields)

    def kept(self, row: int) -> tuple[str, ...] | None:
        """See :meth:`UpdateRule.kept`."""
        return self._rows[row].kept

    def scalars(self, row: int) -> dict[str, Any]:
        """See :meth:`UpdateRule.scalars`."""
        return {key: _copied(value) for key, value in self._rows[row].scalars.items()}

    def set_scalars(self, row: int, values: Mapping[str, Any] | None) -> None:
        """See :meth:`UpdateRule.set_scalars`."""
        own = self._rows[row]
        own.kept = None if values is None else tuple(name for name in self._fields if name in values)
        own.scalars = {}
        for key, value in (values or {}).items():
            if key not in self._fields:
                place = self._scalar_devices.get(key)
                own.scalars[key] = value.to(place, copy=True) if place is not None else _copied(value)
        if own.instance is not None:
            own.instance.optimizer.state[own.stand_in].clear()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
