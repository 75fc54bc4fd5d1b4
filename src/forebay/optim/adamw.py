"""AdamW whose state may live on the host."""

from __future__ import annotations

import copy
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from forebay.engine import Engine, Traffic, get_engine
from forebay.optim import device_update, layout, state_dict
from forebay.optim.chunk_state import PARAM_DTYPES, region_bytes
from forebay.optim.device_update import GroupValues, StepScalars
from forebay.optim.gates import Gates
from forebay.optim.host_share import CONTROL_BYTES, HostShare
from forebay.optim.layout import Chunk, ParamSpec, Placement
from forebay.optim.shares import DeviceShare, Share, StepContext
from forebay.optim.streamed_share import StreamedShare
from forebay.optim.tide import Tide

PLACEMENTS = ("auto", "streamed", "host")
# About 16 Mi elements: a chunk of bf16 parameters has 160 MiB of state, which copies at full speed. Not a power
# of two, because the host kernel reads several fields that are then this far apart, and streams whose addresses
# differ by a power of two evict each other from the first-level cache (measured on Zen 4, see docs/log.md).
DEFAULT_CHUNK_ELEMENTS = 16 * 2**20 - 9 * 1024
# Copies and host updates run side by side; see docs/log.md for the measurement this share comes from.
_AUTO_HOST_SHARE = 0.33
_NUM_STREAM_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class _Options:
    offload_fraction: float
    placement: str
    host_share: float | None
    overlap: bool
    staging_gib: float
    pinned: bool
    skip_nonfinite: bool
    chunk_elements: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise ValueError(
                f"offload_fraction must be between 0.0 and 1.0, got {self.offload_fraction}: it is the share of "
                "the optimizer state that is held on the host"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.placement!r}; choose one of {', '.join(PLACEMENTS)}")
        if self.host_share is not None and not 0.0 <= self.host_share <= 1.0:
            raise ValueError(
                f"host_share must be between 0.0 and 1.0, got {self.host_share}: it is the part of what is offloaded "
                "that the host updates"
            )
        if self.host_share is not None and self.placement != "auto":
            raise ValueError(
                f"host_share={self.host_share} divides what is offloaded, which placement={self.placement!r} does too; "
                "give one of them"
            )
        if not self.staging_gib >= 0.0:
            raise ValueError(f"staging_gib must not be negative, got {self.staging_gib}")
        if self.chunk_elements < 4096:
            raise ValueError(f"chunk_elements must be at least 4096, got {self.chunk_elements}")

    def host_share_on(self, device: torch.device) -> float:
        """Return the share of the offloaded part that is updated on the host when training on ``device``."""
        if self.host_share is not None:
            return self.host_share
        auto = _AUTO_HOST_SHARE if device.type != "cpu" else 0.0
        return {"auto": auto, "streamed": 0.0, "host": 1.0}[self.placement]


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with a share of its state on the host.

    A drop-in for ``torch.optim.AdamW``. Low-precision parameters get fp32 master weights: a bf16 weight is the
    upper half of its master and a 16-bit remainder the lower, so the state of a bf16 parameter is 10 bytes an
    element. The update is the same bit for bit whether state stays on the device or is streamed through it.

    State is allocated by :meth:`allocate`, or at the first :meth:`step`.

    Args:
        params: parameters, named parameters or groups, as in ``torch.optim.AdamW``; bf16, fp16 or fp32,
            contiguous, all on one device.
        lr: learning rate. Default 1e-3.
        betas: decay rates of the two moments. Default (0.9, 0.999).
        eps: term added to the denominator. Default 1e-8.
        weight_decay: decoupled weight decay. Default 0.01.
        maximize: go up the gradient. Default False.
        offload_fraction: share of the state, in elements, that is held on the host; tensors are split to meet
            it exactly. Default 0.0.
        placement: how the offloaded share is held: ``"streamed"`` is updated on the device, bitwise equal to
            no offload; ``"host"`` is updated by the host kernel. Default ``"auto"``: both, divided so that they
            take equally long (on a CPU, where nothing is gained by it, all streamed).
        host_share: fix the share of the offloaded part that the host updates, 0 to 1, instead of ``placement``.
            Default None.
        overlap: let transfers run under other work. Default True.
        staging_gib: device memory, in GiB, that visiting state may add to the highest peak of a step; below
            that peak it uses what is free anyway. Default 0.0.
        pinned: pin the host memory that is copied. Default True.
        skip_nonfinite: leave everything untouched in a step whose gradient norm is not finite. Default False.
        chunk_elements: most elements that travel in one piece. Default about 16 Mi.
        engine: what moves the state. Default: this process's engine for the parameters' device.

    Raises:
        ValueError: for a value out of range, or parameters that it cannot hold; the message says which.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        offload_fraction: float = 0.0,
        placement: str = "auto",
        host_share: float | None = None,
        overlap: bool = True,
        staging_gib: float = 0.0,
        pinned: bool = True,
        skip_nonfinite: bool = False,
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        engine: Engine | None = None,
    ) -> None:
        self._options = _Options(
            offload_fraction, placement, host_share, overlap, staging_gib, pinned, skip_nonfinite, chunk_elements
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        self._engine = engine
        self._setup()
        super().__init__(params, defaults)
        self.state = state_dict.LazyState(self)  # type: ignore[assignment]

    def _setup(self) -> None:
        self._tensors: list[torch.Tensor] = []  # all parameters, in layout order, once allocated
        self._names: list[str] = []
        self._numbers: dict[torch.Tensor, int] = {}
        self._versions: list[tuple[int, int]] = []
        self._shares: dict[Placement, Share] = {}
        self._num_backwards: list[int] = []  # gradients accumulated for each parameter since the last step
        self._expected_backwards: list[int] = []  # and in the step before
        self._num_rows = 0
        self._scalars: StepScalars | None = None
        self._gates = Gates(self._tick)
        self._tide: Tide | None = None
        self._hooks: list[RemovableHandle] = []
        self._grad_scale: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._last_stats: tuple[Traffic, int, int] | None = None
        self._pending_masters: dict[torch.Tensor, state_dict.SavedMaster] = {}

    # Parameters and memory

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; if state is allocated, the fraction holds for the new group by itself."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        if self._tensors:
            self._extend(self._named(self.param_groups[-1:]))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not 0.0 <= float(group["lr"]):
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(f"betas must be at least 0 and below 1, got {group['betas']}")
        if not 0.0 <= group["eps"]:
            raise ValueError(f"eps must not be negative, got {group['eps']}")
        if not 0.0 <= group["weight_decay"]:
            raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
        device = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else None
        for name, param in self._named([group]):
            if param.dtype not in PARAM_DTYPES:
                choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in PARAM_DTYPES)
                raise ValueError(f"parameter {name} is {param.dtype}; forebay.AdamW takes {choices}")
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

    @property
    def engine(self) -> Engine:
        """The engine that moves the state."""
        if self._engine is None:
            self._engine = get_engine(self.param_groups[0]["params"][0].device)
        return self._engine

    def allocate(self) -> None:
        """Allocate all state now, rather than at the first step.

        Pinning 100 GB takes most of a minute, and pinning later, between collectives, can stall other ranks.

        Raises:
            HostMemoryError: if the host share does not fit the host; nothing is allocated then.
        """
        if not self._tensors:
            self._extend(self._named(self.param_groups))

    def _extend(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self._gates.module_order:
            named = sorted(named, key=lambda item: self._gates.module_order.get(item[1], len(self._gates.module_order)))
        first_param = len(self._tensors)
        new = [param for _, param in named]
        chunks = _divide(new, self._options, self.engine.device, first_param)
        self._tensors += new
        self._names += [name for name, _ in named]
        self._numbers = {param: number for number, param in enumerate(self._tensors)}
        if not self._shares:
            self._shares = self._make_shares()
        # The host kernel keeps its own step counts and scalars, but rows are numbered over all chunks so that
        # a segment has one number.
        for placement, share in self._shares.items():
            own = [chunk for chunk in chunks if chunk.placement is placement]
            share.extend(own, self._num_rows, self._tensors)
            self._num_rows += sum(len(chunk.segments) for chunk in own)
        scalars = StepScalars(self._num_rows, self.engine.device)
        if self._scalars is not None:
            scalars.steps[: len(self._scalars.steps)] = self._scalars.steps
            scalars.set_steps(self._scalars.most_steps)
        self._scalars = scalars
        self._versions += [_version(param) for param in new]
        self._num_backwards += [0] * len(new)
        self._expected_backwards += [0] * len(new)
        if self._options.overlap and (self._streamed.chunks or self._host.chunks):
            if self._streamed.chunks and self._tide is None:
                self._tide = Tide(self.engine, int(self._options.staging_gib * 2**30))
            for number, param in enumerate(new, first_param):
                if param.requires_grad:
                    self._hooks.append(param.register_post_accumulate_grad_hook(_GradHook(self, number)))

    @property
    def _streamed(self) -> StreamedShare:
        share = self._shares[Placement.STREAMED]
        assert isinstance(share, StreamedShare)
        return share

    @property
    def _host(self) -> HostShare:
        share = self._shares[Placement.HOST]
        assert isinstance(share, HostShare)
        return share

    def _tick(self, key: int) -> int:
        """Begin an interval of the tide; return the bytes that visits may hold until the update."""
        if self._tide is None:
            return 0
        hold_bytes, prefetch_bytes = self._tide.tick(key)
        self._streamed.shrink(hold_bytes)
        return prefetch_bytes

    def _after_gradient(self, number: int) -> None:
        self._num_backwards[number] += 1
        self._host.forget_sent(number)
        if self._num_backwards[number] == self._expected_backwards[number]:
            grad = self._tensors[number].grad
            assert grad is not None
            self._host.send_early(number, grad)
        # Modules have keys from 0 up.
        self._streamed.prefetch(self._tick(-2 - number))

    def _end_backwards(self) -> None:
        if self._tensors:
            self._host.forget_sent()
            self._num_backwards = [0] * len(self._tensors)

    def _make_shares(self) -> dict[Placement, Share]:
        options, engine = self._options, self.engine
        return {
            Placement.DEVICE: DeviceShare(engine),
            Placement.STREAMED: StreamedShare(
                engine, num_slots=_NUM_STREAM_SLOTS if options.overlap else 1, pinned=options.pinned
            ),
            Placement.HOST: HostShare(engine, self._names, pinned=options.pinned),
        }

    # Using it

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again and returns it; called once, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            HostTaskError: if a host update of an earlier step failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.check_tasks()
        self.allocate()
        # Weights that no forward has asked for since the last step are read and written below.
        self.synchronize()
        self._take_external_writes()
        grads = [self._flat_grad(number) for number in range(len(self._tensors))]
        if any(grad is not None for grad in grads):
            self._update(grads)
        self._grad_scale = self._norm = None
        return loss

    def _update(self, grads: list[torch.Tensor | None]) -> None:
        assert self._scalars is not None
        groups = [_group_values(group) for group in self.param_groups]
        group_of = self._group_of()
        skip = self._skip_flag(grads)
        limit_bytes = self._tide.update_limit_bytes if self._tide is not None else 0
        self._scalars.advance(self._row_inputs(grads, groups, group_of), skip)
        context = StepContext(
            self._tensors, grads, groups, group_of, self._scalars, self._grad_scale, skip, limit_bytes
        )
        # Host updates first: they take longest, and what the device does next runs beside them. Their results go
        # up last: they wait for the host, and copies up that need not would queue behind them.
        for placement in (Placement.HOST, Placement.STREAMED, Placement.DEVICE):
            self._shares[placement].step(context)
        for number, event in self._host.upload(context).items():
            self._gates.close(self._tensors[number], event, self.engine)
        for number, grad in enumerate(grads):
            if grad is not None:
                torch.autograd.graph.increment_version(self._tensors[number])
                self._versions[number] = _version(self._tensors[number])
        self._expected_backwards = self._num_backwards
        self._end_backwards()
        attached = self._options.overlap and self._gates.attached
        if not attached:
            self.synchronize()
        profiled_next = self._tide is not None and self._tide.turn()
        if profiled_next or not attached:
            # Nothing ends visits later: no hook in forward, or none that may while memory is profiled.
            self._streamed.shrink(0)

    def _flat_grad(self, number: int) -> torch.Tensor | None:
        param = self._tensors[number]
        grad = param.grad
        if grad is None:
            return None
        if grad.is_sparse:
            raise ValueError(f"the gradient of {self._names[number]} is sparse; forebay.AdamW takes dense ones")
        if grad.dtype != param.dtype:
            raise ValueError(
                f"the gradient of {self._names[number]} is {grad.dtype} but the parameter is {param.dtype}; "
                "they must have one dtype"
            )
        return grad.detach().contiguous().view(-1)

    def _group_of(self) -> list[int]:
        group_of = [0] * len(self._tensors)
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                group_of[self._numbers[param]] = index
        return group_of

    def _row_inputs(
        self, grads: Sequence[torch.Tensor | None], groups: Sequence[GroupValues], group_of: Sequence[int]
    ) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = [(0.0,) * 5] * self._num_rows
        for placement in (Placement.DEVICE, Placement.STREAMED):
            for state in self._shares[placement].chunks:
                for row, segment in enumerate(state.chunk.segments, state.first_row):
                    values = groups[group_of[segment.param]]
                    active = float(grads[segment.param] is not None)
                    rows[row] = (values.lr, values.weight_decay, values.beta1, values.beta2, active)
        return rows

    def _skip_flag(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        if not self._options.skip_nonfinite:
            return None
        norm = self._norm
        if norm is None:
            norm = device_update.global_norm([grad for grad in grads if grad is not None])
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
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; a clip coefficient computed from them is dropped too."""
        self._grad_scale = self._norm = None
        self._end_backwards()
        super().zero_grad(set_to_none)

    def attach(self, model: torch.nn.Module) -> None:
        """Let each module of ``model`` wait for its own weights only, so that updates run under forward.

        Call it once, before the first step. Reading a parameter outside of a module's forward then needs
        :meth:`synchronize` first; ``model.state_dict()`` does it by itself.
        """
        self._gates.attach(model, self.engine)

    def synchronize(self) -> None:
        """Let what the current stream does next see all updates enqueued so far. Does not block Python."""
        self._gates.open_all()

    def stats(self) -> dict[str, float | None]:
        """Return what was moved since the last call, without waiting for the device.

        Returns:
            ``down_gbps`` and ``up_gbps``, bytes copied over time passed, in GB/s; ``host_update_ms``, time the
            host kernel worked; ``stall_ms``, time the compute stream waited for transfers and host updates (known
            late: part of it may be counted in the next call). None at the first call.
        """
        traffic, now_ns = self.engine.traffic(), time.monotonic_ns()
        busy_ns = self._host.busy_ns if self._shares else 0
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
        """Return the state in ``torch.optim.AdamW``'s schema, on the CPU, whatever the placement.

        A bf16 parameter has ``master_remainder`` and ``master_checksum`` besides; other optimizers ignore them.
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
        """Load what :meth:`state_dict` of any placement, or of ``torch.optim.AdamW``, returned.

        Masters are taken from it where they belong to the weights the model has at the next step; otherwise,
        and where it has none, they are the weights.

        Raises:
            ValueError: if the groups or shapes differ from this optimizer's; the message names the first.
        """
        from forebay.optim import state_dict as io

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
        if self._tensors:
            chosen = self._tensors if params is None else params
            self._refresh({self._numbers[param] for param in chosen})

    def _take_external_writes(self) -> None:
        changed = {n for n, param in enumerate(self._tensors) if self._versions[n] != _version(param)}
        if changed:
            self._refresh(changed)
        if self._pending_masters:
            state_dict.apply_masters(self)

    def _refresh(self, numbers: set[int]) -> None:
        for share in self._shares.values():
            share.refresh(numbers, self._tensors)
        for number in numbers:
            self._versions[number] = _version(self._tensors[number])

    def __getstate__(self) -> dict[str, Any]:
        return {
            "options": dataclasses.asdict(self._options),
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": state_dict.save(self)["state"] if self._tensors else None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = [dict(group) for group in state["param_groups"]]
        engine = self.__dict__.get("_engine")
        self.__init__(groups, **state["defaults"], **state["options"], engine=engine)  # type: ignore[misc]
        if state["state"] is not None:
            state_dict.load(self, {"state": state["state"], "param_groups": state_dict.pack_groups(self)})

    def __deepcopy__(self, memo: dict[int, Any]) -> AdamW:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied._engine = self._engine
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


class _GradHook:
    """Runs after a parameter's gradient was accumulated; does not keep the optimizer alive."""

    def __init__(self, optimizer: AdamW, number: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._number = number

    def __call__(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._after_gradient(self._number)


def plan_memory(
    params: Iterable[torch.Tensor],
    *,
    device: torch.device | str = "cuda",
    offload_fraction: float = 0.0,
    placement: str = "auto",
    host_share: float | None = None,
    overlap: bool = True,
    pinned: bool = True,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> dict[str, dict[str, int]]:
    """Return the bytes an :class:`AdamW` with these options will hold, per tier and purpose.

    Args:
        params: parameters, on any device, ``meta`` included; nothing is allocated.
        device: the device that will train.
        offload_fraction: see :class:`AdamW`, as for the other arguments.
    """
    options = _Options(offload_fraction, placement, host_share, overlap, 0.0, pinned, False, chunk_elements)
    chunks = _divide(list(params), options, torch.device(device), 0)
    by_placement = {p: [chunk for chunk in chunks if chunk.placement is p] for p in Placement}
    state = {p: sum(region_bytes(chunk) for chunk in own) for p, own in by_placement.items()}
    copied = "pinned" if pinned else "pageable"
    plan: dict[str, dict[str, int]] = {"device": {}, "pinned": {}, "pageable": {}}

    def add(tier: str, purpose: str, num_bytes: int) -> None:
        if num_bytes:
            plan[tier][purpose] = plan[tier].get(purpose, 0) + num_bytes

    add("device", "optimizer_state", state[Placement.DEVICE])
    add(copied, "optimizer_state", state[Placement.STREAMED])
    streamed = [region_bytes(chunk) for chunk in by_placement[Placement.STREAMED]]
    add(
        "device",
        "staging",
        max(streamed, default=0) * min(_NUM_STREAM_SLOTS if overlap else 1, len(streamed)),
    )
    add("pageable", "optimizer_state", state[Placement.HOST])
    weights = [chunk.num_elements * chunk.dtype.itemsize for chunk in by_placement[Placement.HOST]]
    add(copied, "weights", sum(weights))
    add(copied, "gradients", sum(weights))
    add(copied, "other", CONTROL_BYTES if weights else 0)
    return plan


def _divide(params: Sequence[torch.Tensor], options: _Options, device: torch.device, first_param: int) -> list[Chunk]:
    return layout.divide(
        [ParamSpec(param.numel(), param.dtype) for param in params],
        offload_fraction=options.offload_fraction,
        host_share=options.host_share_on(device),
        chunk_elements=options.chunk_elements,
        first_param=first_param,
    )


def _group_values(group: Mapping[str, Any]) -> GroupValues:
    beta1, beta2 = group["betas"]
    return GroupValues(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        maximize=bool(group["maximize"]),
    )


def _version(param: torch.Tensor) -> tuple[int, int]:
    return param._version, param.data_ptr()
