"""What ``torch.optim.AdamW`` does in a training script, one module a behaviour, for any optimizer to be held against.

A behaviour is a module here that has a function ``check(make)`` and, as its first docstring line, what is expected.
``make`` is a :class:`Maker` of the optimizer under test. ``check`` runs one script twice, with it and with plain torch,
each on its own model and the same data, and raises :class:`Differs` (an AssertionError) with a sentence if what can be
observed is not the same. Any other exception comes from the optimizer under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer


class Differs(AssertionError):
    """The optimizer under test behaves unlike torch's."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the optimizer under test: ``make(params_or_groups, fraction, **adamw_kwargs)``.

    Attributes:
        build: what is called.
        fraction: the offload fraction to test.
        device: where the model is.
        watch: makes a context that the optimizer under test runs in, and the reference does not.
    """

    build: Callable[..., Optimizer]
    fraction: float
    device: str = "cpu"
    watch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, params: Any, fraction: float, **adamw_kwargs: Any) -> Optimizer:
        return self.build(params, fraction, **adamw_kwargs)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """One behaviour: its name, what is expected, and the script that checks it."""

    name: str
    expectation: str
    check: Callable[[Maker], None]


def _discover() -> dict[str, Behaviour]:
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "check"):
            found[info.name] = Behaviour(info.name, (module.__doc__ or "").partition("\n")[0], module.check)
    return found


BEHAVIOURS = _discover()
