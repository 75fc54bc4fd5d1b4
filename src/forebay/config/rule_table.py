"""What values are refused, and what to do about it: the table.

``native`` is forebay's own trainer. ``megatron`` repeats what Megatron Core and Megatron Bridge refuse.
``docs/rules.md`` is written from this table (``docs/generate_rules.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from forebay.config.hf import ARCHITECTURE_KEYS, hf_config_dict
from forebay.config.rule import MEGATRON, NATIVE, Rule, get, layers_out_of_range, size
from forebay.config.rules_megatron import MEGATRON_RULES
from forebay.config.schema import Config


def _below(key: str, lowest: float) -> Rule:
    return Rule(
        f"{key}_at_least_{lowest}",
        f"`{key}` < {lowest}",
        lambda config: get(config, key) is not None and get(config, key) < lowest,
        f"{key}={{{key}}} must be at least {lowest}",
        f"{key}={lowest} or more",
    )


def _outside_unit(key: str, what: str) -> Rule:
    return Rule(
        f"{key}_in_unit_interval",
        f"`{key}` outside 0.0 to 1.0",
        lambda config: get(config, key) != "auto" and not 0.0 <= get(config, key) <= 1.0,
        f"{key}={{{key}}} must be between 0.0 and 1.0; it is {what}",
        f"{key}=0.5, or another number between 0.0 and 1.0",
    )


def _beta(key: str) -> Rule:
    return Rule(
        f"{key}_is_a_decay",
        f"`{key}` < 0 or >= 1",
        lambda config: not 0.0 <= get(config, key) < 1.0,
        f"{key}={{{key}}} must be at least 0.0 and below 1.0",
        f"{key}={field_default(key)}",
    )


def field_default(key: str) -> Any:
    """Return the default of a dotted key."""
    return get(Config(), key)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


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


def _offloads(config: Config) -> bool:
    return config.optimizer.optimizer_cpu_offload and config.optimizer.optimizer_offload_fraction != 0


def _uses_torch_classes(config: Config) -> bool:
    options = config.optimizer
    return options.optimizer != "adamw" or (
        options.optimizer_cpu_offload and options.use_torch_optimizer_for_cpu_offload
    )


def _decay_differs(config: Config) -> bool:
    options = config.optimizer
    return options.weight_decay != 0 and options.decoupled_weight_decay != (options.optimizer == "adamw")


def _shape_error(config: Config) -> str | None:
    if config.model.path is not None:
        return None
    try:
        hf_config_dict(config.model)
    except ValueError as error:
        return str(error)
    return None


def _describe_shape(config: Config) -> tuple[str, str]:
    message, _, fix = str(_shape_error(config)).partition("; ")
    return message, fix


_RANGES = (
    _outside_unit("optimizer.optimizer_offload_fraction", "the share of the optimizer state on the host"),
    Rule(
        "auto_fraction_is_forebay_s",
        "`optimizer.optimizer_offload_fraction`=auto",
        lambda config: config.optimizer.optimizer_offload_fraction == "auto",
        "optimizer.optimizer_offload_fraction=auto: Megatron takes a number",
        "the number that `forebay plan --engine megatron` finds",
        MEGATRON,
    ),
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
        "`optimizer.adam_eps` <= 0",
        lambda config: config.optimizer.adam_eps <= 0,
        "optimizer.adam_eps={optimizer.adam_eps} must be above 0",
        "optimizer.adam_eps=1e-8",
    ),
    Rule(
        "lr_positive",
        "`optimizer.lr` <= 0",
        lambda config: config.optimizer.lr <= 0,
        "optimizer.lr={optimizer.lr} must be above 0",
        "optimizer.lr=3e-4, or another positive number",
    ),
    Rule(
        "min_lr_range",
        "`optimizer.min_lr` < 0 or > `optimizer.lr`",
        lambda config: not 0 <= config.optimizer.min_lr <= max(config.optimizer.lr, 0),
        "optimizer.min_lr={optimizer.min_lr} must be between 0 and optimizer.lr={optimizer.lr}",
        "a lower optimizer.min_lr",
    ),
    Rule(
        "warmup_fits",
        "`optimizer.lr_warmup_iters` > `optimizer.lr_decay_iters` (null: `train.train_iters`)",
        _warmup_too_long,
        "optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} is longer than the schedule, which ends at "
        "optimizer.lr_decay_iters={optimizer.lr_decay_iters} (null: train.train_iters={train.train_iters})",
        "a shorter optimizer.lr_warmup_iters, or a longer run",
    ),
    Rule(
        "batch_divides",
        "`train.global_batch_size` is not a multiple of `train.micro_batch_size`",
        _does_not_divide,
        "train.global_batch_size={train.global_batch_size} is not a multiple of "
        "train.micro_batch_size={train.micro_batch_size}; the global batch is made of whole micro-batches",
        "a train.micro_batch_size that divides train.global_batch_size",
    ),
    Rule(
        "eval_fraction_range",
        "`dataset.eval_fraction` < 0 or >= 1",
        lambda config: not 0.0 <= config.dataset.eval_fraction < 1.0,
        "dataset.eval_fraction={dataset.eval_fraction} must be at least 0.0 and below 1.0",
        "dataset.eval_fraction=0.01",
    ),
    Rule(
        "heads_divide",
        "`model.num_attention_heads` is not a multiple of `model.num_query_groups`",
        _heads_do_not_divide,
        "the query heads (model.num_attention_heads, {num_attention_heads}) are not a multiple of the key/value heads "
        "(model.num_query_groups, {num_query_groups})",
        "a model.num_query_groups that divides the query heads",
    ),
    Rule(
        "topk_range",
        "`model.moe_router_topk` > `model.num_moe_experts`",
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
        f"`{key}` is not {_shown(field_default(key))}",
        lambda config: get(config, key) != field_default(key),
        f"{key}={{{key}}} {_NOT_YET}",
        fix,
        NATIVE,
    )


def _needs(key: str, switch: str, is_on: Callable[[Config], bool] | None = None) -> Rule:
    return Rule(
        f"{key}_needs_{switch}",
        f"`{key}` is not {_shown(field_default(key))} without `{switch}`",
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
        f"`{key}` is not {_shown(default)} while {why}",
        lambda config: get(config, key) != default and is_unread(config),
        f"{key}={{{key}}} has no effect while {why}",
        f"{fix}, or {key}={_shown(default)}",
        NATIVE,
        only_if_user_set=key,
    )


def _shape_of_path(key: str) -> Rule:
    return Rule(
        f"{key}_with_path",
        f"`model.{key}` and `model.path` are both set",
        lambda config: config.model.path is not None and getattr(config.model, key) is not None,
        f"model.{key}={{model.{key}}}: the model in model.path={{model.path}} has its own shape",
        f"model.{key}=null, or model.path=null",
        NATIVE,
    )


_NATIVE = (
    Rule(
        "device_name",
        "`train.device` is none of auto, cpu, cuda, cuda:N",
        lambda config: re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.train.device) is None,
        "train.device={train.device} is not a device",
        "train.device=auto, cpu, cuda or cuda:N",
        NATIVE,
    ),
    Rule(
        "engine_fits_device",
        "`train.engine`=sim on a GPU, or cuda on a CPU",
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
        "`model.cpu_offloading_num_layers` < 0 or >= number of layers",
        layers_out_of_range,
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
        "`model.recompute_granularity`=selective",
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
        "adam or sgd, an offloaded share, and `optimizer.use_torch_optimizer_for_cpu_offload`=False",
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
        "`optimizer.optimizer_state_dtype`=8bit, offloaded, with `optimizer.optimizer_offload_placement`=host",
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
        "`optimizer.pin_cpu_grads` differs from `optimizer.pin_cpu_params`, and the updates are forebay's own",
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
        "`optimizer.decoupled_weight_decay`=False with adamw, or True with adam or sgd, and a decay above 0",
        _decay_differs,
        "optimizer.optimizer={optimizer.optimizer} with optimizer.decoupled_weight_decay="
        "{optimizer.decoupled_weight_decay}: adamw decays the weights, adam and sgd decay the gradients",
        "optimizer.decoupled_weight_decay=True with adamw and False with adam and sgd, or optimizer.weight_decay=0",
        NATIVE,
    ),
    _not_yet("train.compile", "train.compile=none"),
    Rule(
        "fp16_needs_loss_scaling",
        "`model.params_dtype`=fp16",
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
        "`dataset.seq_length` > the model's positions",
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
        "`train.eval_interval` is set and `dataset.eval_fraction`=0",
        lambda config: config.train.eval_interval is not None and config.dataset.eval_fraction == 0,
        "train.eval_interval={train.eval_interval} has no effect while dataset.eval_fraction=0.0",
        "dataset.eval_fraction=0.01, or train.eval_interval=null",
        NATIVE,
    ),
    Rule(
        "model_shape",
        "`model.hf_config` has no `model_type`, or a size does not go with it",
        lambda config: _shape_error(config) is not None,
        "there is no model, or the model type has no such size",
        "start from a recipe, or set model.path, or model_type under model.hf_config",
        NATIVE,
        describe=_describe_shape,
    ),
)

RULES: tuple[Rule, ...] = (*_RANGES, *_NATIVE, *MEGATRON_RULES)
"""Every rule, in the order in which violations are listed."""
