"""What this machine can do at most: ``python -m forebay.report.ceilings DTYPE RESULT.json``.

Measured through the engine and the kernel that training uses, each alone and the best of a few rounds, so a run can
come near these rates and not pass them by more than noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forebay.engine import Engine, Lane, get_engine
from forebay.host import kernels
from forebay.report.points import write_json

_NUM_ROUNDS = 5
_COPY_BYTES = {"cuda": 256 * 2**20, "sim": 16 * 2**20}
_UPDATE_ELEMENTS = {"cuda": 2**25, "sim": 2**22}


def measure_ceilings(engine: Engine, dtype: torch.dtype) -> dict[str, float]:
    """Return ``down_gbps`` and ``up_gbps`` of pinned copies, and ``update_gparams`` of AdamW on the host.

    Args:
        engine: whose device and host are measured.
        dtype: of weights and gradients.
    """
    num_bytes = _COPY_BYTES[engine.kind]
    host = engine.empty_host(num_bytes, "other")
    device = engine.empty_device(num_bytes, "other")

    def copy(lane: Lane) -> None:
        pair = (host.tensor, device.tensor) if lane is Lane.DOWN else (device.tensor, host.tensor)
        # What the rounds before and the allocation left to do is not this copy's.
        engine.wait(lane, engine.record(Lane.COMPUTE))
        engine.copy(lane, *pair)
        engine.wait(Lane.COMPUTE, engine.record(lane))
        engine.synchronize()

    result = {
        "down_gbps": num_bytes / _seconds(lambda: copy(Lane.DOWN)) / 1e9,
        "up_gbps": num_bytes / _seconds(lambda: copy(Lane.UP)) / 1e9,
    }
    host.release()
    device.release()
    num_elements = _UPDATE_ELEMENTS[engine.kind]
    task = _update_task(num_elements, dtype)
    result["update_gparams"] = num_elements / _seconds(task.run) / 1e9
    task.raise_for_status()
    return result


def _update_task(num_elements: int, dtype: torch.dtype) -> kernels.UpdateTask:
    masters = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    segment = kernels.Segment(
        grad=torch.full((num_elements,), 1e-3, dtype=dtype),
        param=torch.full((num_elements,), 0.5, dtype=dtype),
        exp_avg=torch.zeros(num_elements),
        exp_avg_sq=torch.zeros(num_elements),
        step=torch.zeros(1),
        master=torch.zeros(num_elements, dtype=masters[dtype]) if dtype in masters else None,
    )
    return kernels.UpdateTask("calibration", kernels.Algorithm.ADAMW, [segment], kernels.Hyper(lr=1e-3))


def _seconds(work: Callable[[], object]) -> float:
    work()  # touches the memory
    times = []
    for _ in range(_NUM_ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main(argv: list[str]) -> int:
    """Measure with weights of the dtype that the first word names and write the answer to the second."""
    engine = get_engine("cuda" if torch.cuda.is_available() else "cpu")
    write_json(Path(argv[1]), measure_ceilings(engine, getattr(torch, argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
