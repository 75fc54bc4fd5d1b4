import dataclasses

import pytest
import yaml

from forebay import recipes
from forebay.config import Config, dump, keys, resolve
from forebay.config.yaml_format import format_scalar, parse

DEMO = "tiny_llama_demo"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.train_iters=20", 20),
        ("train.train_iters=1_000", 1000),
        ("train.train_iters=1e3", 1000),
        ("train.train_iters=2.0", 2),
        ("train.seed=9007199254740993", 2**53 + 1),
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.lr=1", 1.0),
        ("optimizer.optimizer_cpu_offload=False", False),
        ("optimizer.optimizer_cpu_offload=true", True),
        ("model.recompute_granularity=full", "full"),
        ("model.recompute_granularity=None", None),
        ("train.eval_interval=null", None),
        ("model.offload_modules=[core_attn,mlp]", ["core_attn", "mlp"]),
        ("model.offload_modules=[]", []),
        ("logger.tensorboard=auto", "auto"),
        ("logger.tensorboard=False", False),
        ("dataset.path=/data/a=b.txt", "/data/a=b.txt"),
        ("train.device=cuda:1", "cuda:1"),
        ("model.hf_config.rms_norm_eps=1e-6", 1e-6),
        ("model.hf_config.hidden_act=silu", "silu"),
        ("model.hf_config.rope_parameters.rope_theta=5e5", 5e5),
    ],
)
def test_words_are_read_by_type(word, expected):
    resolved = resolve(DEMO, [word])
    key = word.partition("=")[0]
    value = resolved.config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)
    assert resolved.source(key) == "command line"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train_iters=5", "override 'train_iters=5': unknown key train_iters; did you mean train.train_iters?"),
        ("train.train_iter=5", "unknown key train.train_iter; did you mean train.train_iters?"),
        ("optimizer.offload_fraction=1", "did you mean optimizer.optimizer_offload_fraction?"),
        ("model.lr=1", "unknown key model.lr; did you mean optimizer.lr?"),
        ("xyz.qqq=1", "unknown key xyz.qqq; `forebay config RECIPE` prints every key"),
        ("train.seed.x=1", "unknown key train.seed.x; did you mean train.seed?"),
        ("model.hf_config.=1", "unknown key model.hf_config.; did you mean model.hf_config?"),
        ("train=5", "train is a section; name a key in it, such as train.train_iters"),
        ("train.train_iters=1.5", "must be a whole number, got '1.5'; for example train.train_iters=8"),
        ("train.train_iters=1e-1", "must be a whole number, got '1e-1'"),
        ("train.train_iters=inf", "must be a whole number, got 'inf'"),
        ("train.train_iters=1e99", "must be a whole number, got '1e99'"),
        ("train.train_iters=True", "must be a whole number, got 'True'"),
        ("train.train_iters=", "must be a whole number, got ''"),
        ("optimizer.lr=fast", "optimizer.lr must be a number, got 'fast'; for example optimizer.lr=3e-4"),
        ("optimizer.lr=nan", "must be a number, got 'nan'"),
        ("optimizer.optimizer_cpu_offload=1", "must be True or False, got '1'"),
        ("model.params_dtype=bf61", "must be one of fp32, bf16, fp16, got 'bf61'; for example model.params_dtype=fp32"),
        ("model.recompute_granularity=some", "must be one of full, selective or null, got 'some'"),
        ("model.offload_modules=mlp", "must be a list of names, got 'mlp'; for example model.offload_modules=[core"),
        ("model.offload_modules=[1]", "must be a list of names, got '[1]'"),
        ("logger.tensorboard=on", "must be True or False or auto, got 'on'"),
        ("dataset.path=", "must be text or null, got ''"),
        ("model.hf_config=5", "must be a mapping of names to values, got '5'; for example model.hf_config={model_type"),
        ("model.hf_config.a=[1", "not valid YAML"),
        ("model.hf_config.hidden_size.x=1", "model.hf_config.hidden_size is 128 and holds no further keys"),
        ("train.train_iters", "expected key=value, for example train.train_iters=VALUE"),
        ("--train.train_iters=5", "overrides start with the key; write train.train_iters=5"),
        ("+train.train_iters=5", "overrides start with the key; write train.train_iters=5"),
        ("--train.train_iters", "overrides start with the key; write train.train_iters=VALUE"),
        ("train.train_iters =5", "no spaces around '='; write train.train_iters=5"),
    ],
)
def test_wrong_words_say_what_to_write(word, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared)
        resolve(DEMO, [word])
    assert message in str(caught.value)
    assert word in str(caught.value) or word.partition("=")[0] in str(caught.value)


def test_later_words_win_and_recipes_are_not_changed():
    assert resolve(DEMO, ["train.seed=1", "train.seed=2"]).config.train.seed == 2
    resolve(DEMO, ["model.hf_config.hidden_size=1", "model.offload_modules=[a]"])
    assert resolve(DEMO).config.model.hf_config["hidden_size"] == 128
    assert resolve(DEMO).config.model.offload_modules == []


