import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from forebay.config import resolve
from forebay.config.schema import Config
from forebay.plan.model import describe
from forebay.train.model import build_on_meta, load_hf_config, num_parameters

TINY = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "olmo2": {"num_key_value_heads": 4},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "qwen2": {"num_key_value_heads": 2},
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def _config(fields, **changes):
    config = Config()
    config.model.hf_config = fields
    config.dataset.seq_length = 32
    for key, value in changes.items():
        setattr(config.model, key, value)
    return config


@pytest.mark.parametrize("model_type", sorted(TINY))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_kept_is_what_autograd_really_keeps(model_type, dtype):
    fields = {"model_type": model_type, **SIZES, **TINY[model_type]}
    described = describe(_config(fields, params_dtype=dtype))
    # The same model with real tensors. Attention on the CPU keeps other things, so layers are compared through the
    # flash kernel, which keeps what the fused kernels on a GPU keep.
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**{k: v for k, v in fields.items() if k != "model_type"}),
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
        attn_implementation="sdpa",
    )
    ignored = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(input_ids=torch.zeros(1, 32, dtype=torch.int64), use_cache=False)
    real = sum(storage.nbytes() for storage in kept.values())
    planned = 32 * (described.saved_bytes_per_token() + described.outside_bytes_per_token)
    assert output.last_hidden_state.requires_grad
    # The CPU's kernel pads its statistics; nothing else may differ.
    assert planned == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("recipe", ["llama_1b_pretrain", "qwen3_0p6b_pretrain", "qwen3_30b_a3b_pretrain"])
def test_parameters_are_all_counted_once(recipe, planned):
    config, model = planned(recipe)
    built = build_on_meta(load_hf_config(config.model.hf_config, None), torch.bfloat16)
    assert model.num_params == num_parameters(built)
    layers = sum(layer.dense_params + layer.expert_params for layer in model.layers)
    assert layers + model.embedding_params + model.head_params + model.other_params == model.num_params


def test_sizes_of_a_mixture_of_experts(planned):
    _, model = planned("qwen3_30b_a3b_pretrain")
    assert (model.num_experts, model.experts_per_token, model.ffn_width) == (128, 8, 768)
    assert (model.query_width, model.key_width) == (4096, 512)
    layer = model.layers[5]
    assert layer.expert_params == 128 * 3 * 2048 * 768
    # Eight of 128 experts work on a token.
    assert layer.flops_per_token == pytest.approx(2 * (layer.expert_params / 16 + layer.dense_params), rel=1e-3)
    # Gathered tokens, gate and up, silu, product, and the weighted outputs: 8 experts of each, bf16.
    assert layer.saved_bytes_per_token > 8 * 2 * (2 * 2048 + 4 * 768)


def test_a_tied_head_is_counted_once(planned):
    _, model = planned("qwen3_0p6b_pretrain")
    assert model.head_params == 0


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "olmoe", "deepseek_v3", "gemma3_text", "mistral"])
def test_other_architectures(model_type):
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    if model_type == "gpt2":
        sizes = {"n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 128}
    config = _config({"model_type": model_type, **sizes, "num_hidden_layers" if model_type != "gpt2" else "n_layer": 4})
    model = describe(config)
    assert len(model.layers) == 4
    assert all(layer.saved_bytes_per_token > 0 and layer.flops_per_token > 0 for layer in model.layers)


def test_kept_bytes_grow_with_the_sequence_only_where_scores_are_kept():
    fields = {"model_type": "llama", **SIZES}
    short, long = _config(fields), _config(fields)
    long.dataset.seq_length = 64
    assert describe(short).layers[1] == describe(long).layers[1]
    short.model.attn_implementation = long.model.attn_implementation = "eager"
    assert describe(long).layers[1].saved_bytes_per_token > 1.1 * describe(short).layers[1].saved_bytes_per_token


def test_a_forward_that_needs_data_is_refused():
    fields = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="the forward of this falcon model cannot run without data"):
        describe(_config(fields))


def test_nothing_is_allocated():
    # 500 times the memory of this machine.
    config = resolve("qwen3_30b_a3b_pretrain", ["model.num_moe_experts=12800", "model.num_layers=4"]).config
    assert describe(config).num_params > 2e11
