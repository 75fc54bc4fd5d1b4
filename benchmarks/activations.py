"""Activations: milliseconds of forward and backward, and GPU peak, of forebay and its peers, one process each.

    python benchmarks/activations.py --output benchmarks/results/activations.csv [--only forebay,none] [--tokens 32768]

All run the same 1.104 B parameter model on one sequence. What the hooks cost with nothing to copy is the difference of
two short runs, divided by the 16 layers:

    python benchmarks/activations.py --tokens 64 --num-steps 50 --output overhead.csv \
        --configs '[{"system": "none"}, {"system": "forebay", "policy": "offload", "min_elements": 1000000000000}]'
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from harness import GIB, batches, environment, llama_1b, measure, run_apart, write_csv
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

NUM_LAYERS = 16
Inside = Callable[[], AbstractContextManager[Any]]
Extra = Callable[[], dict[str, Any]]


def forebay(model: torch.nn.Module, policy: Any, **options: Any) -> tuple[Inside, Extra]:
    """Offload or recompute by ``policy``: a name, or how many layers have each choice, spread evenly."""
    from forebay import offload_activations
    from forebay.activations import Policy

    if "min_elements" in options:
        options["min_offloaded_tensor_size"] = options.pop("min_elements")
    if not isinstance(policy, str):
        policy = Policy.interleaved(policy, NUM_LAYERS)
    made = offload_activations(model, policy, **options)

    def extra() -> dict[str, Any]:
        traffic = made.engine.traffic()
        return {
            "host_gib": made.engine.ledger.num_bytes("pinned") / GIB,
            "down_gib": traffic.down_bytes / GIB,
            "up_gib": traffic.up_bytes / GIB,
            "stall_ms": traffic.stall_ms,
            "pinned_allocations": made.num_pinned_allocations,
        }

    return lambda: made, extra


def none(model: torch.nn.Module) -> tuple[Inside, None]:
    """Keep everything."""
    return contextlib.nullcontext, None


def checkpointing(model: torch.nn.Module, **kwargs: Any) -> tuple[Inside, None]:
    """Checkpoint each layer, with torch."""
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **kwargs)
    return contextlib.nullcontext, None


def selective(model: torch.nn.Module) -> tuple[Inside, None]:
    """Checkpoint each layer, but keep the results of matrix products and attention."""
    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpointing(model, context_fn=functools.partial(create_selective_checkpoint_contexts, choose))


def save_on_cpu(model: torch.nn.Module) -> tuple[Inside, None]:
    """Copy everything with torch's own hooks, pinned."""
    return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True), None


def torchtune(model: torch.nn.Module) -> tuple[Inside, None]:
    """Offload with torchtune's OffloadActivations, streams on."""
    from torchtune.training import OffloadActivations

    return functools.partial(OffloadActivations, use_streams=True), None


SYSTEMS: dict[str, Callable[..., tuple[Inside, Extra | None]]] = {
    "forebay": forebay,
    "none": none,
    "checkpointing": checkpointing,
    "selective": selective,
    "save_on_cpu": save_on_cpu,
    "torchtune": torchtune,
}


def configurations() -> list[dict[str, Any]]:
    """Return what is compared, in the order it is run: peers, then the frontier from much memory to little."""
    peers: list[dict[str, Any]] = [{"system": name} for name in SYSTEMS if name != "forebay"]
    # A layer's copy takes about as long as the forward of three layers, and there is more of everything in flight
    # when copies are spread: the windows are part of the frontier.
    ours: list[dict[str, Any]] = [
        {"policy": {"offload": 2}, "num_layers_in_flight": 3},
        {"policy": {"offload": 4}, "num_layers_in_flight": 3},
        {"policy": {"offload": 6}, "num_layers_in_flight": 2},
        {"policy": {"offload": 4, "recompute_offloaded_input": 4}, "num_layers_in_flight": 3},
        {"policy": {"offload": 4, "recompute_offloaded_input": 8}, "num_layers_in_flight": 3},
        {"policy": {"offload": 4, "recompute_offloaded_input": 11}, "num_layers_in_flight": 3},
        {"policy": {"offload": 2, "recompute_offloaded_input": 13}, "num_layers_in_flight": 3},
        {"policy": "recompute"},
        {"policy": "recompute_offloaded_input"},
        {"policy": {"recompute_offloaded_input": 16}},
        {"policy": "offload"},
    ]
    return [*peers, *({"system": "forebay"} | spec for spec in ours)]


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one configuration in this process."""
    warnings.filterwarnings("ignore")
    spec = dict(spec)
    system, length = spec.pop("system"), spec.pop("tokens")
    num_warmup, num_steps = spec.pop("num_warmup"), spec.pop("num_steps")
    model = llama_1b().train()
    inside, extra = SYSTEMS[system](model, **spec)
    data = batches(2, 1, length)

    def step(index: int) -> None:
        tokens = data[index % len(data)]
        with inside():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()

    result: dict[str, Any] = measure(step, num_warmup=num_warmup, num_steps=num_steps)
    return result | (extra() if extra is not None else {})


def main() -> None:
    """Measure all configurations, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="measure this JSON configuration in this process (used internally)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/activations.csv"))
    parser.add_argument("--only", default="", help="comma-separated systems")
    parser.add_argument("--configs", default="", help="a JSON list of configurations instead of the default ones")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--num-warmup", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--timeout-s", type=int, default=180)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(json.loads(arguments.one))), flush=True)
        return
    chosen = json.loads(arguments.configs) if arguments.configs else configurations()
    if arguments.only:
        chosen = [spec for spec in chosen if spec["system"] in arguments.only.split(",")]
    rows: list[dict[str, Any]] = []
    resident_ms = None
    for spec in chosen:
        request = spec | {
            "tokens": arguments.tokens,
            "num_warmup": arguments.num_warmup,
            "num_steps": arguments.num_steps,
        }
        result = run_apart(__file__, ["--one", json.dumps(request)], timeout_s=arguments.timeout_s)
        if spec["system"] == "none":
            resident_ms = result.get("step_ms")
        if resident_ms and "step_ms" in result:
            result["ratio"] = result["step_ms"] / resident_ms
        row = {"system": spec["system"], "options": json.dumps({k: v for k, v in spec.items() if k != "system"})}
        rows.append(row | {"tokens": arguments.tokens} | result | environment())
        shown = result
        if "step_ms" in result:
            shown = f"{result['step_ms']:8.1f} ms {result.get('ratio', 0):6.3f} {result['peak_gib']:6.2f} GiB"
        print(f"{row['system']:14s} {row['options']:90s} {shown}", flush=True)
        write_csv(arguments.output, rows)


if __name__ == "__main__":
    main()
