"""What a plan needs to know of a model: sizes, and what each layer keeps for backward.

The model is built on the meta device and its forward run there once, with hooks on what autograd saves. So what is
kept is not a formula per architecture but what the model's own code keeps: an upcast norm or an activation function
that saves three tensors shows. Two things stand in for what cannot run without data: fused attention, and experts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from forebay.config.hf import hf_config_dict
from forebay.config.schema import Config
from forebay.train.attention import CAUSAL
from forebay.train.model import build_on_meta, load_hf_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATTENTION = "forebay_plan"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One transformer layer.

    Attributes:
        dense_params: elements of everything but experts.
        expert_params: elements of all experts.
        flops_per_token: of the matrix products of a forward pass, attention's scores left out.
        saved_bytes_per_token: what autograd keeps of it, at the traced sequence length.
    """

    dense_params: int
    expert_params: int
    flops_per_token: float
    saved_bytes_per_token: float


@dataclasses.dataclass(frozen=True)
class Model:
    """What a plan needs to know of a model.

    Attributes:
        model_type: of transformers.
        params: the trained parameters in the model's order, on the meta device.
        item_bytes: of a weight.
        layers: in order.
        embedding_params: of the input embedding.
        head_params: of the output layer; 0 where it is the embedding.
        other_params: outside of layers, embedding and head.
        outside_bytes_per_token: what autograd keeps outside of layers, without the loss.
        hidden_size, vocab_size: widths.
        query_width, key_width: of all query heads and of all key heads together.
        ffn_width: inside a feed-forward block, or inside one expert.
        num_experts, experts_per_token: 0 in a dense model.
    """

    model_type: str
    params: tuple[torch.Tensor, ...]
    item_bytes: int
    layers: tuple[Layer, ...]
    embedding_params: int
    head_params: int
    other_params: int
    outside_bytes_per_token: float
    hidden_size: int
    vocab_size: int
    query_width: int
    key_width: int
    ffn_width: int
    num_experts: int
    experts_per_token: int

    @property
    def num_params(self) -> int:
        """Number of trained parameters."""
        return sum(param.numel() for param in self.params)

    def saved_bytes_per_token(self) -> float:
        """Return what all layers keep."""
        return sum(layer.saved_bytes_per_token for layer in self.layers)


def describe(config: Config) -> Model:
    """Build the model of a configuration on the meta device, run its forward there, and describe it.

    Args:
        config: its ``dataset.seq_length`` is the traced length.

    Raises:
        ValueError: when transformers cannot build the model, or its forward cannot run without data.
        FileNotFoundError: when there is no such folder.
    """
    folder = config.model.path
    hf_config = load_hf_config(None if folder else hf_config_dict(config.model), folder)
    dtype = DTYPES[config.model.params_dtype]
    model = build_on_meta(hf_config, dtype, attention=config.model.attn_implementation)
    text = hf_config.get_text_config()
    blocks = _blocks(model, text.num_hidden_layers)
    inside = {id(param) for block in blocks for param in block.parameters()}
    saved = _trace(model, blocks, config.dataset.seq_length)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_params = embedding.weight.numel()
    tied = head is None or head.weight is embedding.weight
    outside = sum(param.numel() for param in model.parameters() if id(param) not in inside)
    head_params = 0 if tied else head.weight.numel()
    num_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    num_experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
    topk = _first(text, "num_experts_per_tok")
    layers = tuple(_layer(block, num_experts, topk, kept) for block, kept in zip(blocks, saved[:-1], strict=True))
    has_experts = any(layer.expert_params for layer in layers)
    ffn_width = _first(text, *(("moe_intermediate_size",) if has_experts else ()), "intermediate_size", "n_inner")
    return Model(
        model_type=hf_config.model_type,
        params=tuple(param for param in model.parameters() if param.requires_grad),
        item_bytes=dtype.itemsize,
        layers=layers,
        embedding_params=embedding_params,
        head_params=head_params,
        other_params=outside - embedding_params - head_params,
        outside_bytes_per_token=saved[-1],
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        query_width=num_heads * head_dim,
        key_width=(_first(text, "num_key_value_heads") or num_heads) * head_dim,
        ffn_width=ffn_width or 4 * text.hidden_size,
        num_experts=num_experts if has_experts else 0,
        experts_per_token=topk if has_experts else 0,
    )


