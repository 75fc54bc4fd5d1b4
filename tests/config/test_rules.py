import pytest

from forebay.config import Config, resolve, validate, violations
from forebay.config.keys import field_types
from forebay.config.rule_table import RULES

DEMO = "tiny_llama_demo"
NO_OFFLOAD = ["optimizer.optimizer_cpu_offload=False", "optimizer.optimizer_offload_fraction=0.0"]


def _messages(words, engine="native", recipe="llama_1b_pretrain"):
    resolved = resolve(recipe, words)
    return [(v.message, v.fix) for v in violations(resolved.config, engine, sources=resolved.sources)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=1.5", "between 0.0 and 1.0"),
        (
            "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=-1",
            "optimizer_offload_fraction=-1",
        ),
        ("optimizer.optimizer_offload_fraction=0.5", "has no effect while optimizer.optimizer_cpu_offload=False"),
        ("optimizer.pin_cpu_grads=False optimizer.pin_cpu_params=False", "pin_cpu_grads=False has no effect"),
        ("train.global_batch_size=5", "train.global_batch_size=5 is not a multiple of train.micro_batch_size=2"),
        ("train.micro_batch_size=0", "train.micro_batch_size=0 must be at least 1"),
        ("train.train_iters=0", "train.train_iters=0 must be at least 1"),
        ("train.eval_interval=0", "train.eval_interval=0 must be at least 1"),
        ("train.seed=-1", "train.seed=-1 must be at least 0"),
        ("dataset.seq_length=0", "dataset.seq_length=0 must be at least 1"),
        ("dataset.eval_fraction=1", "dataset.eval_fraction=1.0 must be at least 0.0 and below 1.0"),
        ("dataset.eval_fraction=0 train.eval_interval=5", "train.eval_interval=5 has no effect"),
        ("checkpoint.save_interval=5", "checkpoint.save_interval=5 has no effect while checkpoint.save is null"),
        ("checkpoint.keep=0", "checkpoint.keep=0 must be at least 1"),
        ("logger.log_interval=0", "logger.log_interval=0 must be at least 1"),
        ("model.num_layers=0", "model.num_layers=0 must be at least 1"),
        ("model.num_query_groups=5", "the query heads (model.num_attention_heads, 32) are not a multiple of the key"),
        ("model.num_moe_experts=8", "models of type llama have no such size as far as forebay knows"),
        ("model.path=/x model.num_layers=2", "the model in model.path=/x has its own shape"),
        ("model.hf_config={}", "model.hf_config.model_type is not set, so there is no model"),
        ("optimizer.adam_beta1=1.0", "optimizer.adam_beta1=1.0 must be at least 0.0 and below 1.0"),
        ("optimizer.adam_beta2=-0.1", "optimizer.adam_beta2=-0.1 must be at least 0.0 and below 1.0"),
        ("optimizer.adam_eps=0", "optimizer.adam_eps=0.0 must be above 0"),
        ("optimizer.lr=0 optimizer.min_lr=0", "optimizer.lr=0.0 must be above 0"),
        ("optimizer.min_lr=1", "optimizer.min_lr=1.0 must be between 0 and optimizer.lr=0.0003"),
        ("optimizer.min_lr=-1", "optimizer.min_lr=-1.0 must be between 0 and"),
        ("optimizer.lr_warmup_iters=5000", "optimizer.lr_warmup_iters=5000 is longer than the schedule"),
        ("optimizer.clip_grad=-1", "optimizer.clip_grad=-1.0 must be at least 0"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0 must be at least 0"),
        ("optimizer.optimizer=sgd", "adamw decays the weights, adam and sgd decay the gradients"),
        ("optimizer.decoupled_weight_decay=False", "with optimizer.decoupled_weight_decay=False: adamw decays the"),
        ("optimizer.use_distributed_optimizer=False", "use_distributed_optimizer=False is not available"),
        ("train.device=tpu", "train.device=tpu is not a device"),
        ("train.device=cpu train.engine=cuda", "train.engine=cuda cannot drive train.device=cpu"),
        ("train.device=cuda:0 train.engine=sim", "train.engine=sim cannot drive train.device=cuda:0"),
        ("model.cpu_offloading=True", "model.cpu_offloading=True is not available in this version of forebay train"),
        ("model.cpu_offloading_num_layers=2", "has no effect while model.cpu_offloading=False"),
        ("model.cpu_offloading_num_layers=16", "must be from 0 to num_layers - 1; the model has 16 layers"),
        ("model.cpu_offloading_num_layers=-1", "must be from 0 to num_layers - 1"),
        ("model.cpu_offloading_weights=True", "cpu_offloading_weights=True has no effect while model.cpu_offloading"),
        ("model.fine_grained_activation_offloading=True", "fine_grained_activation_offloading=True is not available"),
        ("model.offload_modules=[mlp]", "has no effect while model.fine_grained_activation_offloading=False"),
        ("model.activation_offload_fraction=2", "model.activation_offload_fraction=2.0 must be between 0.0 and 1.0"),
        ("model.cuda_graph_impl=local", "model.cuda_graph_impl=local is not available in this version"),
        ("model.recompute_granularity=selective", "model.recompute_granularity=selective is not available"),
        ("model.recompute_num_layers=2", "model.recompute_num_layers=2 is not available"),
        ("model.recompute_modules=[mlp]", "model.recompute_modules=['mlp'] is not available"),
        ("model.pipeline_model_parallel_size=2", "model.pipeline_model_parallel_size=2 is not available"),
        ("model.tensor_model_parallel_size=2", "model.tensor_model_parallel_size=2 is not available"),
        ("model.context_parallel_size=2", "model.context_parallel_size=2 is not available"),
        ("model.expert_model_parallel_size=2", "model.expert_model_parallel_size=2 is not available"),
        ("train.compile=block", "train.compile=block is not available in this version of forebay train"),
        ("model.params_dtype=fp16", "model.params_dtype=fp16: small gradients become zero in fp16"),
        ("dataset.seq_length=4097", "dataset.seq_length=4097 is longer than the 4096 positions of the model"),
        (
            "dataset.seq_length=4096 model.max_position_embeddings=512",
            "dataset.seq_length=4096 is longer than the 512 positions of the model",
        ),
        ("dataset.text_key=body", "dataset.text_key=body has no effect while dataset.path is null"),
        (
            "optimizer.lr_decay_style=constant optimizer.min_lr=1e-5",
            "optimizer.min_lr=1e-05 has no effect while optimizer.lr_decay_style=constant",
        ),
        (
            "optimizer.lr_decay_style=constant optimizer.lr_decay_iters=50",
            "optimizer.lr_decay_iters=50 has no effect while optimizer.lr_decay_style=constant",
        ),
        (
            "optimizer.optimizer=sgd optimizer.weight_decay=0 optimizer.adam_beta2=0.9",
            "optimizer.adam_beta2=0.9 has no effect while optimizer.optimizer=sgd",
        ),
        (
            "optimizer.optimizer=sgd optimizer.weight_decay=0 optimizer.optimizer_cpu_offload=True "
            "optimizer.optimizer_offload_fraction=1",
            "with an offloaded share: forebay's own updates are AdamW only",
        ),
        (
            "optimizer.use_torch_optimizer_for_cpu_offload=True optimizer.optimizer_cpu_offload=True "
            "optimizer.optimizer_offload_fraction=1 optimizer.optimizer_offload_placement=host",
            "optimizer.optimizer_offload_placement=host has no effect while torch.optim does the updates",
        ),
        (
            "optimizer.optimizer=sgd optimizer.weight_decay=0 optimizer.optimizer_state_dtype=bf16",
            "optimizer.optimizer_state_dtype=bf16 has no effect while torch.optim does the updates",
        ),
        (
            "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=1 "
            "optimizer.optimizer_offload_placement=host optimizer.optimizer_state_dtype=8bit",
            "optimizer.optimizer_offload_placement=host: 8-bit moments have no host kernel",
        ),
    ],
)
def test_what_the_trainer_refuses(words, message):
    found = _messages(words.split())
    assert any(message in text for text, _ in found), found
    assert all(fix for _, fix in found)
    assert "{" not in "".join(text for text, _ in found if "hf_config" not in text)


