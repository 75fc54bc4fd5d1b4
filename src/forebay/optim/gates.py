"""Gates: a module's forward waits, on the stream, until its own weights are current, and for nothing else.

What runs inside a compiled graph cannot wait, so a compiled module waits as one, for all its weights, before its
graph. Its hooks, and those of the model, are calls that Dynamo does not trace: where it meets one, nothing has been
computed yet, so what follows is still one graph. The hooks of modules inside do nothing while they are traced, so
nothing of them is left in the graph. (``_disable_dynamo`` is ``torch.compiler.disable`` without importing the
compiler; a call costs 2 microseconds.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from forebay.engine import Engine, Event, Lane

logger = logging.getLogger("forebay")


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calling ``module`` runs a graph: after ``module.compile()``, or made by ``torch.compile``."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


class Gates:
    """The events after which each parameter is current, and the hooks that wait for them.

    Args:
        engine: whose events they are; None for the gates of a copied model, which are never closed.
        tick: called before each module's forward with a number that tells modules apart.
        check: called before each forward of the model; raises if what the gates wait for has failed.

    Which module's forward reads a parameter is learned: during the first forward after :meth:`attach`
    everything waits at the root. Later a parameter waits at the module that owns it, if that module's forward
    ran then, else (its parent reads it directly, or it is inside a graph) still at the root.

    Attributes:
        attached: whether hooks are placed.
        module_order: parameters in the order in which the model registers them, numbered.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        tick: Callable[[int], object] = lambda key: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.attached = False
        self._engine = engine
        self._tick = tick
        self._check = check
        self._keys: dict[torch.nn.Module, int] = {}
        self.module_order: dict[torch.Tensor, int] = {}
        self._closed: dict[torch.Tensor, list[Event]] = {}
        self._owned: set[torch.Tensor] = set()
        self._learned = False
        self._told = False
        self._handles: dict[torch.nn.Module, RemovableHandle] = {}

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
            self._keys[module] = key
            self._handles[module] = module.register_forward_pre_hook(self._before)

    # The hooks are methods so that a model that has them can be copied and pickled; a copy of the model is not
    # attached to anything.
    def __reduce__(self) -> tuple[type[Gates], tuple[()]]:
        return Gates, ()

    @_disable_dynamo
    def _before_root(self, module: torch.nn.Module, args: Any) -> None:
        self._check()
        if self._closed and self._learned and not self._told:
            self._tell(module)
        for param in list(self._closed):
            if not self._learned or param not in self._owned:
                self._open(param)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        """Run before a module's forward until it has once: from then on it is known whether it waits."""
        if not torch.compiler.is_compiling() or _is_compiled(module):
            self._enter_first(module, args)

    @_disable_dynamo
    def _enter_first(self, module: torch.nn.Module, args: Any) -> None:
        handle = self._handles.pop(module, None)
        if handle is None:  # a copy of a model
            return
        handle.remove()
        params = set(module.parameters(recurse=_is_compiled(module)))
        if not params:
            return
        # This hook stays a wait even if the module is compiled later, though it breaks the graph then.
        module.register_forward_pre_hook(self._enter)
        if not self._learned:
            self._owned |= params
        self._enter(module, args)

    @_disable_dynamo
    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation in between is not part of a training step
            self._tick(self._keys.get(module, -1))
        if self._closed:
            for param in module.parameters(recurse=_is_compiled(module)):
                self._open(param)

    @_disable_dynamo
    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._learned = True

    def _tell(self, root: torch.nn.Module) -> None:
        """Say, once, if most parameters wait at the start of forward, so that updates do not run under it."""
        self._told = True
        at_root = [param for param in self.module_order if _is_compiled(root) or param not in self._owned]
        share = sum(p.numel() for p in at_root) / max(sum(p.numel() for p in self.module_order), 1)
        if share > 0.5 and sum(bool(module._parameters) for module in root.modules()) > 1:
            logger.warning(
                "%.0f%% of the parameters wait for their updates at the start of the model's forward, as those inside "
                "a compiled graph do: updates do not run under forward. Compile the model block by block, before "
                "attach(), and they do",
                100 * share,
            )

    def _before_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        self.open_all()

    def _before_load_state_dict(self, *args: Any) -> None:
        # An update that is still on its way up would overwrite what is loaded.
        self.open_all()

    def _open(self, param: torch.Tensor) -> None:
        for event in self._closed.pop(param, ()):
            assert self._engine is not None
            self._engine.wait(Lane.COMPUTE, event)
