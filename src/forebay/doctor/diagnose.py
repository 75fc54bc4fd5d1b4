"""From what a log says to causes and fixes: one table of symptoms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from forebay.config.rules_megatron import MEGATRON_RULES
from forebay.doctor.log_facts import Facts, Line, read

_MAX_EVIDENCE = 3


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A symptom that a log shows.

    Attributes:
        symptom: its id.
        confidence: ``"certain"``: the log says so itself; ``"likely"``: it fits what the log shows; ``"possible"``:
            nothing speaks against it.
        cause: what went wrong.
        fix: what to do, the first choice first.
        evidence: line numbers and lines.
    """

    symptom: str
    confidence: str
    cause: str
    fix: tuple[str, ...]
    evidence: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class _Symptom:
    id: str
    look: Callable[[Facts], tuple[str, list[Line]] | None]  # confidence and evidence
    cause: str | Callable[[Facts], str]
    fix: tuple[str, ...] | Callable[[Facts], tuple[str, ...]]


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """Return every symptom that a log shows, the most certain first.

    Args:
        lines: of the log of one run, or of several of its ranks.
    """
    facts = read(lines)
    found = []
    for symptom in _SYMPTOMS:
        seen = symptom.look(facts)
        if seen is None:
            continue
        cause = symptom.cause(facts) if callable(symptom.cause) else symptom.cause
        fix = symptom.fix(facts) if callable(symptom.fix) else symptom.fix
        evidence = tuple((line.number, line.text.strip()[:300]) for line in seen[1][:_MAX_EVIDENCE])
        found.append(Diagnosis(symptom.id, seen[0], cause, fix, evidence))
    return sorted(found, key=lambda diagnosis: ("certain", "likely", "possible").index(diagnosis.confidence))


def _says(*patterns: str) -> Callable[[Facts], tuple[str, list[Line]] | None]:
    pattern = re.compile("|".join(patterns))

    def look(facts: Facts) -> tuple[str, list[Line]] | None:
        lines = facts.find(pattern)
        return ("certain", lines) if lines else None

    return look


def _refusals() -> list[_Symptom]:
    """Make a symptom of every rule of Megatron; the two whose messages are equal are one."""
    by_message: dict[str, list[int]] = {}
    for index, rule in enumerate(MEGATRON_RULES):
        by_message.setdefault(rule.message, []).append(index)
    symptoms = []
    for message, indices in by_message.items():
        rules = [MEGATRON_RULES[index] for index in indices]
        pattern = re.escape(message).replace(re.escape("{num_layers}"), r"\d+")
        cause = "Megatron refuses this combination: " + "; or ".join(rule.condition for rule in rules)
        fix = tuple(rule.fix for rule in rules)
        symptoms.append(_Symptom("_or_".join(rule.id for rule in rules), _says(pattern), cause.replace("`", ""), fix))
    return symptoms


def _ooms(facts: Facts) -> list[Line]:
    return [error.line for error in facts.out_of_memory]


def _activation_offload_too_large(facts: Facts) -> tuple[str, list[Line]] | None:
    if not facts.out_of_memory or not facts.offloads_activations:
        return None
    stages = facts.settings.get("pipeline_model_parallel_size", "1")
    return ("likely", _ooms(facts)) if stages == "1" else None


def _partial_fraction(facts: Facts) -> tuple[str, list[Line]] | None:
    fraction = facts.fraction
    return ("likely", _ooms(facts)) if facts.out_of_memory and fraction is not None and 0 < fraction < 1 else None


def _partial_fraction_fix(facts: Facts) -> tuple[str, ...]:
    first = "optimizer.optimizer_offload_fraction=1.0, then lower it while memory allows"
    tried = max((error.tried_gib or 0.0 for error in facts.out_of_memory), default=0.0)
    if tried:
        first += f"; at least {tried:.1f} GiB are missing, and the whole state of a bf16 model is 12 bytes a parameter"
        first += " in Megatron and 10 in forebay"
    return (first, "model.recompute_granularity=full, or a smaller train.micro_batch_size", _PLAN)


