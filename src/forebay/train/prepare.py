"""Everything that can be refused before memory is allocated: data, model, checkpoint, memory, folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config import validate
from forebay.config.hf import hf_config_dict
from forebay.config.schema import Config
from forebay.host.limits import check_host_memory
from forebay.train import checkpoint, memory
from forebay.train.data import Corpus, Sequences, load_corpus, split_corpus, unigram_entropy
from forebay.train.model import build_on_meta, load_hf_config, num_parameters, parameter_bytes
from forebay.train.optimizers import optimizer_plan
from forebay.train.schedule import check_schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # a rule of forebay.config refuses fp16


@dataclass
class Prepared:
    """What a run starts from.

    Attributes:
        device: where the model will live.
        dtype: of the parameters.
        hf_config: the transformers configuration.
        num_parameters: of the model, tied ones once.
        corpus: the whole text.
        unigram_entropy: of the training text, nats.
        train_sequences: in training order.
        eval_sequences: the tail of the text in its own order; None without evaluation.
        plan: bytes per tier and purpose.
        optimizer_device_bytes: the optimizer's state on the device tier.
        staging_device_bytes: what offloaded state takes there while it visits.
        optimizer_device_bytes_without_offload: the same at fraction 0.
        resume_from: the verified checkpoint to continue from; None for a fresh start.
    """

    device: torch.device
    dtype: torch.dtype
    hf_config: Any
    num_parameters: int
    corpus: Corpus
    unigram_entropy: float
    train_sequences: Sequences
    eval_sequences: Sequences | None
    plan: memory.Plan
    optimizer_device_bytes: int
    staging_device_bytes: int
    optimizer_device_bytes_without_offload: int
    resume_from: Path | None


def num_micro_batches(config: Config) -> int:
    """Return how many micro-batches make a global batch."""
    count, rest = divmod(config.train.global_batch_size, config.train.micro_batch_size)
    assert rest == 0, "a rule of forebay.config refuses this"
    return count


def data_seed(config: Config) -> int:
    """Return the seed of the order of the sequences."""
    return config.train.seed if config.dataset.seed is None else config.dataset.seed


def schedule_settings(config: Config) -> dict[str, Any]:
    """Return the arguments of :func:`forebay.train.schedule.build_scheduler`."""
    options = config.optimizer
    return {
        "lr": options.lr,
        "min_lr": options.min_lr,
        "warmup_steps": options.lr_warmup_iters,
        "decay_steps": options.lr_decay_iters or config.train.train_iters,
        "style": options.lr_decay_style,
    }


def resolve_device(name: str) -> torch.device:
    """Return the device for ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises:
        ValueError: for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"train.device={name}: not a device; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"train.device={name}: choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            raise ValueError(f"train.device={name}: torch {torch.__version__} sees {count} CUDA devices")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def prepare(config: Config) -> Prepared:
    """Check a run from front to back without allocating for it.

    Raises:
        ValueError: for any setting, text, checkpoint or folder the run would fail on later.
        FileNotFoundError: for a file or folder that does not exist.
        forebay.train.memory.DoesNotFitError: when device or host memory is too small.
        forebay.host.HostMemoryError: when less may be pinned than is needed.
    """
    validate(config)
    _check_one_process()
    micro_batches = num_micro_batches(config)
    device = resolve_device(config.train.device)
    dtype = DTYPES[config.model.params_dtype]
    folder = config.model.path
    hf_config = load_hf_config(None if folder else hf_config_dict(config.model), folder)
    check_schedule(**schedule_settings(config))
    model = build_on_meta(hf_config, dtype, attention=config.model.attn_implementation)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_plan(config, params, device)

    # Memory before data: a model that is far too large is refused in seconds.
    tokens = config.train.micro_batch_size * config.dataset.seq_length
    full_recompute = config.model.recompute_granularity == "full"
    plan = memory.plan_run(model, optimizer, num_tokens=tokens, full_recompute=full_recompute)
    _check_fits(plan, device, micro_batches, config)

    resume_from = None
    if config.checkpoint.load is not None:
        resume_from = checkpoint.find_checkpoint(Path(config.checkpoint.load).expanduser())
        manifest = checkpoint.read_manifest(resume_from)
        checkpoint.check_same_model(resume_from, manifest, model)
        checkpoint.verify_files(resume_from, manifest)
        if manifest.step >= config.train.train_iters:
            raise checkpoint.CheckpointError(
                f"{resume_from}: has done {manifest.step} steps and train.train_iters={config.train.train_iters}, so "
                "nothing is left to do; raise train.train_iters"
            )
    checkpoint.check_writable(Path(config.logger.output_dir).expanduser(), setting="logger.output_dir")
    if config.checkpoint.save is not None:
        _check_save(Path(config.checkpoint.save).expanduser(), resume_from, model)

    corpus = load_corpus(
        config.dataset.path,
        vocab_size=hf_config.get_text_config().vocab_size,
        tokenizer=config.dataset.tokenizer,
        text_key=config.dataset.text_key,
    )
    seq_length = config.dataset.seq_length
    train_tokens, eval_tokens = split_corpus(
        corpus.tokens, seq_length=seq_length, eval_fraction=config.dataset.eval_fraction
    )
    without = optimizer_plan(config, params, device, fraction=0.0)
    return Prepared(
        device=device,
        dtype=dtype,
        hf_config=hf_config,
        num_parameters=num_parameters(model),
        corpus=corpus,
        unigram_entropy=unigram_entropy(train_tokens),
        train_sequences=Sequences(train_tokens, seq_length, seed=data_seed(config)),
        eval_sequences=Sequences(eval_tokens, seq_length) if len(eval_tokens) else None,
        plan=plan,
        optimizer_device_bytes=optimizer[memory.DEVICE].get("optimizer_state", 0),
        staging_device_bytes=optimizer[memory.DEVICE].get("staging", 0),
        optimizer_device_bytes_without_offload=without[memory.DEVICE].get("optimizer_state", 0),
        resume_from=resume_from,
    )


