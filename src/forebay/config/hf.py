"""From Megatron's names for the shape of a model to the fields of a transformers configuration."""

from __future__ import annotations

import copy
from typing import Any

from forebay.config.schema import ModelConfig

_COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_GPT2 = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
}


def _moe(experts: str, width: str = "moe_intermediate_size") -> dict[str, str]:
    # Where all feed-forward blocks are experts, intermediate_size is an expert's width.
    common = {k: v for k, v in _COMMON.items() if not (k == "ffn_hidden_size" and width == "intermediate_size")}
    return {
        **common,
        "num_moe_experts": experts,
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": width,
    }


_NAMES_BY_MODEL_TYPE: dict[str, dict[str, str]] = {
    "gpt2": _GPT2,
    "qwen2_moe": _moe("num_experts"),
    "qwen3_moe": _moe("num_experts"),
    "olmoe": _moe("num_experts", "intermediate_size"),
    "mixtral": _moe("num_local_experts", "intermediate_size"),
    "gpt_oss": _moe("num_local_experts", "intermediate_size"),
    "phimoe": _moe("num_local_experts", "intermediate_size"),
    "granitemoe": _moe("num_local_experts", "intermediate_size"),
    "deepseek_v2": _moe("n_routed_experts"),
    "deepseek_v3": _moe("n_routed_experts"),
    "glm4_moe": _moe("n_routed_experts"),
}

ARCHITECTURE_KEYS = (*_COMMON, "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
"""The keys of :class:`ModelConfig` that change the shape of the model."""


def field_names(model_type: str) -> dict[str, str]:
    """Return the field of a transformers configuration behind each architecture key that the model type has."""
    return _NAMES_BY_MODEL_TYPE.get(model_type, _COMMON)


def hf_config_dict(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the transformers configuration, the architecture keys applied.

    Args:
        model: its ``hf_config`` holds a ``model_type``.

    Raises:
        ValueError: without a model type, for an architecture key that the model type does not have, or when
            fields that depend on the number of layers cannot follow it.
    """
    fields = copy.deepcopy(model.hf_config)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(
            "model.hf_config.model_type is not set, so there is no model; start from a recipe, or set it (such as "
            "model.hf_config.model_type=llama) or model.path"
        )
    names = field_names(model_type)
    old_num_layers = fields.get(names["num_layers"])
    for key in ARCHITECTURE_KEYS:
        value = getattr(model, key)
        if value is None:
            continue
        if key not in names:
            raise ValueError(
                f"model.{key}={value}: models of type {model_type} have no such size as far as forebay knows; "
                "leave it at null, or set the field of transformers by its own name under model.hf_config"
            )
        fields[names[key]] = value
    if model.num_layers is not None:
        _follow_num_layers(fields, model.num_layers, old_num_layers)
    return fields


def _follow_num_layers(fields: dict[str, Any], num_layers: int, old_num_layers: int | None) -> None:
    kinds = fields.get("layer_types")
    if kinds:
        if num_layers > len(kinds) and len(set(kinds)) > 1:
            raise ValueError(
                f"model.num_layers={num_layers}: model.hf_config.layer_types names {len(kinds)} layers of different "
                "kinds, and forebay does not guess the kinds of more; set model.hf_config.layer_types too"
            )
        fields["layer_types"] = [kinds[min(layer, len(kinds) - 1)] for layer in range(num_layers)]
    first_windowed = fields.get("max_window_layers")
    if first_windowed is not None:
        # "No layer has a window" is written as the number of layers.
        none_windowed = old_num_layers is not None and first_windowed >= old_num_layers
        fields["max_window_layers"] = num_layers if none_windowed else min(first_windowed, num_layers)
    dense_layers = fields.get("mlp_only_layers")
    if dense_layers:
        fields["mlp_only_layers"] = [layer for layer in dense_layers if layer < num_layers]
