import pytest
import torch

from forebay import engine
from forebay.report import points, worker


@pytest.fixture
def in_process(monkeypatch):
    """Lets points be measured in this process, which takes milliseconds rather than seconds."""

    def run(command, **options):
        # A new process would have a new engine, whose ledger knows of no earlier run.
        monkeypatch.setattr(engine, "_engines", {})
        code = worker.main(command[-2:])
        return points.subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(points.subprocess, "run", run)
    yield
    torch.use_deterministic_algorithms(False)
