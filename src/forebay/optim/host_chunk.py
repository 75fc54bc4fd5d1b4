"""A chunk that the host updates: the places its state may be in, and the kernel tasks that update it."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from forebay.engine import Event
from forebay.host import kernels
from forebay.optim.chunk_state import ChunkState
from forebay.optim.kernel_rule import KernelRule
from forebay.optim.layout import Chunk, Segment

# Scale and skip flag of a step, fp32 (1,) on the host; None for 1 and for never.
Controls = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclasses.dataclass(eq=False)
class StateCopy:
    """A place for a chunk's state, with the weights that belong to it.

    Attributes:
        region: flat uint8, the state.
        weights: flat, the weights.
        steps: fp32 (segments,), updates each segment has had.
        tasks: those that update this state, by everything they differ in.
    """

    region: torch.Tensor
    weights: torch.Tensor
    steps: torch.Tensor
    tasks: dict[tuple[object, ...], kernels.UpdateTask] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What an update reads, or writes."""
        return [self.region, self.weights, self.steps]


@dataclasses.dataclass(eq=False)
class HostChunk:
    """What the host kernel needs to update a chunk.

    Attributes:
        state: the chunk; its region is that of ``current``.
        current: its state and weights after every update.
        spare: where an early update writes; None if the chunk gets none.
        grads: flat, where its gradients land.
        label: names its parameters in errors and traces.
        updated: the last task, after which ``grads`` may be overwritten.
        is_early: whether ``spare`` has the outcome of an update that the coming step may still drop.
    """

    state: ChunkState
    current: StateCopy
    spare: StateCopy | None
    grads: torch.Tensor
    label: str
    updated: Event | None = None
    is_early: bool = False

    def swap(self) -> None:
        """Let the spare be the state, and the state the spare."""
        assert self.spare is not None
        self.current, self.spare = self.spare, self.current
        self.state.region = self.current.region

    def task(
        self,
        rule: KernelRule,
        hypers: Sequence[kernels.Hyper],
        group_of: Sequence[int],
        active: tuple[bool, ...],
        *,
        target: StateCopy,
        controls: Controls = (None, None),
        resolve: bool = False,
    ) -> kernels.UpdateTask:
        """Return the task that updates the active segments from ``current`` into ``target``.

        Args:
            rule: what the state is.
            hypers: hyperparameters by group; the same objects in every step that reuses their memory.
            group_of: group by parameter.
            active: which segments.
            target: ``current``, for an update in place, or ``spare``.
            controls: what the task reads when it runs.
            resolve: see :class:`kernels.UpdateTask`.
        """
        assert rule.host_algorithm is not None
        groups = tuple(group_of[segment.param] for segment in self.state.chunk.segments)
        read = tuple(None if control is None else control.data_ptr() for control in controls)
        # Tasks keep the hyperparameters alive, so no others can have their addresses.
        used = tuple(ctypes.addressof(hypers[group]) for group in groups)
        key = (used, active, target is self.current, read, resolve)
        task = self.current.tasks.get(key)
        if task is None:
            segments = self._segments(rule.moments, target, active, [hypers[group] for group in groups])
            scale, skip = controls
            task = kernels.UpdateTask(
                self.label,
                rule.host_algorithm,
                segments,
                kernels.Hyper(),
                grad_scale=scale,
                found_inf=skip,
                resolve=resolve,
            )
            self.current.tasks[key] = task
        return task

    def _segments(
        self,
        moments: Sequence[str],
        target: StateCopy,
        active: Sequence[bool],
        hypers: Sequence[kernels.Hyper],
    ) -> list[kernels.Segment]:
        source, layout = self.current, self.state.chunk
        before, after = (self.state.segment_fields(place.region) for place in (source, target))
        weights, weights_out, grads = (segment_views(layout, f) for f in (source.weights, target.weights, self.grads))
        # The kernel has two slots for moments, named for Adam; other rules use the first or none.
        slots = list(zip(("exp_avg", "exp_avg_sq"), moments, strict=False))
        master = "remainder" if "remainder" in self.state.fields else "master"
        return [
            kernels.Segment(
                grad=grads[index][1],
                param=weights[index][1],
                param_out=weights_out[index][1],
                **{slot: before[index][moment] for slot, moment in slots},
                **{f"{slot}_out": after[index][moment] for slot, moment in slots},
                step=source.steps[index],
                step_out=target.steps[index],
                master=before[index].get(master),
                master_out=after[index].get(master),
                hyper=hypers[index],
                first_element=segment.start,
                seed=segment.param,
            )
            for index, segment in enumerate(layout.segments)
            if active[index]
        ]

    def tasks(self) -> Iterator[kernels.UpdateTask]:
        """Return all tasks that update it."""
        for place in (self.current, self.spare):
            if place is not None:
                yield from place.tasks.values()


def segment_views(chunk: Chunk, field: torch.Tensor) -> list[tuple[Segment, torch.Tensor]]:
    """Return each segment with its part of a field of the chunk."""
    return [
        (segment, field[offset : offset + segment.num_elements])
        for segment, offset in zip(chunk.segments, chunk.offsets, strict=True)
    ]
