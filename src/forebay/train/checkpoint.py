"""Checkpoints: folders that are complete or not there at all.

A checkpoint is written to a temporary folder beside its final place, flushed to the disk, renamed, and only
then named by the file ``latest``; older ones are removed last. So whatever interrupts this, the previous
checkpoint stays and ``latest`` names a complete one. The folder is also a Hugging Face model folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forebay

MODEL_FILE = "model.safetensors"
STATE_FILE = "training_state.pt"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
_TEMPORARY = re.compile(r"(step-.*|latest)\.tmp-\d+")
# Differ without the model being another one.
_VOLATILE_FIELDS = frozenset(
    {"transformers_version", "_name_or_path", "use_cache", "architectures", "output_router_logits"}
)


class CheckpointError(ValueError):
    """A checkpoint cannot be written or used; the message says which file and why."""


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        step: the optimizer steps done.
        files: size in bytes and SHA-256 of each file.
        model: the architecture, field by field.
        version: of forebay, that wrote it.
    """

    step: int
    files: Mapping[str, tuple[int, str]]
    model: Mapping[str, Any]
    version: str


def model_fields(model: Any) -> dict[str, Any]:
    """Return the architecture of a transformers model as flat JSON values."""
    fields: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    return {key: value for key, value in sorted(fields.items()) if key not in _VOLATILE_FIELDS}


