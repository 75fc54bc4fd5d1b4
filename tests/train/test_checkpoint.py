import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forebay.train import checkpoint
from forebay.train.checkpoint import CheckpointError


def _model(**changed):
    fields = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        **changed,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**fields))


def _save(root, step, model=None, keep=None):
    return checkpoint.save_checkpoint(
        root,
        step=step,
        model=model or _model(),
        state={"step": step, "moments": torch.full((3,), float(step))},
        config_yaml="a: 1\n",
        keep=keep,
    )


def _content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path, tied):
    model = _model(tie_word_embeddings=tied)
    folder = checkpoint.find_checkpoint(_save(tmp_path, 20, model))
    assert folder.name == "step-00000020"
    assert (tmp_path / "latest").read_text() == "step-00000020\n"
    manifest = checkpoint.read_manifest(folder)
    assert manifest.step == 20
    checkpoint.verify_files(folder, manifest)
    other = _model(tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    checkpoint.check_same_model(folder, manifest, other)
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    checkpoint.load_model(folder, other)
    assert addresses == [parameter.data_ptr() for parameter in other.parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    for memory_mapped in (False, True):
        state = checkpoint.load_state(folder, memory_mapped=memory_mapped)
        assert torch.equal(state["moments"], torch.full((3,), 20.0))
    # The folder is a Hugging Face model folder too.
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_keeps_the_last(tmp_path):
    for step in range(1, 6):
        _save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    assert checkpoint.find_checkpoint(tmp_path).name == "step-00000005"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000004", "step-00000005"]


def test_a_step_saved_again_replaces_nothing(tmp_path):
    first = _save(tmp_path, 3)
    before = _content(first)
    second = _save(tmp_path, 3)
    assert second.name == "step-00000003.1"
    assert _content(first) == before
    assert checkpoint.find_checkpoint(tmp_path) == second


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint.load=.*gone: no such folder"):
        checkpoint.find_checkpoint(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint there \(no manifest.json, no latest"):
        checkpoint.find_checkpoint(tmp_path)
    folder = _save(tmp_path, 1)
    (folder / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match="names step-00000001, which is not a complete checkpoint; others here: none"
    ):
        checkpoint.find_checkpoint(tmp_path)


def test_a_complete_checkpoint_without_pointer_is_found(tmp_path):
    folder = _save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    assert checkpoint.find_checkpoint(tmp_path) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "config.yaml"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_files_are_named(tmp_path, name, damage):
    folder = _save(tmp_path, 1)
    file = folder / name
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-1])
        message = f"{file}: {len(data) - 1} bytes instead of {len(data)}, so it is cut short"
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        message = f"{file}: its content has changed"
    else:
        file.unlink()
        message = f"{file}: missing"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.verify_files(folder, checkpoint.read_manifest(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"format_version": 1}'])
def test_damaged_manifest(tmp_path, text):
    folder = _save(tmp_path, 1)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json: cannot be read"):
        checkpoint.read_manifest(folder)


def test_newer_format(tmp_path):
    folder = _save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(CheckpointError, match=r"format 2, but forebay .* reads format 1"):
        checkpoint.read_manifest(folder)


def test_checkpoint_of_another_model(tmp_path):
    folder = _save(tmp_path, 1)
    other = _model(num_hidden_layers=3, intermediate_size=48)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_same_model(folder, checkpoint.read_manifest(folder), other)
    assert str(caught.value) == (
        f"{folder}: checkpoint of another model; intermediate_size: 32 in the checkpoint, 48 here; "
        "num_hidden_layers: 2 in the checkpoint, 3 here"
    )


def test_no_place_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"checkpoint.save=.*file/below: cannot write there .*choose another folder"
    ):
        checkpoint.check_writable(tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match=r"a checkpoint takes about 1073741824.00 GiB and .* are free"):
        checkpoint.check_writable(tmp_path, needed_bytes=2**60)


@pytest.fixture
def not_root():
    """Root may write anywhere, so root becomes nobody for the time of a test."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_no_write_permission(tmp_path, not_root, request):
    folder = Path("/") if os.getuid() == 0 else tmp_path
    if os.getuid() != 0:
        tmp_path.chmod(0o500)
        request.addfinalizer(lambda: tmp_path.chmod(0o700))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_writable(folder / "forebay-checkpoints")
    assert str(caught.value) == (
        f"checkpoint.save={folder / 'forebay-checkpoints'}: cannot write there (Permission denied); "
        "choose another folder"
    )


def test_a_place_where_nobody_can_write():
    with pytest.raises(CheckpointError, match=r"checkpoint.save=/proc/forebay: cannot write there \(.+\); choose an"):
        checkpoint.check_writable(Path("/proc/forebay"))


def test_no_write_permission_as_reported_by_the_system(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write there \(Permission denied\); choose another folder"):
        checkpoint.check_writable(tmp_path)


@pytest.mark.parametrize("call", range(8))
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_anywhere_keeps_the_previous(tmp_path, monkeypatch, call, error):
    """Every flush is a place to fail at: four files, the manifest, the folder, the parent, 'latest'."""
    previous = _save(tmp_path, 1, keep=1)
    before = _content(previous)
    real, calls = checkpoint._sync, []

    def fail(path):
        calls.append(path)
        if len(calls) == call + 1:
            raise error
        real(path)

    monkeypatch.setattr(checkpoint, "_sync", fail)
    with pytest.raises((CheckpointError, OSError, KeyboardInterrupt)) as caught:
        _save(tmp_path, 2, keep=1)
    assert len(calls) == call + 1
    if call < 6 and isinstance(error, OSError):
        assert "writing the checkpoint of step 2" in str(caught.value)
        assert "the previous one, step-00000001, is intact" in str(caught.value)
    assert _content(previous) == before
    found = checkpoint.find_checkpoint(tmp_path)
    checkpoint.verify_files(found, checkpoint.read_manifest(found))
    assert found == previous
    monkeypatch.undo()
    assert checkpoint.find_checkpoint(tmp_path).name == "step-00000001"
    _save(tmp_path, 3, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from forebay.train import checkpoint

    class Config:
        def to_dict(self): return {"hidden_size": 2}
        def to_json_file(self, file, use_diff): Path(file).write_text("{}")

    model = torch.nn.Linear(2, 2)
    model.config = Config()

    def save(step):
        checkpoint.save_checkpoint(
            Path(sys.argv[1]), step=step, model=model, state={"step": step}, config_yaml="", keep=1
        )

    save(1)
    real, calls = checkpoint._sync, []

    def kill(path):
        calls.append(path)
        if len(calls) > int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        real(path)

    checkpoint._sync = kill
    save(2)
"""


@pytest.mark.parametrize("call", [0, 3, 5, 6, 7])
def test_a_kill_while_writing_keeps_the_previous(tmp_path, call):
    program = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(call)]
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL
    found = checkpoint.find_checkpoint(tmp_path)
    assert found.name == "step-00000001"
    checkpoint.verify_files(found, checkpoint.read_manifest(found))
    # The next save clears up and works.
    _save(tmp_path, 3, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]