def _first(holder: Any, *names: str) -> int:
    return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), 0)


def _blocks(model: nn.Module, num_layers: int) -> list[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of its {num_layers} layers, so no plan can be made for it")


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module holds all experts in tensors of three dimensions, as transformers 5 does."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def _layer(block: nn.Module, num_experts: int, topk: int, saved_bytes_per_token: float) -> Layer:
    expert_params = sum(p.numel() for m in block.modules() if _is_experts(m) for p in m.parameters(recurse=False))
    params = sum(param.numel() for param in block.parameters())
    # Vectors (norms, biases) multiply nothing.
    dense = sum(param.numel() for param in block.parameters() if param.dim() == 2)
    flops = 2.0 * (dense + (expert_params * topk / num_experts if expert_params else 0))
    return Layer(params - expert_params, expert_params, flops, saved_bytes_per_token)


class _FusedAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: queries, keys, values, the output, and a number per query and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        # The kernel writes (batch, length, heads, width), and so the reshape behind it copies nothing.
        output = query.new_empty(batch, length, heads, value.shape[-1])
        statistics = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a plan runs no backward")


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return _FusedAttention.apply(query, key, value), None


class _GroupedLinear(torch.autograd.Function):
    """Keeps its input, as every linear layer does."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs.new_empty(*inputs.shape[:-1], out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a plan runs no backward")


def _experts_forward(module: Any) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        width, topk = hidden.shape[-1], indices.shape[-1]
        flat = hidden.reshape(-1, width)
        # Each token once for each of its experts, sorted by expert: a copy.
        tokens = flat.unsqueeze(1).expand(-1, topk, -1).reshape(-1, width).clone()
        # Gate and up side by side; which axis they are on differs between models.
        both = next((size for size in module.gate_up_proj.shape[1:] if size != width), width)
        gate, up = _GroupedLinear.apply(tokens, both).chunk(2, dim=-1)
        activation = getattr(module, "act_fn", nn.functional.silu)
        outputs = _GroupedLinear.apply(activation(gate) * up, width)
        scaled = outputs * weights.reshape(-1, 1)[: outputs.shape[0]].to(outputs.dtype)
        return scaled.view(-1, topk, width).sum(dim=1).view(hidden.shape)

    return forward


def _trace(model: Any, blocks: list[nn.Module], seq_length: int) -> list[float]:
    """Return the bytes a token that autograd keeps of each layer, and last of what is outside of them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    if model.config._attn_implementation in (CAUSAL, "sdpa"):
        model.config._attn_implementation = _ATTENTION
        for module in model.modules():
            own = getattr(module, "config", None)
            if own is not None and getattr(own, "_attn_implementation", None) in (CAUSAL, "sdpa"):
                own._attn_implementation = _ATTENTION
    for module in model.modules():
        # Experts that are given all tokens, and no choice of them, can run as they are.
        if _is_experts(module) and len(inspect.signature(module.forward).parameters) >= 3:
            module.forward = _experts_forward(module)
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    place = {id(block): index for index, block in enumerate(blocks)}
    current = len(blocks)
    kept: list[dict[int, torch.UntypedStorage]] = [{} for _ in range(len(blocks) + 1)]
    seen = set(weights)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # What two layers keep is kept once, by the first. The storage is held, or its address would be used again.
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept[current][storage._cdata] = storage
        return tensor

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal current
        current = place[id(module)]

    def leave(*_: Any) -> None:
        nonlocal current
        current = len(blocks)

    mask = None
    if model.config._attn_implementation == "eager":
        # Without one, transformers looks at the positions to make it.
        mask = torch.zeros(1, 1, seq_length, seq_length, dtype=model.dtype, device="meta")
    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            tokens = torch.zeros(1, seq_length, dtype=torch.int64, device="meta")
            output = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"the forward of this {model.config.model_type} model cannot run without data, so what it keeps for "
            f"backward is not known ({str(error).splitlines()[0][:200]})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    del output
    return [sum(storage.nbytes() for storage in storages.values()) / seq_length for storages in kept]
