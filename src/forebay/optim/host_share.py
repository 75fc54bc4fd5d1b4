"""The share whose state lives on the host and is updated there by the host kernel.

Per parameter element 2 bytes of gradient go down and 2 bytes of weight come up (for bf16); the state itself
never moves. A gradient goes down as soon as the last backward of a step has made it. Which backward is the last
is learned from the step before; a wrong guess is noticed, because a gradient that changed after it was sent has
another version, and the gradient is sent again. Chunks with a spare are updated during backward, see
:mod:`forebay.optim.early_updates`; the others at the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from forebay.engine import Buffer, Engine, Event, Lane, check_task
from forebay.host import kernels
from forebay.optim.chunk_state import ChunkState, flat, region_bytes
from forebay.optim.early_updates import EarlyUpdates
from forebay.optim.graph_hypers import GraphHypers
from forebay.optim.host_chunk import Controls, HostChunk, StateCopy, segment_views
from forebay.optim.kernel_rule import kernel_rule
from forebay.optim.layout import Chunk, Segment
from forebay.optim.shares import Share, is_active
from forebay.optim.spares import weight_bytes
from forebay.optim.update_rule import StepContext, UpdateRule

# Two sets of hyperparameters: Python fills one while the tasks of the step before still read the other. And one for
# the step in a CUDA graph, whose launches come one after the other.
_NUM_PHASES = 2
_GRAPH_PHASE = _NUM_PHASES
CONTROL_BYTES = (_NUM_PHASES + 1) * 64


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
        self._places: dict[int, list[tuple[HostChunk, Segment, int]]] = {}
        # Gradients that went down during backward, with their version then. Holding them keeps their addresses
        # from being reused, so a gradient at the same address is the same one.
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        # What was sent before a capture, and which of these gradients its step takes to be on the host already.
        self._sent_before: dict[int, tuple[torch.Tensor, int]] = {}
        self._relied_on: set[int] = set()
        self._graph_hypers: GraphHypers | None = None
        self._old_graph_hypers: list[GraphHypers] = []  # graphs captured before there were more groups read them
        self._all_sent: Event | None = None
        self._host_chunks: list[HostChunk] = []
        self._controls: list[torch.Tensor] = []
        self._hypers: list[list[kernels.Hyper]] = [[] for _ in range(_NUM_PHASES)]
        self._phase_done: list[Event | None] = [None] * _NUM_PHASES
        self._num_steps = 0
        self._early = EarlyUpdates(engine, rule)
        # Updated in the last step, in the order in which the host does it.
        self._updated: list[HostChunk] = []

    def extend(self, chunks: Sequence[Chunk], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.extend`."""
        if not chunks:
            return
        # The state never moves, so it need not be pinned.
        states = self._allocate_on_host(chunks, self._slabs, params, pinned=False)
        if not self._controls:
            self._graph_hypers = GraphHypers(self.engine, 0, pinned=self._pinned)
            slab = self._allocate(CONTROL_BYTES, "other")
            self._controls = [slab.view(torch.float32, 2, phase * 64) for phase in range(_NUM_PHASES + 1)]
        num_bytes = sum(weight_bytes(chunk) for chunk in chunks)
        weights, grads = self._allocate(num_bytes, "weights"), self._allocate(num_bytes, "gradients")
        start = 0
        new = []
        for state in states:
            new.append(self._host_chunk(state, weights, grads, start))
            start += new[-1].grads.nbytes
        self._add_spares(new)
        self._host_chunks += new
        self.chunks += states
        self._download(new, params)

    def _allocate(self, num_bytes: int, purpose: str, *, copied: bool = True) -> Buffer:
        self._slabs.append(self.engine.empty_host(num_bytes, purpose, pinned=copied and self._pinned))
        return self._slabs[-1]

    def _add_spares(self, chunks: Sequence[HostChunk]) -> None:
        layouts = [chunk.state.chunk for chunk in chunks if chunk.state.chunk.has_spare]
        if not layouts:
            return
        regions = self._allocate(sum(region_bytes(c, self.rule) for c in layouts), "spares", copied=False).tensor
        weights = self._allocate(sum(weight_bytes(c) for c in layouts), "spares").tensor
        for chunk in chunks:
            if chunk.state.chunk.has_spare:
                own, regions = regions.tensor_split([chunk.state.num_bytes])
                weight, weights = weights.tensor_split([chunk.grads.nbytes])
                steps = torch.zeros_like(chunk.current.steps)
                chunk.spare = StateCopy(own, weight.view(chunk.state.chunk.dtype), steps)

    def _host_chunk(self, state: ChunkState, weights: Buffer, grads: Buffer, start: int) -> HostChunk:
        chunk = state.chunk
        names = dict.fromkeys(self._names[segment.param] for segment in chunk.segments)
        host_chunk = HostChunk(
            state,
            StateCopy(
                state.region,
                weights.view(chunk.dtype, chunk.num_elements, start),
                torch.zeros(len(chunk.segments)),
            ),
            None,
            grads.view(chunk.dtype, chunk.num_elements, start),
            f"update of {', '.join(names)}",
        )
        for segment, offset in zip(chunk.segments, chunk.offsets, strict=True):
            self._places.setdefault(segment.param, []).append((host_chunk, segment, offset))
        return host_chunk

    def kept(self, number: int, index: int) -> tuple[str, ...] | None:
        """See :meth:`Share.kept`; the host kernel counts by itself."""
        return self.rule.moments if self._host_chunks[number].current.steps[index] != 0 else None

    def scalars(self, number: int, index: int) -> dict[str, Any]:
        """See :meth:`Share.scalars`."""
        return kernel_rule(self.rule).entry_of(self._host_chunks[number].current.steps[index].clone())

    def set_scalars(self, number: int, index: int, values: Mapping[str, Any] | None) -> None:
        """See :meth:`Share.set_scalars`."""
        step = 0.0 if values is None else kernel_rule(self.rule).step_in(values)
        self._host_chunks[number].current.steps[index] = step

    def refresh(self, numbers: set[int], params: Sequence[torch.Tensor]) -> None:
        """See :meth:`Share.refresh`; the host's copies of the weights are brought up to date too."""
        super().refresh(numbers, params)
        touched = [c for c in self._host_chunks if any(s.param in numbers for s in c.state.chunk.segments)]
        self._download(touched, params)

    def _download(self, chunks: Sequence[HostChunk], params: Sequence[torch.Tensor]) -> None:
        engine = self.engine
        # The copies read weights that the compute lane may still be writing.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        for chunk in chunks:
            for segment, weight in segment_views(chunk.state.chunk, chunk.current.weights):
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
                self.forget_sent(number)
                self._send(number, grad)
            elif context.capturing and number in self._sent and self._sent[number] is self._sent_before.get(number):
                self._relied_on.add(number)
        controls = self._send_controls(context, phase)
        hypers = self._set_hypers(context, phase)
        self._all_sent = engine.record(Lane.DOWN)
        # The kernel reads what the copies bring.
        engine.wait(Lane.HOST, self._all_sent)
        # First what is most likely done already, so that its weights go up while the others are updated.
        settled = [chunk for chunk in active if self._early.settle(chunk, context, hypers, controls)]
        others = [chunk for chunk in active if chunk not in settled]
        for chunk in others:
            self._update_in_place(chunk, context, hypers, controls)
        self._updated = settled + others
        if not context.capturing:
            self._phase_done[phase] = engine.record(Lane.HOST)
        self._early.end_step(context)
        self.forget_sent()

    def send_early(self, number: int, grad: torch.Tensor) -> None:
        """Send a parameter's gradient down, during backward; it is not expected to change any more."""
        if number in self._places and grad.is_contiguous():
            # The copy reads what backward has just written.
            self.engine.wait(Lane.DOWN, self.engine.record(Lane.COMPUTE))
            self._send(number, grad.detach().view(-1), speculative=True)
            self._sent[number] = (grad.detach(), grad._version)
            for chunk, _, _ in self._places[number]:
                if all(segment.param in self._sent for segment in chunk.state.chunk.segments):
                    self._early.start(chunk)

    def forget_sent(self, number: int | None = None) -> None:
        """Send a parameter's gradient (all, by default) again in the coming step; drop what was made of it."""
        if number is not None:
            self._sent.pop(number, None)
            for chunk, _, _ in self._places.get(number, ()):
                self._early.drop(chunk)
            return
        self._sent.clear()
        self._drop_early()
        self._early.end_backwards()

    def _drop_early(self) -> None:
        for chunk in self._host_chunks:
            self._early.drop(chunk)

    def _is_sent(self, number: int, grad: torch.Tensor) -> bool:
        sent, version = self._sent.get(number, (None, 0))
        return sent is not None and sent.data_ptr() == grad.data_ptr() and grad._version == version

    def _send(self, number: int, grad: torch.Tensor, *, speculative: bool = False) -> None:
        for chunk, segment, offset in self._places[number]:
            if chunk.updated is not None:
                # The last update of this chunk may still read the gradients that this overwrites.
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
            # An early update may be done while backward, or the user before the step, still uses the old weights on
            # the compute lane; the copies that overwrite them come after everything before this step.
            self.engine.wait(Lane.UP, self._all_sent)
            self._all_sent = None
        for chunk in self._updated:
            layout = chunk.state.chunk
            assert chunk.updated is not None
            # The copies read the weights that the kernel writes.
            self.engine.wait(Lane.UP, chunk.updated)
            for segment, weight in segment_views(layout, chunk.current.weights):
                if context.grads[segment.param] is not None:
                    self.engine.copy(Lane.UP, flat(context.params[segment.param], segment), weight)
            uploaded = self.engine.record(Lane.UP)
            gates.update((segment.param, uploaded) for segment in layout.segments)
        self._updated = []
        return gates

    # CUDA graphs

    def begin_capture(self) -> None:
        """Take note of what was sent outside of the graph; from here on state stays where it is."""
        # A graph updates state at the addresses of its capture, so chunks and spares may not trade places any more.
        self._drop_early()
        self._early.stop()
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
                kernel_rule(self.rule).set_hyper(hyper, group)
            self._graph_hypers.write(hypers)

    def _set_hypers(self, context: StepContext, phase: int) -> list[kernels.Hyper]:
        assert self._graph_hypers is not None
        if context.capturing:
            self._graph_hypers.send()
            return self._graph_hypers.hypers
        if len(self._graph_hypers.hypers) < len(context.groups):
            self._old_graph_hypers.append(self._graph_hypers)
            self._graph_hypers = GraphHypers(self.engine, len(context.groups), pinned=self._pinned)
        hypers = self._hypers[phase]
        hypers += [kernels.Hyper() for _ in context.groups[len(hypers) :]]
        for hyper, group in zip(hypers, context.groups, strict=True):
            kernel_rule(self.rule).set_hyper(hyper, group)
        return hypers

    def _send_controls(self, context: StepContext, phase: int) -> Controls:
        def send(source: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor | None:
            if source is None:
                return None
            self.engine.copy(Lane.DOWN, target, source)
            return target

        scale, skip = self._controls[phase].split(1)
        return send(context.grad_scale, scale), send(context.skip, skip)

    def _update_in_place(
        self,
        chunk: HostChunk,
        context: StepContext,
        hypers: Sequence[kernels.Hyper],
        controls: Controls,
    ) -> None:
        active = tuple(context.grads[segment.param] is not None for segment in chunk.state.chunk.segments)
        task = chunk.task(
            kernel_rule(self.rule), hypers, context.group_of, active, target=chunk.current, controls=controls
        )
        reads = [chunk.grads, *(control for control in controls if control is not None)]
        if context.capturing:
            # The hyperparameters of a launch are copied down in the launch itself.
            assert self._graph_hypers is not None
            reads.append(self._graph_hypers.memory)
        self.engine.host_task(task, reads=reads, writes=chunk.current.tensors)
        chunk.updated = self.engine.record(Lane.HOST)

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
            yield from chunk.tasks()

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that the host kernel has worked, added up."""
        return sum(task.busy_ns for task in self._tasks())

    def settle(self) -> None:
        """See :meth:`Share.settle`. Updates made early are dropped: they would be stale after a write."""
        self._drop_early()
        self.engine.record(Lane.HOST).synchronize()
