import pytest
import torch

from forebay import engine
from forebay.report import points, worker


@pytest.fixture
def one_thread():
    """Tiny models: sharing their work among threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_process(monkeypatch, one_thread):
    """Lets points be measured in this process, which takes milliseconds rather than seconds."""

    def run(command, **options):
        # A new process would have a new engine, whose ledger knows of no earlier run.
        monkeypatch.setattr(engine, "_engines", {})
        code = worker.main(command[-2:])
        return points.subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(points.subprocess, "run", run)
    yield
    torch.use_deterministic_algorithms(False)
