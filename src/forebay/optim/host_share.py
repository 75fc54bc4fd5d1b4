"""The share whose state lives on the host and is updated there by the host kernel.

Per parameter element 2 bytes of gradient go down and 2 bytes of weight come up (for bf16); the state itself
never moves. Gradients land in a ring of slots, so that they cost a bounded amount of host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from forebay.engine import Buffer, Engine, Event, Lane
from forebay.host import kernels
from forebay.optim.chunk_state import ChunkState, flat
from forebay.optim.device_update import StepScalars
from forebay.optim.layout import Chunk, Segment
from forebay.optim.shares import Share, StepContext, allocate_on_host, init_masters, is_active

# Two sets of hyperparameters: Python fills one while the tasks of the step before still read the other.
_NUM_PHASES = 2


@dataclasses.dataclass
class _HostChunk:
    """What the host kernel needs beside the state.

    Attributes:
        state: the chunk and its region.
        weights: flat, the chunk's weights on the host, current after every update.
        steps: fp32 (segments,), updates each segment has had.
        label: names its parameters in errors and traces.
        tasks: one for each combination of segments with a gradient, phase and controls.
    """

    state: ChunkState
    weights: torch.Tensor
    steps: torch.Tensor
    label: str
    tasks: dict[tuple[object, ...], kernels.UpdateTask] = dataclasses.field(default_factory=dict)


class HostShare(Share):
    """State updated on the host.

    Args:
        engine: what moves gradients and weights and runs the kernel.
        names: of all parameters, by number; grows with :meth:`extend`.
        num_slots: gradient slots in the ring.
        pinned_grads: pin the gradient slots.
        pinned_weights: pin the host copies of the weights.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        *,
        num_slots: int,
        pinned_grads: bool,
        pinned_weights: bool,
    ) -> None:
        super().__init__(engine)
        self._names = names
        self._num_slots = num_slots
        self._pinned_grads = pinned_grads
        self._pinned_weights = pinned_weights
        self._slabs: list[Buffer] = []
        self._grad_slots: list[Buffer] = []
        self._slot_free: list[Event | None] = []
        self._host_chunks: list[_HostChunk] = []
        self._controls: list[torch.Tensor] = []
        self._hypers: list[list[kernels.Hyper]] = [[] for _ in range(_NUM_PHASES)]
        self._phase_done: list[Event | None] = [None] * _NUM_PHASES
        self._num_steps = 0

    def extend(self, chunks: Sequence[Chunk], first_row: int, params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        if not chunks:
            return
        # The state never moves, so it need not be pinned.
        states = allocate_on_host(self.engine, chunks, first_row, self._slabs, pinned=False)
        weights_slab = self.engine.empty_host(
            sum(chunk.num_elements * chunk.dtype.itemsize for chunk in chunks),
            "weights",
            pinned=self._pinned_weights,
        )
        self._slabs.append(weights_slab)
        start = 0
        for state in states:
            chunk = state.chunk
            init_masters(state, params)
            weights = weights_slab.view(chunk.dtype, chunk.num_elements, start)
            start += weights.nbytes
            label = ", ".join(dict.fromkeys(self._names[segment.param] for segment in chunk.segments))
            self._host_chunks.append(_HostChunk(state, weights, torch.zeros(len(chunk.segments)), f"update of {label}"))
            self.chunks.append(state)
        self._download(self._host_chunks[-len(states) :], params)
        self._make_slots()

    def _make_slots(self) -> None:
        most = max(chunk.weights.nbytes for chunk in self._host_chunks)
        for buffer in self._grad_slots:
            buffer.release()
        self._grad_slots = [
            self.engine.empty_host(most, "gradients", pinned=self._pinned_grads)
            for _ in range(min(self._num_slots, len(self._host_chunks)))
        ]
        self._slot_free = [None] * len(self._grad_slots)
        if not self._controls:
            slab = self.engine.empty_host(_NUM_PHASES * 64, "other", pinned=self._pinned_grads)
            self._slabs.append(slab)
            self._controls = [slab.view(torch.float32, 2, phase * 64) for phase in range(_NUM_PHASES)]

    def step_counter(self, number: int, index: int, scalars: StepScalars) -> torch.Tensor:
        """See :meth:`Share.step_counter`; the host kernel counts by itself."""
        return self._host_chunks[number].steps[index]

    def refresh(self, numbers: set[int], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.refresh`; the host's copies of the weights are brought up to date too."""
        super().refresh(numbers, params)
        touched = [c for c in self._host_chunks if any(s.param in numbers for s in c.state.chunk.segments)]
        self._download(touched, params)

    def _download(self, chunks: Sequence[_HostChunk], params: Sequence[torch.Tensor]) -> None:
        engine = self.engine
        # The copies read weights that the compute lane may still be writing.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        for chunk in chunks:
            for segment, weight in _segment_views(chunk.state.chunk, chunk.weights):
                engine.copy(Lane.DOWN, weight, flat(params[segment.param], segment))
        engine.record(Lane.DOWN).synchronize()

    def step(self, context: StepContext) -> dict[int, Event]:
        """See :meth:`Share.step`."""
        engine = self.engine
        if not any(is_active(chunk.state.chunk, context) for chunk in self._host_chunks):
            return {}
        phase = self._num_steps % _NUM_PHASES
        self._num_steps += 1
        done = self._phase_done[phase]
        if done is not None:
            # The tasks of two steps ago read the hyperparameters and controls written below.
            done.synchronize()
        # Gradients, norm and skip flag are computed on the compute lane.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        self._send_controls(context, phase)
        self._set_hypers(context, phase)
        gates: dict[int, Event] = {}
        for index, chunk in enumerate(self._host_chunks):
            if is_active(chunk.state.chunk, context):
                uploaded = self._update_chunk(chunk, index % len(self._grad_slots), phase, context)
                gates.update((segment.param, uploaded) for segment in chunk.state.chunk.segments)
        self._phase_done[phase] = engine.record(Lane.HOST)
        return gates

    def _set_hypers(self, context: StepContext, phase: int) -> None:
        hypers = self._hypers[phase]
        hypers += [kernels.Hyper() for _ in context.groups[len(hypers) :]]
        for hyper, values in zip(hypers, context.groups, strict=True):
            for name, value in dataclasses.asdict(values).items():
                setattr(hyper, name, value)

    def _send_controls(self, context: StepContext, phase: int) -> None:
        for source, target in zip((context.grad_scale, context.skip), self._controls[phase].split(1), strict=True):
            if source is not None:
                self.engine.copy(Lane.DOWN, target, source)

    def _update_chunk(self, chunk: _HostChunk, slot: int, phase: int, context: StepContext) -> Event:
        engine, layout = self.engine, chunk.state.chunk
        free = self._slot_free[slot]
        if free is not None:
            # The kernel that last read this slot; without the wait it would read this chunk's gradients.
            engine.wait(Lane.DOWN, free)
        active = tuple(context.grads[segment.param] is not None for segment in layout.segments)
        grad_views = []
        for segment, has_grad, offset in zip(layout.segments, active, layout.offsets, strict=True):
            grad = context.grads[segment.param]
            if has_grad:
                assert grad is not None
                view = self._grad_slots[slot].view(grad.dtype, segment.num_elements, offset * grad.itemsize)
                engine.copy(Lane.DOWN, view, grad[segment.start : segment.stop])
                grad_views.append(view)
        # The kernel reads the gradients that the copies bring.
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        task = self._task(chunk, active, phase, grad_views, context)
        engine.host_task(
            task,
            reads=[*grad_views, self._controls[phase]],
            writes=[chunk.state.region, chunk.weights, chunk.steps],
        )
        self._slot_free[slot] = engine.record(Lane.HOST)
        # The copies up read the weights that the kernel writes. It came after this step's gradients, hence
        # after every use of the old weights on the compute lane.
        engine.wait(Lane.UP, self._slot_free[slot])
        for (segment, weight), has_grad in zip(_segment_views(layout, chunk.weights), active, strict=True):
            if has_grad:
                engine.copy(Lane.UP, flat(context.params[segment.param], segment), weight)
        return engine.record(Lane.UP)

    def _task(
        self,
        chunk: _HostChunk,
        active: tuple[bool, ...],
        phase: int,
        grads: Sequence[torch.Tensor],
        context: StepContext,
    ) -> kernels.UpdateTask:
        has_scale, has_skip = context.grad_scale is not None, context.skip is not None
        key = (active, phase, has_scale, has_skip)
        task = chunk.tasks.get(key)
        if task is None:
            fields = chunk.state.segment_fields(chunk.state.region)
            weights = _segment_views(chunk.state.chunk, chunk.weights)
            remaining = iter(grads)
            segments = [
                kernels.Segment(
                    grad=next(remaining),
                    param=weight,
                    exp_avg=fields[index]["exp_avg"],
                    exp_avg_sq=fields[index]["exp_avg_sq"],
                    step=chunk.steps[index],
                    master=fields[index].get("remainder", fields[index].get("master")),
                    hyper=self._hypers[phase][context.group_of[segment.param]],
                )
                for index, (segment, weight) in enumerate(weights)
                if active[index]
            ]
            scale, skip = self._controls[phase].split(1)
            task = kernels.UpdateTask(
                chunk.label,
                kernels.Algorithm.ADAMW,
                segments,
                segments[0].hyper or kernels.Hyper(),
                grad_scale=scale if has_scale else None,
                found_inf=skip if has_skip else None,
            )
            chunk.tasks[key] = task
        return task

    def settle(self) -> None:
        """See :meth:`Share.settle`."""
        self.engine.record(Lane.HOST).synchronize()


def _segment_views(chunk: Chunk, field: torch.Tensor) -> list[tuple[Segment, torch.Tensor]]:
    return [
        (segment, field[offset : offset + segment.num_elements])
        for segment, offset in zip(chunk.segments, chunk.offsets, strict=True)
    ]