OFFLOAD = "model.cpu_offloading=True model.cpu_offloading_num_layers=4 "
OPTIMIZER = "optimizer.optimizer_cpu_offload=True "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            OFFLOAD + "model.pipeline_model_parallel_size=2",
            "Currently there is no support for Pipeline parallelism with CPU offloading",
        ),
        (
            OFFLOAD + "model.recompute_granularity=full",
            "CPU offloading does not work when activation recomputation is enabled",
        ),
        (
            OFFLOAD + "model.fine_grained_activation_offloading=True",
            "fine_grained_activation_offloading cannot be enabled with cpu_offloading",
        ),
        (OFFLOAD + "model.cuda_graph_impl=local", "CUDA graphs not supported with CPU offloading"),
        (
            "model.cpu_offloading=True model.cpu_offloading_num_layers=16",
            "CPU offloading can be done only for layers less than 16",
        ),
        (
            OPTIMIZER + "optimizer.use_distributed_optimizer=False",
            "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        ),
        (
            OPTIMIZER + "optimizer.decoupled_weight_decay=False",
            "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        ),
        (
            OPTIMIZER + "optimizer.optimizer_offload_fraction=auto",
            "optimizer.optimizer_offload_fraction=auto: Megatron takes a number",
        ),
    ],
)
def test_what_megatron_refuses_word_for_word(words, message):
    assert [text for text, _ in _messages(words.split(), "megatron")] == [message]


