"""Causal attention that looks at no data: torch's fused kernels without transformers' search for packed sequences."""

from __future__ import annotations

from typing import Any

CAUSAL = "forebay_causal"
"""The name in transformers of :func:`causal_attention`'s choice."""

_WINDOWS = ("sliding_window", "attention_chunk_size")


def causal_attention(hf_config: Any, model_class: Any, attention: str) -> str:
    """Return the attention that a model is built with.

    Without a mask, transformers asks in every forward whether the positions start again somewhere, and that
    answer is copied to the host. The copy waits behind all other copies down, so the step waits for offloaded
    state. Training sequences here are whole: the answer is known, and no mask is needed either, because the
    fused kernels are causal by themselves. Transformers makes no mask for a function that has no mask function.

    Args:
        hf_config: a transformers configuration.
        model_class: of the model that is built from it.
        attention: the configured ``"sdpa"`` or ``"eager"``.

    Returns:
        :data:`CAUSAL` in place of ``"sdpa"``, the same function bit for bit, if every layer of the model attends
        to all earlier positions through it; else ``attention``.
    """
    if attention != "sdpa" or not _is_plain_causal(hf_config.get_text_config(), model_class):
        return attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(CAUSAL, ALL_ATTENTION_FUNCTIONS["sdpa"])
    return CAUSAL


def _is_plain_causal(config: Any, model_class: Any) -> bool:
    # Models that do not look up their attention by name would lose their mask, and so their causality.
    looks_up = model_class._supports_sdpa and model_class._supports_attention_backend
    if not looks_up or getattr(model_class, "_is_stateful", False):
        return False
    if getattr(config, "is_heterogeneous", False):  # each layer may have a window of its own
        return False
    layer_types = getattr(config, "layer_types", None) or ()
    windows = [getattr(config, name, None) for name in _WINDOWS]
    return all(kind == "full_attention" for kind in layer_types) and not any(windows)
