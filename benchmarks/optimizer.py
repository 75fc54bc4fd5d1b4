"""Optimizer offload: milliseconds a step and GPU peak of forebay and its peers, one process each.

    python benchmarks/optimizer.py --output benchmarks/results/optimizer.csv --tokens 8192,32768 --budget-s 550
    python benchmarks/optimizer.py --output benchmarks/results/optimizer.csv --tokens 8192,32768 --append --missing

All systems train the same 1.104 B parameter model on the same tokens with bf16 weights, AdamW and clipping at 1.0,
and may use all cores. The file is written after every configuration, and one that fails loses nothing. ``ratio`` is
milliseconds over those of ``none``, fp32 masters and torch's fused AdamW on the GPU, at the same tokens a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import GIB, batches, environment, llama_1b, measure, plain_update, read_csv, report, run_apart, write_csv

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
SEQ_LENGTH, MICRO_BATCH = 2048, 4  # 8192 tokens a micro-batch

Step = Callable[[int], Any]


def _loop(model: torch.nn.Module, num_micro: int, update: Callable[[], Any]) -> Step:
    data = batches(4 * num_micro, MICRO_BATCH, SEQ_LENGTH)

    def step(index: int) -> None:
        for micro in range(num_micro):
            tokens = data[(index * num_micro + micro) % len(data)]
            (model(input_ids=tokens, labels=tokens).loss / num_micro).backward()
        update()

    return step


def forebay(
    num_micro: int, graph: bool | str = False, max_norm: float = MAX_NORM, **options: Any
) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Train with forebay.AdamW; ``graph`` launches whole steps as a CUDA graph, see :func:`_graphed`."""
    from forebay import AdamW

    if graph:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    model = llama_1b()
    optimizer = AdamW(model.parameters(), **ADAM, **options)
    optimizer.attach(model)
    optimizer.allocate()

    def update() -> None:
        optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def extra() -> dict[str, Any]:
        ledger = optimizer.engine.ledger
        host = ledger.num_bytes("pinned") + ledger.num_bytes("pageable")
        num_params = sum(param.numel() for param in model.parameters())
        return {"host_gib": host / GIB, "host_bytes_per_param": host / num_params} | peak

    peak: dict[str, float] = {}
    if graph:
        return _graphed(model, optimizer, num_micro, peak, is_rotated=graph != "plain"), extra
    return _loop(model, num_micro, update), extra


def _graphed(
    model: torch.nn.Module, optimizer: Any, num_micro: int, peak: dict[str, float], *, is_rotated: bool
) -> Step:
    """Capture a step in a CUDA graph and return what launches it.

    Rotated, a launch updates with the gradients that are there and runs the next forward and backward, so that its
    transfers have these to hide under. Otherwise it runs forward, backward and the update, and ends when all is done.
    ``peak`` receives the memory that the capture used: a launch allocates nothing.
    """
    data = batches(4 * num_micro, MICRO_BATCH, SEQ_LENGTH)
    tokens = [torch.empty_like(data[0]) for _ in range(num_micro)]

    def feed(index: int) -> None:
        for micro, own in enumerate(tokens):
            own.copy_(data[(index * num_micro + micro) % len(data)])

    def backward() -> None:
        for own in tokens:
            (model(input_ids=own, labels=own).loss / num_micro).backward()

    def update() -> None:
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not is_rotated)

    for index in range(4):
        feed(index)
        backward()
        update()
    feed(4)
    if is_rotated:
        backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for part in (update, backward) if is_rotated else (backward, update):
            part()
        optimizer.join()
    peak |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB}

    def step(index: int) -> None:
        feed(index + 5)
        optimizer.refresh_hyperparameters()
        graph.replay()

    return step


def plain(num_micro: int) -> tuple[Step, None]:
    """Train with fp32 masters on the GPU and torch's fused AdamW, the usual mixed-precision recipe."""
    model = llama_1b()
    return _loop(model, num_micro, plain_update(list(model.parameters()), MAX_NORM, **ADAM)), None


