"""Configurations that were written for Megatron Bridge: YAML files, lists of overrides, words.

Megatron Bridge has hundreds of keys that no rule here looks at. They are read past and returned, so that whoever
checks a configuration can say what was not looked at. A key that rules do look at must have a value of its type.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config import keys, yaml_format
from forebay.config.overrides import set_value
from forebay.config.resolve import COMMAND_LINE, Resolved, resolve
from forebay.config.schema import Config

_RENAMED = {
    "scheduler.lr_warmup_iters": "optimizer.lr_warmup_iters",
    "scheduler.lr_decay_iters": "optimizer.lr_decay_iters",
    "scheduler.lr_decay_style": "optimizer.lr_decay_style",
    "dataset.sequence_length": "dataset.seq_length",
    "rng.seed": "train.seed",
}
_DDP_SWITCH = "ddp.use_distributed_optimizer"
_SWITCH = "optimizer.use_distributed_optimizer"
# Its dtype is torch's own, its datasets are objects, and it names Adam where the decay may still be AdamW's.
_SPELLED_DIFFERENTLY = ("model.params_dtype", "dataset.path", "optimizer.optimizer", "optimizer.lr_decay_style")


@dataclass
class Foreign:
    """A configuration for Megatron, as far as forebay knows its keys.

    Attributes:
        resolved: the values of known keys; all others are at forebay's default.
        not_checked: the other keys with their values: no rule looks at them.
        hints: for keys in ``not_checked`` that look mistyped, the key that was probably meant.
    """

    resolved: Resolved
    not_checked: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)


def read_words(path: Path) -> list[str]:
    """Return the overrides in a text file: any number a line, quoted as in a shell, ``#`` starts a comment.

    A backslash may end a line, and words without ``=`` (the command they were copied with) are left out.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if quotes are not closed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"file {path}: no such file")
    try:
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"file {path}: not a list of overrides ({error})") from None
    return [word for word in words if "=" in word]


def read(name: str | None, words: Sequence[str]) -> Foreign:
    """Return what a recipe or file and some words say to Megatron.

    Args:
        name: a recipe of forebay, a ``.yaml`` file of Megatron Bridge, or a text file of overrides. None: words only.
        words: ``section.key=value``; Hydra's ``+`` and ``++`` before the key are allowed.

    Raises:
        ValueError: for text that is not YAML, a word without ``=``, or a value of the wrong type.
        FileNotFoundError: for a file that does not exist.
    """
    if name is None:
        foreign = Foreign(Resolved(Config(), "overrides", "", {}))
    elif name.endswith((".yaml", ".yml")):
        foreign = _read_yaml(Path(name).expanduser())
    elif "/" in name or Path(name).is_file():
        foreign = Foreign(Resolved(Config(), name, "", {}))
        words = [*read_words(Path(name).expanduser()), *words]
    else:
        foreign = Foreign(resolve(name))
    for word in words:
        key, equals, text = word.lstrip("+").partition("=")
        if not equals or not key or key != key.strip():
            raise ValueError(f"override {word!r}: expected key=value, for example model.cpu_offloading=True")
        where = f"override {word!r}"
        _set(foreign, key, text, where, is_text=True)
    _join_switches(foreign)
    foreign.hints = {key: hint for key in foreign.not_checked if (hint := _hint(key)) is not None}
    return foreign


def _read_yaml(path: Path) -> Foreign:
    where = f"file {path}"
    if not path.is_file():
        raise FileNotFoundError(f"{where}: no such file")
    data = yaml_format.parse(path.read_text(encoding="utf-8"), where)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected sections such as train: and model:, got {type(data).__name__}")
    foreign = Foreign(Resolved(Config(), str(path), "", {}))
    for key, value in _flatten(data):
        _set(foreign, key, value, where)
    return foreign


def _flatten(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; ``_target_`` and the like say what to build, not with which settings."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if str(name).startswith("_"):
            continue
        if isinstance(value, Mapping) and value and key != keys.FREE_KEY and key not in keys.field_types():
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _set(foreign: Foreign, key: str, value: Any, where: str, *, is_text: bool = False) -> None:
    known = _RENAMED.get(key, key)
    if known not in keys.field_types() and not known.startswith(keys.FREE_KEY + "."):
        foreign.not_checked[key] = value
        return
    if value is None or (is_text and value.lower() in ("null", "none", "~")):
        # Megatron's way to say "not set", also for keys that are never null here.
        value = _default(known)
    elif known in keys.field_types():
        try:
            value = keys.from_text(known, value, where) if is_text else keys.from_value(known, value, where)
        except ValueError:
            if known not in _SPELLED_DIFFERENTLY:
                raise
            foreign.not_checked[key] = value
            return
    set_value(foreign.resolved.config, known, value)
    foreign.resolved.sources[known] = COMMAND_LINE if is_text else where


def _join_switches(foreign: Foreign) -> None:
    """Do as Megatron Bridge does: the distributed optimizer is on when either of its two switches is."""
    other = str(foreign.not_checked.pop(_DDP_SWITCH, None)).lower()  # a word's value is text
    if other == "true":
        foreign.resolved.config.optimizer.use_distributed_optimizer = True
    elif other == "false" and _SWITCH not in foreign.resolved.sources:
        foreign.resolved.config.optimizer.use_distributed_optimizer = False


def _hint(key: str) -> str | None:
    """Return the known key that differs from ``key`` by a slip of the finger."""
    section = key.partition(".")[0]
    same = [known for known in keys.field_types() if known.startswith(section + ".")]
    found = difflib.get_close_matches(key, same, n=1, cutoff=0.92)
    return found[0] if found else None


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(Config(), section), name, None)
