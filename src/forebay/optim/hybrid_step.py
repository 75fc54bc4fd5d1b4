"""One step of HybridDeviceOptimizer: gradients down, updates on both sides, weights up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from forebay.engine import Buffer, Engine, Event, Lane
from forebay.optim.dense import flat, is_dense, shaped
from forebay.optim.hybrid_slots import PythonTask, Slot, carve

Gradients = Mapping[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(eq=False)
class Bucket:
    """Offloaded parameters that travel and are updated together, and their sub-optimizer."""

    slots: list[Slot] = dataclasses.field(default_factory=list)
    optimizer: Optimizer | None = None
    num_bytes: int = 0


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return what to update ``param`` with: its ``decoupled_grad`` if that is set, else its ``grad``.

    Raises:
        ValueError: it is sparse, or of another shape or device.
    """
    grad = getattr(param, "decoupled_grad", None)
    grad = param.grad if grad is None else grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is {grad.layout}, and only dense gradients "
            "can be sent to the host in place; use sparse=False in the embedding that makes it"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(param.shape)} on {param.device} has shape "
            f"{tuple(grad.shape)} and is on {grad.device}; a (decoupled) gradient must match its parameter"
        )
    return grad.detach()


class Step:
    """Runs steps, and owns the host memory that gradients land in.

    Args:
        engine: moves the bytes.
        task: for the host's part.
        pin_grads: pin that memory.
    """

    def __init__(self, engine: Engine, task: PythonTask, *, pin_grads: bool) -> None:
        self._engine = engine
        self._task = task
        self._pin_grads = pin_grads
        self._buffers: list[Buffer] = []
        self._uploaded: Event | None = None

    def finish(self) -> None:
        """Block Python until the last step's uploads are done."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def run(
        self, buckets: Sequence[Bucket], resident: Sequence[Slot], gpu_optimizer: Optimizer | None, gradients: Gradients
    ) -> None:
        """Update every parameter that has a gradient. The compute lane sees the new weights on return.

        Args:
            buckets: the offloaded parameters.
            resident: the others.
            gpu_optimizer: updates ``resident``.
            gradients: of the parameters that have one in this step.
        """
        engine = self._engine
        work = [(bucket, [s for s in bucket.slots if s.param in gradients]) for bucket in buckets]
        work = [(bucket, slots) for bucket, slots in work if slots]
        # Gathering a gradient that is in pieces (an expanded tensor) is compute-lane work, so it comes first.
        dense = {s: _dense(gradients[s.param]) for _, slots in work for s in slots}
        self._reserve(buckets, dense)
        sent = self._send([slots for _, slots in work], dense) if work else []
        # The device's kernels are enqueued before Python is busy with the host's share, so they run under it.
        if gpu_optimizer is not None:
            self._update_resident([slot for slot in resident if slot.param in gradients], gpu_optimizer, gradients)
        if not work:
            return
        try:
            for number, ((bucket, slots), (arrived, host_grads)) in enumerate(zip(work, sent, strict=True)):
                self._update_offloaded(f"update of bucket {number}", bucket, slots, arrived, host_grads)
        finally:
            # Without this wait the next forward would read weights that are still arriving. Uploads of the buckets
            # that were updated are waited for even if a later one failed.
            self._uploaded = engine.record(Lane.UP)
            engine.wait(Lane.COMPUTE, self._uploaded)

    def _send(
        self, work: Sequence[Sequence[Slot]], dense: Mapping[Slot, torch.Tensor]
    ) -> list[tuple[Event, list[torch.Tensor]]]:
        """Enqueue all copies down; return each bucket's event and host gradients."""
        engine = self._engine
        # Without this wait the copies would read gradients that backward is still writing.
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        sent = []
        for slots in work:
            host_grads = []
            for slot in slots:
                grad = dense[slot]
                assert slot.grad_memory is not None
                memory = slot.grad_memory[: grad.nbytes].view(grad.dtype)
                # Nothing reads this memory any more: the last update from it ran in Python, before this call.
                engine.copy(Lane.DOWN, memory, flat(grad))
                host_grads.append(shaped(memory, grad))
            # One event a bucket: with a single one the first update would wait for the last gradient.
            sent.append((engine.record(Lane.DOWN), host_grads))
        return sent

    def _reserve(self, buckets: Sequence[Bucket], dense: Mapping[Slot, torch.Tensor]) -> None:
        """Allocate gradient memory: at the first step for all, later for what is new or wider than before."""
        sizes = {slot: grad.nbytes for slot, grad in dense.items()}
        lacking = [slot for slot, size in sizes.items() if slot.grad_memory is None or slot.grad_memory.numel() < size]
        if not lacking:
            return
        lacking += [s for b in buckets for s in b.slots if s.grad_memory is None and s not in sizes]
        buffer, memory = carve(
            lambda num_bytes: self._engine.empty_host(num_bytes, "gradients", pinned=self._pin_grads),
            [(torch.uint8, sizes.get(slot, slot.param.nbytes)) for slot in lacking],
        )
        if buffer is not None:
            self._buffers.append(buffer)
        for slot, own in zip(lacking, memory, strict=True):
            slot.grad_memory = own

    def _update_offloaded(
        self, label: str, bucket: Bucket, slots: Sequence[Slot], arrived: Event, host_grads: Sequence[torch.Tensor]
    ) -> None:
        engine = self._engine
        optimizer = bucket.optimizer
        assert optimizer is not None
        weights = [slot.weight for slot in slots if slot.weight is not None]
        inners = [slot.inner for slot in slots]

        def update() -> None:
            with _gradients(slots, host_grads):
                optimizer.step()
            for slot, weight in zip(slots, weights, strict=True):
                if slot.has_master:
                    weight.copy_(slot.inner)

        # Without this wait the update would read gradients that have not arrived. It is for this bucket's event
        # only, so that the other buckets travel meanwhile.
        engine.wait(Lane.HOST, arrived)
        self._task.label, self._task.work = label, update
        # The last upload has left the weights that this writes: the gradients it waits for came down after
        # kernels that had waited for that upload.
        engine.host_task(
            self._task, reads=[flat(grad) for grad in host_grads], writes=[flat(t) for t in (*weights, *inners)]
        )
        for slot, weight in zip(slots, weights, strict=True):
            # Needs no event: the update has run in this thread. The kernels that read the old weight are done,
            # since they were enqueued before the gradients' copies down.
            engine.copy(Lane.UP, flat(slot.param), flat(weight))

    def _update_resident(self, slots: Sequence[Slot], optimizer: Optimizer, gradients: Gradients) -> None:
        with _gradients(slots, [gradients[slot.param] for slot in slots]):
            optimizer.step()
        masters = [slot.inner for slot in slots if slot.has_master]
        if masters:
            torch._foreach_copy_([slot.param for slot in slots if slot.has_master], masters)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if is_dense(grad) else grad.contiguous()


@contextlib.contextmanager
def _gradients(slots: Sequence[Slot], grads: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give the sub-optimizer's tensors their gradients, in their own dtype, for the block only.

    A sub-optimizer skips what has none, so a parameter without gradient keeps its state and step counter.
    """
    try:
        for slot, grad in zip(slots, grads, strict=True):
            slot.inner.grad = grad.to(slot.inner.dtype)
        yield
    finally:
        for slot in slots:
            slot.inner.grad = None
