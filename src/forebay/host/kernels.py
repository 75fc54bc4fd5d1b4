"""Optimizer updates on the host: AdamW, Adam, SGD and Lion in one pass over memory, on all cores, without the GIL.

An :class:`UpdateTask` updates one chunk, a list of :class:`Segment` s. It is a ``HostTask``, so an engine can run it
between two copies; ``task.run()`` runs it from Python. The work is done by ``libforebay_native``
(``native/include/forebay_native.h`` has the formulas) or, where that was not built, by torch.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forebay.host import _native_library as native
from forebay.host import _torch_kernels as fallback

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MASTER_KINDS = {
    None: native.MASTER_NONE,
    torch.int16: native.MASTER_REMAINDER16,
    torch.float32: native.MASTER_FLOAT32,
}


class Algorithm(enum.IntEnum):
    """The update rule."""

    ADAMW = 0
    ADAM = 1
    SGD = 2
    LION = 3


class Hyper(native.CHyper):
    """Hyperparameters, in memory that the kernel reads when it runs: assign to an attribute to change one.

    Args:
        lr: learning rate.
        beta1: decay of the first state (Adam, AdamW); Lion: weight of the old state in the update.
        beta2: decay of the second state (Adam, AdamW); Lion: decay of its state.
        eps: added to the denominator (Adam, AdamW).
        weight_decay: decoupled for AdamW and Lion, added to the gradient for Adam and SGD.
        momentum: of SGD. Above 0 each segment needs an ``exp_avg``.
        dampening: of SGD.
        nesterov: of SGD.
        maximize: ascend instead of descend.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, beta1, beta2, eps, weight_decay, momentum, dampening, nesterov, maximize)

    def __repr__(self) -> str:
        return f"Hyper({', '.join(f'{field[0]}={getattr(self, field[0])}' for field in self._fields_)})"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def _check_tensor(name: str, tensor: object, num_elements: int, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}.")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; host updates take dense tensors only.")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, but host updates work on CPU memory.")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, but has shape {tuple(tensor.shape)} and strides {tensor.stride()}."
        )
    if tensor.numel() != num_elements:
        raise ValueError(f"{name} has {tensor.numel()} elements, but {num_elements} are needed.")


def _check_output(name: str, output: torch.Tensor | None, source: torch.Tensor | None) -> None:
    if output is None:
        return
    if source is None:
        raise ValueError(f"{name}_out is given without {name}.")
    _check_tensor(f"{name}_out", output, source.numel(), [source.dtype])
    distance = output.data_ptr() - source.data_ptr()
    if distance != 0 and abs(distance) < source.nbytes:
        raise ValueError(f"{name}_out overlaps {name}; it must be the same memory or separate memory.")


