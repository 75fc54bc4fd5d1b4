"""What an optimizer promises beyond arithmetic, as scripts that the simulator's tests and the GPU's share.

Each builds a model and an optimizer from a :class:`Case`, trains a few steps in its way, and returns both and what
else it observed. Run without offload and with, it must give the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle

import torch
from tiny import assert_bitwise, batch, build, loss_of, weights
from torch import nn

import forebay
from forebay.engine import Engine
from forebay.engine.sim import SimEngine
from forebay.host import kernels
from forebay.optim.layout import Placement

NATIVE = kernels.backend() != "torch"  # the fallback's updates on the host are the same only within rounding
PLACEMENTS = [
    {"offload_fraction": 1.0, "placement": "streamed"},
    {"offload_fraction": 1.0, "host_share": 0.5},
    {"offload_fraction": 1.0, "placement": "host"},
    {"offload_fraction": 0.6, "host_share": 0.7},
    {"offload_fraction": 0.4, "placement": "streamed"},
]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@dataclasses.dataclass
class Case:
    """One run of a script: what it builds its models and optimizers with."""

    dtype: torch.dtype
    engine: Engine
    seed: int | None = None  # None: without offload
    width: int = 32
    chunk_elements: int = 4096

    def options(self, other=0):
        """Return where state lives; with ``other``, another place than the script's first optimizer has."""
        if self.seed is None:
            return {}
        options = PLACEMENTS[(self.seed + other) % len(PLACEMENTS)]
        if not NATIVE:
            options = {"offload_fraction": options["offload_fraction"], "placement": "streamed"}
        return options | {"overlap": (self.seed + other) % 4 > 0}

    def model(self, **kwargs):
        return build(self.dtype, self.engine.device.type, width=self.width, num_blocks=1, **kwargs)

    def optimizer(self, model, groups=None, *, other=0, **kwargs):
        groups = model.parameters() if groups is None else groups
        kwargs = {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "chunk_elements": self.chunk_elements,
            "engine": self.engine,
        } | kwargs
        optimizer = forebay.AdamW(groups, **self.options(other), **kwargs)
        if model is not None and self.seed is not None and (self.seed + other) % 3 > 0:
            optimizer.attach(model)
        return optimizer


def on_device_of(model, tokens):
    return tokens.to(next(model.parameters()).device)


def backward(model, step, num_micro=1):
    for micro in range(num_micro):
        loss_of(model, on_device_of(model, batch(10 * step + micro))).backward()


def steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def clipping(case):
    model = case.model()
    optimizer = case.optimizer(model)
    norms = []
    for step, max_norm in enumerate([0.05, None, 100.0, 0.2, 0.05]):
        optimizer.zero_grad()
        backward(model, step)
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm))
        if step == 3:  # on top of it, one that changes gradients which may have been sent already
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model, optimizer, {"norms": torch.stack(norms)}


def nonfinite_gradients(case):
    model = case.model()
    optimizer = case.optimizer(model, skip_nonfinite=True)
    for step, bad in enumerate([None, float("nan"), float("inf"), None, float("-inf")]):
        optimizer.zero_grad()
        backward(model, step)
        if bad is not None:
            model.head.weight.grad[3, 5] = bad
        if step % 2:
            optimizer.clip_grad_norm_(0.3)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert {float(entry["step"]) for entry in state.values()} == {2.0}
    return model, optimizer, state


def accumulation(case):
    model = case.model()
    optimizer = case.optimizer(model)
    for step, num_micro in enumerate([1, 3, 3, 2, 1]):
        optimizer.zero_grad()
        backward(model, step, num_micro)
        optimizer.step()
    return model, optimizer, {}


def schedulers(case):
    model = case.model()
    groups = [
        {"params": model.blocks.parameters()},
        {"params": [model.embedding.weight, model.head.weight], "lr": 3e-3},
    ]
    optimizer = case.optimizer(model, groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[2e-2, 5e-3], total_steps=6)  # betas change too
    for step in range(5):
        steps(model, optimizer, [step])
        scheduler.step()
        optimizer.param_groups[1]["weight_decay"] = 0.05 * step
    return model, optimizer, {"lr": [group["lr"] for group in optimizer.param_groups]}


def frozen_parameters(case):
    model = case.model()
    model.head.weight.requires_grad_(False)
    optimizer = case.optimizer(model)
    steps(model, optimizer, range(2))
    model.head.weight.requires_grad_(True)
    model.embedding.weight.requires_grad_(False)
    steps(model, optimizer, range(2, 4))
    return model, optimizer, {"steps": [float(e["step"]) for e in optimizer.state_dict()["state"].values()]}


def parameters_without_a_gradient(case):
    model = case.model()
    optimizer = case.optimizer(model)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        if step == 1:
            model.blocks[0][1].weight.grad = None
        if step in (2, 3):
            model.embedding.weight.grad = model.head.weight.grad = None
        if step == 3:
            for param in model.parameters():
                param.grad = None
        optimizer.step()
    return model, optimizer, optimizer.state_dict()["state"]


def tied_weights(case):
    model = case.model(tied=True)
    optimizer = case.optimizer(model)
    steps(model, optimizer, range(4))
    return model, optimizer, {"num": len(optimizer.state_dict()["state"])}


def groups_added_later(case):
    model = case.model()
    optimizer = case.optimizer(model, [{"params": model.blocks.parameters()}])
    steps(model, optimizer, range(2))
    optimizer.add_param_group({"params": [model.head.weight], "lr": 3e-3})
    steps(model, optimizer, range(2, 4))
    optimizer.add_param_group({"params": [model.embedding.weight], "weight_decay": 0.0})
    steps(model, optimizer, range(4, 6))
    return model, optimizer, {}


