"""What values are refused, and what to do about it: the table.

``native`` is forebay's own trainer. ``megatron`` repeats what Megatron Core and Megatron Bridge refuse, with the
message that their users see in a log.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

from forebay.config.hf import ARCHITECTURE_KEYS, field_names
from forebay.config.schema import Config

Engine = Literal["native", "megatron"]
BOTH: tuple[Engine, ...] = ("native", "megatron")
NATIVE: tuple[Engine, ...] = ("native",)
MEGATRON: tuple[Engine, ...] = ("megatron",)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        id: a stable name.
        is_broken: whether a configuration breaks the rule.
        message: what is wrong; ``{train.seed}`` stands for a value, ``{num_layers}`` for an
            architecture key's, taken from ``hf_config`` if it is not overridden.
        fix: what to set instead.
        engines: where it holds.
        only_if_user_set: a key; the rule holds only when the user gave it a value, not when a recipe did.
    """

    id: str
    is_broken: Callable[[Config], bool]
    message: str
    fix: str
    engines: tuple[Engine, ...] = BOTH
    only_if_user_set: str | None = None


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def size(config: Config, key: str) -> int | None:
    """Return an architecture key's value, also from ``hf_config``; None if only transformers knows it."""
    value = getattr(config.model, key)
    if value is None:
        fields = config.model.hf_config
        value = fields.get(field_names(str(fields.get("model_type"))).get(key, key))
    return value if type(value) is int else None


def _below(key: str, lowest: float) -> Rule:
    return Rule(
        f"{key}_at_least_{lowest}",
        lambda config: get(config, key) is not None and get(config, key) < lowest,
        f"{key}={{{key}}} must be at least {lowest}",
        f"{key}={lowest} or more",
    )


def _outside_unit(key: str, what: str) -> Rule:
    return Rule(
        f"{key}_in_unit_interval",
        lambda config: not 0.0 <= get(config, key) <= 1.0,
        f"{key}={{{key}}} must be between 0.0 and 1.0; it is {what}",
        f"{key}=0.5, or another number between 0.0 and 1.0",
    )


def _beta(key: str) -> Rule:
    return Rule(
        f"{key}_is_a_decay",
        lambda config: not 0.0 <= get(config, key) < 1.0,
        f"{key}={{{key}}} must be at least 0.0 and below 1.0",
        f"{key}={field_default(key)}",
    )


def field_default(key: str) -> Any:
    """Return the default of a dotted key."""
    return get(Config(), key)


def _does_not_divide(config: Config) -> bool:
    train = config.train
    return (
        train.micro_batch_size > 0
        and train.global_batch_size > 0
        and train.global_batch_size % train.micro_batch_size != 0
    )


def _warmup_too_long(config: Config) -> bool:
    decay_iters = config.optimizer.lr_decay_iters or config.train.train_iters
    return config.optimizer.lr_warmup_iters > decay_iters > 0


def _heads_do_not_divide(config: Config) -> bool:
    heads, groups = size(config, "num_attention_heads"), size(config, "num_query_groups")
    return heads is not None and groups is not None and heads > 0 and groups > 0 and heads % groups != 0


def _topk_too_large(config: Config) -> bool:
    experts, topk = size(config, "num_moe_experts"), size(config, "moe_router_topk")
    return experts is not None and topk is not None and 0 < experts < topk


def _layers_out_of_range(config: Config) -> bool:
    model, total = config.model, size(config, "num_layers")
    # Megatron checks the range only when offloading; forebay always, since the number means nothing else.
    return model.cpu_offloading_num_layers < 0 or (total is not None and model.cpu_offloading_num_layers >= total)


def _offloads(config: Config) -> bool:
    return config.optimizer.optimizer_cpu_offload and config.optimizer.optimizer_offload_fraction > 0


def _uses_torch_classes(config: Config) -> bool:
    options = config.optimizer
    return options.optimizer != "adamw" or (
        options.optimizer_cpu_offload and options.use_torch_optimizer_for_cpu_offload
    )