def _check_one_process() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ValueError(
            f"started as one of {world_size} processes (WORLD_SIZE), but forebay train runs on one device, and "
            "every process would train the same; start it without torchrun"
        )


def _check_fits(plan: memory.Plan, device: torch.device, micro_batches: int, config: Config) -> None:
    device_available, host_available = memory.available_bytes(device)
    memory.check_fits(
        plan,
        device_name=str(device),
        device_available=device_available,
        host_available=host_available,
        num_micro_batches=micro_batches,
        levers=_levers(plan, micro_batches, config),
    )
    pinned_bytes = sum(plan.get(memory.PINNED, {}).values())
    if pinned_bytes:
        # Pinned memory may have a limit of its own.
        check_host_memory(pinned_bytes, purpose="the optimizer", pinned=True)


def _levers(plan: memory.Plan, micro_batches: int, config: Config) -> list[memory.Lever]:
    options, device_plan = config.optimizer, plan[memory.DEVICE]
    without_forward: memory.Plan = {memory.DEVICE: {**device_plan, "activations": 0, "logits": 0}}
    # What the forward pass adds to the peak; nothing when the gradients of a single micro-batch are larger.
    forward = memory.needed_device_bytes(plan, num_micro_batches=micro_batches) - memory.needed_device_bytes(
        without_forward, num_micro_batches=micro_batches
    )
    fraction = f"optimizer.optimizer_offload_fraction (now {options.optimizer_offload_fraction})"
    higher_fraction = f"optimizer.optimizer_cpu_offload=True (now {options.optimizer_cpu_offload}), a higher {fraction}"
    device, host = memory.DEVICE, memory.HOST
    levers = [
        memory.Lever(device, higher_fraction, device_plan.get("optimizer_state", 0), moves=True),
        memory.Lever(device, f"train.micro_batch_size (now {config.train.micro_batch_size})", forward),
        memory.Lever(device, f"dataset.seq_length (now {config.dataset.seq_length})", forward),
        memory.Lever(device, "model.recompute_granularity=full", min(forward, device_plan["activations"])),
        memory.Lever(host, f"a lower {fraction}", memory.host_bytes(plan), moves=True),
        *(memory.Lever(tier, "a smaller model (model.num_layers, model.hidden_size, ...)") for tier in (device, host)),
    ]
    useless = {
        "train.micro_batch_size": config.train.micro_batch_size == 1,
        "model.recompute_granularity": config.model.recompute_granularity == "full",
    }
    return [lever for lever in levers if not any(lever.setting.startswith(k) for k, v in useless.items() if v)]


def _check_save(root: Path, resume_from: Path | None, model: Any) -> None:
    # Weights, two fp32 moments and at most four bytes of master a parameter.
    needed_bytes = parameter_bytes(model) + 12 * num_parameters(model)
    checkpoint.check_writable(root, needed_bytes=needed_bytes)
    existing = checkpoint.list_checkpoints(root)
    if existing and (resume_from is None or resume_from.parent.resolve() != root.resolve()):
        raise checkpoint.CheckpointError(
            f"checkpoint.save={root}: holds checkpoints of another run ({existing[-1].name} is the last), which "
            f"this run would remove in time; continue it with checkpoint.load={root}, or choose another folder"
        )