def closures(case):
    model = case.model()
    optimizer = case.optimizer(model)
    losses, enabled = [], []

    def closure(step):
        optimizer.zero_grad()
        loss = loss_of(model, on_device_of(model, batch(10 * step)))
        loss.backward()
        enabled.append(torch.is_grad_enabled())
        return loss

    for step in range(3):
        with torch.no_grad() if step == 1 else contextlib.nullcontext():
            losses.append(optimizer.step(lambda step=step: closure(step)).detach())
    assert enabled == [True] * 3
    return model, optimizer, {"losses": torch.stack(losses)}


def zero_grad(case):
    model = case.model()
    optimizer = case.optimizer(model)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        if step == 2:  # these gradients lead to no step, and to no clipping of later ones
            if case.seed is not None:
                optimizer.clip_grad_norm_(0.01)
            continue
        optimizer.step()
        if step == 4:  # and these to two
            optimizer.step()
    return model, optimizer, {}


def copied(case, how):
    model = case.model()
    optimizer = case.optimizer(model)
    steps(model, optimizer, range(2))
    optimizer.synchronize()  # copying a model reads its parameters
    other_model, other = how((model, optimizer))
    steps(model, optimizer, range(2, 4))
    steps(other_model, other, range(2, 4))
    other.synchronize()
    optimizer.synchronize()
    assert_bitwise(weights(other_model), weights(model))
    return model, optimizer, {}


def deepcopied(case):
    return copied(case, copy.deepcopy)


def pickled(case):
    return copied(case, lambda pair: pickle.loads(pickle.dumps(pair)))


def state_dict_in_between(case):
    """Saved while updates may be under way, loaded into another division, order of loading by the seed.

    Without offload nothing is saved: going through a state dict makes no difference.
    """
    model = case.model()
    optimizer = case.optimizer(model)
    steps(model, optimizer, range(2))
    if case.seed is None:
        steps(model, optimizer, range(2, 4))
        return model, optimizer, optimizer.state_dict()["state"]
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    steps(model, optimizer, range(50, 52))  # the saved ones are copies, and stay as they were
    model = case.model()
    other = case.optimizer(model, other=1, lr=7.0, chunk_elements=case.chunk_elements + 1024)
    loads = [(model, "model"), (other, "optimizer")]
    for target, key in loads[:: -1 if case.seed % 2 else 1]:
        target.load_state_dict(saved[key])
    assert other.param_groups[0]["lr"] == 1e-2
    steps(model, other, range(2, 4))
    return model, other, other.state_dict()["state"]


def only_the_model_loaded(case):
    model = case.model()
    optimizer = case.optimizer(model, lr=1e-4)  # a low-precision weight moves by its master only
    steps(model, optimizer, range(2))
    model.load_state_dict({name: value * 0.5 for name, value in weights(case.model()).items()})
    steps(model, optimizer, range(2, 5))
    return model, optimizer, {}


def written_by_the_user(case):
    model = case.model()
    optimizer = case.optimizer(model)
    steps(model, optimizer, range(2))
    optimizer.synchronize()
    with torch.no_grad():
        model.head.weight.mul_(0.5)
        model.blocks[0][1].bias.zero_()
    steps(model, optimizer, range(2, 4))
    return model, optimizer, {}


def read_after_synchronize(case):
    model = case.model()
    optimizer = case.optimizer(model)
    average = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in model.named_parameters()}
    for step in range(4):
        steps(model, optimizer, [step])
        optimizer.synchronize()
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach().float(), 0.3)
    return model, optimizer, average


def evaluation_in_between(case):
    model = case.model()
    optimizer = case.optimizer(model)
    losses = []
    for step in range(4):
        steps(model, optimizer, [step])
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model, on_device_of(model, batch(1000 + step))))
        model.train()
    return model, optimizer, {"losses": torch.stack(losses)}


SCRIPTS = [
    clipping,
    nonfinite_gradients,
    accumulation,
    schedulers,
    frozen_parameters,
    parameters_without_a_gradient,
    tied_weights,
    groups_added_later,
    closures,
    zero_grad,
    deepcopied,
    pickled,
    state_dict_in_between,
    only_the_model_loaded,
    written_by_the_user,
    read_after_synchronize,
    evaluation_in_between,
]

_expected = {}


def expected(script, case):
    """Return what ``script`` gives without offload, on the same device."""
    key = (script, case.dtype, case.engine.device)
    if key not in _expected:
        resident = dataclasses.replace(case, seed=None)
        if case.engine.kind == "sim":
            resident.engine = SimEngine(checked=False)
        _expected[key] = finish(script, resident)
    return _expected[key]


def finish(script, case):
    model, optimizer, observed = script(case)
    optimizer.synchronize()
    found = {f"weight {name}": value for name, value in weights(model).items()}
    found |= dict(leaves(observed))
    case.engine.synchronize()
    return found


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key}]")
    else:
        yield path, value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)


def break_update(optimizer, number):
    """Let the coming updates of a host chunk fail, noticed by the kernel; return how to mend them, and its label."""
    chunk = optimizer.placed.shares[Placement.HOST]._host_chunks[number]
    whole = {task: list(task._segments) for task in chunk.tasks()}
    for task in whole:
        if task.function_address:
            task._c_segments[0].grad = None
        else:
            task._segments[0] = None

    def mend():
        for task, segments in whole.items():
            task._segments[:] = segments
            task.set_segment(0, segments[0])

    return mend, chunk.label
