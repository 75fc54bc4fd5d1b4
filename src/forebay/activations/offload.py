"""Activation offloading for the layers of a model: :func:`offload_activations`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from forebay.activations.handles import Packer, Rules, unpack
from forebay.activations.layers import find_layers
from forebay.activations.policy import Choice, Policy, PolicyLike, resolve
from forebay.activations.ranges import RangeStore
from forebay.activations.schedule import Pass, Schedule
from forebay.engine import Engine, get_engine

Call = Callable[..., Any]


def offload_activations(
    model_or_layers: nn.Module | Sequence[nn.Module],
    policy: PolicyLike = Choice.OFFLOAD,
    *,
    layers: str | Sequence[str] | None = None,
    min_offloaded_tensor_size: int = 1024 * 1024,
    fraction: float = 1.0,
    num_layers_in_flight: int = 1,
    num_layers_prefetched: int = 1,
    host_slab_bytes: int = 256 * 2**20,
    engine: Engine | None = None,
) -> ActivationOffload:
    """Hold what layers save for backward on the host, or compute it again, layer by layer as ``policy`` says.

    Gradients are the same bit for bit. Only forward has to run inside; backward may run anywhere, any number of
    times, or not at all::

        offload = forebay.offload_activations(model)
        with offload:
            loss = model(tokens, labels=tokens).loss
        loss.backward()

    ``offload(tokens, labels=tokens)`` does the same: it calls the model inside. Make the object once and use it for
    every step: it holds the pinned buffers and what it has learned about the order of backward.

    Args:
        model_or_layers: a model whose layers are found (see ``layers``), or its layers in the order they run.
        policy: what becomes of each layer's activations: a :class:`forebay.activations.Policy`, a sequence with a
            choice for each layer, or one choice for all but the last layer (backward needs that one's at once).
            Choices: ``"keep"``, ``"offload"``, ``"recompute"``, ``"recompute_offloaded_input"``. Default
            ``"offload"``.
        layers: module paths such as ``"model.layers.*"``, where ``*`` stands for one word. Default None: the
            largest ``nn.ModuleList`` of the model. Where one match lies inside another, the inner layer's choice
            holds for what it saves.
        min_offloaded_tensor_size: tensors that use fewer elements of memory stay. Default 1048576.
        fraction: of the bytes of each layer that may be offloaded, the share that is; 0.0 to 1.0. Default 1.0.
        num_layers_in_flight: how many layers may be on their way to the host while the next one computes. More
            hides copies better and holds that much more memory. Default 1.
        num_layers_prefetched: how many layers are fetched back before backward gets there. Default 1.
        host_slab_bytes: pinned memory is allocated in slabs of this size; larger tensors get one of their own.
            Default 256 MiB.
        engine: that copies. Default: this process's engine for the device that the layers are on.

    Raises:
        ValueError: if there are no such layers, for a policy that does not fit them, or a number out of range.

    Activations on the host are the idea of ``torch.autograd.graph.save_on_cpu`` and of Rhu et al., "vDNN" (2016);
    recomputation that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    found = find_layers(model_or_layers, layers)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must be between 0.0 and 1.0, got {fraction}: it is the share of bytes that leave")
    if min_offloaded_tensor_size < 1:
        raise ValueError(f"min_offloaded_tensor_size must be at least 1 element, got {min_offloaded_tensor_size}")
    for name, value in (
        ("num_layers_in_flight", num_layers_in_flight),
        ("num_layers_prefetched", num_layers_prefetched),
    ):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}; 1 is a good choice")
    if host_slab_bytes < 1024 or host_slab_bytes % 256:
        raise ValueError(f"host_slab_bytes must be a multiple of 256, and 1024 or more, got {host_slab_bytes}")
    root = model_or_layers if isinstance(model_or_layers, nn.Module) else nn.ModuleList(model_or_layers)
    if engine is None:
        engine = get_engine(next((param.device for param in root.parameters()), torch.device("cpu")))
    return ActivationOffload(
        root,
        found,
        resolve(policy, len(found)),
        engine,
        min_elements=min_offloaded_tensor_size,
        fraction=fraction,
        num_in_flight=num_layers_in_flight,
        num_prefetched=num_layers_prefetched,
        slab_bytes=host_slab_bytes,
    )