@dataclass(frozen=True, eq=False)
class Segment:
    """One tensor, or a contiguous piece of one, to update. All tensors are on the CPU, contiguous, with N elements.

    Args:
        grad: gradient, N elements of float32, bfloat16 or float16.
        param: weight, N elements of float32, bfloat16 or float16.
        exp_avg: first state, float32 or bfloat16 (stored with stochastic rounding). Adam, AdamW and Lion need it; for
            SGD it is the momentum buffer.
        exp_avg_sq: second state of Adam and AdamW, same dtype as ``exp_avg``.
        step: updates made so far, one float32; the kernel adds one. Adam, AdamW and bfloat16 states need it. SGD takes
            the step from 0 as the first, which copies the gradient into the momentum buffer as torch does.
        master: None: ``param`` is updated itself, in float32 arithmetic, and rounded to nearest even. int16: with a
            bfloat16 ``param``, the lower half of the float32 master, see :func:`split_master`. float32: the master;
            ``param`` is only written, rounded to nearest even.
        hyper: hyperparameters of this segment; default: those of the task.
        first_element: index of the first element in the whole tensor, so that stochastic rounding does not depend on
            how a tensor is cut.
        seed: of stochastic rounding; give each tensor its own.
        param_out: where to write instead of ``param``, which is then left as it is. Default: in place.
        master_out: likewise for ``master``.
        exp_avg_out: likewise for ``exp_avg``.
        exp_avg_sq_out: likewise for ``exp_avg_sq``.
        step_out: likewise for ``step``.

    Raises:
        ValueError: a tensor has the wrong device, layout, dtype or size.
    """

    grad: torch.Tensor
    param: torch.Tensor
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    step: torch.Tensor | None = None
    master: torch.Tensor | None = None
    hyper: Hyper | None = None
    first_element: int = 0
    seed: int = 0
    param_out: torch.Tensor | None = None
    master_out: torch.Tensor | None = None
    exp_avg_out: torch.Tensor | None = None
    exp_avg_sq_out: torch.Tensor | None = None
    step_out: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_tensor("param", self.param, self.param.numel(), list(_DTYPES))
        num_elements = self.param.numel()
        _check_tensor("grad", self.grad, num_elements, list(_DTYPES))
        if self.exp_avg is not None:
            _check_tensor("exp_avg", self.exp_avg, num_elements, [torch.float32, torch.bfloat16])
        if self.exp_avg_sq is not None:
            if self.exp_avg is None:
                raise ValueError("exp_avg_sq is given without exp_avg.")
            _check_tensor("exp_avg_sq", self.exp_avg_sq, num_elements, [self.exp_avg.dtype])
        if self.step is not None:
            _check_tensor("step", self.step, 1, [torch.float32])
        elif self.exp_avg is not None and self.exp_avg.dtype == torch.bfloat16:
            raise ValueError("a bfloat16 exp_avg needs a step, which makes its stochastic rounding differ by step.")
        if self.master is not None:
            _check_tensor("master", self.master, num_elements, [torch.float32, torch.int16])
            if self.master.dtype == torch.int16 and self.param.dtype != torch.bfloat16:
                raise ValueError(
                    f"an int16 master is the lower half of a bfloat16 param, but param is {self.param.dtype}; use a "
                    "float32 master."
                )
        for name in ("param", "master", "exp_avg", "exp_avg_sq", "step"):
            _check_output(name, getattr(self, f"{name}_out"), getattr(self, name))
        if self.first_element < 0 or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"first_element ({self.first_element}) must not be negative, and seed ({self.seed}) must be in "
                "[0, 2**64)."
            )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_scalar(name: str, tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        _check_tensor(name, tensor, 1, [torch.float32])


class UpdateTask:
    """Update some segments. Implements ``forebay.engine.base.HostTask``.

    Args:
        label: names the task in errors and traces.
        algorithm: the update rule.
        segments: what to update. They, and so all their tensors, live at least as long as the task.
        hyper: hyperparameters of the segments without their own, kept by reference: assign ``task.hyper.lr`` between
            runs.
        grad_scale: one float32 on the CPU that every gradient is multiplied with (a clip coefficient), read when the
            task runs. Default: 1.
        found_inf: one float32 on the CPU, read when the task runs; unless it is 0 nothing at all is changed.
        resolve: settle an update whose separate outputs another task with the same segments has written before
            ``grad_scale`` and ``found_inf`` were known, and had neither: keep the outputs if the scale is 1, make the
            update again if it is not, make the outputs copies of the inputs if ``found_inf`` is not 0.
            Default False.

    Raises:
        ValueError: a segment lacks what the algorithm needs, or a tensor is unfit.
    """

    def __init__(
        self,
        label: str,
        algorithm: Algorithm,
        segments: Sequence[Segment],
        hyper: Hyper,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        *,
        resolve: bool = False,
    ) -> None:
        _check_scalar("grad_scale", grad_scale)
        _check_scalar("found_inf", found_inf)
        self.label = label
        self._resolve = resolve
        self.algorithm = Algorithm(algorithm)
        self._hyper = hyper
        self._grad_scale = grad_scale
        self._found_inf = found_inf
        self._segments = list(segments)
        self._library = native.library()
        self._c_segments = (native.CSegment * len(self._segments))()
        self._c_task = native.CTask(
            algorithm=int(self.algorithm),
            num_segments=len(self._segments),
            segments=ctypes.addressof(self._c_segments),
            grad_scale=_address(grad_scale),
            found_inf=_address(found_inf),
        )
        self.error: Exception | None = None
        self.function_address = 0
        self.argument_address = 0
        if self._library is not None:
            self._function = self._library.forebay_resolve if resolve else self._library.forebay_update
            self.function_address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
            self.argument_address = ctypes.addressof(self._c_task)
        for index, segment in enumerate(self._segments):
            self.set_segment(index, segment)

    @property
    def hyper(self) -> Hyper:
        """The hyperparameters; assign to their attributes."""
        return self._hyper

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments; :meth:`set_segment` replaces one."""
        return tuple(self._segments)

    def set_segment(self, index: int, segment: Segment) -> None:
        """Put ``segment`` in place of the one at ``index``. The task must not be running."""
        self._check_segment(index, segment)
        self._segments[index] = segment
        s = segment
        self._c_segments[index] = native.CSegment(
            num_elements=s.param.numel(),
            first_element=s.first_element,
            grad=s.grad.data_ptr(),
            param=s.param.data_ptr(),
            param_out=_address(s.param_out),
            master=_address(s.master),
            master_out=_address(s.master_out),
            state1=_address(s.exp_avg),
            state1_out=_address(s.exp_avg_out),
            state2=_address(s.exp_avg_sq),
            state2_out=_address(s.exp_avg_sq_out),
            step=_address(s.step),
            step_out=_address(s.step_out),
            hyper=ctypes.addressof(s.hyper or self.hyper),
            seed=s.seed,
            grad_dtype=_DTYPES[s.grad.dtype],
            param_dtype=_DTYPES[s.param.dtype],
            master_kind=_MASTER_KINDS[None if s.master is None else s.master.dtype],
            state_dtype=0 if s.exp_avg is None else _DTYPES[s.exp_avg.dtype],
        )

    def _check_segment(self, index: int, segment: Segment) -> None:
        name = self.algorithm.name
        needed = {
            Algorithm.ADAMW: ("exp_avg", "exp_avg_sq", "step"),
            Algorithm.ADAM: ("exp_avg", "exp_avg_sq", "step"),
            Algorithm.SGD: ("exp_avg",) if (segment.hyper or self.hyper).momentum else (),
            Algorithm.LION: ("exp_avg",),
        }[self.algorithm]
        missing = [field for field in needed if getattr(segment, field) is None]
        if missing:
            raise ValueError(f"{self.label}: {name} needs {' and '.join(missing)}, but segment {index} has none.")
        used = [f for f in ("param", "master", "exp_avg", "exp_avg_sq", "step") if getattr(segment, f) is not None]
        in_place = [f for f in used if _address(getattr(segment, f"{f}_out")) in (None, _address(getattr(segment, f)))]
        if self._resolve and in_place:
            raise ValueError(
                f"{self.label}: resolving needs the inputs as they were, but segment {index} updates "
                f"{' and '.join(in_place)} in place; give a separate {in_place[0]}_out."
            )
        if segment.exp_avg_sq is not None and "exp_avg_sq" not in needed:
            raise ValueError(f"{self.label}: {name} has no exp_avg_sq, but segment {index} has one; leave it out.")

    def run(self) -> None:
        """Do the update now, on this and the library's other threads. Look at :meth:`status` afterwards."""
        if self._library is not None:
            self._function(ctypes.addressof(self._c_task))
            return
        start_ns = time.monotonic_ns()
        try:
            function = fallback.resolve if self._resolve else fallback.update
            updated = function(self.algorithm.name, self._segments, self.hyper, self._grad_scale, self._found_inf)
        except Exception as error:
            # Like the library, whose failures only the status tells: the work is done apart from who asked for it.
            self.error = self.error or error
            self._c_task.status = self._c_task.status or native.STATUS_EXCEPTION
            return
        if updated:
            self._c_task.num_runs += 1
            self._c_task.busy_ns += time.monotonic_ns() - start_ns
        elif updated is None:
            self._c_task.num_kept += 1
        else:
            self._c_task.num_skipped += 1

    def status(self) -> int:
        """0 when every run so far went well, else the ``forebay_status`` of the first that did not."""
        return int(self._c_task.status)

    def clear_status(self) -> None:
        """Forget that a run failed: what it left half written has been written anew. It must not be running."""
        self._c_task.status, self._c_task.failed_segment = 0, -1
        self.error = None

    def raise_for_status(self) -> None:
        """Raise RuntimeError, saying what was wrong with which segment, when a run failed."""
        if self.status():
            where = f" in segment {self._c_task.failed_segment}" if self._c_task.failed_segment >= 0 else ""
            raise RuntimeError(f"{self.label}: {native.STATUS_MESSAGES[self.status()]}{where}.")

    @property
    def num_runs(self) -> int:
        """Runs that updated."""
        return int(self._c_task.num_runs)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that the runs took, added up."""
        return int(self._c_task.busy_ns)

    @property
    def num_skipped(self) -> int:
        """Runs that ``found_inf`` skipped."""
        return int(self._c_task.num_skipped)

    @property
    def num_kept(self) -> int:
        """Runs of a ``resolve`` task that had nothing to do."""
        return int(self._c_task.num_kept)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 weights into bfloat16 weights and an int16 remainder that together lose nothing.

    The bits of the master are ``(bfloat16 bits << 16) + remainder``; the bfloat16 weight is the master rounded to
    nearest, ties away from zero. Only the lower payload of a NaN is lost. Any device.
    """
    if master.dtype != torch.float32:
        raise ValueError(f"master must be torch.float32, not {master.dtype}.")
    return fallback.split(master)


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 master that :func:`split_master` split. Any device."""
    if (param.dtype, remainder.dtype) != (torch.bfloat16, torch.int16):
        raise ValueError(
            f"param must be torch.bfloat16 and remainder torch.int16, not {param.dtype} and {remainder.dtype}."
        )
    return fallback.join(param, remainder)


def backend() -> str:
    """``"native-avx512"``, ``"native-avx2"``, ``"native-neon"``, ``"native-scalar"`` or ``"torch"``."""
    library = native.library()
    return "torch" if library is None else f"native-{library.forebay_instruction_set().decode()}"


def set_instruction_set(name: str) -> None:
    """Use another instruction set from now on; results are bitwise the same. For tests and benchmarks."""
    library = native.library()
    if library is None or library.forebay_set_instruction_set(name.encode()) != 0:
        raise ValueError(
            f"the instruction set {name!r} is not available here (backend {backend()}); there are "
            f"{', '.join(native.INSTRUCTION_SETS)}, as far as the CPU has them."
        )


def num_threads() -> int:
    """Threads that share an update, the calling one included.

    Default: the cores of the process's affinity mask divided by ``LOCAL_WORLD_SIZE``; ``FOREBAY_NUM_THREADS``
    overrides it.
    """
    library = native.library()
    return torch.get_num_threads() if library is None else int(library.forebay_num_threads())


def set_num_threads(n: int | None) -> None:
    """Share updates among ``n`` threads from now on; None restores the default. With the torch backend, torch's own
    number of threads is set.
    """
    if n is not None and n < 1:
        raise ValueError(f"the number of threads must be at least 1, not {n}.")
    library = native.library()
    if library is not None:
        library.forebay_set_threads(n or 0)
    elif n is not None:
        torch.set_num_threads(n)


def delay_function_address() -> int:
    """Return the address of a host function that sleeps for the nanoseconds (int64) its argument points at.

    For tests that look for missing waits; 0 without the native library.
    """
    library = native.library()
    return 0 if library is None else ctypes.cast(library.forebay_delay, ctypes.c_void_p).value or 0


def stream_bandwidth(num_bytes: int, kind: str = "update", repeats: int = 5) -> float:
    """Measure memory bandwidth with the threads that updates use.

    Args:
        num_bytes: size of the buffer; well above the last-level cache.
        kind: ``"update"`` reads and writes one buffer in place, ``"copy"`` copies one buffer to another.
        repeats: passes, of which the best counts.

    Returns:
        Bytes per second, read and written ones both counted.
    """
    if kind not in native.STREAM_KINDS:
        raise ValueError(f"kind must be one of {', '.join(native.STREAM_KINDS)}, not {kind!r}.")
    if num_bytes < 8 or repeats < 1:
        raise ValueError(f"num_bytes ({num_bytes}) must be at least 8 and repeats ({repeats}) at least 1.")
    destination = torch.zeros(num_bytes // 8, dtype=torch.int64)
    source = torch.ones_like(destination) if kind == "copy" else destination
    library = native.library()
    if library is None:
        return fallback.stream_bandwidth(destination, source, repeats)
    addresses = (destination.data_ptr(), source.data_ptr())
    rate = library.forebay_stream_bandwidth(native.STREAM_KINDS[kind], *addresses, destination.nbytes, repeats)
    return float(rate)
