import pytest
import torch

from forebay.config import resolve

TINY = [
    "model.vocab_size=256",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=64",
    "train.device=cpu",
    "train.train_iters=6",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.eval_interval=null",
    "dataset.seq_length=16",
    "dataset.eval_fraction=0.0",
    "logger.tensorboard=False",
    "logger.log_interval=1",
    "optimizer.optimizer_cpu_offload=False",
    "optimizer.optimizer_offload_fraction=0.0",
    "optimizer.lr=1e-2",
    "optimizer.min_lr=1e-3",
    "optimizer.lr_warmup_iters=2",
]


@pytest.fixture(autouse=True)
def one_thread():
    """The models here are so small that sharing their work among threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{number} bottles of beer on the wall, take {number % 7} down\n" for number in range(60)))
    return file


@pytest.fixture
def resolved(tmp_path, text):
    """Returns a function from overrides to a resolved configuration of a model that trains in milliseconds."""

    def make(*overrides, recipe="tiny_llama_demo"):
        places = [f"dataset.path={text}", f"logger.output_dir={tmp_path / 'run'}"]
        from_folder = any(override.startswith("model.path=") for override in overrides)
        base = [word for word in TINY if not (from_folder and word.startswith("model."))]
        return resolve(recipe, [*base, *places, *overrides])

    return make
