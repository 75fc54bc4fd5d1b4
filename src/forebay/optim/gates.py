"""Gates: a module's forward waits, on the stream, until its own weights are current, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forebay.engine import Engine, Event, Lane


class Gates:
    """The events after which each parameter is current, and the hooks that wait for them.

    Args:
        engine: whose events they are; None for the gates of a copied model, which are never closed.
        tick: called before each module's forward with a number that tells modules apart.

    Which module's forward reads a parameter is learned: during the first forward after :meth:`attach`
    everything waits at the root. Later a parameter waits at the module that owns it, if that module's forward
    ran then, else (its parent reads it directly) still at the root.

    Attributes:
        attached: whether hooks are placed.
        module_order: parameters in the order in which the model registers them, numbered.
    """

    def __init__(self, engine: Engine | None = None, tick: Callable[[int], object] = lambda key: None) -> None:
        self.attached = False
        self._engine = engine
        self._tick = tick
        self._keys: dict[torch.nn.Module, int] = {}
        self.module_order: dict[torch.Tensor, int] = {}
        self._closed: dict[torch.Tensor, list[Event]] = {}
        self._owned: set[torch.Tensor] = set()
        self._learned = False

    def close(self, param: torch.Tensor, event: Event) -> None:
        """Let readers of ``param`` wait for ``event``."""
        self._closed.setdefault(param, []).append(event)

    def open_all(self) -> None:
        """Let the compute lane wait for everything."""
        for param in list(self._closed):
            self._open(param)

    def attach(self, model: torch.nn.Module) -> None:
        """Place the hooks on ``model`` and its modules.

        Raises:
            ValueError: if hooks are placed already.
        """
        if self.attached:
            raise ValueError("attach() was called before; an optimizer is attached to one model, once")
        self.attached = True
        self.module_order = {param: number for number, param in enumerate(model.parameters())}
        model.register_forward_pre_hook(self._before_root, prepend=True)
        model.register_forward_hook(self._after_root)
        model.register_state_dict_pre_hook(self._before_state_dict)
        model.register_load_state_dict_pre_hook(self._before_load_state_dict)
        for key, module in enumerate(model.modules()):
            if next(module.parameters(recurse=False), None) is not None:
                self._keys[module] = key
                module.register_forward_pre_hook(self._before)

    # The hooks are methods so that a model that has them can be copied and pickled; a copy of the model is not
    # attached to anything.
    def __reduce__(self) -> tuple[type[Gates], tuple[()]]:
        return Gates, ()

    def _before_root(self, module: torch.nn.Module, args: Any) -> None:
        for param in list(self._closed):
            if not self._learned or param not in self._owned:
                self._open(param)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if not self._learned:
            self._owned.update(module.parameters(recurse=False))
        if torch.is_grad_enabled():  # an evaluation in between is not part of a training step
            self._tick(self._keys.get(module, -1))
        if self._closed:
            for param in module.parameters(recurse=False):
                self._open(param)

    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._learned = True

    def _before_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        self.open_all()

    def _before_load_state_dict(self, *args: Any) -> None:
        # An update that is still on its way up would overwrite what is loaded.
        self.open_all()

    def _open(self, param: torch.Tensor) -> None:
        for event in self._closed.pop(param, ()):
            assert self._engine is not None
            self._engine.wait(Lane.COMPUTE, event)
