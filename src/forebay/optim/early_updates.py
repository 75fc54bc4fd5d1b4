"""Host updates that start during backward, before it is known whether the step will clip, or skip.

As soon as all gradients of a chunk are on the host, its update is made with a scale of 1, from the chunk's state
into its spare. At the step, when the clip coefficient and the skip flag have arrived on the host, a task settles it
there: nothing to do if nothing was clipped; else the update is made again from the old state, which is untouched,
or, for a skipped step, the spare becomes a copy of the old state. In each case the spare has what an update at the
step would have made, bit for bit, so Python lets chunk and spare trade places without knowing which case it was.

What an early update read may turn out not to be what the step means: a gradient that changed, another learning
rate, a parameter without a gradient. Python can tell; such an update is dropped, and the chunk is updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.engine import Engine, Event, Lane
from forebay.host import kernels
from forebay.optim.host_chunk import Controls, HostChunk
from forebay.optim.kernel_rule import kernel_rule
from forebay.optim.update_rule import StepContext, UpdateRule

# Early updates that are not used cost memory bandwidth. After one was made in vain, this many steps at most pass
# without any, twice as many each time.
MOST_PAUSED_STEPS = 16
# Sets of hyperparameters, of which each step writes one during backward. Python is more than a step ahead of the
# host: what it has waited for by then, at the step before, are the tasks of three steps ago.
_NUM_PHASES = 3


class EarlyUpdates:
    """Makes the early updates of a host share, and settles them.

    Args:
        engine: runs them.
        rule: what the state is.
    """

    def __init__(self, engine: Engine, rule: UpdateRule) -> None:
        self._engine = engine
        self._rule = rule
        self._groups: Sequence[dict[str, Any]] = ()
        self._group_of: Sequence[int] = ()
        self._hypers: list[list[kernels.Hyper]] = [[] for _ in range(_NUM_PHASES)]
        # The last task that reads each of them.
        self._done: list[Event | None] = [None] * _NUM_PHASES
        self._phase = 0  # of the coming step
        self._begun = False  # whether its hyperparameters are written
        self._resolving: dict[int, kernels.UpdateTask] = {}
        self._num_kept = self._num_dropped = 0  # as far as Python knows by itself
        self._last_counts = (0, 0)
        self._looked = False
        self._is_stopped = False
        self._paused_steps = self._last_pause = 0

    def stop(self) -> None:
        """Make no more of them."""
        self._is_stopped = True

    # During backward

    def start(self, chunk: HostChunk) -> None:
        """Update a chunk whose gradients have all been sent down, if there is a place for the outcome."""
        if chunk.spare is None or self._is_stopped or self._is_paused() or not self._begin():
            return
        engine = self._engine
        # The kernel reads what the copies down bring. They came after the compute lane had waited for the copies up
        # of the step before last, which read the weights that the spare had until then: it may be overwritten.
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        task = self._task(chunk)
        engine.host_task(task, reads=[chunk.grads, *chunk.current.tensors], writes=chunk.spare.tensors)
        chunk.updated = self._done[self._phase] = engine.record(Lane.HOST)
        chunk.is_early = True

    def _begin(self) -> bool:
        if not self._begun and self._groups:
            done = self._done[self._phase]
            if done is not None and not done.query():
                # Tasks that read these hyperparameters have not all run, such as those that were dropped in this
                # very step. Blocking backward for an early start would gain nothing.
                return False
            hypers = self._hypers[self._phase]
            hypers += [kernels.Hyper() for _ in self._groups[len(hypers) :]]
            for hyper, group in zip(hypers, self._groups, strict=True):
                kernel_rule(self._rule).set_hyper(hyper, group)
            self._begun = True
        return self._begun

    def drop(self, chunk: HostChunk) -> None:
        """Do not use a chunk's early update, if there is one."""
        self._num_dropped += chunk.is_early
        chunk.is_early = False

    # At the step

    def settle(
        self,
        chunk: HostChunk,
        context: StepContext,
        hypers: Sequence[kernels.Hyper],
        controls: Controls,
    ) -> bool:
        """Let a chunk's early update, if there is one, be the update of this step.

        Args:
            chunk: its gradients are those that the early update read.
            context: of the step.
            hypers: the step's hyperparameters, by group.
            controls: scale and skip flag of the step on the host, None for 1 and for never.

        Returns:
            False if the chunk has still to be updated.
        """
        if not chunk.is_early or not self._is_right(chunk, context, hypers):
            self.drop(chunk)
            return False
        assert chunk.spare is not None
        chunk.is_early = False
        given = [control for control in controls if control is not None]
        if given:
            task = self._task(chunk, controls, resolve=True)
            self._resolving[id(task)] = task
            self._engine.host_task(
                task, reads=[*given, chunk.grads, *chunk.current.tensors], writes=chunk.spare.tensors
            )
            chunk.updated = self._done[self._phase] = self._engine.record(Lane.HOST)
        else:
            self._num_kept += 1
        chunk.swap()
        return True

    def _is_right(self, chunk: HostChunk, context: StepContext, hypers: Sequence[kernels.Hyper]) -> bool:
        for segment in chunk.state.chunk.segments:
            used = self._hypers[self._phase][self._group_of[segment.param]]
            if context.grads[segment.param] is None or bytes(used) != bytes(hypers[context.group_of[segment.param]]):
                return False
        return True

    def end_step(self, context: StepContext) -> None:
        """Take note that all chunks have been settled; remember the groups, whose values may change until then."""
        self._groups, self._group_of = context.groups, context.group_of
        self._phase = (self._phase + 1) % _NUM_PHASES
        self._begun = False
        self._paused_steps = max(self._paused_steps - 1, 0)
        self._looked = False

    def end_backwards(self) -> None:
        """Take note that there is no early update any more; the next takes the hyperparameters of its time."""
        self._begun = False

    def _task(
        self, chunk: HostChunk, controls: Controls = (None, None), *, resolve: bool = False
    ) -> kernels.UpdateTask:
        assert chunk.spare is not None
        # With a parameter that is not updated the spare would miss what belongs to it.
        all_active = (True,) * len(chunk.state.chunk.segments)
        return chunk.task(
            kernel_rule(self._rule),
            self._hypers[self._phase],
            self._group_of,
            all_active,
            target=chunk.spare,
            controls=controls,
            resolve=resolve,
        )

    # Whether it pays

    def _is_paused(self) -> bool:
        if not self._looked:
            self._looked = True
            # Counters that the tasks write; what has not run yet is counted another time.
            tasks = self._resolving.values()
            kept = self._num_kept + sum(task.num_kept for task in tasks)
            in_vain = self._num_dropped + sum(task.num_runs + task.num_skipped for task in tasks)
            new_kept, new_in_vain = kept - self._last_counts[0], in_vain - self._last_counts[1]
            self._last_counts = (kept, in_vain)
            if new_in_vain > new_kept:
                self._last_pause = min(max(2 * self._last_pause, 1), MOST_PAUSED_STEPS)
                self._paused_steps = self._last_pause
            elif new_kept:
                self._last_pause = 0
        return self._paused_steps > 0