def megatron(num_micro: int, fraction: float, overlap: bool) -> tuple[Step, None]:
    """Train with Megatron Core's HybridDeviceOptimizer; its CPU side is torch's fused AdamW."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    model = llama_1b()

    def cpu_adamw(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **kwargs)

    optimizer = HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=fraction,
        cpu_optimizer_cls=cpu_adamw,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        **ADAM,
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.zero_grad()

    return _loop(model, num_micro, update), None


def torchao(num_micro: int) -> tuple[Step, None]:
    """Train with torchao's CPUOffloadOptimizer: bf16 state, no fp32 masters."""
    from torchao.optim import CPUOffloadOptimizer

    model = llama_1b()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **ADAM)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.zero_grad()

    return _loop(model, num_micro, update), None


def deepspeed(num_micro: int, stage: int) -> tuple[Step, None]:
    """Train with DeepSpeed ZeRO and its CPU Adam."""
    import deepspeed as ds

    model = llama_1b()
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": num_micro,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": 10**9,
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(4 * num_micro, MICRO_BATCH, SEQ_LENGTH)

    def step(index: int) -> None:
        for micro in range(num_micro):
            tokens = data[(index * num_micro + micro) % len(data)]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    return step, None


def fsdp2(num_micro: int) -> tuple[Step, None]:
    """Train with FSDP2's CPUOffloadPolicy on one rank, each decoder layer a group of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cuda", (1,))
    model = llama_1b("cpu", torch.float32)
    policy = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    for buffer_name, buffer in list(model.named_buffers()):
        owner = model.get_submodule(buffer_name.rpartition(".")[0])
        setattr(owner, buffer_name.rpartition(".")[2], buffer.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _loop(model, num_micro, update), None


SYSTEMS: dict[str, Callable[..., Any]] = {
    "forebay": forebay,
    "none": plain,
    "megatron": megatron,
    "torchao": torchao,
    "deepspeed": deepspeed,
    "fsdp2": fsdp2,
}


def configurations() -> list[dict[str, Any]]:
    """Return what is compared, the most important first: time may run out."""

    def ours(fraction: float, **options: Any) -> dict[str, Any]:
        return {"system": "forebay", "offload_fraction": fraction, **options}

    def theirs(fraction: float, overlap: bool) -> dict[str, Any]:
        return {"system": "megatron", "fraction": fraction, "overlap": overlap}

    staging = {"staging_gib": 3.0}
    return [
        {"system": "none"},
        ours(1.0),
        ours(1.0, **staging),
        theirs(1.0, overlap=True),
        {"system": "deepspeed", "stage": 2},
        ours(0.5),
        ours(1.0, state_dtype="bf16"),
        ours(1.0, state_dtype="8bit"),
        ours(0.25),
        ours(0.75),
        ours(0.0),
        {"system": "torchao"},
        {"system": "deepspeed", "stage": 3},
        {"system": "fsdp2"},
        theirs(0.5, overlap=True),
        theirs(1.0, overlap=False),
        ours(1.0, placement="streamed"),
        ours(1.0, placement="host"),
        *(ours(fraction, **staging) for fraction in (0.25, 0.5, 0.75)),
        *(ours(1.0, state_dtype=dtype, **staging) for dtype in ("bf16", "8bit")),
        *(theirs(fraction, overlap=False) for fraction in (0.25, 0.5, 0.75)),
    ]


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one configuration in this process."""
    warnings.filterwarnings("ignore")
    spec = dict(spec)
    system, num_micro = spec.pop("system"), spec.pop("num_micro")
    num_warmup, num_steps = spec.pop("num_warmup"), spec.pop("num_steps")
    trace = spec.pop("trace", None)
    step, extra = SYSTEMS[system](num_micro, **spec)
    result: dict[str, Any] = measure(step, num_warmup=num_warmup, num_steps=num_steps)
    if trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for index in range(3):
                step(num_warmup + num_steps + index)
            torch.cuda.synchronize()
        profile.export_chrome_trace(trace)
    if extra is not None:
        result |= extra()
    return result