class ActivationOffload:
    """What :func:`offload_activations` returns: a context manager, and a callable that runs the model inside it.

    It is entered and left any number of times, and may be nested in itself.

    Attributes:
        layers: the layers by module path.
        engine: that copies.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: dict[str, nn.Module],
        policy: Policy,
        engine: Engine,
        *,
        min_elements: int,
        fraction: float,
        num_in_flight: int,
        num_prefetched: int,
        slab_bytes: int,
    ) -> None:
        self.layers = layers
        self._policy = policy
        self.engine = engine
        self._root = root
        self._layers = list(layers.items())
        words = [path.split(".") for path in layers]
        self._parents = sorted({".".join(path[:num]) for path in words for num in range(len(path))})
        self._rules = Rules(engine.device, min_elements, fraction, root)
        self._store = RangeStore(engine, slab_bytes=slab_bytes)
        self._schedule = Schedule(engine, self._store, num_in_flight=num_in_flight, num_prefetched=num_prefetched)
        self._depth = 0

    def __enter__(self) -> ActivationOffload:
        if self._depth == 0:
            self._refuse_compiled_parents()
            self._rules.parameters = None  # they may have been replaced
            for index in range(len(self._layers)):
                self._intercept(index)
        self._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave(len(self._layers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model inside; ValueError if it was made from a list of layers."""
        if isinstance(self._root, nn.ModuleList):
            raise ValueError(
                "a list of layers cannot be called; call the model that they belong to inside `with offload:`, or make "
                "the object from the model"
            )
        with self:
            return self._root(*args, **kwargs)

    @property
    def policy(self) -> Policy:
        """A choice for each layer; it may be replaced between two forwards.

        Raises ValueError for a policy that does not fit the layers.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: PolicyLike) -> None:
        self._policy = resolve(policy, len(self._layers))

    @property
    def num_pinned_allocations(self) -> int:
        """How many times host memory was allocated; it stays the same once steps repeat."""
        return self._store.pool.num_allocations

    @property
    def num_host_buffers(self) -> int:
        """How many host buffers are held by graphs or by copies on their way."""
        return self._store.pool.num_out

    def trim(self) -> int:
        """Give back the host memory that no graph holds; return how many bytes. The next step pins it again."""
        self.engine.synchronize()  # a slab with a copy on its way cannot go
        return self._store.pool.trim()

    # Layers

    def _refuse_compiled_parents(self) -> None:
        for path in self._parents:
            module = self._root.get_submodule(path)
            by_method = module.__dict__.get(_ATTRIBUTE)
            compiled = by_method is not None and not isinstance(by_method, _Interception)
            if compiled or "dynamo_ctx" in module.__dict__:
                raise ValueError(
                    f"{path or 'the model'} is compiled as a whole: its layers run as part of it, never called, so "
                    "nothing would be offloaded. Compile each layer instead (layer.compile())"
                )

    def _intercept(self, index: int) -> None:
        path, layer = self._layers[index]
        # The attribute that `nn.Module.__call__` calls in place of its own code if it is set, which is what
        # `module.compile()` does. So this is outside of a compiled layer, where no tracer comes by, and outside of
        # the layer's own hooks, which are part of its forward.
        present = layer.__dict__.get(_ATTRIBUTE)
        if isinstance(present, _Interception):
            self._leave(index)
            raise ValueError(
                f"layer {path!r} is offloaded by another object of forebay.offload_activations "
                "that is in use; leave that one first, or make one object for both"
            )
        layer.__dict__[_ATTRIBUTE] = _Interception(self, index, layer, present)

    def _leave(self, num_layers: int) -> None:
        for _, layer in self._layers[:num_layers]:
            _release(layer)

    def _run(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or _is_recomputed():
            return call(*args, **kwargs)
        this = self._schedule.begin(index)
        try:
            output = self._forward(this, self._policy.choices[index], call, args, kwargs)
        finally:
            self._schedule.end(this)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                # Where backward enters the layer: earlier than the first unpack, and layers that keep everything
                # have no other sign that the next ones' copies should start.
                tensor.register_hook(functools.partial(_reach, self._schedule, this.number, index))
        return output

    def _forward(self, this: Pass, choice: Choice, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if choice is Choice.KEEP:
            return call(*args, **kwargs)
        if choice is Choice.RECOMPUTE:
            return _recomputed(call, args, kwargs)
        path, layer = self._layers[this.layer]
        packer = Packer(this, layer, path, self._rules, self._store, self._schedule)
        with saved_tensors_hooks(packer.pack, unpack):
            if choice is Choice.OFFLOAD:
                return call(*args, **kwargs)
            # Checkpointing saves its inputs under the hooks that are in force around it, and the rest under its own.
            return _recomputed(call, args, kwargs)


_ATTRIBUTE = "_compiled_call_impl"


class _Interception:
    """Stands in for the call of one layer, between entering and leaving."""

    def __init__(self, offload: ActivationOffload, index: int, layer: nn.Module, compiled: Call | None) -> None:
        self.compiled = compiled
        self._offload = offload
        self._index = index
        self._call = compiled if compiled is not None else layer._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._offload._run(self._index, self._call, args, kwargs)


def _release(layer: nn.Module) -> None:
    present = layer.__dict__.get(_ATTRIBUTE)
    if not isinstance(present, _Interception):
        return  # compiled meanwhile: that has replaced it
    if present.compiled is None:
        del layer.__dict__[_ATTRIBUTE]
    else:
        layer.__dict__[_ATTRIBUTE] = present.compiled


def _recomputed(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Checkpointing takes care of positional tensors only; tensors anywhere else in the arguments would be held by
    # reference, on the device.
    leaves, spec = pytree.tree_flatten((args, kwargs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others = [None if found else leaf for leaf, found in zip(leaves, is_tensor, strict=True)]

    def run(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        merged = [next(given) if found else other for other, found in zip(others, is_tensor, strict=True)]
        run_args, run_kwargs = pytree.tree_unflatten(merged, spec)
        return call(*run_args, **run_kwargs)

    tensors = [leaf for leaf, found in zip(leaves, is_tensor, strict=True) if found]
    return checkpoint(run, *tensors, use_reentrant=False)


def _is_recomputed() -> bool:
    """Return whether this forward is part of a backward, or of a checkpoint that will run it again."""
    if torch._C._current_graph_task_id() != -1:
        return True  # what is saved now is used now
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _reach(schedule: Schedule, number: int, layer: int, grad: torch.Tensor) -> None:
    schedule.reach(number, layer)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    else:
        yield from (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
