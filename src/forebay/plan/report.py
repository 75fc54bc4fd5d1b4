"""A plan as text and as data: the answers, where memory and time go, what to paste, and how far to trust it."""

from __future__ import annotations

import dataclasses
from typing import Any

from forebay.plan import profile as profiles
from forebay.plan.options import GIB, Estimate
from forebay.plan.plan import Plan
from forebay.plan.solver import Option, words

_TITLES = {
    "no_offload": "no offload",
    "offload": "offload alone",
    "cheapest": "cheapest that fits",
    "fastest": "fastest that fits",
    "smallest": "smallest possible",
}
_NOT_MODELLED = {
    "native": (
        "evaluation, checkpoints, logging and data loading",
        "memory that torch holds in pieces too small to use, beyond 3%",
        "experts that get more tokens than others",
        "sliding windows in attention: it is counted as if every token looked at all before it",
        "the first steps, which allocate, pin and learn the schedule",
    ),
    "megatron": (
        "communication that overlaps with compute, other than of gradients",
        "interleaved pipeline schedules and uneven stages",
        "experts that get more tokens than others",
        "fp8, selective recomputation, fine-grained offload, and precision-aware optimizers",
        "evaluation, checkpoints, logging and data loading",
    ),
}


def to_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as it is printed with ``--json``."""
    return {
        "model": plan.name,
        "engine": plan.engine,
        "num_params": plan.model.num_params,
        "gpu_gib": plan.budget.gpu_bytes / GIB,
        "usable_gpu_gib": plan.budget.usable_gpu_bytes / GIB,
        "host_gib_per_rank": None if plan.budget.host_bytes is None else plan.budget.host_bytes / GIB,
        "layout": dataclasses.asdict(plan.layout),
        "profile": plan.profile.name,
        "why_profile": plan.why_profile,
        "answers": {name: _option_data(plan, getattr(plan.answer, name)) for name in _TITLES},
        "advice": advice(plan),
        "confidence": confidence(plan),
        "not_modelled": list(_NOT_MODELLED[plan.engine]),
    }


def _option_data(plan: Plan, option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    estimate = option.estimate
    return {
        "fits": option.fits,
        "gpu_peak_gib": estimate.gpu_peak_bytes / GIB,
        "gpu_gib": {name: num_bytes / GIB for name, num_bytes in estimate.gpu_bytes.items()},
        "host_gib": {name: num_bytes / GIB for name, num_bytes in estimate.host_bytes.items()},
        "step_seconds": estimate.step_seconds,
        "seconds": estimate.seconds,
        "tokens_per_s": _tokens(plan) / estimate.step_seconds,
        "words": words(plan.config, option.choice, len(plan.model.layers)),
    }


def _tokens(plan: Plan) -> int:
    return plan.config.train.global_batch_size * plan.config.dataset.seq_length


def to_text(plan: Plan) -> str:
    """Return the plan for a reader."""
    config, budget, layout = plan.config, plan.budget, plan.layout
    kind = "measured" if plan.profile.is_measured else "datasheet"
    host = "not limited" if budget.host_bytes is None else f"{budget.host_bytes / GIB:.1f} GiB a rank"
    gpus = "1 GPU" if layout.num_gpus == 1 else f"{layout.num_gpus} GPUs"
    spread = "".join(
        f", {name} {size}"
        for name, size in (
            ("TP", layout.tensor),
            ("PP", layout.pipeline),
            ("CP", layout.context),
            ("EP", layout.expert),
            ("DP", layout.data),
        )
        if size > 1
    )
    lines = [
        f"{plan.name}: {plan.model.model_type}, {plan.model.num_params / 1e9:.2f} B parameters, "
        f"{config.model.params_dtype}; {config.train.global_batch_size} x {config.dataset.seq_length} tokens a step",
        f"engine {plan.engine}, {gpus}{spread}, {budget.gpu_bytes / GIB:.1f} GiB each, of which "
        f"{budget.usable_gpu_bytes / GIB:.1f} GiB for torch's allocations; host {host}",
        f"rates of {plan.profile.name} ({kind}): {plan.why_profile}",
        "",
        f"{'':20}{'fits':>6}{'GPU GiB':>9}{'host GiB':>10}{'s/step':>9}{'tokens/s':>11}",
    ]
    options: dict[str, Option | None] = {name: getattr(plan.answer, name) for name in _TITLES}
    for name, option in options.items():
        lines.append(_TITLES[name].ljust(20) + (_row(plan, option) if option else f"{'-':>6}"))
    shown: dict[Any, str] = {}
    for name, option in options.items():
        if option is None:
            continue
        if option.choice in shown:
            lines += ["", f"{_TITLES[name]}: the same as {shown[option.choice]}"]
            continue
        shown[option.choice] = _TITLES[name]
        lines += ["", f"{_TITLES[name]}", *_details(option.estimate)]
        changed = words(config, option.choice, len(plan.model.layers))
        lines.append(f"  set   {' '.join(changed) or '(nothing: as configured)'}")
    lines += ["", *advice(plan), *_notes(plan)]
    lines += ["", "confidence"] + [f"  {what}: {text}" for what, text in confidence(plan).items()]
    return "\n".join([*lines, "not modelled", *(f"  {what}" for what in _NOT_MODELLED[plan.engine])])


def _row(plan: Plan, option: Option) -> str:
    estimate = option.estimate
    return (
        f"{'yes' if option.fits else 'no':>6}{estimate.gpu_peak_bytes / GIB:9.1f}"
        f"{estimate.host_total_bytes / GIB:10.1f}{estimate.step_seconds:9.3f}"
        f"{_tokens(plan) / estimate.step_seconds:11,.0f}"
    )


def _details(estimate: Estimate) -> list[str]:
    def amounts(values: dict[str, int]) -> str:
        return ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in values.items() if num_bytes >= GIB / 20)

    times = {name: seconds for name, seconds in estimate.seconds.items() if seconds >= 0.005 * estimate.step_seconds}
    return [
        f"  GPU   {amounts(estimate.gpu_bytes)}",
        f"  host  {amounts(estimate.host_bytes) or 'nothing'}",
        "  time  " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in times.items()),
    ]


def advice(plan: Plan) -> list[str]:
    """Return what to conclude: what to set, or by how much nothing fits and what would make it fit."""
    answer = plan.answer
    if answer.no_offload.fits and answer.fastest is not None:
        if answer.fastest.estimate.step_seconds > 0.98 * answer.no_offload.estimate.step_seconds:
            return ["it fits without offload, which is the fastest: set nothing"]
        return ["it fits without offload; another setting that fits is faster"]
    if answer.fastest is not None:
        slower = answer.fastest.estimate.step_seconds / answer.no_offload.estimate.step_seconds
        return [
            f"take the fastest that fits: {slower:.2f} x the time that a GPU large enough would take without offload"
        ]
    return _what_would_fit(plan)


def _notes(plan: Plan) -> list[str]:
    """Return what goes with the words for a reader of Megatron's documents."""
    if plan.engine != "megatron" or "recompute_granularity=full" not in str(to_data(plan)["answers"]):
        return []
    return [
        "Megatron also wants model.recompute_method=block with recompute_granularity=full, a key that forebay lacks"
    ]


