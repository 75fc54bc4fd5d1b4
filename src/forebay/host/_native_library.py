"""Find and load ``libforebay_native``; its structs as ctypes (native/include/forebay_native.h is the reference)."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

ABI_VERSION = 3
INSTRUCTION_SETS = ("avx512", "avx2", "neon", "scalar")
MASTER_NONE, MASTER_REMAINDER16, MASTER_FLOAT32 = range(3)
STREAM_KINDS = {"copy": 0, "update": 1}
STATUS_EXCEPTION = -1
STATUS_MESSAGES = {
    STATUS_EXCEPTION: "the torch fallback raised an exception",
    0: "ok",
    1: "the task has no segments or a negative number of them",
    2: "unknown algorithm",
    3: "negative number of elements or first element",
    4: "a tensor is missing that the algorithm, the master or a hyperparameter (momentum) needs",
    5: "unknown dtype, or a state that is neither float32 nor bfloat16",
    6: "unknown kind of master, or a 16-bit remainder with a param that is not bfloat16",
    7: "FOREBAY_NATIVE_ISA names an instruction set that is not available",
}

logger = logging.getLogger("forebay")


class CHyper(ctypes.Structure):
    """``forebay_hyper``."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps")),
        *((name, ctypes.c_double) for name in ("weight_decay", "momentum", "dampening")),
        *((name, ctypes.c_int32) for name in ("nesterov", "maximize")),
    ]


class CSegment(ctypes.Structure):
    """``forebay_segment``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_elements", "first_element")),
        *((name, ctypes.c_void_p) for name in ("grad", "param", "param_out", "master", "master_out")),
        *((name, ctypes.c_void_p) for name in ("state1", "state1_out", "state2", "state2_out")),
        *((name, ctypes.c_void_p) for name in ("step", "step_out", "hyper")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("grad_dtype", "param_dtype", "master_kind", "state_dtype")),
        ("scratch", ctypes.c_uint64 * 12),
    ]


class CTask(ctypes.Structure):
    """``forebay_task``."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("algorithm", "num_segments")),
        *((name, ctypes.c_void_p) for name in ("segments", "grad_scale", "found_inf")),
        *((name, ctypes.c_int32) for name in ("status", "failed_segment")),
        *((name, ctypes.c_uint64) for name in ("num_runs", "num_skipped", "num_kept", "busy_ns")),
    ]


def _path() -> Path | None:
    # An editable install keeps the library in site-packages and the package elsewhere; `__path__` has both.
    import forebay

    name = "libforebay_native" + (".dylib" if sys.platform == "darwin" else ".so")
    candidates = (Path(directory) / "_native" / name for directory in forebay.__path__)
    return next((path for path in candidates if path.is_file()), None)


def _declare(library: ctypes.CDLL) -> None:
    int32, int64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures = {
        "forebay_abi_version": (int32, []),
        "forebay_struct_size": (int64, [int32]),
        "forebay_update": (None, [pointer]),
        "forebay_resolve": (None, [pointer]),
        "forebay_delay": (None, [pointer]),
        "forebay_instruction_set": (ctypes.c_char_p, []),
        "forebay_set_instruction_set": (int32, [ctypes.c_char_p]),
        "forebay_num_threads": (int32, []),
        "forebay_set_threads": (int32, [int32]),
        "forebay_stream_bandwidth": (ctypes.c_double, [int32, pointer, pointer, int64, int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _check(library: ctypes.CDLL, path: Path) -> None:
    version = library.forebay_abi_version()
    sizes = [library.forebay_struct_size(i) for i in range(3)]
    if version != ABI_VERSION or sizes != [ctypes.sizeof(t) for t in (CHyper, CSegment, CTask)]:
        raise RuntimeError(
            f"{path} has ABI version {version}, but this forebay needs {ABI_VERSION}: it was built from other "
            "sources. Install forebay again (pip install --force-reinstall .), or set FOREBAY_NATIVE=0."
        )
    if library.forebay_instruction_set() is None:
        raise ValueError(
            f"FOREBAY_NATIVE_ISA={os.environ.get('FOREBAY_NATIVE_ISA')!r} is not available on this CPU; choose "
            f"one of {', '.join(INSTRUCTION_SETS)} that it has, or unset it to use the best."
        )
    threads = os.environ.get("FOREBAY_NUM_THREADS", "")
    if threads and not (threads.isdecimal() and int(threads) > 0):
        raise ValueError(f"FOREBAY_NUM_THREADS must be a positive whole number, not {threads!r}.")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the library once; None means that the torch fallback is to be used.

    ``FOREBAY_NATIVE=0`` asks for the fallback, ``FOREBAY_NATIVE=1`` makes a missing library an error. With neither,
    a missing library is logged as a warning, once.
    """
    wanted = os.environ.get("FOREBAY_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"FOREBAY_NATIVE must be 0 (torch), 1 (native) or unset (native if built), not {wanted!r}.")
    if wanted == "0":
        return None
    path = _path()
    if path is None:
        message = (
            "forebay was installed without its native host kernels (no C++ compiler at install time?). Install a "
            "C++17 compiler and run pip install --force-reinstall forebay."
        )
        if wanted == "1":
            raise RuntimeError(f"FOREBAY_NATIVE=1, but {message}")
        logger.warning(
            "%s Host updates use torch instead: same results within rounding, several times slower.", message
        )
        return None
    loaded = ctypes.CDLL(str(path))
    _declare(loaded)
    _check(loaded, path)
    return loaded
