"""State in its placements, and the schedule by which it is updated.

What an optimizer has beneath its torch interface: which parameters have state and where, the hooks in
forward and backward by which transfers run under compute, and the order in which a step enqueues its work.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from forebay.engine import Engine, Lane
from forebay.optim.gates import Gates
from forebay.optim.host_share import HostShare
from forebay.optim.layout import Placement
from forebay.optim.options import NUM_STREAM_SLOTS, Options, divide_params
from forebay.optim.shares import DeviceShare, Share
from forebay.optim.streamed_share import StreamedShare
from forebay.optim.tide import Tide
from forebay.optim.update_rule import StepContext, UpdateRule


@dataclasses.dataclass
class _Tracked:
    """A parameter that has state.

    Attributes:
        param: the parameter.
        name: for errors.
        version: what :func:`_version` was after the last write of ours.
        num_backwards: gradients accumulated since the last step.
        expected_backwards: gradients that were accumulated before the last step.
    """

    param: torch.Tensor
    name: str
    version: tuple[int, int]
    num_backwards: int = 0
    expected_backwards: int = 0


class PlacedState:
    """The state of some parameters, divided among the placements.

    Args:
        engine: moves it.
        options: say how it is divided.
        rule: says what the state is and how it is updated.

    Attributes:
        gates: the events after which each parameter is current.
        params: the parameters that have state, by number.
        numbers: the number of each.
        shares: the state by placement.
    """

    def __init__(self, engine: Engine, options: Options, rule: UpdateRule) -> None:
        self.engine = engine
        self.options = options
        self.rule = rule
        # The hooks are held by the model and must not keep the state alive.
        self.gates = Gates(engine, _weak(self.tick), _weak(self.check_tasks))
        self.params: list[torch.Tensor] = []
        self.numbers: dict[torch.Tensor, int] = {}
        self._tracked: list[_Tracked] = []
        self._names: list[str] = []
        num_slots = NUM_STREAM_SLOTS if options.overlap else 1
        self._streamed = StreamedShare(engine, rule, num_slots=num_slots, pinned=options.pinned)
        self._host = HostShare(engine, rule, self._names, pinned=options.pinned)
        self.shares: dict[Placement, Share] = {
            Placement.DEVICE: DeviceShare(engine, rule),
            Placement.STREAMED: self._streamed,
            Placement.HOST: self._host,
        }
        self._tide: Tide | None = None
        self._in_capture = False
        self._num_steps = 0
        # Whether a CUDA graph holds a step of all that has state now, and whether one ever did.
        self._is_captured = self._may_be_launched = False
        self._has_stepped = False  # in the capture that is under way
        # Where the captured step reads gradients; kept if the backward that makes them comes after it in the graph.
        self._graph_grads: dict[int, int] = {}
        self._grads_come_after = False

    def extend(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Allocate state for more parameters, in forward order; the fraction holds for these by themselves.

        Raises:
            HostMemoryError: if the host share does not fit the host; nothing is allocated then.
        """
        order = self.gates.module_order
        named = sorted(named, key=lambda item: order.get(item[1], len(order)))
        if not named:
            return
        if self.engine.capturing:
            raise RuntimeError(
                f"parameter {named[0][0]} has no state yet, and none can be allocated while a CUDA graph is being "
                "captured; call optimizer.allocate() and make a step, in which every parameter to be trained has a "
                "gradient, before the capture"
            )
        self._is_captured = False  # what a graph holds is not all of the step any more
        first_param = len(self.params)
        new = [param for _, param in named]
        chunks = divide_params(new, self.options, self.rule, self.engine.device, first_param)
        self.params += new
        self._names += [name for name, _ in named]
        self.numbers.update((param, number) for number, param in enumerate(new, first_param))
        self._tracked += [_Tracked(param, name, _version(param)) for name, param in named]
        for placement, share in self.shares.items():
            share.extend([chunk for chunk in chunks if chunk.placement is placement], self.params)
        if self.options.overlap and (self._streamed.chunks or self._host.chunks):
            if self._streamed.chunks and self._tide is None:
                self._tide = Tide(self.engine, int(self.options.staging_gib * 2**30))
            for number, param in enumerate(new, first_param):
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(_GradHook(self, number))

    # Hooks

    def tick(self, key: int) -> int:
        """Begin an interval of the tide; return the bytes that visits may hold until the update."""
        if self._notice_capture():
            self._grads_come_after = self._has_stepped
        if self._tide is None:
            return 0
        hold_bytes, prefetch_bytes = self._tide.tick(key)
        self._streamed.shrink(hold_bytes)
        return prefetch_bytes

    def after_gradient(self, number: int) -> None:
        """Take note that a gradient was accumulated into a parameter."""
        if self._notice_capture():
            self._grads_come_after = self._has_stepped
        tracked = self._tracked[number]
        tracked.num_backwards += 1
        self._host.forget_sent(number)
        if tracked.num_backwards == tracked.expected_backwards:
            grad = tracked.param.grad
            assert grad is not None
            self._host.send_early(number, grad)
        # Modules have keys from 0 up.
        self._streamed.prefetch(self.tick(-2 - number))

    def end_backwards(self) -> None:
        """Take note that the gradients accumulated so far are used up or dropped."""
        self._notice_capture()
        self._host.forget_sent()
        for tracked in self._tracked:
            tracked.num_backwards = 0

    # A step

    def step(
        self,
        groups: Sequence[dict[str, Any]],
        group_of: Sequence[int],
        grad_scale: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Enqueue the update of every parameter that has a gradient.

        Args:
            groups: the parameter groups.
            group_of: the group of each parameter, by number.
            grad_scale: see :class:`StepContext`.
            skip: see :class:`StepContext`.
        """
        capturing = self._notice_capture()
        if capturing:
            self._check_capturable()
        grads = [self._flat_grad(tracked) for tracked in self._tracked]
        limit_bytes = self._tide.update_limit_bytes if self._tide is not None else 0
        context = StepContext(self.params, grads, groups, group_of, grad_scale, skip, limit_bytes, capturing)
        is_updated = self.rule.begin_step(context)
        # Host updates first: they take longest, and what the device does next runs beside them. Their results go
        # up last: they wait for the host, and copies up that need not would queue behind them.
        if is_updated:
            for placement in (Placement.HOST, Placement.STREAMED, Placement.DEVICE):
                self.shares[placement].step(context)
            for number, event in self._host.upload(context).items():
                self.gates.close(self.params[number], event)
            self.rule.end_step(context)
        for tracked, grad in zip(self._tracked, grads, strict=True):
            if is_updated and grad is not None:
                torch.autograd.graph.increment_version(tracked.param)
                tracked.version = _version(tracked.param)
            tracked.expected_backwards = tracked.num_backwards
        if capturing:
            self._is_captured = self._may_be_launched = self._has_stepped = True
            self._graph_grads = {
                n: t.param.grad.data_ptr() for n, t in enumerate(self._tracked) if t.param.grad is not None
            }
        else:
            self._num_steps += 1
        self.end_backwards()
        attached = self.options.overlap and self.gates.attached
        if not attached:
            self.gates.open_all()
        profiled_next = self._tide is not None and self._tide.turn()
        if profiled_next or not attached:
            # Nothing ends visits later: no hook in forward, or none that may while memory is profiled.
            self._streamed.shrink(0)

    def _flat_grad(self, tracked: _Tracked) -> torch.Tensor | None:
        grad = tracked.param.grad
        if grad is None:
            return None
        if grad.is_sparse:
            raise ValueError(f"the gradient of {tracked.name} is sparse; {self.rule.name} takes dense ones here")
        if grad.dtype != tracked.param.dtype:
            raise ValueError(
                f"the gradient of {tracked.name} is {grad.dtype} but the parameter is {tracked.param.dtype}; "
                "they must have one dtype"
            )
        return grad.detach().contiguous().view(-1)

    # CUDA graphs

    def _notice_capture(self) -> bool:
        """Notice whether a capture has begun; return whether one is under way."""
        capturing = self.engine.capturing
        if capturing and not self._in_capture:
            if self._tide is not None:
                self._tide.freeze()
            self._streamed.begin_capture(int(self.options.staging_gib * 2**30))
            self._host.begin_capture()
            self._in_capture = True
            self._has_stepped = self._grads_come_after = False
        elif self._in_capture and not capturing:
            # It ended with an exception or without join(): nothing of it will ever be carried out.
            self._streamed.abandon_capture()
            self._host.abandon_capture()
            self._is_captured = False
            self._thaw()
        return capturing

    def _thaw(self) -> None:
        self._in_capture = False
        if self._tide is not None:
            self._tide.thaw()

    def _check_capturable(self) -> None:
        if not self.rule.is_capturable:
            raise ValueError(
                f"a step of {self.rule.name} cannot be captured in a CUDA graph, only one of AdamW; leave step() out "
                "of the capture"
            )
        if not self.options.pinned and any(chunk for share in (self._streamed, self._host) for chunk in share.chunks):
            raise ValueError("pinned=False: a CUDA graph needs pinned host memory for its copies; use pinned=True")
        if self._num_steps == 0:
            raise RuntimeError(
                "the first step cannot be captured in a CUDA graph: it compiles kernels and allocates; make at least "
                "one step before the capture (three let the schedule learn how much memory is free when)"
            )

    def join(self) -> None:
        """Let the compute lane wait for all transfers and host updates; in a capture, finish it."""
        if self._notice_capture():
            self._check_graph_grads()
            if self._has_stepped and not self._grads_come_after:
                self._graph_grads = {}
            self._streamed.end_capture()
            self._host.end_capture()
            self._thaw()
        self.engine.join()

    def _check_graph_grads(self) -> None:
        for number, address in self._graph_grads.items():
            grad = self.params[number].grad
            if grad is not None and grad.data_ptr() != address:
                raise RuntimeError(
                    f"the gradient of {self._names[number]} is not where the captured step reads it: where step() "
                    "comes before backward in a graph, use zero_grad(set_to_none=False), in the capture and after it"
                )

    def before_launch(self, groups: Sequence[dict[str, Any]], group_of: Sequence[int]) -> None:
        """Enqueue what must come before a launch of the captured step.

        Args:
            groups: the parameter groups, with the hyperparameters for the launches to come.
            group_of: the group of each parameter, by number.
        """
        self._notice_capture()
        if not self._is_captured:
            raise RuntimeError(
                "no step has been captured in a CUDA graph, or parameters were added since: capture one first, with "
                "optimizer.join() as the last line of the capture"
            )
        self._check_graph_grads()
        self.rule.before_launch(groups, group_of)
        self._host.before_launch(groups, self.params)
        self._streamed.before_launch()
        # A launch does not wait for work outside of its graph.
        self.engine.join()

    def _wait_for_launches(self) -> None:
        if self.engine.capturing:
            raise RuntimeError(
                "the optimizer's state cannot be read or written while a CUDA graph is being captured; do it before "
                "or after"
            )
        self._notice_capture()
        if self._may_be_launched:
            # A share knows when its own transfers are done, not when those of a graph are.
            self.engine.record(Lane.COMPUTE).synchronize()

    # Masters and figures

    def externally_written(self) -> set[int]:
        """Return the numbers of the parameters that somebody else wrote to since our last write."""
        return {n for n, tracked in enumerate(self._tracked) if tracked.version != _version(tracked.param)}

    def refresh(self, numbers: Iterable[int]) -> None:
        """Set the masters of the numbered parameters to the parameters' values."""
        chosen = set(numbers)
        if not chosen:
            return
        self._wait_for_launches()
        for share in self.shares.values():
            share.refresh(chosen, self.params)
        for number in chosen:
            self._tracked[number].version = _version(self.params[number])

    def settle(self) -> None:
        """Block until all state may be read and written by Python."""
        self._wait_for_launches()
        self.gates.open_all()
        for share in self.shares.values():
            share.settle()

    def check_tasks(self) -> None:
        """Raise :class:`HostTaskError`, naming parameters, if a host update that has run by now failed."""
        self._host.check_tasks()

    def clear_failures(self) -> None:
        """Forget failed host updates: all state has been written anew."""
        self._host.clear_failures()

    @property
    def host_busy_ns(self) -> int:
        """Nanoseconds that the host kernel has worked, added up."""
        return self._host.busy_ns


class _GradHook:
    """Runs after a parameter's gradient was accumulated; does not keep the state alive."""

    def __init__(self, state: PlacedState, number: int) -> None:
        self._state = weakref.ref(state)
        self._number = number

    def __call__(self, param: torch.Tensor) -> None:
        state = self._state()
        if state is not None:
            state.after_gradient(self._number)


def _weak(method: Callable[..., object]) -> Callable[..., object]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> object:
        target = reference()
        return target(*args) if target is not None else None

    return call


def _version(param: torch.Tensor) -> tuple[int, int]:
    return param._version, param.data_ptr()
