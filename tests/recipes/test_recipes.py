import pytest
import torch

from forebay import recipes
from forebay.config import resolve, validate
from forebay.config.hf import hf_config_dict
from forebay.train.model import build_on_meta, load_hf_config, num_parameters

NUM_PARAMETERS = {
    "tiny_llama_demo": 853_120,
    "llama_1b_pretrain": 1_104_218_112,
    "qwen3_0p6b_pretrain": 596_049_920,
    "qwen3_8b_pretrain": 8_190_735_360,
    "qwen3_30b_a3b_pretrain": 30_532_122_624,
}
OFFLOAD_HALF = [
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=0.5",
    "train.train_iters=20",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
]


def _num_parameters(resolved):
    return num_parameters(build_on_meta(load_hf_config(hf_config_dict(resolved.config.model), None), torch.bfloat16))


def test_every_recipe_has_its_size():
    assert recipes.list_recipes() == sorted(NUM_PARAMETERS)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_recipe_is_valid_and_builds(name):
    resolved = resolve(name)
    validate(resolved.config)
    validate(resolved.config, "megatron")
    # It makes offloading fast, and does nothing without.
    assert resolved.config.optimizer.overlap_cpu_optimizer_d2h_h2d
    assert resolved.description == recipes.load(name)["description"]
    assert _num_parameters(resolved) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_recipe_trains_half_offloaded_for_a_few_steps(name):
    validate(resolve(name, [*OFFLOAD_HALF[:3], "optimizer.lr_warmup_iters=10"]).config)


def test_the_mixture_of_experts_word_for_word():
    config = resolve("qwen3_30b_a3b_pretrain", OFFLOAD_HALF).config
    validate(config)
    assert (config.optimizer.optimizer_offload_fraction, config.train.train_iters) == (0.5, 20)
    small = resolve("qwen3_30b_a3b_pretrain", [*OFFLOAD_HALF, "model.num_layers=2", "model.num_moe_experts=8"])
    validate(small.config)
    # Embedding and head, two layers of attention and of eight experts with their router, norms.
    attention = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128
    experts = 8 * (3 * 2048 * 768) + 8 * 2048
    assert _num_parameters(small) == 2 * 151936 * 2048 + 2 * (attention + experts + 2 * 2048) + 2048


def test_unknown_recipes():
    with pytest.raises(ValueError, match="unknown recipe 'tiny_lama_demo'; did you mean tiny_llama_demo") as caught:
        resolve("tiny_lama_demo")
    assert all(name in str(caught.value) for name in NUM_PARAMETERS)
    assert "a file of your own needs a path that ends in .yaml" in str(caught.value)
    with pytest.raises(ValueError, match="unknown recipe 'zzz'; The recipes are"):
        recipes.load("zzz")