def _fragmented(facts: Facts) -> tuple[str, list[Line]] | None:
    errors = [
        error.line
        for error in facts.out_of_memory
        if error.unallocated_gib and error.tried_gib and error.unallocated_gib > error.tried_gib
    ]
    return ("likely", errors) if errors else None


def _shared_gpu(facts: Facts) -> tuple[str, list[Line]] | None:
    errors = [error.line for error in facts.out_of_memory if error.others_gib > 1]
    return ("certain", errors) if errors else None


_IN_STEP = re.compile(
    r"optimizer\.step\(|_init_group|\bin _?(single|multi)_tensor_adam|optim/adamw?\.py|exp_avg|fp32_from_fp16"
    r"|main_param"
)
_IN_LOSS = re.compile(r"cross_entropy|log_softmax|logits|lm_head")


def _near_oom(facts: Facts, pattern: re.Pattern[str]) -> tuple[str, list[Line]] | None:
    """Look in the traceback above each error, the last twenty lines."""
    for error in facts.out_of_memory:
        start = max(0, error.line.number - 21)
        above = [line for line in facts.lines[start : error.line.number] if pattern.search(line.text)]
        if above:
            return "likely", [above[-1], error.line]
    return None


def _other_oom(facts: Facts) -> tuple[str, list[Line]] | None:
    return ("certain", _ooms(facts)) if facts.out_of_memory else None


def _other_oom_cause(facts: Facts) -> str:
    error = max(facts.out_of_memory, key=lambda error: error.tried_gib or 0.0)
    text = "the GPU's memory is full"
    if error.tried_gib and error.total_gib:
        text += f": {error.tried_gib:.2f} GiB more were asked for of {error.total_gib:.1f} GiB"
        if error.allocated_gib:
            text += f", {error.allocated_gib:.1f} GiB of them in use by torch"
    return text


_PLAN = "`forebay plan MODEL --gpu-mem ... --host-mem ...` says which setting fits and what it costs"
_OOM_FIXES = {
    "forebay": ("optimizer.optimizer_cpu_offload=True with a higher optimizer.optimizer_offload_fraction",),
    "megatron": (
        "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5 (works with PP > 1)",
        "model.cpu_offloading=True, if activations dominate and PP=1 fits",
    ),
    "deepspeed": ('"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}',),
    "fsdp": (
        "activation checkpointing, before CPUOffloadPolicy: that moves gradients and the whole update to the host",
        "forebay.AdamW in place of the optimizer, where one GPU holds the model",
    ),
    "torch": ("forebay.AdamW(params, offload_fraction=1.0) in place of torch.optim.AdamW: 10 bytes a bf16 parameter",),
}


def _other_oom_fix(facts: Facts) -> tuple[str, ...]:
    common = "full recomputation of activations, a smaller micro-batch or a shorter sequence"
    return (*_OOM_FIXES[facts.framework], common, _PLAN)