def row_key(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what two rows must not share: system, options and tokens."""
    options = json.dumps(json.loads(row["options"]), sort_keys=True)
    return row["system"], options, str(row["tokens"])


def add_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a measured row in place of one with the same key, with its ratio to ``none`` at the same tokens."""
    rows[:] = [other for other in rows if row_key(other) != row_key(row)]
    rows.append(row)
    none = next((other for other in rows if row_key(other) == ("none", "{}", str(row["tokens"]))), {})
    none_ms = float(none.get("step_ms") or 0.0)  # a row from a file has an empty text where it failed
    row["ratio"] = row["step_ms"] / none_ms if none_ms and "step_ms" in row else ""


def main() -> None:
    """Measure all configurations, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="measure this JSON configuration in this process (used internally)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/optimizer.csv"))
    parser.add_argument("--only", default="", help="comma-separated systems")
    parser.add_argument("--configs", default="", help="a JSON list of configurations instead of the default ones")
    parser.add_argument("--tokens", default="8192", help="comma-separated tokens a step, multiples of 8192")
    parser.add_argument("--num-warmup", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--timeout-s", type=int, default=150)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing new after this long")
    parser.add_argument("--append", action="store_true", help="keep the other rows of an existing output")
    parser.add_argument("--missing", action="store_true", help="with --append: skip what has a row with status ok")
    parser.add_argument("--plot", action="store_true", help="also plot, beside the output, as PNG and SVG")
    arguments = parser.parse_args()
    if arguments.one:
        report(lambda: run_one(json.loads(arguments.one)))
        return
    if arguments.plot:
        import matplotlib  # noqa: F401 - a missing one is to be noticed before anything is measured
    if arguments.missing and not arguments.append:
        parser.error("--missing needs --append")
    tokens = [int(word) for word in arguments.tokens.split(",")]
    per_micro = SEQ_LENGTH * MICRO_BATCH
    if any(count % per_micro or count < per_micro for count in tokens):
        parser.error(f"--tokens {arguments.tokens}: must be multiples of {per_micro}")
    chosen = json.loads(arguments.configs) if arguments.configs else configurations()
    if arguments.only:
        chosen = [spec for spec in chosen if spec["system"] in arguments.only.split(",")]
    rows = read_csv(arguments.output) if arguments.append else []
    done = {row_key(row) for row in rows if arguments.missing and row["status"] == "ok"}
    start, left_out = time.monotonic(), []
    for spec, num_tokens in itertools.product(chosen, tokens):
        row = {
            "system": spec["system"],
            "options": json.dumps({key: value for key, value in spec.items() if key != "system"}),
            "tokens": num_tokens,
        }
        if row_key(row) in done:
            continue
        title = f"{row['system']:10s} {row['options']:64s} {num_tokens:6d}"
        if time.monotonic() - start > arguments.budget_s:
            left_out.append(title)
            continue
        request = spec | {
            "num_micro": num_tokens // per_micro,
            "num_warmup": arguments.num_warmup,
            "num_steps": arguments.num_steps,
        }
        result = run_apart(__file__, ["--one", json.dumps(request)], timeout_s=arguments.timeout_s)
        row |= {"status": result["status"], "ratio": ""} | result
        add_row(rows, row | environment())
        print(f"{title}  {_shown(rows[-1])}", flush=True)
        write_csv(arguments.output, rows)
    if left_out:
        print(f"left out after {arguments.budget_s:.0f} s; measure them with --append --missing:", flush=True)
        print("\n".join(f"  {title}" for title in left_out), flush=True)
    if arguments.plot:
        from optimizer_plot import plot

        plot(read_csv(arguments.output), arguments.output)


def _shown(row: dict[str, Any]) -> str:
    if "step_ms" not in row:
        return f"{row['status']}: {row.get('error', '')}"
    ratio = f"{row['ratio']:5.2f}x" if row["ratio"] else "      "
    return f"{row['step_ms']:8.1f} ms {ratio} {row['peak_gib']:6.2f} GiB"


if __name__ == "__main__":
    main()