def check_writable(root: Path, *, needed_bytes: int = 0, setting: str = "checkpoint.save") -> None:
    """Make ``root`` and try to write there, before any training is done.

    Args:
        root: the folder.
        needed_bytes: what one checkpoint takes. Default 0.
        setting: that names the folder, for the message.

    Raises:
        CheckpointError: when that fails, or the disk is too full for one checkpoint.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(b"x")
        free_bytes = shutil.disk_usage(root).free
    except OSError as error:
        raise CheckpointError(
            f"{setting}={root}: cannot write there ({error.strerror or error}); choose another folder"
        ) from None
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{setting}={root}: a checkpoint takes about {needed_bytes / 2**30:.2f} GiB and "
            f"{free_bytes / 2**30:.2f} GiB are free; free some space or choose another folder"
        )


def list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints in ``root``, the one written last at the end."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if _NAME.fullmatch(p.name) and (p / MANIFEST_FILE).is_file()]
    return sorted(found, key=lambda p: ((p / MANIFEST_FILE).stat().st_mtime_ns, p.name))


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` stands for: itself, or the latest in it.

    Raises:
        FileNotFoundError: when there is none.
        CheckpointError: when ``latest`` names a checkpoint that is gone.
    """
    if not path.exists():
        raise FileNotFoundError(f"checkpoint.load={path}: no such folder")
    if (path / MANIFEST_FILE).is_file():
        return path
    latest = path / LATEST_FILE
    if latest.is_file():
        chosen = path / latest.read_text().strip()
        if (chosen / MANIFEST_FILE).is_file():
            return chosen
        others = ", ".join(p.name for p in list_checkpoints(path)) or "none"
        raise CheckpointError(
            f"{latest}: names {chosen.name}, which is not a complete checkpoint; others here: {others}. "
            "Give one of them as checkpoint.load"
        )
    # A crash between the rename and the first 'latest' leaves a complete checkpoint without a pointer.
    complete = list_checkpoints(path)
    if complete:
        return complete[-1]
    raise FileNotFoundError(
        f"checkpoint.load={path}: no checkpoint there (no {MANIFEST_FILE}, no {LATEST_FILE}, no complete step-* folder)"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read what ``folder`` holds.

    Raises:
        CheckpointError: when the manifest is damaged or of a newer format.
    """
    file = folder / MANIFEST_FILE
    try:
        data = json.loads(file.read_text())
        version = data["format_version"]
        manifest = Manifest(
            step=int(data["step"]),
            files={name: (int(entry["bytes"]), entry["sha256"]) for name, entry in data["files"].items()},
            model=data["model"],
            version=data["forebay_version"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); use another checkpoint") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format {version}, but forebay {forebay.__version__} reads format {FORMAT_VERSION}; it "
            f"was written by forebay {manifest.version}"
        )
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    for name, (size_bytes, digest) in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; use another checkpoint")
        actual_bytes = file.stat().st_size
        if actual_bytes != size_bytes:
            raise CheckpointError(
                f"{file}: {actual_bytes} bytes instead of {size_bytes}, so it is cut short or overwritten; "
                "use another checkpoint"
            )
        if _sha256(file) != digest:
            raise CheckpointError(f"{file}: its content has changed since it was written; use another checkpoint")


def check_same_model(folder: Path, manifest: Manifest, model: Any) -> None:
    """Check that a checkpoint fits ``model``, which may be on the meta device.

    Fields that only one side knows are left out: versions of transformers differ in them.

    Raises:
        CheckpointError: listing the fields that differ.
    """
    ours = model_fields(model)
    differing = [
        f"{key}: {manifest.model[key]!r} in the checkpoint, {ours[key]!r} here"
        for key in sorted(ours.keys() & manifest.model.keys())
        if ours[key] != manifest.model[key]
    ]
    if differing:
        raise CheckpointError(f"{folder}: checkpoint of another model; " + "; ".join(differing))


def save_checkpoint(
    root: Path, *, step: int, model: Any, state: Mapping[str, Any], config_yaml: str, keep: int | None
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        root: the folder of checkpoints; one run at a time writes to it.
        step: the optimizer steps done.
        model: a transformers model, up to date.
        state: everything else, as plain containers, numbers, strings and tensors.
        config_yaml: the resolved configuration.
        keep: how many to keep, this one included. None: all.

    Raises:
        CheckpointError: when writing fails; what was there before is untouched.
    """
    from safetensors import SafetensorError

    _remove_leftovers(root)
    temporary = root / f"step-{step:08d}.tmp-{os.getpid()}"
    try:
        temporary.mkdir()
        _write_files(temporary, step, model, state, config_yaml)
        final = _free_name(root, step)
        temporary.rename(final)
        _sync(root)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        existing = list_checkpoints(root)
        intact = f"the previous one, {existing[-1].name}, is intact" if existing else "there is none before it"
        raise CheckpointError(f"writing the checkpoint of step {step} to {root} failed ({error}); {intact}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _write_atomically(root / LATEST_FILE, f"{final.name}\n")
    if keep is not None:
        for old in list_checkpoints(root)[:-keep]:
            # Without its manifest a half-removed folder does not look complete.
            (old / MANIFEST_FILE).unlink()
            shutil.rmtree(old)
    return final


def load_model(folder: Path, model: Any) -> None:
    """Copy the weights of a checkpoint into ``model``, in place, tied weights included."""
    from safetensors.torch import load_model as load_safetensors

    load_safetensors(model, folder / MODEL_FILE, strict=True, device="cpu")


def load_state(folder: Path, *, memory_mapped: bool) -> dict[str, Any]:
    """Read everything but the weights, as tensors on the CPU. Runs no code from the file.

    Args:
        folder: a checkpoint.
        memory_mapped: leave the tensors in the file until they are copied elsewhere, so that they never
            take memory twice.
    """
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True, mmap=memory_mapped)
    assert isinstance(state, dict)
    return state


def _write_files(folder: Path, step: int, model: Any, state: Mapping[str, Any], config_yaml: str) -> None:
    from safetensors.torch import save_model

    writers: dict[str, Callable[[Path], Any]] = {
        MODEL_FILE: lambda file: save_model(model, str(file), metadata={"format": "pt"}),
        "config.json": lambda file: model.config.to_json_file(file, use_diff=True),
        "config.yaml": lambda file: file.write_text(config_yaml),
        STATE_FILE: lambda file: torch.save(dict(state), file),
    }
    files = {}
    for name, write in writers.items():
        file = folder / name
        write(file)
        _sync(file)
        files[name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = {
        "format_version": FORMAT_VERSION,
        "forebay_version": forebay.__version__,
        "step": step,
        "files": files,
        "model": model_fields(model),
    }
    # Last: a folder with a manifest is complete.
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
    _sync(folder / MANIFEST_FILE)
    _sync(folder)


def _remove_leftovers(root: Path) -> None:
    # Of runs that were killed while writing; nobody else writes here.
    for path in root.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _free_name(root: Path, step: int) -> Path:
    # A step that is saved a second time (training went back to an earlier checkpoint) gets a new name:
    # replacing a folder is not atomic, and the old one must stay until the new one is complete.
    name = root / f"step-{step:08d}"
    repeat = 1
    while name.exists():
        name = root / f"step-{step:08d}.{repeat}"
        repeat += 1
    return name


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(file)
    _sync(file.parent)


def _sync(path: Path) -> None:
    # Without it a power failure after the rename could leave a complete-looking folder of empty files.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
