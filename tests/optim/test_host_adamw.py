"""HostAdamW against torch.optim.AdamW and Adam."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from forebay.optim.host_adamw import HostAdamW

RTOL, ATOL = 2e-6, 2e-6  # a few units in the last place of fp32, over a few steps


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(17, 33), (5,), (), (3, 0), (65, 7)]
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def set_grads(params: list[torch.nn.Parameter], seed: int, skip: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if i == skip else grad


def assert_close(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_matches_torch(decoupled: bool, maximize: bool, tensor_lr: bool) -> None:
    reference_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = make_params(), make_params()
    options: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    lr: Any = torch.tensor(0.01) if tensor_lr else 0.01
    optimizer = HostAdamW(
        [{"params": ours[:2], "lr": 0.05, "wd_mult": 2.0}, {"params": ours[2:]}],
        lr=lr,
        decoupled_weight_decay=decoupled,
        **options,
    )
    reference = reference_class(
        [{"params": theirs[:2], "lr": 0.05}, {"params": theirs[2:]}], lr=0.01, foreach=False, **options
    )
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.05 / (step + 1)
        optimizer.step()
        reference.step()
    assert_close(ours, theirs)
    assert ours[1] not in optimizer.state
    for a, b in zip(ours, theirs, strict=True):
        assert optimizer.state[a].keys() == reference.state[b].keys()
        for key, value in optimizer.state[a].items():
            torch.testing.assert_close(value, reference.state[b][key], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_state_dicts_interchange(ours_first: bool, decoupled: bool) -> None:
    theirs_class = torch.optim.AdamW if decoupled else torch.optim.Adam

    def make(ours: bool, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if ours:
            return HostAdamW(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=decoupled)
        return theirs_class(params, lr=0.01, weight_decay=0.1)

    expected = make_params()
    reference = theirs_class(expected, lr=0.01, weight_decay=0.1)
    params = make_params()
    optimizer = make(ours_first, params)
    for step in range(6):
        if step == 3:
            successor = make(not ours_first, params)
            assert optimizer.state_dict()["param_groups"][0].keys() == successor.state_dict()["param_groups"][0].keys()
            successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = successor
        for p, o in ((params, optimizer), (expected, reference)):
            set_grads(p, step)
            o.step()
    assert_close(params, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_params_are_updated_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    optimizer = HostAdamW(ours, lr=0.01, weight_decay=0.1)
    # Reference: one fp32 step from the same rounded weight and the exact state, then one rounding.
    master = [torch.nn.Parameter(p.detach().float()) for p in ours]
    reference = torch.optim.AdamW(master, lr=0.01, weight_decay=0.1)
    for step in range(4):
        set_grads(ours, step)
        for p, m in zip(ours, master, strict=True):
            m.data.copy_(p.detach())
            m.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        reference.step()
        for p, m in zip(ours, master, strict=True):
            # Equal, or one unit apart where the fp32 results fall on two sides of a tie.
            torch.testing.assert_close(p.float(), m.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-7)
    state = optimizer.state[ours[0]]
    assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(state, torch.float32)

    other = HostAdamW(ours, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, value in state.items():
        assert torch.equal(other.state[ours[0]][key], value), key  # no rounding to the param's dtype on the way
        assert other.state[ours[0]][key] is not value


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided", "expanded_grad"])
def test_any_layout(layout: str) -> None:
    def make() -> torch.nn.Parameter:
        torch.manual_seed(0)
        x = torch.randn(4, 6, 5, 3)
        if layout == "transposed":
            x = x.transpose(0, 3)
        elif layout == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        elif layout == "strided":
            x = x[:, ::2]
        return torch.nn.Parameter(x)

    ours, theirs = make(), make()
    optimizer, reference = HostAdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, foreach=False)
    for step in range(3):
        for p in (ours, theirs):
            torch.manual_seed(step)
            p.grad = torch.randn(()).expand(p.shape) if layout == "expanded_grad" else torch.randn(p.shape)
        optimizer.step()
        reference.step()
        for o in (optimizer, reference):  # loading may change the layout of the state
            o.load_state_dict(copy.deepcopy(o.state_dict()))
    assert ours.stride() == theirs.stride()
    assert_close([ours], [theirs])


def test_closure_runs_once_with_grad_and_its_loss_is_returned() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([param], lr=0.1)
    calls = []

    def closure() -> Any:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert (param < 1).all()


def test_works_with_schedulers_hooks_deepcopy_and_pickle() -> None:
    params = make_params()
    optimizer = HostAdamW(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert steps == [1]
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin_params = twin.param_groups[0]["params"]
        set_grads(twin_params, 1)
        twin.step()
        assert twin.state[twin_params[0]]["step"] == 2
    assert optimizer.state[params[0]]["step"] == 1


def test_a_backward_through_the_old_value_fails() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([param])
    loss = (param**2).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_errors() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    for options, message in (
        ({"lr": -1.0}, "lr must be 0 or more, not -1.0"),
        ({"lr": torch.ones(2)}, "lr has 2 elements"),
        ({"eps": float("nan")}, "eps must be 0 or more, not nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), not \(0.9, 1.0\)"),
        ({"amsgrad": True}, r"does not support amsgrad=True; use torch\.optim\.AdamW"),
    ):
        with pytest.raises(ValueError, match=message):
            HostAdamW([param], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one is on meta"):
        HostAdamW([torch.nn.Parameter(torch.ones(3, device="meta"))])
    with pytest.raises(ValueError, match=r"one is torch\.float64"):
        HostAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])
    amsgrad = torch.optim.AdamW([param], amsgrad=True).state_dict()
    optimizer = HostAdamW([param])
    with pytest.raises(ValueError, match="the state dict has amsgrad=True"):
        optimizer.load_state_dict(amsgrad)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1

    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradients"):
        HostAdamW(table.parameters()).step()
