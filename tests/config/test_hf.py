import pytest

from forebay.config.hf import hf_config_dict
from forebay.config.schema import ModelConfig


def _fields(model_type, /, hf=None, **overrides):
    return hf_config_dict(ModelConfig(hf_config={"model_type": model_type, **(hf or {})}, **overrides))


@pytest.mark.parametrize(
    ("model_type", "key", "field"),
    [
        ("llama", "num_layers", "num_hidden_layers"),
        ("llama", "ffn_hidden_size", "intermediate_size"),
        ("llama", "num_query_groups", "num_key_value_heads"),
        ("llama", "kv_channels", "head_dim"),
        ("gpt2", "num_layers", "n_layer"),
        ("gpt2", "ffn_hidden_size", "n_inner"),
        ("qwen3_moe", "num_moe_experts", "num_experts"),
        ("qwen3_moe", "moe_router_topk", "num_experts_per_tok"),
        ("qwen3_moe", "moe_ffn_hidden_size", "moe_intermediate_size"),
        ("qwen3_moe", "ffn_hidden_size", "intermediate_size"),
        ("mixtral", "num_moe_experts", "num_local_experts"),
        ("mixtral", "moe_ffn_hidden_size", "intermediate_size"),
        ("deepseek_v3", "num_moe_experts", "n_routed_experts"),
    ],
)
def test_names(model_type, key, field):
    assert _fields(model_type, **{key: 4}) == {"model_type": model_type, field: 4}


@pytest.mark.parametrize(
    ("model_type", "key"), [("llama", "num_moe_experts"), ("gpt2", "num_query_groups"), ("mixtral", "ffn_hidden_size")]
)
def test_sizes_a_model_does_not_have_are_refused(model_type, key):
    with pytest.raises(ValueError, match=rf"model.{key}=4: models of type {model_type} have no such size"):
        _fields(model_type, **{key: 4})


def test_fields_that_go_by_layer_follow_their_number():
    hf = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_window_layers": 4,
        "mlp_only_layers": [0, 3],
    }
    assert _fields("qwen3", hf, num_layers=3) == {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_window_layers": 3,
        "mlp_only_layers": [0],
    }
    assert _fields("qwen3", {**hf, "max_window_layers": 2}, num_layers=3)["max_window_layers"] == 2
    with pytest.raises(ValueError, match=r"model.num_layers=5: .*names 4 layers of different kinds"):
        _fields("qwen3", hf, num_layers=5)
    same = {"layer_types": ["full_attention"] * 2, "max_window_layers": 2, "num_hidden_layers": 2}
    longer = _fields("qwen3", same, num_layers=3)
    assert longer["layer_types"] == ["full_attention"] * 3
    assert longer["max_window_layers"] == 3


def test_the_configuration_itself_is_not_changed():
    model = ModelConfig(hf_config={"model_type": "llama", "num_hidden_layers": 2}, num_layers=5)
    assert hf_config_dict(model)["num_hidden_layers"] == 5
    assert model.hf_config["num_hidden_layers"] == 2


def test_a_model_type_is_needed():
    with pytest.raises(ValueError, match=r"model.hf_config.model_type is not set, so there is no model"):
        hf_config_dict(ModelConfig())
