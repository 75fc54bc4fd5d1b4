"""What a machine can do, in numbers that each say where they come from.

A datasheet names ceilings that no program reaches, so a datasheet number counts with a share of it. For matrix products
and copies the share is what the H200, measured, reaches of its own datasheet (740 of 989 TFLOP/s, 55 and 48 of 64
GB/s). Host memory counts with 80%, and the host kernel beside copies gets 58% of that, again as measured
beside the H200. The shares of GPU memory and links are assumptions.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config import yaml_format

PROFILE_VARIABLE = "FOREBAY_PROFILE"
KINDS = ("measured", "datasheet")
_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Field:
    """A number of a profile.

    Attributes:
        text: what it is, with its unit.
        share_of_datasheet: what of a datasheet's figure a program gets.
        is_needed: whether a plan cannot do without it.
    """

    text: str
    share_of_datasheet: float = 1.0
    is_needed: bool = True


FIELDS: dict[str, Field] = {
    "gpu_memory_gib": Field("GPU memory, GiB"),
    "matmul_tflops": Field("dense bf16 matrix products, TFLOP/s", 0.75),
    "gpu_memory_gbps": Field("GPU memory, GB/s, reads and writes", 0.85),
    "down_gbps": Field("pinned copies down (GPU to host), GB/s, when only that direction runs", 0.86),
    "up_gbps": Field("pinned copies up (host to GPU), GB/s, when only that direction runs", 0.86),
    "down_both_gbps": Field("copies down while copies up run, GB/s", 0.75),
    "up_both_gbps": Field("copies up while copies down run, GB/s", 0.75),
    "host_memory_gbps": Field("host memory for one GPU, GB/s, reads and writes in place", 0.8),
    "host_update_gbps": Field("what the host kernel reads and writes while copies run, GB/s", 0.46),
    "host_cores": Field("cores for one GPU"),
    "pinned_allocation_gbps": Field("allocating pinned memory, GB/s", is_needed=False),
    "gpu_link_gbps": Field("GPU to GPU within a machine, GB/s each way", 0.75, is_needed=False),
    "network_gbps": Field("network for one GPU, GB/s each way", 0.8, is_needed=False),
}
"""Every number that a profile may have. GB is 1e9 bytes, GiB 2**30."""


@dataclass(frozen=True)
class Number:
    """A value, whether it was ``measured`` or is a ``datasheet``'s, and the source in words."""

    value: float
    kind: str
    source: str


@dataclass
class Profile:
    """A machine, seen from one of its GPUs.

    Attributes:
        name: of the shipped profile or the file.
        description: the machine in a line.
        numbers: by the names in :data:`FIELDS`.
        gpu_names: as torch reports them.
        details: what was measured beside (curves by size and by threads, NUMA layout, limits); not planned with.
    """

    name: str
    description: str
    numbers: dict[str, Number]
    gpu_names: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """Return what a program gets of a number: all of a measured one, a share of a datasheet's.

        Args:
            name: one of :data:`FIELDS`.
        """
        number = self.numbers[name]
        return number.value * (FIELDS[name].share_of_datasheet if number.kind == "datasheet" else 1.0)

    def needs(self, name: str) -> float:
        """Return :meth:`rate` of a number that a profile may lack.

        Raises:
            ValueError: if this one lacks it.
        """
        if name not in self.numbers:
            raise ValueError(
                f"profile {self.name} has no {name} ({FIELDS[name].text}), which several GPUs need; add it to the "
                "file, or name another with --profile"
            )
        return self.rate(name)

    def rates(self) -> dict[str, float]:
        """Return what the division between streamed and host placement goes by, in GB/s."""
        names = ("down_gbps", "up_gbps", "down_both_gbps", "up_both_gbps", "host_update_gbps")
        return {name: self.rate(name) for name in names}

    @property
    def is_measured(self) -> bool:
        """Whether all rates of this machine's own GPU and host were measured."""
        return all(self.numbers[name].kind == "measured" for name in (*self.rates(), "matmul_tflops"))

    def to_data(self) -> dict[str, Any]:
        """Return what is written to a file."""
        numbers = {
            name: {"value": number.value, "kind": number.kind, "source": number.source}
            for name, number in self.numbers.items()
        }
        data = {"description": self.description, "gpu_names": list(self.gpu_names), "numbers": numbers}
        return {**data, **({"details": self.details} if self.details else {})}


