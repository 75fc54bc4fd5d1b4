"""The share whose state lives on the host and is updated there by the host kernel.

Per parameter element 2 bytes of gradient go down and 2 bytes of weight come up (for bf16); the state itself
never moves. A gradient goes down as soon as the last backward of a step has made it. Which backward is the last
is learned from the step before; a wrong guess is noticed, because a gradient that changed after it was sent has
another version, and the gradient is sent again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from forebay.engine import Buffer, Engine, Event, Lane, check_task
from forebay.host import kernels
from forebay.optim.chunk_state import ChunkState, flat
from forebay.optim.graph_hypers import GraphHypers
from forebay.optim.layout import Chunk, Segment
from forebay.optim.shares import Share, is_active
from forebay.optim.update_rule import KernelRule, StepContext, UpdateRule

# Two sets of hyperparameters: Python fills one while the tasks of the step before still read the other. And one for
# the step in a CUDA graph, whose launches come one after the other.
_NUM_PHASES = 2
_GRAPH_PHASE = _NUM_PHASES
CONTROL_BYTES = (_NUM_PHASES + 1) * 64


@dataclasses.dataclass
class _HostChunk:
    """What the host kernel needs beside the state.

    Attributes:
        state: the chunk and its region.
        weights: flat, the chunk's weights on the host, current after every update.
        grads: flat, where its gradients land.
        steps: fp32 (segments,), updates each segment has had.
        label: names its parameters in errors and traces.
        updated: the last update, after which ``grads`` may be overwritten.
        tasks: one for each combination of segments with a gradient, phase and controls.
    """

    state: ChunkState
    weights: torch.Tensor
    grads: torch.Tensor
    steps: torch.Tensor
    label: str
    updated: Event | None = None
    tasks: dict[tuple[object, ...], kernels.UpdateTask] = dataclasses.field(default_factory=dict)


class HostShare(Share):
    """State updated on the host.

    Args:
        engine: what moves gradients and weights and runs the kernel.
        rule: what the state is; it must have a host kernel if there are chunks.
        names: of all parameters, by number; grows with :meth:`extend`.
        pinned: pin the gradients and the host copies of the weights.
    """

    def __init__(self, engine: Engine, rule: UpdateRule, names: Sequence[str], *, pinned: bool) -> None:
        super().__init__(engine, rule)
        self._names = names
        self._pinned = pinned
        self._slabs: list[Buffer] = []
        self._places: dict[int, list[tuple[_HostChunk, Segment, int]]] = {}
        # Gradients that went down during backward, with their version then. Holding them keeps their addresses
        # from being reused, so a gradient at the same address is the same one.
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        # What was sent before a capture, and which of these gradients its step takes to be on the host already.
        self._sent_before: dict[int, tuple[torch.Tensor, int]] = {}
        self._relied_on: set[int] = set()
        self._graph_hypers: GraphHypers | None = None
        self._all_sent: Event | None = None
        self._host_chunks: list[_HostChunk] = []
        self._controls: list[torch.Tensor] = []
        self._hypers: list[list[kernels.Hyper]] = [[] for _ in range(_NUM_PHASES + 1)]
        self._phase_done: list[Event | None] = [None] * _NUM_PHASES
        self._num_steps = 0

    def extend(self, chunks: Sequence[Chunk], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        if not chunks:
            return
        # The state never moves, so it need not be pinned.
        states = self._allocate_on_host(chunks, self._slabs, params, pinned=False)
        if not self._controls:
            slab = self._allocate(CONTROL_BYTES, "other")
            self._controls = [slab.view(torch.float32, 2, phase * 64) for phase in range(_NUM_PHASES + 1)]
        num_bytes = sum(chunk.num_elements * chunk.dtype.itemsize for chunk in chunks)
        weights, grads = self._allocate(num_bytes, "weights"), self._allocate(num_bytes, "gradients")
        start = 0
        new = []
        for state in states:
            new.append(self._host_chunk(state, weights, grads, start))
            start += new[-1].weights.nbytes
        self._host_chunks += new
        self.chunks += states
        self._download(new, params)

    def _allocate(self, num_bytes: int, purpose: str) -> Buffer:
        self._slabs.append(self.engine.empty_host(num_bytes, purpose, pinned=self._pinned))
        return self._slabs[-1]

    def _host_chunk(self, state: ChunkState, weights: Buffer, grads: Buffer, start: int) -> _HostChunk:
        chunk = state.chunk
        names = dict.fromkeys(self._names[segment.param] for segment in chunk.segments)
        host_chunk = _HostChunk(
            state,
            weights.view(chunk.dtype, chunk.num_elements, start),
            grads.view(chunk.dtype, chunk.num_elements, start),
            torch.zeros(len(chunk.segments)),
            f"update of {', '.join(names)}",
        )
        for segment, offset in zip(chunk.segments, chunk.offsets, strict=True):
            self._places.setdefault(segment.param, []).append((host_chunk, segment, offset))
        return host_chunk

    @property
    def _kernel_rule(self) -> KernelRule:
        assert isinstance(self.rule, KernelRule), "Options.host_share_of refuses others"
        return self.rule

    def kept(self, number: int, index: int) -> tuple[str, ...] | None:
        """See :meth:`Share.kept`; the host kernel counts by itself."""
        return self.rule.moments if self._host_chunks[number].steps[index] != 0 else None

    def scalars(self, number: int, index: int) -> dict[str, Any]:
        """See :meth:`Share.scalars`."""
        return self._kernel_rule.entry_of(self._host_chunks[number].steps[index].clone())

    def set_scalars(self, number: int, index: int, values: Mapping[str, Any] | None) -> None:
        """See :meth:`Share.set_scalars`."""
        step = 0.0 if values is None else self._kernel_rule.step_in(values)
        self._host_chunks[number].steps[index] = step

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

    def step(self, context: StepContext) -> None:
        """See :meth:`Share.step`."""
        engine = self.engine
        active = [chunk for chunk in self._host_chunks if is_active(chunk.state.chunk, context)]
        if not active:
            return
        phase = _GRAPH_PHASE
        if not context.capturing:
            phase = self._num_steps % _NUM_PHASES
            self._num_steps += 1
            done = self._phase_done[phase]
            if done is not None:
                # The tasks of two steps ago read the hyperparameters and controls written below.
                done.synchronize()
        # Gradients, norm and skip flag are computed on the compute lane.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        for number in self._places:
            grad = context.grads[number]
            if grad is not None and not self._is_sent(number, grad):
                self._send(number, grad)
            elif context.capturing and number in self._sent and self._sent[number] is self._sent_before.get(number):
                self._relied_on.add(number)
        self.forget_sent()
        self._send_controls(context, phase)
        self._set_hypers(context, phase)
        self._all_sent = engine.record(Lane.DOWN)
        # The kernel reads what the copies bring.
        engine.wait(Lane.HOST, self._all_sent)
        for chunk in active:
            self._update_chunk(chunk, phase, context)
        if not context.capturing:
            self._phase_done[phase] = engine.record(Lane.HOST)

    def send_early(self, number: int, grad: torch.Tensor) -> None:
        """Send a parameter's gradient down, during backward; it is not expected to change any more."""
        if number in self._places and grad.is_contiguous():
            # The copy reads what backward has just written.
            self.engine.wait(Lane.DOWN, self.engine.record(Lane.COMPUTE))
            self._send(number, grad.detach().view(-1), speculative=True)
            self._sent[number] = (grad.detach(), grad._version)

    def forget_sent(self, number: int | None = None) -> None:
        """Send a parameter's gradient (all, by default) again in the coming step."""
        if number is None:
            self._sent.clear()
        else:
            self._sent.pop(number, None)

    def _is_sent(self, number: int, grad: torch.Tensor) -> bool:
        sent, version = self._sent.get(number, (None, 0))
        return sent is not None and sent.data_ptr() == grad.data_ptr() and grad._version == version

    def _send(self, number: int, grad: torch.Tensor, *, speculative: bool = False) -> None:
        for chunk, segment, offset in self._places[number]:
            if chunk.updated is not None:
                # The last step's update of this chunk may still read the gradients that this overwrites.
                self.engine.wait(Lane.DOWN, chunk.updated)
            target = chunk.grads[offset : offset + segment.num_elements]
            part = grad[segment.start : segment.stop]
            self.engine.copy(Lane.DOWN, target, part, speculative=speculative)

    def upload(self, context: StepContext) -> dict[int, Event]:
        """Enqueue the copies up of updated weights; return per parameter number the event to wait for.

        Apart from :meth:`step` so that other copies up, which need not wait for the host, can go first.
        """
        gates: dict[int, Event] = {}
        if self._all_sent is not None:
            # From now on gradients may be zeroed, or their memory used for something else.
            self.engine.wait(Lane.COMPUTE, self._all_sent)
            self._all_sent = None
        for chunk in self._host_chunks:
            layout = chunk.state.chunk
            if not is_active(layout, context):
                continue
            assert chunk.updated is not None
            # The copies read the weights that the kernel writes. It came after this step's gradients, hence
            # after every use of the old weights on the compute lane.
            self.engine.wait(Lane.UP, chunk.updated)
            for segment, weight in _segment_views(layout, chunk.weights):
                if context.grads[segment.param] is not None:
                    self.engine.copy(Lane.UP, flat(context.params[segment.param], segment), weight)
            uploaded = self.engine.record(Lane.UP)
            gates.update((segment.param, uploaded) for segment in layout.segments)
        return gates

    # CUDA graphs

    def begin_capture(self) -> None:
        """Take note of what was sent outside of the graph."""
        self._sent_before, self._relied_on = dict(self._sent), set()

    def end_capture(self) -> None:
        """Raise RuntimeError if the captured step relies on gradients that no launch will have sent."""
        for number in self._relied_on:
            sent = self._sent.get(number)
            if sent is None or sent is self._sent_before[number]:
                raise RuntimeError(
                    f"the captured step needs the gradient of {self._names[number]} on the host, where the backward "
                    "before the capture has sent it, but no backward in the capture sends the next one: capture "
                    "forward and backward in the same graph, before step(), or after it with "
                    "zero_grad(set_to_none=False) in between"
                )
        self._sent_before = {}

    def abandon_capture(self) -> None:
        """Forget a capture that failed, and so has sent nothing."""
        self._sent, self._sent_before, self._relied_on = {}, {}, set()

    def before_launch(self, groups: Sequence[Mapping[str, Any]], params: Sequence[torch.Tensor]) -> None:
        """Enqueue what a launch of the captured step needs; see :meth:`UpdateRule.before_launch`."""
        self._sent = {number: sent for number, sent in self._sent.items() if number in self._relied_on}
        for number in self._relied_on:
            grad = params[number].grad
            if grad is not None and not self._is_sent(number, grad):
                self.engine.wait(Lane.DOWN, self.engine.record(Lane.COMPUTE))  # backward may just have written it
                self._send(number, grad.detach().view(-1))
                self._sent[number] = (grad.detach(), grad._version)
        if self._graph_hypers is not None:
            hypers = [kernels.Hyper() for _ in groups]
            for hyper, group in zip(hypers, groups, strict=True):
                self._kernel_rule.set_hyper(hyper, group)
            self._graph_hypers.write(hypers)

    def _set_hypers(self, context: StepContext, phase: int) -> None:
        if context.capturing:
            assert self._graph_hypers is not None, "made by the first step"
            self._graph_hypers.send()
            return
        if self._graph_hypers is None or len(self._graph_hypers.hypers) < len(context.groups):
            self._graph_hypers = GraphHypers(self.engine, len(context.groups), pinned=self._pinned)
            self._hypers[_GRAPH_PHASE] = self._graph_hypers.hypers
        hypers = self._hypers[phase]
        hypers += [kernels.Hyper() for _ in context.groups[len(hypers) :]]
        for hyper, group in zip(hypers, context.groups, strict=True):
            self._kernel_rule.set_hyper(hyper, group)

    def _send_controls(self, context: StepContext, phase: int) -> None:
        for source, target in zip((context.grad_scale, context.skip), self._controls[phase].split(1), strict=True):
            if source is not None:
                self.engine.copy(Lane.DOWN, target, source)

    def _update_chunk(self, chunk: _HostChunk, phase: int, context: StepContext) -> None:
        layout = chunk.state.chunk
        active = tuple(context.grads[segment.param] is not None for segment in layout.segments)
        self.engine.host_task(
            self._task(chunk, active, phase, context),
            reads=[chunk.grads, self._controls[phase], *self._hyper_memory(phase)],
            writes=[chunk.state.region, chunk.weights, chunk.steps],
        )
        chunk.updated = self.engine.record(Lane.HOST)

    def _hyper_memory(self, phase: int) -> list[torch.Tensor]:
        return [self._graph_hypers.memory] if phase == _GRAPH_PHASE and self._graph_hypers is not None else []

    def _task(
        self,
        chunk: _HostChunk,
        active: tuple[bool, ...],
        phase: int,
        context: StepContext,
    ) -> kernels.UpdateTask:
        has_scale, has_skip = context.grad_scale is not None, context.skip is not None
        # A graph's tasks read the hyperparameters that were there when it was captured.
        key = (active, self._graph_hypers if phase == _GRAPH_PHASE else phase, has_scale, has_skip)
        task = chunk.tasks.get(key)
        if task is None:
            fields = chunk.state.segment_fields(chunk.state.region)
            weights = _segment_views(chunk.state.chunk, chunk.weights)
            grads = _segment_views(chunk.state.chunk, chunk.grads)
            algorithm = self._kernel_rule.host_algorithm
            assert algorithm is not None
            # The kernel has two slots for moments, named for Adam; other rules use the first or none.
            slots = dict(zip(("exp_avg", "exp_avg_sq"), self.rule.moments, strict=False))
            segments = [
                kernels.Segment(
                    grad=grads[index][1],
                    param=weight,
                    **{slot: fields[index][moment] for slot, moment in slots.items()},
                    step=chunk.steps[index],
                    master=fields[index].get("remainder", fields[index].get("master")),
                    hyper=self._hypers[phase][context.group_of[segment.param]],
                    first_element=segment.start,
                    seed=segment.param,
                )
                for index, (segment, weight) in enumerate(weights)
                if active[index]
            ]
            scale, skip = self._controls[phase].split(1)
            task = kernels.UpdateTask(
                chunk.label,
                algorithm,
                segments,
                segments[0].hyper or kernels.Hyper(),
                grad_scale=scale if has_scale else None,
                found_inf=skip if has_skip else None,
            )
            chunk.tasks[key] = task
        return task

    def check_tasks(self) -> None:
        """Raise :class:`HostTaskError`, naming parameters, if an update that has run by now failed."""
        for task in self._tasks():
            check_task(task)

    def clear_failures(self) -> None:
        """Forget failed updates: all state has been written anew."""
        for task in self._tasks():
            task.clear_status()

    def _tasks(self) -> Iterator[kernels.UpdateTask]:
        for chunk in self._host_chunks:
            yield from chunk.tasks.values()

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that the host kernel has worked, added up."""
        return sum(task.busy_ns for task in self._tasks())

    def settle(self) -> None:
        """See :meth:`Share.settle`."""
        self.engine.record(Lane.HOST).synchronize()


def _segment_views(chunk: Chunk, field: torch.Tensor) -> list[tuple[Segment, torch.Tensor]]:
    return [
        (segment, field[offset : offset + segment.num_elements])
        for segment, offset in zip(chunk.segments, chunk.offsets, strict=True)
    ]