def test_sources(tmp_path):
    resolved = resolve(DEMO, ["train.seed=1", "model.hf_config.rope_parameters={rope_theta: 5e5}"])
    assert resolved.source("train.seed") == "command line"
    assert resolved.source("train.train_iters") == f"recipe {DEMO}"
    assert resolved.source("train.deterministic") == "default"
    assert resolved.source("model.hf_config.hidden_size") == f"recipe {DEMO}"
    assert resolved.source("model.hf_config.rope_parameters.rope_theta") == "command line"
    with pytest.raises(ValueError, match=r"unknown key train.sed; did you mean train.seed\?"):
        resolved.source("train.sed")
    file = tmp_path / "run.yaml"
    file.write_text("train: {seed: 7}\n")
    assert resolve(file).source("train.seed") == f"file {file}"
    assert resolve(str(file)).config.train.seed == 7
    replaced = resolve(DEMO, ["model.hf_config={model_type: gpt2}"])
    assert replaced.config.model.hf_config == {"model_type": "gpt2"}
    assert replaced.source("model.hf_config.model_type") == "command line"
    assert "model.hf_config.hidden_size" not in replaced.sources


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_a_dump_resolves_to_the_same_values(tmp_path, name):
    words = ["train.seed=3", "optimizer.lr=1.1e-7", "dataset.path=a b: #c", "model.offload_modules=[a,b]"]
    words += ["model.hf_config.name='1e-3'", "logger.output_dir=1e-3", "dataset.text_key=no"]
    resolved = resolve(name, words)
    text = dump(resolved)
    file = tmp_path / "again.yaml"
    file.write_text(text)
    again = resolve(file)
    assert again.config == resolved.config
    assert again.description == resolved.description
    # Also as others read YAML, which take more words for something else.
    assert yaml.safe_load(text)["model"] == dataclasses.asdict(resolved.config.model)
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["seed"].endswith("# default") or "# command line" in lines["seed"]
    assert lines["lr"].endswith("# command line")
    assert lines["params_dtype"].endswith(f"# recipe {name}")
    assert lines["head_dim" if "qwen" in name else "vocab_size"].rstrip()
    assert len([line for line in text.splitlines() if "  # " in line]) >= len(keys.field_types()) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {seed: 1}", "unknown key trian"),
        ("train: {sed: 1}", "unknown key train.sed; did you mean train.seed?"),
        ("train: 5", "train must be a mapping of keys to values, got 5"),
        ("train: {seed: 1.0}", "train.seed must be a whole number, got 1.0"),
        ("train: {seed: true}", "train.seed must be a whole number, got True"),
        ("train: {seed: 1, seed: 2}", "key 'seed' is given twice (line 1)"),
        ("- 1", "expected sections such as train: and model:, got list"),
        ("", "expected sections such as train: and model:, got NoneType"),
        ("description: 5", "description must be text, got 5"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml") as caught:
        resolve(file)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.yaml: no such file; the shipped recipes are .*tiny_llama_demo"):
        resolve(tmp_path / "gone.yaml")
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        resolve(file)


def test_runs_of_two_recipes_do_not_share_a_folder(tmp_path):
    assert resolve(DEMO).config.logger.output_dir == f"runs/{DEMO}"
    assert resolve(DEMO, ["logger.output_dir=x"]).config.logger.output_dir == "x"
    file = tmp_path / "mine.yaml"
    file.write_text("train: {seed: 7}\n")
    assert resolve(file).config.logger.output_dir == "runs/mine"
    file.write_text("logger: {output_dir: there}\n")
    assert resolve(file).config.logger.output_dir == "there"


def test_fields_of_the_command_line_that_something_replaces_are_refused(tmp_path):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared)
        resolve(DEMO, ["model.hf_config.num_hidden_layers=3", "model.num_layers=2"])
    assert str(caught.value) == (
        "override model.hf_config.num_hidden_layers=3: has no effect, model.num_layers=2 (command line) replaces it; "
        "set model.num_layers=3 instead"
    )
    resolve(DEMO, ["model.hf_config.num_hidden_layers=2", "model.num_layers=2"])
    with pytest.raises(
        ValueError, match=r"override model.hf_config.rms_norm_eps: has no effect, the model in model.pa"
    ):
        resolve(DEMO, ["model.hf_config.rms_norm_eps=1e-6", f"model.path={tmp_path}"])
    resolve(DEMO, [f"model.path={tmp_path}"])


SCALARS = [1e-5, 1.0, 1e22, 3, -5, True, False, None, [1, "a"], {"a": 1e-6}, {"a": {"b": []}}]
TEXTS = [
    "on",
    "no",
    "1e-3",
    "None",
    "null",
    "",
    "a: b",
    "x # y",
    "two\nlines",
    "0x10",
    "07",
    "~",
    "12:30",
    "=",
    "<<",
    "-",
]


@pytest.mark.parametrize("value", [*SCALARS, *TEXTS, "no", "2020-01-01", "é"])
def test_scalars_read_back_exactly(value):
    text = f"key: {format_scalar(value)}  # comment"
    for again in (parse(text, "test")["key"], yaml.safe_load(text)["key"]):
        assert again == value
        assert type(again) is type(value)


def test_numbers_as_people_write_them():
    assert parse("[1e-6, 1.5e3, .5, 010, no, on, 1:30]", "test") == [1e-6, 1500.0, 0.5, "010", "no", "on", "1:30"]


def test_every_default_is_of_its_own_type():
    for key in keys.field_types():
        section, name = key.split(".")
        value = getattr(getattr(Config(), section), name)
        assert keys.from_value(key, value, "default") == value
