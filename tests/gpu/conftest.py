"""Everything in this folder needs a CUDA device."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
