import pytest
import torch
from tiny_run import TEXT, TINY

from forebay.config import resolve


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
    file.write_text(TEXT)
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
