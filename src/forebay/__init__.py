"""forebay trains language models with part of their memory on the host.

The public names are loaded when first used, so that importing the package costs nothing and never
initialises CUDA.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "AdamW": "forebay.optim.adamw",
    "HybridDeviceOptimizer": "forebay.optim.hybrid",
    "Lion": "forebay.optim.momentum",
    "OffloadedOptimizer": "forebay.optim.offloaded",
    "SGD": "forebay.optim.momentum",
    "offload_activations": "forebay.activations.offload",
    "plan_memory": "forebay.optim.options",
    "trace": "forebay.report.trace",
}

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "AdamW",
    "HybridDeviceOptimizer",
    "Lion",
    "OffloadedOptimizer",
    "__version__",
    "offload_activations",
    "plan_memory",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
