"""Speed of the host update kernels against memory bandwidth measured in the same run, and against torch.

    python benchmarks/host_kernels.py --output benchmarks/results/host_kernels.csv

Kernels take turns, so that a noisy neighbour hits all of them; the best of ``--repeats`` rounds counts. GB/s are the
bytes that an update has to read and write, so a kernel at the speed of memory reaches ``stream_update``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forebay.host import kernels
from forebay.host.kernels import Algorithm, Hyper, Segment, UpdateTask

BF16, FP32 = torch.bfloat16, torch.float32
# name, algorithm, gradient, master, state, separate outputs
CASES = [
    ("adamw_fp32", Algorithm.ADAMW, FP32, "none", FP32, False),
    ("adamw_fp32_bf16grad", Algorithm.ADAMW, BF16, "none", FP32, False),
    ("adamw_master32", Algorithm.ADAMW, BF16, "float32", FP32, False),
    ("adamw_remainder16", Algorithm.ADAMW, BF16, "remainder", FP32, False),
    ("adamw_remainder16_bf16state", Algorithm.ADAMW, BF16, "remainder", BF16, False),
    ("adamw_remainder16_separate", Algorithm.ADAMW, BF16, "remainder", FP32, True),
    ("sgd_momentum_remainder16", Algorithm.SGD, BF16, "remainder", FP32, False),
    ("lion_remainder16", Algorithm.LION, BF16, "remainder", FP32, False),
]


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def make_task(
    n: int, algorithm: Algorithm, grad: torch.dtype, master: str, state: torch.dtype, separate: bool
) -> tuple[UpdateTask, int]:
    """Return a task and the bytes that it has to move."""
    weight = torch.randn(n)
    param, kept = weight, None
    if master == "remainder":
        param, kept = kernels.split_master(weight)
    elif master == "float32":
        param, kept = weight.to(BF16), weight
    m = torch.zeros(n, dtype=state)
    v = torch.zeros(n, dtype=state) if algorithm == Algorithm.ADAMW else None
    tensors = {"param": param, "master": kept, "exp_avg": m, "exp_avg_sq": v}
    outs = {f"{k}_out": torch.zeros_like(x) for k, x in tensors.items() if x is not None and separate}
    gradient = torch.randn(n).to(grad)
    segment = Segment(gradient, step=torch.zeros(()), **tensors, **outs)
    num_bytes = gradient.nbytes + sum(2 * x.nbytes for x in tensors.values() if x is not None)
    if master == "float32":
        num_bytes -= param.nbytes  # only written
    return UpdateTask(algorithm.name, algorithm, [segment], Hyper(lr=1e-3, momentum=0.9)), num_bytes


def make_torch(n: int, separate_casts: bool) -> tuple[Callable[[], None], int]:
    """``torch._fused_adamw_`` in fp32; with ``separate_casts`` a bf16 gradient in and a bf16 weight out around it."""
    p, g, m, v = torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n)
    g16, p16 = g.to(BF16), p.to(BF16)
    step = torch.zeros(())

    def run() -> None:
        if separate_casts:
            g.copy_(g16)
        step.add_(1)
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        if separate_casts:
            p16.copy_(p)

    return run, n * 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Not a power of two: tensors that mmap places 2**27 + 4096 bytes apart alias in the first-level cache of AMD Zen.
    parser.add_argument("--num-elements", type=int, default=30_000_000, help="parameters per update")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="default: the library's")
    parser.add_argument("--isa", nargs="*", default=[], help="instruction sets; default: the best")
    parser.add_argument("--output", type=Path, help="CSV file; default: standard output")
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(kernels.num_threads())
    n = args.num_elements

    runs: list[tuple[str, str, Callable[[], None], int]] = []
    tasks = [(case[0], *make_task(n, *case[1:])) for case in CASES]
    for isa in args.isa or [kernels.backend().removeprefix("native-")]:
        for name, task, num_bytes in tasks:

            def run(task: UpdateTask = task, isa: str = isa) -> None:
                task.run()

            runs.append((name, isa, run, num_bytes))
    for name, casts in (("torch_fused_adamw", False), ("torch_fused_adamw_with_casts", True)):
        runs.append((name, "torch", *make_torch(n, casts)))

    best = [float("inf")] * len(runs)
    stream = {"copy": 0.0, "update": 0.0}
    for repeat in range(args.repeats + 1):
        for kind in stream:
            stream[kind] = max(stream[kind], kernels.stream_bandwidth(n * 4, kind, repeats=2))
        for i, (_, isa, function, _) in enumerate(runs):
            if isa != "torch" and kernels.backend() != "torch":
                kernels.set_instruction_set(isa)
            start = time.perf_counter()
            function()
            if repeat > 0:  # the first touches the memory
                best[i] = min(best[i], time.perf_counter() - start)
    for _, task, _ in tasks:
        task.raise_for_status()

    common = {
        "threads": kernels.num_threads(),
        "num_elements": n,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
    }
    rows = [
        {"name": f"stream_{kind}", "isa": "", "gparam_per_s": "", "gb_per_s": f"{rate / 1e9:.1f}", "of_stream": ""}
        for kind, rate in stream.items()
    ]
    for (name, isa, _, num_bytes), seconds in zip(runs, best, strict=True):
        rate = num_bytes / seconds
        rows.append(
            {
                "name": name,
                "isa": isa,
                "gparam_per_s": f"{n / seconds / 1e9:.3f}",
                "gb_per_s": f"{rate / 1e9:.1f}",
                "of_stream": f"{rate / stream['update']:.2f}",
            }
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") if args.output else sys.stdout as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        writer.writeheader()
        writer.writerows(row | common for row in rows)


if __name__ == "__main__":
    main()
