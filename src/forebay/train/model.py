"""Causal language models from transformers: on the meta device to look at, then on the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forebay.train.attention import causal_attention
from forebay.train.hf_fields import check_fields

INSTALL_HINT = "pip install 'forebay[train]'"


def load_hf_config(fields: dict[str, Any] | None, folder: str | None) -> Any:
    """Return a transformers configuration.

    Args:
        fields: of the configuration, ``model_type`` among them; used when there is no folder.
        folder: a local checkpoint folder whose own configuration is used. Default None.

    Raises:
        FileNotFoundError: when there is no such folder.
        ValueError: when transformers is missing, does not know the model type or a field, or rejects a value.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise ValueError(f"models come from transformers, which is not installed; {INSTALL_HINT}") from error
    if folder is not None:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"model.path={folder}: no such folder (a local checkpoint is needed)")
        try:
            return AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"model.path={folder}: no model configuration can be loaded ({error})") from error
    assert fields is not None
    given = dict(fields)
    model_type = given.pop("model_type")
    if model_type in CONFIG_MAPPING:
        check_fields(CONFIG_MAPPING[model_type], given)
    try:
        return AutoConfig.for_model(model_type, **given)
    except Exception as error:  # transformers validates with exceptions of huggingface_hub's own
        raise ValueError(f"transformers rejects the model configuration: {error}") from error


def build_on_meta(hf_config: Any, dtype: torch.dtype, *, attention: str = "sdpa") -> Any:
    """Return the model without memory, to count and to plan with; see :func:`build_on_device`.

    Raises:
        ValueError: when transformers has no causal language model of this type, or cannot build this one.
    """
    from transformers import AutoModelForCausalLM

    if type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model type {hf_config.model_type!r} has no causal language model in transformers; choose one that "
            "AutoModelForCausalLM supports, such as llama or qwen3"
        )
    chosen = causal_attention(hf_config, AutoModelForCausalLM._model_mapping[type(hf_config)], attention)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=chosen)
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise ValueError(f"transformers cannot build this {hf_config.model_type} model: {error}") from error


def build_on_device(
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    folder: str | None = None,
    attention: str = "sdpa",
) -> Any:
    """Return the model on ``device`` in training mode.

    Random weights are made where they stay, so the peak is the weights alone; the same seed gives the same
    weights on the same kind of device. Weights of a folder pass through host memory.

    Args:
        hf_config: from :func:`load_hf_config`.
        dtype: of the parameters.
        device: where they live.
        seed: of random weights; sets torch's generators.
        folder: a local checkpoint to load. Default None: random weights.
        attention: transformers' implementation, ``"sdpa"`` or ``"eager"``; see
            :func:`forebay.train.attention.causal_attention`.

    Raises:
        ValueError: when the folder's weights cannot be loaded or do not cover the model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    attention = causal_attention(hf_config, AutoModelForCausalLM._model_mapping[type(hf_config)], attention)
    torch.manual_seed(seed)
    if folder is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
        return model.train()
    logging.disable_progress_bar()
    path = str(Path(folder).expanduser())
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            local_files_only=True,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except Exception as error:  # damaged safetensors raise exceptions of their own
        raise ValueError(f"model.path={folder}: the weights cannot be loaded ({error})") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"model.path={folder}: {len(missing)} weights of the model are not in the checkpoint "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); they would be random"
        )
    return model.to(device).train()


def enable_full_recompute(model: Any) -> None:
    """Run every layer's forward again in backward instead of keeping its activations.

    Raises:
        ValueError: when the model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"model.recompute_granularity=full: {type(model).__name__} of transformers cannot recompute its "
            "layers; set it to null"
        )
    # Later versions of transformers 5 renamed it, and warn about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def num_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def language_model_loss(
    model: Any, sequences: torch.Tensor, *, num_global_tokens: int, num_micro_batches: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this micro-batch's part of the global batch's mean loss.

    The sum over the tokens here is divided by the tokens of the whole global batch, so the parts add up to
    the exact mean however the batch is cut.

    Args:
        model: a transformers causal language model.
        sequences: token ids ``(micro_batch, seq_length + 1)``, int64, on the model's device.
        num_global_tokens: targets in the global batch.
        num_micro_batches: in the global batch; shares out a mixture of experts' balancing loss.

    Returns:
        What to call ``backward()`` on, and its next-token part in nats, detached. They differ only by the
        balancing loss.
    """
    outputs = model(input_ids=sequences[:, :-1], use_cache=False)
    logits = outputs.logits.float()
    targets = sequences[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = total / num_global_tokens
    report = loss.detach()
    balancing = getattr(outputs, "aux_loss", None)
    if isinstance(balancing, torch.Tensor) and balancing.requires_grad:
        loss = loss + model.config.router_aux_loss_coef * balancing / num_micro_batches
    return loss, report
