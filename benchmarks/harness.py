"""What every benchmark shares: the model, the timing, and the columns that say where a figure comes from."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
VOCABULARY = 32000


def llama_1b(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Build the 1.104 B parameter Llama shape of all comparisons, with random weights.

    Its attention is transformers' SDPA without the mask code, which asks the device in every forward whether
    sequences are packed: that synchronisation would be measured in every system.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("causal_sdpa", sdpa_attention_forward)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        attn_implementation="causal_sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


def batches(num: int, micro_batch: int, seq_length: int, device: str = "cuda") -> list[torch.Tensor]:
    """Return ``num`` fixed random batches of (micro_batch, seq_length) token ids."""
    generator = torch.Generator(device=device).manual_seed(1)
    return [
        torch.randint(VOCABULARY, (micro_batch, seq_length), device=device, generator=generator) for _ in range(num)
    ]


def plain_update(params: list[Any], max_norm: float, **adamw: Any) -> Callable[[], None]:
    """Return the usual mixed-precision update: fp32 masters on the GPU, clipping and torch's fused AdamW.

    Args:
        params: bf16 parameters, or groups of them.
        max_norm: clip to this norm.
        adamw: arguments of ``torch.optim.AdamW``.
    """
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    pairs = [(p, torch.nn.Parameter(p.detach().float())) for group in groups for p in group["params"]]
    master_of = dict(pairs)
    masters = [master for _, master in pairs]
    master_groups = [group | {"params": [master_of[param] for param in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(master_groups, **adamw, fused=True)

    def update() -> None:
        for param, master in pairs:
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([param.data for param, _ in pairs], [master.data for master in masters])
        optimizer.zero_grad()

    return update


def measure(step: Callable[[int], Any], *, num_warmup: int, num_steps: int) -> dict[str, float]:
    """Time steady steps by events on the stream, without a synchronisation between them.

    Returns:
        ``step_ms`` (median), ``step_ms_min``, ``step_ms_max`` and ``peak_gib`` of the steady steps.
    """
    for index in range(num_warmup):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    start = time.perf_counter()
    events[0].record()
    for index in range(num_steps):
        step(num_warmup + index)
        events[index + 1].record()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - start) * 1e3 / num_steps
    times = [left.elapsed_time(right) for left, right in itertools.pairwise(events)]
    return {
        "step_ms": statistics.median(times),
        "step_ms_min": min(times),
        "step_ms_max": max(times),
        "wall_ms": wall_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def environment() -> dict[str, str]:
    """Return the columns that say on what, with what and when a figure was measured."""
    commit = os.environ.get("FOREBAY_COMMIT", "")
    if not commit:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": str(len(os.sched_getaffinity(0))),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }


def report(run: Callable[[], dict[str, Any]]) -> None:
    """Print, as the last line of a process that :func:`run_apart` started, what ``run`` measured, as JSON.

    Running out of device memory is a result too: what the failed allocation asked for, beside what was in use.
    """
    try:
        result = run()
    except torch.OutOfMemoryError as error:
        asked = re.search(r"allocate ([\d.]+) (GiB|MiB)", str(error))
        scale = {"GiB": 1.0, "MiB": 1 / 1024}
        result = {
            "status": "out of memory",
            "error": str(error)[:300],
            "asked_gib": float(asked[1]) * scale[asked[2]] if asked else float("nan"),
            "allocated_gib": torch.cuda.memory_allocated() / GIB,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        }
    print(json.dumps(result), flush=True)


def all_cores() -> dict[str, str]:
    """Return the environment in which OpenMP, which most CPU optimizers run on, uses every core there is.

    It is read when OpenMP is loaded, so it is given to a process that is yet to start. Unset, torch uses half of a
    hyper-threaded machine and a launcher's default is one thread. Threads are not pinned one by one: the thread
    that starts them would be pinned to a single core too, and with it autograd's.
    """
    return {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def run_apart(script: str, arguments: list[str], *, timeout_s: int) -> dict[str, Any]:
    """Run one configuration in a process of its own, on all cores, and return the JSON object it prints last.

    A run that fails gives ``{"status": "...", "error": "..."}``, so that one failure loses nothing.
    """
    command = [sys.executable, script, *arguments]
    environ = os.environ | all_cores()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environ, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "error": f"over {timeout_s} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return {"status": "ok", **json.loads(lines[-1])}
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    status = "out of memory" if "OutOfMemoryError" in done.stderr else "failed"
    if os.environ.get("FOREBAY_BENCH_VERBOSE"):
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
    return {"status": status, "error": error[:300]}


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, all values as text; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with the union of their columns, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
