"""What is generated in the documents is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("script", sorted(DOCS.glob("generate_*.py")), ids=lambda path: path.name)
def test_generated_tables_are_current(script):
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
