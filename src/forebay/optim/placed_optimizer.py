"""What the optimizers with placed state share: torch's interface over :class:`PlacedState`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from forebay.engine import Engine, Traffic, get_engine
from forebay.optim import device_update, state_dict
from forebay.optim.options import Options
from forebay.optim.placed_state import PlacedState
from forebay.optim.update_rule import PARAM_DTYPES, UpdateRule


class PlacedOptimizer(Optimizer):
    """An optimizer a share of whose state is on the host; see :class:`forebay.AdamW` for how it is used.

    Args:
        params: parameters, named parameters or groups.
        defaults: the hyperparameters of a group that does not set them.
        options: where state lives.
        engine: what moves it. Default: this process's engine for the parameters' device.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: Options, engine: Engine | None) -> None:
        self._options = options
        self._placed: PlacedState | None = None
        self._grad_scale: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._clipped_in_capture = False
        self._last_stats: tuple[Traffic, int, int] | None = None
        self._pending_masters: dict[torch.Tensor, state_dict.SavedMaster] = {}
        super().__init__(params, defaults)
        device = self.param_groups[0]["params"][0].device
        self._placed = PlacedState(engine or get_engine(device), options, self._make_rule(device))
        self.state = state_dict.LazyState(self)  # type: ignore[assignment]

    def _make_rule(self, device: torch.device) -> UpdateRule:
        """Return the rule by which state is updated on ``device``."""
        raise NotImplementedError

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a group with values out of range; add what it does not set and ``defaults`` lacks."""
        raise NotImplementedError

    def _arguments(self) -> dict[str, Any]:
        """Return what to hand to the constructor, beside groups and engine, to make an optimizer like this one."""
        raise NotImplementedError

    @property
    def placed(self) -> PlacedState:
        """The state in its placements."""
        assert self._placed is not None
        return self._placed

    @property
    def engine(self) -> Engine:
        """The engine that moves the state."""
        return self.placed.engine

    # Parameters and memory

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; if state is allocated, the fraction holds for the new group by itself."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        if self._placed is not None and self._placed.params:
            self.allocate()

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_hyperparameters(group)
        device = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else None
        for name, param in self._named([group]):
            if param.dtype not in PARAM_DTYPES:
                choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in PARAM_DTYPES)
                raise ValueError(f"parameter {name} is {param.dtype}; forebay.{type(self).__name__} takes {choices}")
            if param.device != device:
                raise ValueError(
                    f"parameter {name} is on {param.device}, others are on {device}; use one optimizer per device"
                )
            if not param.is_contiguous():
                raise ValueError(
                    f"parameter {name} is not contiguous (shape {tuple(param.shape)}, strides {param.stride()}); "
                    "make it contiguous before handing it to the optimizer"
                )

    def _named(self, groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
        named = []
        for index, group in enumerate(groups):
            names = group.get("param_names") or [
                f"{position} of group {index}" for position in range(len(group["params"]))
            ]
            named += list(zip(names, group["params"], strict=True))
        return named

    def allocate(self) -> None:
        """Allocate the state of all parameters that require a gradient now, rather than at the first step.

        Pinning 100 GB takes most of a minute, and pinning later, between collectives, can stall other ranks.

        Raises:
            HostMemoryError: if the host share does not fit the host; nothing is allocated then.
        """
        self._allocate_where(lambda param: param.requires_grad)

    def _allocate_where(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        named = self._named(self.param_groups)
        self.placed.extend([(n, p) for n, p in named if p not in self.placed.numbers and wanted(p)])

    # Using it

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again and returns it; called once, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            HostTaskError: if a host update of an earlier step failed; so will all later steps, until the model's
                and the optimizer's state have been loaded again.
            RuntimeError, ValueError: if a CUDA graph is being captured that cannot hold this step.
        """
        loss = None
        if self.engine.capturing:
            self._check_capture(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Frozen parameters have no state until the day they get a gradient.
        self._allocate_where(lambda param: param.requires_grad or param.grad is not None)
        # Weights that no forward has asked for since the last step are read and written below.
        self.synchronize()
        self._take_external_writes()
        grads = [param.grad for param in self.placed.params if param.grad is not None]
        if grads:
            self.placed.step(self.param_groups, self._group_of(), self._grad_scale, self._skip_flag(grads))
        self._grad_scale = self._norm = None
        return loss

    def _check_capture(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise ValueError(
                "a closure cannot be captured in a CUDA graph; call it before step(), and step() without it"
            )
        if all(param.grad is None for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                "no parameter has a gradient, so the captured step would update nothing; capture forward and backward "
                "before it, or run them before the capture"
            )
        if self._grad_scale is not None and not self._clipped_in_capture:
            raise RuntimeError(
                "clip_grad_norm_() was called before the capture, so all launches of the graph would clip by the same "
                "coefficient; call it in the capture, just before step()"
            )
        if self._pending_masters or self.placed.externally_written():
            raise RuntimeError(
                "parameters were written or state was loaded since the last step, and a CUDA graph cannot hold how "
                "masters follow; make a step, or call optimizer.refresh_masters(), before the capture"
            )

    def _group_of(self) -> list[int]:
        numbers = self.placed.numbers
        group_of = [0] * len(numbers)
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param in numbers:
                    group_of[numbers[param]] = index
        return group_of

    def _skip_flag(self, grads: list[torch.Tensor]) -> torch.Tensor | None:
        if not self._options.skip_nonfinite:
            return None
        norm = self._norm if self._norm is not None else device_update.global_norm(grads)
        return (~norm.isfinite()).to(torch.float32).reshape(1)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the norm of all gradients together to ``max_norm`` in the coming step.

        Like ``torch.nn.utils.clip_grad_norm_``, but the gradients stay as they are: the coefficient is applied
        in fp32 inside the update, and never leaves the device.

        Returns:
            The norm before clipping, an fp32 scalar on the device. Reading it blocks; nothing here does.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm}; leave the call out to not clip")
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not grads:
            return torch.zeros((), device=self.engine.device)
        self._norm = device_update.global_norm([grad.detach() for grad in grads])
        self._grad_scale = (max_norm / (self._norm + 1e-6)).clamp(max=1.0).reshape(1)
        self._clipped_in_capture = self.engine.capturing
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; a clip coefficient computed from them is dropped too."""
        self._grad_scale = self._norm = None
        self.placed.end_backwards()
        super().zero_grad(set_to_none)

    def attach(self, model: torch.nn.Module) -> None:
        """Let each module of ``model`` wait for its own weights only, so that updates run under forward.

        Call it once, before the first step. Reading a parameter outside of a module's forward then needs
        :meth:`synchronize` first; ``model.state_dict()`` does it by itself.
        """
        self.placed.gates.attach(model)

    def synchronize(self) -> None:
        """Let what the current stream does next see all updates enqueued so far. Does not block Python.

        Raises:
            HostTaskError: if a host update that has run by now failed.
        """
        self.placed.gates.open_all()
        self.placed.check_tasks()

    def join(self) -> None:
        """Let the current stream wait for all transfers and host updates enqueued so far. Does not block Python.

        As the last line of a ``torch.cuda.graph`` block that holds a step, it makes what runs on other streams part
        of the graph.

        Raises:
            RuntimeError: if the captured step reads gradients that no launch of the graph will write.
        """
        self.placed.join()

    @torch.no_grad()
    def refresh_hyperparameters(self) -> None:
        """Call before each launch of a CUDA graph with a captured step, on the stream that it is launched on.

        The launches from here on use the current ``lr`` and ``weight_decay`` of the groups, see parameters that were
        written from outside, and come after steps made outside of the graph. Does not block Python, unless there
        were such writes.

        Raises:
            HostTaskError: if a host update of an earlier launch or step failed.
            RuntimeError: if no step was captured, or parameters were added since.
            ValueError: if another hyperparameter has changed since the capture.
        """
        self.placed.check_tasks()
        if self.engine.capturing:
            raise RuntimeError("refresh_hyperparameters() comes before a launch of a CUDA graph, not into a capture")
        self._take_external_writes()
        self.placed.before_launch(self.param_groups, self._group_of())

    def stats(self) -> dict[str, float | None]:
        """Return what was moved since the last call, without waiting for the device.

        Returns:
            ``down_gbps`` and ``up_gbps``, bytes copied over time passed, in GB/s; ``host_update_ms``, time the
            host kernel worked; ``stall_ms``, time the compute stream waited for transfers and host updates (known
            late: part of it may be counted in the next call). None at the first call.
        """
        traffic, now_ns = self.engine.traffic(), time.monotonic_ns()
        busy_ns = self.placed.host_busy_ns
        last, self._last_stats = self._last_stats, (traffic, busy_ns, now_ns)
        if last is None:
            return dict.fromkeys(("down_gbps", "up_gbps", "host_update_ms", "stall_ms"))
        before, busy_before_ns, before_ns = last
        passed_ns = max(now_ns - before_ns, 1)
        return {
            "down_gbps": (traffic.down_bytes - before.down_bytes) / passed_ns,
            "up_gbps": (traffic.up_bytes - before.up_bytes) / passed_ns,
            "host_update_ms": (busy_ns - busy_before_ns) / 1e6,
            "stall_ms": traffic.stall_ms - before.stall_ms,
        }

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's schema, on the CPU, whatever the placement.

        A bf16 parameter has ``master_remainder`` and ``master_checksum`` besides; other optimizers ignore them.

        Raises:
            HostTaskError: if a host update failed, since when the state may be half updated.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        result = state_dict.save(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of any placement, or of the torch optimizer, returned.

        Masters are taken from it where they belong to the weights the model has at the next step; otherwise,
        and where it has none, they are the weights. All state is written anew, so an optimizer one of whose host
        updates failed can go on, once the model's weights have been loaded too.

        Raises:
            ValueError: if the groups or shapes differ from this optimizer's; the message names the first.
        """
        from forebay.optim import state_dict as io

        self.placed.settle()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        io.load(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def refresh_masters(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Set the masters of ``params`` (all by default) to their current values.

        Needed only after writes that torch does not count, such as ``param.data.copy_()``; others are noticed.
        """
        chosen = self.placed.params if params is None else params
        self.placed.refresh(self.placed.numbers[param] for param in chosen if param in self.placed.numbers)

    def _take_external_writes(self) -> None:
        self.placed.refresh(self.placed.externally_written())
        if self._pending_masters:
            state_dict.apply_masters(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "arguments": self._arguments(),
            "param_groups": self.param_groups,
            "state": state_dict.save(self)["state"] if self.placed.params else None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedOptimizer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied._restore(copy.deepcopy(self.__getstate__(), memo), self.engine)
        return copied

    def _restore(self, state: dict[str, Any], engine: Engine | None) -> None:
        groups = [dict(group) for group in state["param_groups"]]
        self.__init__(groups, **state["arguments"], engine=engine)  # type: ignore[misc]
        if state["state"] is not None:
            state_dict.load(self, {"state": state["state"], "param_groups": state_dict.pack_groups(self)})