def _decay_differs(config: Config) -> bool:
    options = config.optimizer
    return options.weight_decay != 0 and options.decoupled_weight_decay != (options.optimizer == "adamw")


_RANGES = (
    _outside_unit("optimizer.optimizer_offload_fraction", "the share of the optimizer state on the host"),
    _outside_unit("model.activation_offload_fraction", "the share of the chosen modules' inputs that is offloaded"),
    *(_below(f"model.{key}", 1) for key in ARCHITECTURE_KEYS),
    *(
        _below(f"model.{key}", 1)
        for key in (
            "recompute_num_layers",
            "pipeline_model_parallel_size",
            "tensor_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    ),
    _below("model.min_offloaded_tensor_size", 0),
    *(_below(f"train.{key}", 1) for key in ("train_iters", "global_batch_size", "micro_batch_size", "eval_iters")),
    _below("train.eval_interval", 1),
    *(_below(f"{key}", 0) for key in ("train.seed", "model.seed", "dataset.seed")),
    _below("dataset.seq_length", 1),
    _below("checkpoint.save_interval", 1),
    _below("checkpoint.keep", 1),
    _below("logger.log_interval", 1),
    _below("optimizer.lr_warmup_iters", 0),
    _below("optimizer.lr_decay_iters", 1),
    _below("optimizer.weight_decay", 0),
    _below("optimizer.clip_grad", 0),
    _below("optimizer.optimizer_staging_gib", 0),
    _beta("optimizer.adam_beta1"),
    _beta("optimizer.adam_beta2"),
    Rule(
        "adam_eps_positive",
        lambda config: config.optimizer.adam_eps <= 0,
        "optimizer.adam_eps={optimizer.adam_eps} must be above 0",
        "optimizer.adam_eps=1e-8",
    ),
    Rule(
        "lr_positive",
        lambda config: config.optimizer.lr <= 0,
        "optimizer.lr={optimizer.lr} must be above 0",
        "optimizer.lr=3e-4, or another positive number",
    ),
    Rule(
        "min_lr_range",
        lambda config: not 0 <= config.optimizer.min_lr <= max(config.optimizer.lr, 0),
        "optimizer.min_lr={optimizer.min_lr} must be between 0 and optimizer.lr={optimizer.lr}",
        "a lower optimizer.min_lr",
    ),
    Rule(
        "warmup_fits",
        _warmup_too_long,
        "optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} is longer than the schedule, which ends at "
        "optimizer.lr_decay_iters={optimizer.lr_decay_iters} (null: train.train_iters={train.train_iters})",
        "a shorter optimizer.lr_warmup_iters, or a longer run",
    ),
    Rule(
        "batch_divides",
        _does_not_divide,
        "train.global_batch_size={train.global_batch_size} is not a multiple of "
        "train.micro_batch_size={train.micro_batch_size}; the global batch is made of whole micro-batches",
        "a train.micro_batch_size that divides train.global_batch_size",
    ),
    Rule(
        "eval_fraction_range",
        lambda config: not 0.0 <= config.dataset.eval_fraction < 1.0,
        "dataset.eval_fraction={dataset.eval_fraction} must be at least 0.0 and below 1.0",
        "dataset.eval_fraction=0.01",
    ),
    Rule(
        "heads_divide",
        _heads_do_not_divide,
        "the query heads (model.num_attention_heads, {num_attention_heads}) are not a multiple of the key/value heads "
        "(model.num_query_groups, {num_query_groups})",
        "a model.num_query_groups that divides the query heads",
    ),
    Rule(
        "topk_range",
        _topk_too_large,
        "each token goes to model.moe_router_topk={moe_router_topk} experts, but there are {num_moe_experts} "
        "(model.num_moe_experts)",
        "a lower model.moe_router_topk",
    ),
)

_LAYER_OFFLOADING_KEYS = (
    "model.cpu_offloading_num_layers",
    "model.cpu_offloading_activations",
    "model.cpu_offloading_weights",
    "model.cpu_offloading_double_buffering",
    "model.cpu_offloading_retain_pinned_cpu_buffers",
)
_FINE_GRAINED_KEYS = (
    "model.offload_modules",
    "model.min_offloaded_tensor_size",
    "model.activation_offload_fraction",
)
_OPTIMIZER_OFFLOAD_KEYS = (
    "optimizer.optimizer_offload_fraction",
    "optimizer.optimizer_offload_placement",
    "optimizer.use_torch_optimizer_for_cpu_offload",
    "optimizer.pin_cpu_grads",
    "optimizer.pin_cpu_params",
)
_PARALLEL_KEYS = (
    "model.pipeline_model_parallel_size",
    "model.tensor_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
)
_NOT_YET = "is not available in this version of forebay train"


def _not_yet(key: str, fix: str) -> Rule:
    return Rule(
        f"{key}_not_available",
        lambda config: get(config, key) != field_default(key),
        f"{key}={{{key}}} {_NOT_YET}",
        fix,
        NATIVE,
    )


def _needs(key: str, switch: str, is_on: Callable[[Config], bool] | None = None) -> Rule:
    return Rule(
        f"{key}_needs_{switch}",
        lambda config: get(config, key) != field_default(key) and not (is_on(config) if is_on else get(config, switch)),
        f"{key}={{{key}}} has no effect while {switch}={{{switch}}}",
        f"{switch}=True, or leave {key} at {field_default(key)}",
        NATIVE,
        only_if_user_set=key,
    )


def _unread(key: str, is_unread: Callable[[Config], bool], why: str, fix: str) -> Rule:
    # A recipe's value is no mistake of the user who changes something else.
    default = field_default(key)
    return Rule(
        f"{key}_unread",
        lambda config: get(config, key) != default and is_unread(config),
        f"{key}={{{key}}} has no effect while {why}",
        f"{fix}, or {key}={'null' if default is None else default}",
        NATIVE,
        only_if_user_set=key,
    )


def _shape_of_path(key: str) -> Rule:
    return Rule(
        f"{key}_with_path",
        lambda config: config.model.path is not None and getattr(config.model, key) is not None,
        f"model.{key}={{model.{key}}}: the model in model.path={{model.path}} has its own shape",
        f"model.{key}=null, or model.path=null",
        NATIVE,
    )


_NATIVE = (
    Rule(
        "device_name",
        lambda config: re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.train.device) is None,
        "train.device={train.device} is not a device",
        "train.device=auto, cpu, cuda or cuda:N",
        NATIVE,
    ),
    Rule(
        "engine_fits_device",
        lambda config: (
            (config.train.engine == "sim" and config.train.device.startswith("cuda"))
            or (config.train.engine == "cuda" and config.train.device == "cpu")
        ),
        "train.engine={train.engine} cannot drive train.device={train.device}",
        "train.engine=auto",
        NATIVE,
    ),
    Rule(
        "offloaded_layers_range",
        _layers_out_of_range,
        "model.cpu_offloading_num_layers={model.cpu_offloading_num_layers} must be from 0 to num_layers - 1; the model "
        "has {num_layers} layers",
        "a model.cpu_offloading_num_layers in that range",
        NATIVE,
    ),
    _not_yet(
        "model.cpu_offloading",
        "model.cpu_offloading=False; optimizer.optimizer_cpu_offload and model.recompute_granularity=full save memory",
    ),
    *(_needs(key, "model.cpu_offloading") for key in _LAYER_OFFLOADING_KEYS),
    _not_yet(
        "model.fine_grained_activation_offloading",
        "model.fine_grained_activation_offloading=False; model.recompute_granularity=full saves activations",
    ),
    *(_needs(key, "model.fine_grained_activation_offloading") for key in _FINE_GRAINED_KEYS),
    _not_yet("model.cuda_graph_impl", "model.cuda_graph_impl=none"),
    Rule(
        "selective_recompute_not_available",
        lambda config: config.model.recompute_granularity == "selective",
        f"model.recompute_granularity=selective {_NOT_YET}, which recomputes whole layers only",
        "model.recompute_granularity=full or null",
        NATIVE,
    ),
    _not_yet("model.recompute_num_layers", "model.recompute_num_layers=null; all layers are recomputed, or none"),
    _not_yet("model.recompute_modules", "model.recompute_modules=[]"),
    *(_not_yet(key, f"{key}=1; this version runs on one device") for key in _PARALLEL_KEYS),
    _not_yet(
        "optimizer.use_distributed_optimizer",
        "optimizer.use_distributed_optimizer=True; on one device there is nothing to shard either way",
    ),
    *(_needs(key, "optimizer.optimizer_cpu_offload") for key in _OPTIMIZER_OFFLOAD_KEYS),
    Rule(
        "own_updates_are_adamw",
        lambda config: (
            config.optimizer.optimizer != "adamw"
            and _offloads(config)
            and not config.optimizer.use_torch_optimizer_for_cpu_offload
        ),
        "optimizer.optimizer={optimizer.optimizer} with an offloaded share: forebay's own updates are AdamW only",
        "optimizer.use_torch_optimizer_for_cpu_offload=True, or optimizer.optimizer=adamw",
        NATIVE,
    ),
    *(
        _unread(
            key,
            lambda config: _uses_torch_classes(config) and _offloads(config),
            "torch.optim does the updates",
            "optimizer.use_torch_optimizer_for_cpu_offload=False",
        )
        for key in (
            "optimizer.optimizer_offload_placement",
            "optimizer.optimizer_staging_gib",
            "optimizer.optimizer_early_updates",
        )
    ),
    _unread(
        "optimizer.optimizer_state_dtype",
        _uses_torch_classes,
        "torch.optim does the updates",
        "optimizer.optimizer=adamw optimizer.use_torch_optimizer_for_cpu_offload=False",
    ),
    Rule(
        "8bit_state_has_no_host_kernel",
        lambda config: (
            config.optimizer.optimizer_state_dtype == "8bit"
            and config.optimizer.optimizer_offload_placement == "host"
            and _offloads(config)
            and not _uses_torch_classes(config)
        ),
        "optimizer.optimizer_state_dtype=8bit with optimizer.optimizer_offload_placement=host: 8-bit moments have no "
        "host kernel",
        "optimizer.optimizer_offload_placement=streamed, or optimizer.optimizer_state_dtype=bf16",
        NATIVE,
    ),
    Rule(
        "pinning_agrees",
        lambda config: (
            not _uses_torch_classes(config) and config.optimizer.pin_cpu_grads != config.optimizer.pin_cpu_params
        ),
        "optimizer.pin_cpu_grads={optimizer.pin_cpu_grads} with optimizer.pin_cpu_params={optimizer.pin_cpu_params}: "
        "forebay.AdamW pins both or neither",
        "both the same, or optimizer.use_torch_optimizer_for_cpu_offload=True",
        NATIVE,
    ),
    Rule(
        "decay_fits_optimizer",
        _decay_differs,
        "optimizer.optimizer={optimizer.optimizer} with optimizer.decoupled_weight_decay="
        "{optimizer.decoupled_weight_decay}: adamw decays the weights, adam and sgd decay the gradients",
        "optimizer.decoupled_weight_decay=True with adamw and False with adam and sgd, or optimizer.weight_decay=0",
        NATIVE,
    ),
    _not_yet("train.compile", "train.compile=none"),
    Rule(
        "fp16_needs_loss_scaling",
        lambda config: config.model.params_dtype == "fp16",
        "model.params_dtype=fp16: small gradients become zero in fp16, and forebay train has no loss scaling",
        "model.params_dtype=bf16, which has the range of fp32",
        NATIVE,
    ),
    *(_shape_of_path(key) for key in ARCHITECTURE_KEYS),
    _unread(
        "checkpoint.save_interval",
        lambda config: config.checkpoint.save is None,
        "checkpoint.save is null",
        "checkpoint.save=FOLDER",
    ),
    _unread(
        "dataset.text_key", lambda config: config.dataset.path is None, "dataset.path is null", "dataset.path=FILE"
    ),
    *(
        _unread(
            key,
            lambda config: config.optimizer.lr_decay_style == "constant",
            "optimizer.lr_decay_style=constant",
            "optimizer.lr_decay_style=cosine or linear",
        )
        for key in ("optimizer.min_lr", "optimizer.lr_decay_iters")
    ),
    *(
        _unread(
            key,
            lambda config: config.optimizer.optimizer == "sgd",
            "optimizer.optimizer=sgd",
            "optimizer.optimizer=adamw or adam",
        )
        for key in ("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps")
    ),
    Rule(
        "sequence_fits_positions",
        lambda config: (
            config.model.path is None
            and config.dataset.seq_length > (size(config, "max_position_embeddings") or config.dataset.seq_length)
        ),
        "dataset.seq_length={dataset.seq_length} is longer than the {max_position_embeddings} positions of the model",
        "a shorter dataset.seq_length, or a larger model.max_position_embeddings",
        NATIVE,
    ),
    Rule(
        "evaluation_without_text",
        lambda config: config.train.eval_interval is not None and config.dataset.eval_fraction == 0,
        "train.eval_interval={train.eval_interval} has no effect while dataset.eval_fraction=0.0",
        "dataset.eval_fraction=0.01, or train.eval_interval=null",
        NATIVE,
    ),
)

_MEGATRON = (
    Rule(
        "activation_offload_pp",
        lambda config: config.model.cpu_offloading and config.model.pipeline_model_parallel_size > 1,
        "Currently there is no support for Pipeline parallelism with CPU offloading",
        "model.pipeline_model_parallel_size=1, or optimizer.optimizer_cpu_offload=True and model.cpu_offloading=False",
        MEGATRON,
    ),
    Rule(
        "activation_offload_recompute",
        lambda config: config.model.cpu_offloading and config.model.recompute_granularity is not None,
        "CPU offloading does not work when activation recomputation is enabled",
        "model.recompute_granularity=null",
        MEGATRON,
    ),
    Rule(
        "both_activation_offloads",
        lambda config: config.model.cpu_offloading and config.model.fine_grained_activation_offloading,
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading",
        "model.fine_grained_activation_offloading=False, or model.cpu_offloading=False",
        MEGATRON,
    ),
    Rule(
        "activation_offload_cuda_graphs",
        lambda config: config.model.cpu_offloading and config.model.cuda_graph_impl != "none",
        "CUDA graphs not supported with CPU offloading",
        "model.cuda_graph_impl=none",
        MEGATRON,
    ),
    Rule(
        "activation_offload_layers",
        lambda config: config.model.cpu_offloading and _layers_out_of_range(config),
        "CPU offloading can be done only for layers less than {num_layers}",
        "model.cpu_offloading_num_layers from 0 to num_layers - 1",
        MEGATRON,
    ),
    Rule(
        "optimizer_offload_distributed",
        lambda config: config.optimizer.optimizer_cpu_offload and not config.optimizer.use_distributed_optimizer,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        "optimizer.use_distributed_optimizer=True",
        MEGATRON,
    ),
    Rule(
        "optimizer_offload_decoupled",
        lambda config: config.optimizer.optimizer_cpu_offload and not config.optimizer.decoupled_weight_decay,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        "optimizer.decoupled_weight_decay=True",
        MEGATRON,
    ),
)

RULES: tuple[Rule, ...] = (*_RANGES, *_NATIVE, *_MEGATRON)
"""Every rule, in the order in which violations are listed."""
