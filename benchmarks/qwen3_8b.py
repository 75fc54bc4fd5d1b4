"""A model that does not train on one GPU without offloading: Qwen3-8B, exact AdamW, beside the plain run.

    python benchmarks/qwen3_8b.py --output benchmarks/results/qwen3_8b.csv --budget-s 300

Trains the shape of a recipe (random weights and tokens, bf16, clipping as the recipe has it) with all of the
optimizer's state on the host; and beside it with fp32 masters and moments on the GPU, for which there is not enough
memory. Each run is a process of its own. ``init_s`` is the time to build the model and to pin the host's memory,
``stall_share`` the share of a step in which the GPU's compute stream waited for transfers or host updates.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import GIB, environment, measure, plain_update, report, run_apart, write_csv

from forebay.config import resolve
from forebay.config.schema import Config

RECOMPUTE = "model.recompute_granularity=full"
ONE_MICRO_BATCH = "train.global_batch_size=1"
STAGING = "optimizer.optimizer_staging_gib=3"
# System, and what a run changes in the recipe. One micro-batch a step is the hardest case for offloading, which
# hides under a step's compute; the recipe has eight. The most important first, since time may run out.
RUNS = [
    ("forebay", [RECOMPUTE]),
    ("none", [RECOMPUTE]),
    ("forebay", [ONE_MICRO_BATCH]),
    ("none", [ONE_MICRO_BATCH]),
    ("forebay", [ONE_MICRO_BATCH, STAGING]),
]
OFFLOAD = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]

Update = Callable[[], Any]
Stats = Callable[[], dict[str, Any]]


def forebay(model: torch.nn.Module, config: Config) -> tuple[Update, Stats]:
    """Return the update by the optimizer that ``forebay train`` would use, and its figures since the last call."""
    from forebay.engine import get_engine
    from forebay.train.optimizers import build_optimizer

    optimizer: Any = build_optimizer(config, model, get_engine("cuda"))
    ledger = optimizer.engine.ledger

    def update() -> None:
        optimizer.clip_grad_norm_(config.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    def stats() -> dict[str, Any]:
        tiers = {f"{tier}_gib": ledger.num_bytes(tier) / GIB for tier in ("pinned", "pageable")}
        return optimizer.stats() | tiers

    return update, stats


def plain(model: torch.nn.Module, config: Config) -> tuple[Update, Stats]:
    """Return the update with fp32 masters on the GPU."""
    from forebay.train.optimizers import parameter_groups

    options = config.optimizer
    groups = parameter_groups(model, options.weight_decay)
    for group in groups:
        group["params"] = [param for _, param in group["params"]]
    adamw = {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
    return plain_update(groups, options.clip_grad, **adamw), dict


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one run in this process."""
    warnings.filterwarnings("ignore")
    from forebay.config.hf import hf_config_dict
    from forebay.train.model import (
        build_on_device,
        enable_full_recompute,
        language_model_loss,
        load_hf_config,
        num_parameters,
    )

    config = resolve(spec["recipe"], spec["words"]).config
    start = time.perf_counter()
    device = torch.device("cuda", 0)
    # On the GPU from the start: the host has no room for a second copy beside the optimizer's state.
    hf_config = load_hf_config(hf_config_dict(config.model), None)
    model = build_on_device(hf_config, torch.bfloat16, device, seed=0)
    if config.model.recompute_granularity == "full":
        enable_full_recompute(model)
    update, stats = (forebay if spec["system"] == "forebay" else plain)(model, config)
    torch.cuda.synchronize()
    init_s = time.perf_counter() - start

    micro_batch, num_micro = config.train.micro_batch_size, spec["num_micro"]
    num_tokens = micro_batch * num_micro * config.dataset.seq_length
    generator = torch.Generator(device=device).manual_seed(1)
    size = (micro_batch, config.dataset.seq_length + 1)
    data = [torch.randint(hf_config.vocab_size, size, device=device, generator=generator) for _ in range(4)]

    def step(index: int) -> None:
        for micro in range(num_micro):
            sequences = data[(index * num_micro + micro) % len(data)]
            loss, _ = language_model_loss(model, sequences, num_global_tokens=num_tokens, num_micro_batches=num_micro)
            loss.backward()
        update()
        if index == spec["num_warmup"] - 1:
            torch.cuda.synchronize()  # the stalls of the warm-up are known then, and not counted with what follows
            stats()

    result: dict[str, Any] = {"num_parameters": num_parameters(model), "init_s": init_s}
    result |= measure(step, num_warmup=spec["num_warmup"], num_steps=spec["num_steps"])
    result["tokens_per_s"] = 1e3 * num_tokens / result["wall_ms"]
    found = stats()
    if "stall_ms" in found:
        found["stall_ms"] /= spec["num_steps"]
        found["host_update_ms"] /= spec["num_steps"]
        found["stall_share"] = found["stall_ms"] / result["wall_ms"]
    return result | found | {"total_s": time.perf_counter() - start}


def main() -> None:
    """Measure all runs, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="measure this JSON configuration in this process (used internally)")
    parser.add_argument("--recipe", default="qwen3_8b_pretrain")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/qwen3_8b.csv"))
    parser.add_argument("--only", default="forebay,none", help="comma-separated systems")
    parser.add_argument("--num-warmup", type=int, default=3, help="steps; the third is the first with a known tide")
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--timeout-s", type=int, default=280)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing new after this long")
    parser.add_argument("words", nargs="*", help="further key.sub=value words, for all runs")
    arguments = parser.parse_args()
    if arguments.one:
        report(lambda: run_one(json.loads(arguments.one)))
        return
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for system, changes in RUNS:
        if system not in arguments.only.split(","):
            continue
        words = [*(OFFLOAD if system == "forebay" else []), *changes, *arguments.words]
        config = resolve(arguments.recipe, words).config
        row = {
            "system": system,
            "recipe": arguments.recipe,
            "changes": " ".join(changes + arguments.words),
            "seq_length": config.dataset.seq_length,
            "micro_batch": config.train.micro_batch_size,
            "num_micro": config.train.global_batch_size // config.train.micro_batch_size,
        }
        title = f"{system:8s} {row['changes']:64s}"
        if time.monotonic() - start > arguments.budget_s:
            print(f"{title} left out, {arguments.budget_s:.0f} s are over", flush=True)
            continue
        spec = {key: row[key] for key in ("system", "recipe", "num_micro")} | {
            "words": words,
            "num_warmup": arguments.num_warmup,
            "num_steps": arguments.num_steps,
        }
        result = run_apart(__file__, ["--one", json.dumps(spec)], timeout_s=arguments.timeout_s)
        rows.append(row | {"status": result["status"]} | result | environment())
        write_csv(arguments.output, rows)
        if "step_ms" in result:
            stall = f", stalled {result['stall_share']:.1%}" if "stall_share" in result else ""
            print(
                f"{title} {result['step_ms']:8.1f} ms, {result['tokens_per_s']:7.0f} tokens/s, "
                f"{result['peak_gib']:6.2f} GiB{stall}, init {result['init_s']:.0f} s, all {result['total_s']:.0f} s",
                flush=True,
            )
        else:
            print(f"{title} {result['status']}: {result.get('error', '')}", flush=True)


if __name__ == "__main__":
    main()
