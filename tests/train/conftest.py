import pytest
from tiny_run import TEXT, TINY

from forebay.config import resolve


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