def shipped() -> list[str]:
    """Return the names of the profiles that come with forebay, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def stored_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where ``forebay calibrate`` stores this machine's profile unless told otherwise.

    ``FOREBAY_PROFILE`` if set; else a file of the machine's name in the user's cache, because machines of a cluster
    share a home.
    """
    chosen = environment.get(PROFILE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    host = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "machine"
    return Path(cache).expanduser() / "forebay" / "profiles" / f"{host}.yaml"


def load(name_or_path: str) -> Profile:
    """Return a profile by the name of a shipped one or the path of a file (it ends in .yaml or has a slash).

    Raises:
        ValueError: for an unknown name, or a file that is no profile; says what is wrong with which number.
        FileNotFoundError: for a file that does not exist.
    """
    if name_or_path in shipped():
        path = _FOLDER / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"profile {path}: no such file; `forebay calibrate --output {path}` makes one")
    else:
        raise ValueError(
            f"unknown profile {name_or_path!r}; the shipped ones are {', '.join(shipped())}; a file of your own needs "
            "a path that ends in .yaml"
        )
    where = f"profile {name_or_path}"
    return from_data(yaml_format.parse(path.read_text(encoding="utf-8"), where), path.stem, where)


def from_data(data: Any, name: str, where: str) -> Profile:
    """Return the profile that :meth:`Profile.to_data` describes.

    Raises:
        ValueError: naming the number that is missing or wrong.
    """
    if not isinstance(data, dict) or not isinstance(data.get("numbers"), dict):
        raise ValueError(f"{where}: not a profile; it needs numbers:, such as `forebay calibrate` writes")
    numbers = {}
    for key, entry in data["numbers"].items():
        if key not in FIELDS:
            raise ValueError(f"{where}: unknown number {key}; there are {', '.join(FIELDS)}")
        value = entry.get("value") if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{where}: {key}.value must be a number above 0 ({FIELDS[key].text}), got {value!r}")
        if entry.get("kind") not in KINDS or not entry.get("source"):
            raise ValueError(f"{where}: {key} needs kind: {' or '.join(KINDS)}, and a source")
        numbers[key] = Number(float(value), entry["kind"], str(entry["source"]))
    missing = [key for key, what in FIELDS.items() if what.is_needed and key not in numbers]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    names = tuple(map(str, data.get("gpu_names") or ()))
    return Profile(name, str(data.get("description", "")), numbers, names, data.get("details") or {})


def choose(name: str | None, *, gpu_memory_gib: float | None, gpu_name: str | None = None) -> tuple[Profile, str]:
    """Return the profile to plan with, and in words why that one.

    Args:
        name: what the user asked for: a shipped name or a path. None: this machine's stored profile if there is one
            of a GPU, else the shipped profile of the GPU here, else the shipped one whose memory is nearest.
        gpu_memory_gib: of the GPU that is planned for; None: no preference.
        gpu_name: of the GPU in this machine, if there is one.
    """
    if name is not None:
        return load(name), "chosen"
    path = stored_path()
    if path.is_file():
        stored = load(str(path))
        if stored.gpu_names:  # of a machine without a GPU, the rates are no GPU's
            return stored, f"measured on this machine, {path}"
    profiles = [load(each) for each in shipped()]
    for profile in profiles:
        if gpu_name is not None and gpu_name in profile.gpu_names:
            return profile, f"shipped, for the {gpu_name} of this machine; `forebay calibrate` measures it"
    if gpu_memory_gib is None:
        return load("h200"), "shipped, because no other is named; --profile names one"

    def distance(profile: Profile) -> float:
        return abs(profile.numbers["gpu_memory_gib"].value - gpu_memory_gib)

    return min(profiles, key=distance), "shipped, the nearest GPU memory; --profile names another"
