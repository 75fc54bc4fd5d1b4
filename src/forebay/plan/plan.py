"""``forebay plan``, without its command line: from a model and a budget to answers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from forebay.config import resolve, validate
from forebay.config.overrides import parse_word, set_value
from forebay.config.resolve import COMMAND_LINE, Resolved
from forebay.config.rule import Engine
from forebay.config.schema import Config
from forebay.plan import profile as profiles
from forebay.plan.megatron import MegatronPlanner
from forebay.plan.model import Model, describe
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB, Budget, Layout
from forebay.plan.profile import Profile
from forebay.plan.solver import Answer, Planner, Solver

_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*(GiB|GB|G|MiB|TiB|TB)?", re.IGNORECASE)
_UNITS = {"": GIB, "g": GIB, "gib": GIB, "gb": 1e9, "mib": 2**20, "tib": 2**40, "tb": 1e12}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan with everything it was made from."""

    name: str
    config: Config
    engine: Engine
    model: Model
    layout: Layout
    budget: Budget
    profile: Profile
    why_profile: str
    planner: Planner
    answer: Answer


def parse_size(text: str, option: str) -> int:
    """Return bytes from ``24GiB``, ``24`` (GiB), ``80GB`` or ``1.5TiB``.

    Raises:
        ValueError: for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match.group(1)) * _UNITS[(match.group(2) or "").lower()]) if match else 0
    if num_bytes <= 0:
        raise ValueError(f"{option} {text!r}: expected an amount of memory, for example {option} 24GiB")
    return num_bytes


def load_model(name: str, words: list[str]) -> Resolved:
    """Return the configuration that MODEL and some overrides mean.

    Args:
        name: a recipe, a ``.yaml`` file, a folder with a ``config.json``, or a ``.json`` file with the fields of a
            transformers configuration.
        words: overrides.

    Raises:
        ValueError: for what is none of these.
        FileNotFoundError: for a file that does not exist.
    """
    path = Path(name).expanduser()
    if not path.is_dir() and path.suffix != ".json":
        return resolve(name, words)
    config = Config()
    sources = {}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{name}: no config.json in this folder, so it is no model of transformers")
        config.model.path = name
        sources["model.path"] = COMMAND_LINE
    else:
        if not path.is_file():
            raise FileNotFoundError(f"{name}: no such file")
        config.model.hf_config = _read_json(path)
    for word in words:
        key, value = parse_word(word)
        set_value(config, key, value)
        sources[key] = COMMAND_LINE
    return Resolved(config, name, "", sources)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ValueError(f"{path}: not a configuration of transformers, it has no model_type")
    # What transformers writes about the file, and not about the model.
    about = ("architectures", "transformers_version", "torch_dtype", "dtype", "auto_map", "_name_or_path")
    return {key: value for key, value in data.items() if key not in about}


def without_auto(config: Config) -> Config:
    """Return a configuration whose offload fraction is a number: what ``auto`` stands for is found from 0 up."""
    if not isinstance(config.optimizer.optimizer_offload_fraction, str):
        return config
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, optimizer_offload_fraction=0.0))


def make_plan(
    resolved: Resolved,
    *,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    engine: Engine = "native",
    layout: Layout | None = None,
    profile_name: str | None = None,
    gpu_name: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        resolved: the run; what is planned changes, the rest stays.
        gpu_bytes: of one GPU. Default None: as the profile says.
        host_bytes: of one machine. Default None: not limited.
        engine: who runs it.
        layout: how it is spread. Default None: one GPU.
        profile_name: see :func:`forebay.plan.profile.choose`.
        gpu_name: of the GPU in this machine, to choose a profile by.

    Raises:
        ValueError: for a configuration that the engine refuses, or a model that cannot be described.
    """
    layout = layout or Layout()
    config = without_auto(resolved.config)
    if engine == "native" and layout.num_gpus > 1:
        raise ValueError(
            f"--gpus {layout.num_gpus}: forebay train runs on one GPU in this version; plan for one, or use "
            "--engine megatron"
        )
    if config.train.global_batch_size % layout.data:
        raise ValueError(
            f"train.global_batch_size={config.train.global_batch_size} is not a multiple of the {layout.data} copies "
            f"of the model on {layout.num_gpus} GPUs; set --global-batch"
        )
    validate(resolved.config, engine, sources=resolved.sources)
    wanted_gib = None if gpu_bytes is None else gpu_bytes / GIB
    profile, why = profiles.choose(profile_name, gpu_memory_gib=wanted_gib, gpu_name=gpu_name)
    if gpu_bytes is None:
        gpu_bytes = int(profile.rate("gpu_memory_gib") * GIB)
    model = describe(config)
    budget = Budget(gpu_bytes, None if host_bytes is None else host_bytes // layout.ranks_per_node)
    planner: Planner
    if engine == "native":
        planner = NativePlanner(model, config, profile)
    else:
        planner = MegatronPlanner(model, config, profile, layout)
    num_layers = len(model.layers)
    solver = Solver(
        planner,
        config,
        budget,
        engine,
        num_layers=num_layers,
        num_stage_layers=-(-num_layers // layout.pipeline),
        num_data_parallel=layout.data,
    )
    return Plan(resolved.name, config, engine, model, layout, budget, profile, why, planner, solver.solve())
