import json

import pytest
import torch
from transformers import AutoModelForCausalLM, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forebay import recipes
from forebay.config.hf import hf_config_dict
from forebay.config.resolve import resolve
from forebay.train import checkpoint
from forebay.train.attention import CAUSAL
from forebay.train.hf_fields import known_fields
from forebay.train.model import (
    build_on_device,
    build_on_meta,
    enable_full_recompute,
    language_model_loss,
    load_hf_config,
)

CPU = torch.device("cpu")
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
PLAIN = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 16},
    "qwen3_moe": {
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "mistral": {**_SIZES, "sliding_window": None},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
WINDOWED = {
    "mistral": {**_SIZES, "sliding_window": 4},
    "qwen3": {
        **_SIZES, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma3_text": {**_SIZES, "head_dim": 8},
    "llama4_text": {
        **_SIZES, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 4,
    },
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


@pytest.fixture
def packing_searches(monkeypatch):
    """Every call of the search whose answer is copied from the device to the host."""
    calls = []
    real = masking_utils.find_packed_sequence_indices

    def search(position_ids):
        calls.append(position_ids)
        return real(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", search)
    return calls


def _config(model_type, fields):
    return load_hf_config({"model_type": model_type, **fields}, None)


def _attention(model):
    return model.config.get_text_config()._attn_implementation


def _gradients(model, batch):
    language_model_loss(model, batch, num_global_tokens=batch[:, 1:].numel())[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model_type", PLAIN)
def test_plain_causal_attention_is_sdpa_bit_for_bit_without_the_search(model_type, packing_searches):
    torch.manual_seed(5)
    batch = torch.randint(1, 64, (2, 18))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(_config(model_type, PLAIN[model_type]), attn_implementation="sdpa")
    reference.eval()
    expected = reference(input_ids=batch, use_cache=False).logits
    gradients = _gradients(reference, batch)
    assert len(packing_searches) > 0
    packing_searches.clear()
    model = build_on_device(_config(model_type, PLAIN[model_type]), torch.float32, CPU, seed=0).eval()
    assert _attention(model) == CAUSAL
    assert _attention(build_on_meta(_config(model_type, PLAIN[model_type]), torch.float32)) == CAUSAL
    logits = model(input_ids=batch, use_cache=False).logits
    assert torch.equal(logits, expected)
    for name, gradient in _gradients(model, batch).items():
        assert torch.equal(gradient, gradients[name]), name
    assert packing_searches == []
    # Causal: another last token changes no earlier logits.
    other = batch.clone()
    other[:, -1] = 0
    changed = model(input_ids=other, use_cache=False).logits
    assert torch.equal(changed[:, :-1], logits[:, :-1])
    assert not torch.equal(changed[:, -1], logits[:, -1])


def test_recomputing_does_not_search_either(packing_searches):
    model = build_on_device(_config("llama", _SIZES), torch.float32, CPU, seed=0)
    enable_full_recompute(model)
    _gradients(model, torch.randint(1, 64, (2, 18)))
    assert packing_searches == []


@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_keep_their_masks(model_type, packing_searches):
    batch = torch.randint(1, 64, (2, 18))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(_config(model_type, WINDOWED[model_type]), attn_implementation="sdpa")
    expected = reference.eval()(input_ids=batch, use_cache=False).logits
    packing_searches.clear()
    model = build_on_device(_config(model_type, WINDOWED[model_type]), torch.float32, CPU, seed=0).eval()
    assert _attention(model) == "sdpa"
    assert torch.equal(model(input_ids=batch, use_cache=False).logits, expected)
    assert len(packing_searches) > 0


def test_eager_stays_eager():
    model = build_on_device(_config("llama", _SIZES), torch.float32, CPU, seed=0, attention="eager")
    assert _attention(model) == "eager"


def test_it_is_transformers_own_function_without_a_mask_function():
    build_on_meta(_config("llama", _SIZES), torch.float32)
    assert ALL_ATTENTION_FUNCTIONS[CAUSAL] is ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert CAUSAL not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


def test_a_checkpoint_does_not_name_it(tmp_path, packing_searches):
    model = build_on_device(_config("llama", _SIZES), torch.float32, CPU, seed=0)
    folder = checkpoint.save_checkpoint(tmp_path, step=1, model=model, state={}, config_yaml="", keep=None)
    assert CAUSAL not in (folder / "config.json").read_text() + (folder / "manifest.json").read_text()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    # Others load it with sdpa; forebay with its own choice again.
    assert _attention(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)) == "sdpa"
    again = build_on_device(load_hf_config(None, str(folder)), torch.float32, CPU, seed=1, folder=str(folder))
    assert _attention(again) == CAUSAL
    batch = torch.randint(1, 64, (2, 18))
    assert torch.equal(again(batch, use_cache=False).logits, model(batch, use_cache=False).logits)
    assert packing_searches == []


@pytest.mark.parametrize(
    ("model_type", "name", "hint"),
    [
        ("llama", "num_hiden_layers", "did you mean model.hf_config.num_hidden_layers?"),
        ("llama", "num_layers", "did you mean model.hf_config.num_hidden_layers?"),
        ("llama", "rms_norm_epsilon", "did you mean model.hf_config.rms_norm_eps?"),
        ("llama", "num_experts_per_tok", "leave it out"),
        ("qwen3_moe", "num_expert", "did you mean model.hf_config.num_experts?"),
        ("gpt2", "rope_theta", "leave it out"),
        ("gpt2", "zzz", "leave it out"),
    ],
)
def test_unknown_fields(model_type, name, hint):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared)
        load_hf_config({"model_type": model_type, name: 1}, None)
    assert f"model.hf_config.{name}: " in str(caught.value)
    assert "Config of transformers has no such field and would ignore it; " in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        # Own fields, aliases, older names, what the model reads if it is there, and what every class has.
        ("llama", ["rope_theta", "rope_scaling", "rope_parameters", "head_dim", "attention_bias", "use_cache"]),
        ("llama", ["architectures", "transformers_version", "dtype", "torch_dtype", "bos_token_id", "num_labels"]),
        ("llama", ["output_attentions", "attn_implementation"]),
        ("qwen2", ["head_dim", "layer_types", "max_window_layers"]),
        ("gpt2", ["n_embd", "hidden_size", "num_hidden_layers", "max_position_embeddings", "summary_type"]),
        ("mixtral", ["num_local_experts", "num_experts", "head_dim", "sliding_window"]),
        ("deepseek_v3", ["n_routed_experts", "kv_lora_rank"]),
    ],
)
def test_known_fields(model_type, names):
    from transformers import CONFIG_MAPPING

    known = known_fields(CONFIG_MAPPING[model_type])
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_recipes_use_known_fields(name):
    load_hf_config(hf_config_dict(resolve(name).config.model), None)


def test_everything_transformers_writes_can_be_given_again():
    for model_type in PLAIN:
        written = json.loads(_config(model_type, PLAIN[model_type]).to_json_string(use_diff=False))
        load_hf_config(written, None)
