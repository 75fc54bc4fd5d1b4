import functools

import pytest

from forebay.config import resolve
from forebay.plan.model import describe


@pytest.fixture(autouse=True)
def _no_stored_profile(tmp_path, monkeypatch):
    """Keep what is stored on the machine that runs the tests out of them."""
    monkeypatch.setenv("FOREBAY_PROFILE", str(tmp_path / "none.yaml"))


@functools.cache
def _described(recipe, words):
    config = resolve(recipe, words).config
    return describe(config)


@pytest.fixture
def planned():
    """Return a function: a recipe and words to a fresh configuration and its model, described once."""
    return lambda recipe, *words: (resolve(recipe, words).config, _described(recipe, words))