def _slow(facts: Facts) -> tuple[str, list[Line]] | None:
    """Find the update on the CPU taking over: by its own timer, by a run beside it, or else only by the setting."""
    fraction = facts.fraction
    if fraction is None or fraction < 1.0:
        return None
    step_ms = facts.median_step_ms(fraction)
    if step_ms is None:
        return None
    lines = facts.find(re.compile(r"elapsed time per iteration|\bms\b|iter_ms|optimizer_step"))[-_MAX_EVIDENCE:]
    optimizer_ms = sorted(facts.optimizer_ms)[len(facts.optimizer_ms) // 2] if facts.optimizer_ms else 0.0
    without_ms = facts.median_step_ms(0.0) or facts.median_step_ms(None)
    if optimizer_ms > 0.5 * step_ms or (without_ms is not None and step_ms > 2 * without_ms):
        return "likely", lines
    # forebay hides most of the update, so its setting alone is no reason to suspect it.
    told = bool(facts.optimizer_ms) or without_ms is not None or facts.framework == "forebay"
    return None if told else ("possible", lines)


_NAN = (
    r"(?i:\bloss\b[^|]{0,20}?[:= ]\s*(?:nan|-?inf)\b)",
    r"found NaN in local grad",
    r"number of nan iterations:\s+[1-9]",
    r"NonFiniteLossError",
    r"(?i:loss is nan)",
)


def _nan(facts: Facts, *, offloads: bool) -> tuple[str, list[Line]] | None:
    lines = facts.find(re.compile("|".join(_NAN)))
    return ("likely", lines) if lines and facts.offloads is offloads else None


def _nan_fix(facts: Facts) -> tuple[str, ...]:
    native = (
        "does it also happen with optimizer.overlap_cpu_optimizer_d2h_h2d=False? Then a copy was not waited for",
        "does it also happen with optimizer.optimizer_offload_placement=streamed, or FOREBAY_NATIVE=0? Then it is the "
        "host kernel",
    )
    other = (
        "optimizer.overlap_cpu_optimizer_d2h_h2d=False: a copy that is not waited for shows there",
        "optimizer.use_torch_optimizer_for_cpu_offload=True: leaves out the vectorised CPU update",
    )
    return (
        "run the same steps without offload: if the loss fails there too, it is the learning rate, the data or fp16",
        *(native if facts.framework == "forebay" else other),
        "fp16: use bf16, or look whether the loss scale falls to 1",
    )


_SYMPTOMS: tuple[_Symptom, ...] = (
    *_refusals(),
    _Symptom(
        "run_does_not_fit",
        _says(r"this run does not fit; nothing has been allocated"),
        "forebay added up what the run needs and refused it before allocating",
        ("what the message lists under `what lowers the need`", _PLAN),
    ),
    _Symptom(
        "oom_activation_offload_pp1",
        _activation_offload_too_large,
        "activation offload needs one pipeline stage in Megatron, so weights, gradients and optimizer state of all "
        "layers are on each GPU; offloading activations does not make these smaller",
        (
            "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=1.0 model.cpu_offloading=False, "
            "with pipeline parallelism",
            "model.recompute_granularity=full model.cpu_offloading=False",
            _PLAN,
        ),
    ),
    _Symptom(
        "oom_partial_fraction",
        _partial_fraction,
        "too little of the optimizer state is offloaded for the rest to fit",
        _partial_fraction_fix,
    ),
    _Symptom(
        "oom_fragmentation",
        _fragmented,
        "torch holds more unused memory than it asked for, in pieces that are too small",
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch 2.10 on)",),
    ),
    _Symptom(
        "oom_shared_gpu",
        _shared_gpu,
        "other processes hold memory of this GPU",
        ("nvidia-smi shows which; end them, or choose another GPU with CUDA_VISIBLE_DEVICES",),
    ),
    _Symptom(
        "oom_optimizer_step",
        lambda facts: _near_oom(facts, _IN_STEP),
        "memory ran out where the optimizer allocates or updates its state, in the first step",
        lambda facts: (*_OOM_FIXES[facts.framework], _PLAN),
    ),
    _Symptom(
        "oom_logits",
        lambda facts: _near_oom(facts, _IN_LOSS),
        "memory ran out in the loss: logits, their log-softmax and its gradient take up to 10 bytes a token and word",
        ("a smaller micro-batch with more accumulation", "a shorter sequence", "a loss that is computed in chunks"),
    ),
    _Symptom("oom", _other_oom, _other_oom_cause, _other_oom_fix),
    _Symptom(
        "host_oom_killed",
        _says(
            r"exitcode\s*:?\s*-9\b",
            r"[Ss]ignal 9\b",
            r"SIGKILL",
            r"oom[-_]kill",
            r"OOMKilled",
            r"(?i:out of memory: killed process)",
            r"killed by signal: Killed",
            r"^\s*(\S+: line \d+:\s+\d+ )?Killed\b",
        ),
        "the process was killed from outside, nearly always because host memory (of the machine or its control group) "
        "ran out: offloaded state, gradients and pinned buffers live there",
        (
            "a lower optimizer.optimizer_offload_fraction, or more memory for the container or job (dmesg, and "
            "memory.events of the control group, tell whether it was memory)",
            "fewer ranks a machine: each holds its own share on the host",
            "FOREBAY_HOST_MEMORY_GIB: forebay then refuses before it allocates what is not there",
        ),
    ),
    _Symptom(
        "pinned_memory",
        _says(
            r"cudaHost(Alloc|Register)\b.*(fail|error|out of memory|invalid)",
            r"(?i:(fail|error|cannot|unable).{0,60}(pin(ned)?[ _]memory|page-locked))",
            r"(?i:pin(ned)?[ _]memory.{0,60}(fail|error|out of memory))",
            r"(?i:RLIMIT_MEMLOCK|max locked memory|\bmemlock\b)",
            r"GiB of pinned host memory, but only",
            r"out of memory.*(CachingHostAllocator|cudaHost)",
        ),
        "host memory could not be pinned: the limit on locked memory (ulimit -l), the control group, or what the "
        "driver can map",
        (
            "ulimit -l unlimited, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 of the container",
            "a lower optimizer.optimizer_offload_fraction",
            "optimizer.pin_cpu_grads=False optimizer.pin_cpu_params=False: works without pinning, and copies 4 to 8 "
            "times slower",
            "`forebay doctor` shows the limits that hold here",
        ),
    ),
    _Symptom(
        "slow_cpu_update",
        _slow,
        "at fraction 1.0 every parameter is updated by Adam on the CPU, which is bound by host memory and takes most "
        "of the step; more than 4x the time of a run without offload is usual in Megatron",
        (
            "a lower optimizer.optimizer_offload_fraction: 0.25 to 0.5 is enough under moderate pressure",
            "optimizer.overlap_cpu_optimizer_d2h_h2d=True (about 7% in Megatron)",
            "more tokens a step (train.global_batch_size): the update is once a step",
            "OMP_NUM_THREADS at cores / ranks of the machine: torchrun sets it to 1",
            "forebay.AdamW, which updates a part on the GPU and hides the rest behind backward and forward",
        ),
    ),
    _Symptom(
        "scalar_cpu_adam",
        _says(r"created with scalar arithmetic capability"),
        "DeepSpeed's CPU Adam was compiled without vector instructions",
        ("build it on the machine that runs it, with DS_BUILD_CPU_ADAM=1, and remove the cached extension",),
    ),
    _Symptom(
        "torch_host_kernel",
        _says(r"forebay was installed without its native host kernels"),
        "updates on the host run in torch operations, several times slower than the kernel",
        ("install a C++17 compiler and run pip install --force-reinstall forebay",),
    ),
    _Symptom(
        "nan_after_offload",
        lambda facts: _nan(facts, offloads=True),
        "the loss or the gradient is not finite in a run with offload. Where state lives must not change the loss: "
        "within 0.001 in Megatron, not by a bit in forebay",
        _nan_fix,
    ),
    _Symptom(
        "nan",
        lambda facts: _nan(facts, offloads=False),
        "the loss or the gradient is not finite, and the log shows no offload",
        ("a lower optimizer.lr, a longer warm-up, bf16 in place of fp16; look at the data of that step",),
    ),
    _Symptom(
        "collective_timeout",
        _says(r"Watchdog caught collective operation timeout", r"NCCL.{0,40}(timeout|timed out)"),
        "a rank did not come to a collective: it failed or was killed (see its log), or pinned memory within the step, "
        "which can wait for the device",
        ("find the first rank whose log ends; fix that", "allocate before the first step: optimizer.allocate()"),
    ),
)