@pytest.mark.parametrize(
    "words",
    [
        OFFLOAD,
        OFFLOAD.replace("=4", "=15"),
        OFFLOAD.replace("=4", "=0"),
        OPTIMIZER,
        OPTIMIZER + "model.pipeline_model_parallel_size=4",
        "model.pipeline_model_parallel_size=2",
        "model.recompute_granularity=selective",
        "model.cuda_graph_impl=local",
        "optimizer.use_distributed_optimizer=False",
    ],
)
def test_what_megatron_accepts(words):
    assert _messages(words.split(), "megatron") == []


@pytest.mark.parametrize(
    "words",
    [
        "",
        "model.recompute_granularity=full",
        "model.path=/x",
        "model.path=/x dataset.seq_length=100000",
        "optimizer.lr_decay_style=constant",
        "optimizer.overlap_cpu_optimizer_d2h_h2d=True",
        "optimizer.overlap_cpu_optimizer_d2h_h2d=False",
        "optimizer.optimizer_staging_gib=2",
        "optimizer.optimizer_state_dtype=8bit",
        "optimizer.optimizer=sgd optimizer.weight_decay=0 optimizer.optimizer_staging_gib=2",
        "dataset.text_key=body dataset.path=/x",
        "checkpoint.save=/x checkpoint.save_interval=5",
        "checkpoint.keep=null",
        "optimizer.optimizer=sgd optimizer.decoupled_weight_decay=False",
        "model.cpu_offloading_num_layers=0",
        *(f"{OPTIMIZER}optimizer.optimizer_offload_fraction={x}" for x in ("0", "0.0", "0.5", "1", "1.0", "auto")),
    ],
)
def test_what_the_trainer_accepts(words):
    assert _messages(words.split()) == []


def test_values_that_nothing_reads_are_refused_only_where_the_user_set_them(tmp_path):
    switch = ["optimizer.optimizer=sgd", "optimizer.weight_decay=0"]
    message = "optimizer.adam_beta2=0.95 has no effect while optimizer.optimizer=sgd"
    assert _messages(switch) == []
    assert [text for text, _ in _messages([*switch, "optimizer.adam_beta2=0.95"])] == [message]
    file = tmp_path / "run.yaml"
    file.write_text("model: {hf_config: {model_type: llama}}\noptimizer: {adam_beta2: 0.95}\n")
    assert [text for text, _ in _messages(switch, recipe=file)] == [message]
    resolved = resolve(file, switch)
    validate(resolved.config)
    with pytest.raises(ValueError, match=message):
        validate(resolved.config, sources=resolved.sources)


@pytest.mark.parametrize(
    "word", ["optimizer.optimizer_cpu_offload=False", "optimizer.use_torch_optimizer_for_cpu_offload=True"]
)
def test_one_word_turns_a_recipe_s_offloading_off_or_to_torch(word):
    assert _messages([word], recipe=DEMO) == []


def test_all_violations_are_listed_with_their_fixes():
    config = resolve(DEMO, ["train.train_iters=-1", "train.global_batch_size=12", *NO_OFFLOAD]).config
    with pytest.raises(ValueError, match="2 settings are refused") as caught:
        validate(config)
    assert str(caught.value).splitlines() == [
        "2 settings are refused",
        "  1. train.train_iters=-1 must be at least 1",
        "     fix: train.train_iters=1 or more",
        "  2. train.global_batch_size=12 is not a multiple of train.micro_batch_size=8; the global batch is made of "
        "whole micro-batches",
        "     fix: a train.micro_batch_size that divides train.global_batch_size",
    ]
    with pytest.raises(ValueError, match="unknown engine 'nemo'; choose one of native, megatron"):
        validate(config, "nemo")


def test_the_table_is_sound():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    for rule in RULES:
        assert rule.condition, rule.id
        # Every fix and message names a key that exists.
        for word in f"{rule.message} {rule.fix}".replace(",", " ").replace("=", " ").split():
            if word.split(".")[0] in ("model", "optimizer", "train", "dataset", "checkpoint", "logger") and "." in word:
                assert word.rstrip(".;):") in field_types() or word == "optimizer.", (rule.id, word)


def test_defaults_lack_only_a_model():
    assert [v.rule for v in violations(Config())] == ["model_shape"]