def _what_would_fit(plan: Plan) -> list[str]:
    smallest, budget = plan.answer.smallest.estimate, plan.budget
    lines = ["it does not fit, whatever is set"]
    missing_gpu = smallest.gpu_peak_bytes - budget.usable_gpu_bytes
    if missing_gpu > 0:
        needed_gib = (budget.gpu_bytes + missing_gpu / 0.97) / GIB
        lines.append(f"  the GPU lacks {missing_gpu / GIB:.1f} GiB at the smallest; what would make it fit:")
        enough = [name for name in profiles.shipped() if _memory_gib(name) >= needed_gib]
        lines.append(f"  - a GPU of {needed_gib:.0f} GiB or more" + (f" ({', '.join(enough)})" if enough else ""))
        activations = sum(smallest.gpu_bytes.get(name, 0) for name in ("activations", "logits and loss", "temporary"))
        fixed = smallest.gpu_peak_bytes - activations
        if fixed < budget.usable_gpu_bytes and activations:
            share = (budget.usable_gpu_bytes - fixed) / activations
            length = int(plan.config.dataset.seq_length * share) // 64 * 64
            if length:
                lines.append(f"  - dataset.seq_length={length}")
        else:
            fewer = int(len(plan.model.layers) * budget.usable_gpu_bytes / smallest.gpu_peak_bytes)
            lines.append(f"  - a model of about {fewer} layers of this width" if fewer else "  - a smaller model")
        if plan.engine == "megatron":
            lines.append("  - more GPUs: a higher --tp, --pp or --ep divides weights and gradients")
        else:
            lines.append("  - several GPUs with --engine megatron, which divide weights and gradients")
    elif budget.host_bytes is not None and plan.answer.least_host is not None:
        missing = plan.answer.least_host.estimate.host_total_bytes - budget.host_bytes
        lines.append(
            f"  the GPU has room, the host lacks {missing / GIB:.1f} GiB a rank: more host memory, fewer ranks a "
            "machine, or optimizer.optimizer_state_dtype=bf16"
        )
    return lines


def _memory_gib(name: str) -> float:
    return profiles.load(name).numbers["gpu_memory_gib"].value


def confidence(plan: Plan) -> dict[str, str]:
    """Return how far to trust memory and time, each with the reason."""
    measured = plan.profile.is_measured
    routed = plan.model.num_experts > 0
    if plan.engine == "megatron":
        memory = "fair: what stays is within 1% of the published Qwen3-30B-A3B; activations are a formula"
        time = "low: constants from two published or measured runs; take ratios and not seconds"
        return {"memory": memory, "time": time}
    if plan.config.optimizer.optimizer != "adamw" or plan.config.optimizer.use_torch_optimizer_for_cpu_offload:
        return {"memory": "fair", "time": "low: updates by torch.optim on the host are not modelled"}
    memory = "high: kept tensors are counted in the model's own code; within 1% of the 1.1 B model on the H200"
    if routed:
        memory = "fair: counted in the model's own code, but for experts, which get equal numbers of tokens here"
    if not measured:
        return {"memory": memory, "time": "low: rates from datasheets; `forebay calibrate` measures this machine"}
    time = (
        "low: experts' products were never measured"
        if routed
        else "fair: fitted to the 1.1 B model on the H200, where it is within 15%"
    )
    return {"memory": memory, "time": time}
