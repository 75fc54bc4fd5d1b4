"""``forebay plan``: what a run takes in memory and time, and which setting to choose, without a GPU at hand."""

from __future__ import annotations

import argparse
import json

HELP = "say which settings fit a memory budget, and what they cost"

_OVERRIDES = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "seq": "dataset.seq_length",
    "micro_batch": "train.micro_batch_size",
    "global_batch": "train.global_batch_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a recipe, a .yaml file, a folder with a config.json, or a .json file of a transformers configuration",
    )
    parser.add_argument("words", metavar="key.sub=value", nargs="*", help="change a value")
    parser.add_argument("--gpu-mem", metavar="SIZE", help="memory of one GPU, such as 24GiB (default: the profile's)")
    parser.add_argument("--host-mem", metavar="SIZE", help="memory of one machine (default: not limited)")
    parser.add_argument("--engine", choices=["native", "megatron"], default="native", help="who runs it")
    parser.add_argument("--profile", metavar="NAME|FILE", help="rates to plan with; see `forebay calibrate`")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="of them in one machine (default: 8)")
    for name, key in _OVERRIDES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"the same as {key}=N")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 0 if something fits, else 1."""
    from forebay.plan.options import Layout
    from forebay.plan.plan import load_model, make_plan, parse_size
    from forebay.plan.report import to_data, to_text

    given = {key: getattr(arguments, name) for name, key in _OVERRIDES.items()}
    words = [*arguments.words, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    gpu_bytes = None if arguments.gpu_mem is None else parse_size(arguments.gpu_mem, "--gpu-mem")
    host_bytes = None if arguments.host_mem is None else parse_size(arguments.host_mem, "--host-mem")
    resolved = load_model(arguments.model, words)
    model = resolved.config.model
    layout = Layout(
        arguments.gpus,
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        model.expert_model_parallel_size,
        arguments.gpus_per_node,
    )
    plan = make_plan(
        resolved,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        engine=arguments.engine,
        layout=layout,
        profile_name=arguments.profile,
        gpu_name=_gpu_name(),
    )
    print(json.dumps(to_data(plan), indent=1) if arguments.json else to_text(plan))
    return 0 if plan.answer.fastest is not None else 1


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
