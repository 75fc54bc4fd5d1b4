"""HybridDeviceOptimizer: one optimizer class for the part of the parameters updated on the CPU, one for the rest.

A drop-in for the class of that name in Megatron Core (documented in its developer guide); the interface is its,
the implementation is not. What leaves the device is updated there by a torch optimizer class of the user's
choice, so results are that class's, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from forebay.engine import Buffer, Engine, get_engine
from forebay.optim import hybrid_arguments, hybrid_slots, hybrid_state
from forebay.optim.host_adamw import HostAdamW
from forebay.optim.hybrid_arguments import OptimizerClass, as_groups, named
from forebay.optim.hybrid_slots import PythonTask, Slot
from forebay.optim.hybrid_state import MASTER, Saved, StateAccount
from forebay.optim.hybrid_step import Bucket, Step, gradient_of


@dataclasses.dataclass(frozen=True)
class _Config:
    offload_fraction: float
    cpu_optimizer_cls: type[Optimizer]
    gpu_optimizer_cls: type[Optimizer]
    param_update_in_fp32: bool
    pin_cpu_grads: bool
    pin_cpu_params: bool
    overlap_cpu_optimizer_d2h_h2d: bool
    kwargs: dict[str, Any]


class HybridDeviceOptimizer(Optimizer):
    """Updates a fraction of the parameters on the CPU, where their optimizer state lives, the rest on the device.

    Parameters are offloaded in group order while the elements offloaded so far are fewer than ``offload_fraction``
    of all elements. Tensors are not split. Parameters that do not require a gradient are placed, by the same rule,
    when they first have one; so are those of ``add_param_group``. What is placed stays where it is.

    ``state`` is keyed by the given parameters, is empty before the first step, and holds what the classes keep
    (``step``, ``exp_avg``, ``exp_avg_sq`` for Adam) and, with ``param_update_in_fp32``, ``master_param``: the tensor
    that is updated, which is a copy in fp32 for a parameter of lower precision. A parameter's ``decoupled_grad``
    attribute, if set, takes the place of its ``grad``, in any floating dtype.

    Writing to a parameter between steps (loading weights, an EMA swap) is noticed and carried over to its copies,
    as long as autograd's version counter notices it: after writing through ``param.data`` call
    :meth:`update_fp32_param_by_new_param`.

    Args:
        params: parameters or parameter groups, all on one device. Groups may have keys that no class knows
            (``wd_mult``); they are kept, and handed on.
        offload_fraction: share of the elements that are updated on the CPU, 0.0 to 1.0.
        cpu_optimizer_cls: optimizer class for these. Default: ``HostAdamW``.
        gpu_optimizer_cls: optimizer class for the others. Default: ``torch.optim.AdamW``.
        param_update_in_fp32: update an fp32 master of each parameter of lower precision.
        pin_cpu_grads: pin the host memory that gradients land in.
        pin_cpu_params: pin the host memory of offloaded weights and masters.
        overlap_cpu_optimizer_d2h_h2d: move gradients and weights in buckets, so that the CPU updates one while
            others travel. Otherwise there is one bucket. Results are the same.
        engine: moves the bytes. Default: the process's engine for the parameters' device.
        **kwargs: for the classes (``lr``, ``betas``, ``momentum``, ...); each gets those that it takes. An option that
            is not given, and for which the two classes have different defaults, has its own default in each and
            is in no group.

    Attributes:
        param_to_fp32_param: the fp32 master of each parameter that has one.
        bucket_bytes: gradient bytes from which a bucket is full; set it on a subclass. 16 MiB is where copies
            reach the bandwidth of the bus (DESIGN.md, section 1).

    Raises:
        ValueError: a value out of range, an argument that neither class takes, parameters on several devices, none at
            all, or with gaps in memory.
        TypeError: a class that is no ``torch.optim.Optimizer``; a parameter that is a DTensor.
    """

    bucket_bytes = 16 * 2**20

    def __init__(
        self,
        params: ParamsT,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[Optimizer] | None = None,
        gpu_optimizer_cls: type[Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        engine: Engine | None = None,
        **kwargs: Any,
    ) -> None:
        hybrid_arguments.check_fraction(offload_fraction)
        groups = as_groups(params)
        first = next((param for group in groups for _, param in named(group["params"])), None)
        if first is None:
            raise ValueError(
                "there are no parameters to optimize: params is empty (a generator can be read only once; is it "
                "model.parameters() of a model without any?)"
            )
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"params must be tensors, (name, tensor) pairs or groups (dict) of them, got {first!r}")
        config = _Config(
            offload_fraction,
            HostAdamW if cpu_optimizer_cls is None else cpu_optimizer_cls,
            torch.optim.AdamW if gpu_optimizer_cls is None else gpu_optimizer_cls,
            param_update_in_fp32,
            pin_cpu_grads,
            pin_cpu_params,
            overlap_cpu_optimizer_d2h_h2d,
            kwargs,
        )
        self._set_up(config, first.device, engine)
        super().__init__(groups, hybrid_arguments.merged_defaults((self._cpu_class, self._gpu_class), kwargs))
        self._place([p for p in self._all_params() if p.requires_grad])
        self._constructed = True

    def _set_up(self, config: _Config, device: torch.device, engine: Engine | None) -> None:
        """Set all attributes that do not depend on the parameters."""
        self._config = config
        self._cpu_class = OptimizerClass(
            "cpu_optimizer_cls", config.cpu_optimizer_cls, config.kwargs, torch.device("cpu")
        )
        self._gpu_class = OptimizerClass("gpu_optimizer_cls", config.gpu_optimizer_cls, config.kwargs, device)
        hybrid_arguments.check_kwargs((self._cpu_class, self._gpu_class), config.kwargs)
        self._engine = get_engine(device) if engine is None else engine
        if self._engine.device != device:
            raise ValueError(
                f"the parameters are on {device} but the engine drives {self._engine.device}; leave out `engine`, or "
                "give one of the parameters' device"
            )
        self._task = PythonTask()
        self._step = Step(self._engine, self._task, pin_grads=config.pin_cpu_grads)
        # Without this the host memory could be unmapped under uploads of the last step.
        weakref.finalize(self, self._step.finish).atexit = False
        self._slots: dict[torch.Tensor, Slot] = {}
        self._buckets: list[Bucket] = []
        self.gpu_optimizer: Optimizer | None = None
        self.param_to_fp32_param: dict[torch.Tensor, torch.Tensor] = {}
        # A sub-optimizer's group, its class, and the number of the user's group that it follows.
        self._followers: list[tuple[dict[str, Any], OptimizerClass, int]] = []
        self._num_elements = 0
        self._num_offloaded = 0
        self._memory: list[Buffer] = []
        self._account = StateAccount(self, self._engine)
        self._constructed = False

    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        """The sub-optimizers that work on the CPU, one a bucket, in the order in which they run."""
        return [bucket.optimizer for bucket in self._buckets if bucket.optimizer is not None]

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        """All sub-optimizers: ``cpu_optimizers``, then ``gpu_optimizer`` unless it is None."""
        return self.cpu_optimizers + ([] if self.gpu_optimizer is None else [self.gpu_optimizer])

    # Placement

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in ``torch.optim.Optimizer``; the fraction then holds for old and new elements together."""
        group = as_groups([param_group])[0]
        for _, param in named(group["params"]):
            if isinstance(param, torch.Tensor):
                hybrid_slots.check_param(param, self._engine.device)
        hybrid_arguments.check_group({**self.defaults, **group}, self._config.offload_fraction)
        super().add_param_group(group)
        if not self._constructed:
            return
        try:
            self._place([p for p in self.param_groups[-1]["params"] if p.requires_grad])
        except Exception:
            self.param_groups.pop()  # there was no memory for it, or a class refused it
            raise

    def _all_params(self) -> list[torch.Tensor]:
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))

    def _place(self, params: Sequence[torch.Tensor], placement: Mapping[torch.Tensor, bool] | None = None) -> None:
        """Decide where ``params`` are updated, unless ``placement`` says, and make what is needed there."""
        num_elements = self._num_elements + sum(param.numel() for param in params)
        num_offloaded = self._num_offloaded
        group_of = {param: i for i, group in enumerate(self.param_groups) for param in group["params"]}
        offloaded, resident = [], []
        for param in params:
            wanted = num_offloaded < self._config.offload_fraction * num_elements
            if wanted if placement is None else placement[param]:
                num_offloaded += param.numel()
                offloaded.append(param)
            else:
                resident.append(param)
        slots: list[Slot] = []
        memory: list[Buffer] = []
        for chosen, kind in ((offloaded, self._cpu_class), (resident, self._gpu_class)):
            new, buffers = hybrid_slots.make_slots(
                self._engine,
                chosen,
                groups=[group_of[param] for param in chosen],
                kind=kind,
                offloaded=kind is self._cpu_class,
                with_masters=self._config.param_update_in_fp32,
                pinned=self._config.pin_cpu_params,
            )
            slots += new
            memory += buffers
        hybrid_slots.refresh(self._engine, self._task, slots, keep_residue=False)
        self._assign(slots)
        self._num_elements, self._num_offloaded = num_elements, num_offloaded
        self._memory += memory
        for slot in slots:
            self._slots[slot.param] = slot
            if slot.has_master:
                self.param_to_fp32_param[slot.param] = slot.inner

    def _assign(self, slots: Sequence[Slot]) -> None:
        """Give ``slots`` to sub-optimizers."""
        full = self.bucket_bytes if self._config.overlap_cpu_optimizer_d2h_h2d else math.inf
        new: dict[Bucket, list[Slot]] = {}
        for slot in slots:
            if not slot.offloaded:
                continue
            if not self._buckets or self._buckets[-1].num_bytes >= full:
                self._buckets.append(Bucket())
            bucket = self._buckets[-1]
            bucket.slots.append(slot)
            bucket.num_bytes += slot.param.nbytes
            new.setdefault(bucket, []).append(slot)
        for bucket, own in new.items():
            bucket.optimizer = self._attach(bucket.optimizer, own)
        resident = [slot for slot in slots if not slot.offloaded]
        if resident:
            self.gpu_optimizer = self._attach(self.gpu_optimizer, resident)

    def _attach(self, optimizer: Optimizer | None, slots: Sequence[Slot]) -> Optimizer:
        kind = slots[0].kind
        numbers = list(dict.fromkeys(slot.group for slot in slots))
        groups = []
        for number in numbers:
            inners = [slot.inner for slot in slots if slot.group == number]
            groups.append({"params": inners, **kind.options(self.param_groups[number])})
        if optimizer is None:
            optimizer = kind.build(groups)
        else:
            for group in groups:
                optimizer.add_param_group(group)
        followers = zip(optimizer.param_groups[-len(groups) :], numbers, strict=True)
        self._followers += [(group, kind, number) for group, number in followers]
        for slot in slots:
            slot.optimizer = optimizer
        return optimizer

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients enabled, and returns it. It is called once.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a gradient is sparse or does not match its parameter, or a parameter was moved to another
                device or dtype since it was given to the optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {}
        for param in self._all_params():
            grad = gradient_of(param)
            if grad is not None:
                gradients[param] = grad
        self._place([param for param in gradients if param not in self._slots])
        self._refresh_written()
        self._push()
        resident = [slot for slot in self._slots.values() if not slot.offloaded]
        try:
            self._step.run(self._buckets, resident, self.gpu_optimizer, gradients)
        finally:
            self._pull(gradients)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``grad`` as in ``torch.optim.Optimizer``, and ``decoupled_grad`` likewise."""
        super().zero_grad(set_to_none)
        for param in self._all_params():
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None:
                if set_to_none:
                    param.decoupled_grad = None  # type: ignore[attr-defined]
                else:
                    grad.detach().zero_()

    def _push(self) -> None:
        """Hand the groups' values, and the states, to the sub-optimizers; the user may have changed either."""
        for group, kind, number in self._followers:
            group.update(kind.options(self.param_groups[number]))
        for slot in self._slots.values():
            assert slot.optimizer is not None
            state = self.state.get(slot.param)
            if state:
                # Without the master: classes take a state that is not empty for one that they have made.
                slot.optimizer.state[slot.inner] = {key: value for key, value in state.items() if key != MASTER}
            else:
                slot.optimizer.state.pop(slot.inner, None)

    def _pull(self, updated: Iterable[torch.Tensor]) -> None:
        """Take over the sub-optimizers' states of ``updated`` parameters."""
        num_states = len(self.state)
        for param in updated:
            slot = self._slots[param]
            assert slot.optimizer is not None
            self._set_state(slot, slot.optimizer.state.get(slot.inner, {}))
            slot.mark_current()
        if len(self.state) != num_states:
            self._account.update(self._slots.values(), self.state)

    def _set_state(self, slot: Slot, state: Mapping[str, Any]) -> None:
        state = dict(state)
        if self._config.param_update_in_fp32:
            state[MASTER] = slot.inner
        if state:
            self.state[slot.param] = state

    # Copies of the parameters

    def _refresh_written(self) -> None:
        stale = [slot for slot in self._slots.values() if slot.is_stale()]
        if stale:
            hybrid_slots.refresh(self._engine, self._task, stale, keep_residue=True)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Set the masters and the host copies to the parameters' present values, whatever they were before."""
        hybrid_slots.refresh(self._engine, self._task, list(self._slots.values()), keep_residue=False)

    # State

    @torch.no_grad()
    def dummy_step(self) -> None:
        """Make the state of all parameters that have none, as for loading a checkpoint in place.

        It is the state after one step of the class with a zero gradient: moments are 0 and, as in the reference,
        step counters are 1, so load something before training on. No parameter changes, and no state that exists.
        """
        self._refresh_written()
        for slot in self._slots.values():
            if not self.state.get(slot.param):
                options = slot.kind.options(self.param_groups[slot.group])
                self._set_state(slot, slot.kind.state_after_zero_gradient(slot.inner, options))
        self._account.update(self._slots.values(), self.state)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state in the schema of the classes, and ``master_param``; independent of the placement."""
        # A write since the last step must show in the masters that are saved.
        self._refresh_written()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of any fraction, or of the plain optimizer class.

        Tensors are copied to where each parameter is updated, in the dtype that the class keeps there. Masters that
        ``state_dict`` does not have are made from the parameters.
        """
        # Registered last, so that the user's hooks see the state dict as it is.
        handle = self.register_load_state_dict_pre_hook(hybrid_state.hide_saved_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _adopt(self, saved: Mapping[Any, Saved]) -> None:
        """Replace all state by ``saved``."""
        self.state.clear()
        self._place([p for p in saved if isinstance(p, torch.Tensor) and p not in self._slots])
        for key, hidden in saved.items():
            if isinstance(key, torch.Tensor):
                slot = self._slots[key]
                options = slot.kind.options(self.param_groups[slot.group])
                self._set_state(slot, hybrid_state.place(slot, hidden.state, options))
            else:
                self.state[key] = hidden.state
        own: list[Slot] = []
        others: list[Slot] = []
        for slot in self._slots.values():
            hidden = saved.get(slot.param, Saved({}))
            (own if hybrid_state.load_master(slot, hidden.state) else others).append(slot)
        hybrid_slots.refresh(self._engine, self._task, others, keep_residue=False)
        for slot in own:
            # The loaded master is the newer one, if the parameter was written to before.
            slot.mark_current()
        self._account.update(self._slots.values(), self.state)

    # Copying and pickling

    def __getstate__(self) -> dict[str, Any]:
        self._refresh_written()
        offloaded = {param: slot.offloaded for param, slot in self._slots.items()}
        return {**super().__getstate__(), "_config": self._config, "offloaded": offloaded}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        # Three callers: load_state_dict (with hidden states), pickle, and __deepcopy__, which keeps the engine.
        state = dict(state)
        saved = {key: value if isinstance(value, Saved) else Saved(value) for key, value in state["state"].items()}
        for key, hidden in saved.items():
            if isinstance(key, torch.Tensor):
                hybrid_state.check_master(key, hidden.state)
        state["state"] = defaultdict(dict)
        offloaded = state.pop("offloaded", None)
        engine = state.pop("engine", None)
        super().__setstate__(state)
        if offloaded is not None:
            device = next(iter(self._all_params())).device
            self._set_up(self._config, device, engine)
            self._place(list(offloaded), offloaded)
            self._constructed = True
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # from a class or version that did not have the option
        self._adopt(saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridDeviceOptimizer:
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate.__setstate__({**copy.deepcopy(self.__getstate__(), memo), "engine": self._engine})
        return duplicate
