"""The host kernels against torch, against each other, and against the bits they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forebay.host import _torch_kernels as fallback
from forebay.host import kernels
from forebay.host.kernels import Algorithm, Hyper, Segment, UpdateTask, join_master, split_master

native_only = pytest.mark.skipif(kernels.backend() == "torch", reason="the native library is not built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HYPERS = {
    Algorithm.ADAMW: {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1},
    Algorithm.ADAM: {"lr": 0.02, "beta1": 0.4, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1},
    Algorithm.SGD: {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    Algorithm.LION: {"lr": 0.02, "beta1": 0.9, "beta2": 0.97, "weight_decay": 0.1},
}
# Four fp32 operations between a state and the weight, each within half a unit in the last place, grow over 5 steps.
RTOL, ATOL = 2e-6, 2e-6


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = kernels.backend()
    yield
    if before != "torch":
        kernels.set_instruction_set(before.removeprefix("native-"))
        kernels.set_num_threads(None)


def instruction_sets() -> list[str]:
    available = []
    for name in ("scalar", "avx2", "avx512", "neon"):
        try:
            kernels.set_instruction_set(name)
        except ValueError:
            continue
        available.append(name)
    return available


def make_segment(
    num_elements: int,
    algorithm: Algorithm = Algorithm.ADAMW,
    *,
    grad: torch.dtype = torch.float32,
    param: torch.dtype = torch.float32,
    master: str = "none",
    state: torch.dtype = torch.float32,
    seed: int = 0,
    offset: int = 0,
    step: float = 3.0,
    separate: bool = False,
    special: bool = False,
) -> Segment:
    """Make a segment of random numbers. ``offset`` elements shift every tensor off its alignment."""
    generator = torch.Generator().manual_seed(seed)

    def make(dtype: torch.dtype, positive: bool = False) -> torch.Tensor:
        x = torch.randn(num_elements + offset, generator=generator)
        if special and num_elements >= 8:
            x[offset : offset + 7] = torch.tensor([0.0, -0.0, 1e-41, torch.inf, -torch.inf, torch.nan, 3e38])
        return (x.abs() if positive else x).to(dtype)[offset:]

    weight = make(torch.float32)
    kept: torch.Tensor | None = None
    if master == "none":
        value = weight.to(param)
    elif master == "remainder":
        value, kept = (x.contiguous() for x in split_master(weight))
    else:
        value, kept = weight.to(param), weight
    m = make(state) if algorithm != Algorithm.SGD or HYPERS[Algorithm.SGD]["momentum"] else None
    v = make(state, positive=True) if algorithm in (Algorithm.ADAMW, Algorithm.ADAM) else None
    tensors: dict[str, Any] = {
        "param": value,
        "master": kept,
        "exp_avg": m,
        "exp_avg_sq": v,
        "step": torch.tensor([step]),
    }
    if separate:
        outs = {f"{k}_out": torch.full_like(x, 77) for k, x in tensors.items() if x is not None}
        tensors.update(outs)
    return Segment(grad=make(grad), seed=seed, **tensors)


NAMES = ("param", "master", "exp_avg", "exp_avg_sq", "step")


def outputs(segment: Segment) -> dict[str, torch.Tensor]:
    values = {}
    for name in NAMES:
        value = getattr(segment, f"{name}_out")
        value = getattr(segment, name) if value is None else value
        if value is not None:
            values[name] = value.clone()
    return values


def run(algorithm: Algorithm, *segments: Segment, resolve: bool = False, **scalars: torch.Tensor) -> UpdateTask:
    task = UpdateTask("test", algorithm, segments, Hyper(**HYPERS[algorithm]), **scalars, resolve=resolve)
    task.run()
    task.raise_for_status()
    return task


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits, with one pattern for every NaN: payloads are not promised."""
    if not x.dtype.is_floating_point:
        return x
    integer = {4: torch.int32, 2: torch.int16}[x.dtype.itemsize]
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(integer)


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(as_bits(a[name]), as_bits(b[name])), name


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "hyper", "reference", "options"),
    [
        (Algorithm.ADAMW, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (Algorithm.ADAMW, {"beta1": 0.3}, torch.optim.AdamW, {"betas": (0.3, 0.999), "weight_decay": 0.0}),
        (Algorithm.ADAM, {"weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        (Algorithm.ADAM, {}, torch.optim.Adam, {}),
        (Algorithm.SGD, {"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
        (Algorithm.SGD, {"momentum": 0.9, "dampening": 0.4}, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
        (Algorithm.SGD, {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_matches_torch(
    algorithm: Algorithm, hyper: dict[str, Any], reference: Any, options: dict[str, Any], maximize: bool
) -> None:
    torch.manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(10_007))
    param = expected.detach().clone()
    optimizer = reference([expected], lr=0.01, maximize=maximize, foreach=False, **options)
    m, v, step = torch.zeros_like(param), torch.zeros_like(param), torch.zeros(())
    is_adam = algorithm in (Algorithm.ADAM, Algorithm.ADAMW)
    grad = torch.empty_like(param)
    segment = Segment(grad, param, m, v if is_adam else None, step)
    task = UpdateTask("test", algorithm, [segment], Hyper(lr=0.01, maximize=maximize, **hyper))
    for i in range(5):
        grad.normal_()
        expected.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = task.hyper.lr = 0.01 / (i + 1)
        optimizer.step()
        task.run()
    assert (task.status(), task.num_runs, step.item()) == (0, 5, 5.0)
    torch.testing.assert_close(param, expected.detach(), rtol=RTOL, atol=ATOL)
    state = optimizer.state[expected]
    if is_adam:
        torch.testing.assert_close(m, state["exp_avg"], rtol=RTOL, atol=ATOL)
        torch.testing.assert_close(v, state["exp_avg_sq"], rtol=RTOL, atol=ATOL)
    elif "momentum" in hyper:
        torch.testing.assert_close(m, state["momentum_buffer"], rtol=RTOL, atol=ATOL)
    else:
        assert not m.any()


def test_matches_lion_of_the_paper() -> None:
    torch.manual_seed(0)
    param, m, grad = torch.randn(1001), torch.zeros(1001), torch.empty(1001)
    expected, momentum = param.double(), m.double()
    task = UpdateTask("test", Algorithm.LION, [Segment(grad, param, m)], Hyper(**HYPERS[Algorithm.LION]))
    for _ in range(4):
        grad.normal_()
        direction = torch.sign(0.9 * momentum + 0.1 * grad)
        expected = expected - 0.02 * (direction + 0.1 * expected)
        momentum = 0.97 * momentum + 0.03 * grad
        task.run()
    torch.testing.assert_close(param, expected.float(), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(m, momentum.float(), rtol=RTOL, atol=ATOL)


CASES = [
    (grad, param, master, state)
    for grad in DTYPES
    for param, master in [
        *((dtype, "none") for dtype in DTYPES),
        (torch.bfloat16, "remainder"),
        *((dtype, "float32") for dtype in DTYPES),
    ]
    for state in (torch.float32, torch.bfloat16)
]


@native_only
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_instruction_sets_agree_bitwise(algorithm: Algorithm) -> None:
    names = instruction_sets()
    assert "scalar" in names
    for index, (grad, param, master, state) in enumerate(CASES):
        for separate in (False, True):
            results = []
            for name in names:
                kernels.set_instruction_set(name)
                segment = make_segment(
                    # Odd sizes and offsets: full vectors, tails, unaligned streams and first elements past 2**32.
                    (101 + index) if index % 2 else 1 + index,
                    algorithm,
                    grad=grad,
                    param=param,
                    master=master,
                    state=state,
                    seed=index,
                    offset=index % 3,
                    separate=separate,
                    special=True,
                )
                run(algorithm, segment)
                results.append(outputs(segment))
            for result in results[1:]:
                assert_same_bits(results[0], result)


@native_only
@pytest.mark.parametrize("name", ["avx2", "avx512", "neon"])
@pytest.mark.parametrize("master", ["none", "remainder", "float32"])
def test_stores_past_the_cache_change_nothing(name: str, master: str) -> None:
    if name not in instruction_sets():
        pytest.skip(f"no {name} here")
    param = torch.float32 if master == "none" else torch.bfloat16
    results = []
    for offset in (0, 1):  # stores past the cache need alignment
        whole = make_segment((1 << 18) + 1, param=param, master=master, separate=True, seed=1)
        cut = slice(offset, offset + (1 << 18))
        fields = {k: getattr(whole, k) for k in (*NAMES, *(f"{n}_out" for n in NAMES))}
        fields = {k: x if x is None or k.startswith("step") else x[cut] for k, x in fields.items()}
        kernels.set_instruction_set(name)
        kernels.set_num_threads(1)
        run(Algorithm.ADAMW, Segment(grad=whole.grad[cut], **fields))
        results.append(
            {
                k: x[1 - offset : (1 << 18) - offset]
                for k, x in outputs(Segment(whole.grad[cut], **fields)).items()
                if k != "step"
            }
        )
    assert_same_bits(*results)


@pytest.mark.parametrize("num_elements", [*range(1, 101, 9), 1023, 1024, 1025])
def test_any_size_writes_exactly_its_own_elements(num_elements: int) -> None:
    full = {name: torch.full((num_elements + 64,), 5.0) for name in ("param", "exp_avg", "exp_avg_sq")}
    inside = {name: x[32 : 32 + num_elements] for name, x in full.items()}
    segment = Segment(grad=torch.ones(num_elements), step=torch.zeros(()), **inside)
    run(Algorithm.ADAMW, segment)
    for name, x in full.items():
        assert (x[:32] == 5).all(), name
        assert (x[32 + num_elements :] == 5).all(), name
        assert (x[32 : 32 + num_elements] != 5).all(), name


@native_only
def test_threads_and_cuts_change_nothing() -> None:
    sizes = [70_001, 3, 0, 40_000, 1, 123_457]
    results = []
    for threads in (1, 2, 5):
        kernels.set_num_threads(threads)
        assert kernels.num_threads() == threads
        segments = [
            make_segment(n, state=torch.bfloat16, param=torch.bfloat16, master="remainder", seed=i)
            for i, n in enumerate(sizes)
        ]
        run(Algorithm.ADAMW, *segments)
        results.append([outputs(segment) for segment in segments])
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert_same_bits(a, b)

    whole = make_segment(70_001, state=torch.bfloat16, param=torch.bfloat16, master="remainder", seed=0)
    pieces = []
    for start, stop in ((0, 5), (5, 33_333), (33_333, 70_001)):
        tensors = {name: getattr(whole, name)[start:stop] for name in ("grad", *NAMES[:-1])}
        pieces.append(Segment(**tensors, step=whole.step, first_element=start, seed=0))  # one step for all three
    run(Algorithm.ADAMW, *pieces)
    assert_same_bits(results[0][0], outputs(whole))


@pytest.mark.parametrize("master", ["none", "remainder", "float32"])
def test_separate_outputs_leave_the_inputs_alone(master: str) -> None:
    for algorithm in Algorithm:
        options: dict[str, Any] = {"param": torch.float32 if master == "none" else torch.bfloat16, "master": master}
        in_place, separate = (make_segment(999, algorithm, separate=s, **options) for s in (False, True))
        before = {name: getattr(separate, name).clone() for name in NAMES if getattr(separate, name) is not None}
        run(algorithm, in_place)
        run(algorithm, separate)
        assert_same_bits(before, {name: getattr(separate, name) for name in before})
        assert_same_bits(outputs(in_place), outputs(separate))


def test_grad_scale_and_found_inf_are_read_at_run_time() -> None:
    scale, found_inf = torch.tensor(0.25), torch.tensor(0.0)
    scaled, plain = make_segment(500), make_segment(500)
    plain.grad.mul_(0.25)
    task = run(Algorithm.ADAMW, scaled, grad_scale=scale, found_inf=found_inf)
    run(Algorithm.ADAMW, plain)
    assert_same_bits(outputs(plain), outputs(scaled))
    before = outputs(scaled)
    for value in (1.0, torch.nan, torch.inf):
        found_inf.fill_(value)
        task.run()
        assert_same_bits(before, outputs(scaled))
    assert (task.num_runs, task.num_skipped, task.status()) == (1, 3, 0)
    found_inf.zero_()
    scale.fill_(0.0)
    task.run()
    assert task.num_runs == 2
    torch.testing.assert_close(scaled.exp_avg, 0.8 * before["exp_avg"], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("backend", [*instruction_sets(), "torch"])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_resolve_gives_what_an_update_at_that_time_would(
    algorithm: Algorithm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":
        monkeypatch.setattr(kernels.native, "library", lambda: None)
    else:
        kernels.set_instruction_set(backend)
    # More elements than one thread takes, and sizes that no vector divides.
    for index, (grad, param, master, state) in enumerate(CASES):
        options: dict[str, Any] = {"grad": grad, "param": param, "master": master, "state": state, "separate": True}
        sizes = (40_001, 5, 20_003)
        for scale, found_inf in ((1.0, 0.0), (0.3, 0.0), (torch.nan, 0.0), (1.0, 1.0), (0.3, torch.nan)):
            early, late = ([make_segment(n, algorithm, seed=index + n, **options) for n in sizes] for _ in range(2))
            scalars = {"grad_scale": torch.tensor(scale), "found_inf": torch.tensor(found_inf)}
            run(algorithm, *early)
            task = run(algorithm, *early, resolve=True, **scalars)
            assert (task.num_kept, task.num_runs, task.num_skipped) == (
                int(scale == 1.0 and found_inf == 0.0),
                int(scale != 1.0 and found_inf == 0.0),
                int(found_inf != 0.0),
            )
            run(algorithm, *late, **scalars)
            for ours, theirs in zip(early, late, strict=True):
                if found_inf != 0.0:
                    inputs = {name: getattr(theirs, name) for name in NAMES if getattr(theirs, name) is not None}
                    assert_same_bits(outputs(ours), inputs)
                else:
                    assert_same_bits(outputs(ours), outputs(theirs))


def test_resolve_refuses_to_work_in_place() -> None:
    with pytest.raises(ValueError, match=r"chunk 3: .* segment 0 updates param and exp_avg and exp_avg_sq and step in"):
        UpdateTask("chunk 3", Algorithm.ADAMW, [make_segment(4)], Hyper(), resolve=True)


def special_floats() -> torch.Tensor:
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)  # ties and their neighbours
    return (upper[:, None] | lower).flatten().view(torch.float32)


def test_remainder_loses_nothing() -> None:
    master = special_floats()
    param, remainder = split_master(master)
    joined = join_master(param, remainder)
    number = ~master.isnan()
    assert torch.equal(joined.view(torch.int32)[number], master.view(torch.int32)[number])
    assert joined[~number].isnan().all()
    assert param[~number].isnan().all()
    assert not param[number].isnan().any()
    # Nearest, ties away from zero, in exact arithmetic.
    finite = number & (master.abs() < 3.3e38)
    down = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)[finite].double()
    up = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)[finite].double()
    exact = master[finite].double()
    expected = torch.where((exact - down).abs() < (up - exact).abs(), down, up)
    assert torch.equal(param[finite].double(), expected)


@native_only
def test_kernel_splits_like_split_master() -> None:
    master = special_floats()
    for name in instruction_sets():
        kernels.set_instruction_set(name)
        param, remainder = split_master(master)
        task = UpdateTask(
            "noop", Algorithm.SGD, [Segment(torch.zeros(len(master)), param, master=remainder)], Hyper(lr=0)
        )
        task.run()
        assert task.status() == 0
        expected = split_master(master)
        nan = master.isnan()
        assert torch.equal(param.view(torch.int16)[~nan], expected[0].view(torch.int16)[~nan])
        assert torch.equal(remainder, expected[1])
        assert param[nan].isnan().all()


@native_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    master = torch.cat([special_floats(), (torch.arange(1 << 20, dtype=torch.int32) * 4093).view(torch.float32)])
    master = master[~master.isnan()]
    grads = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    grads = grads[~grads.isnan()]
    for name in instruction_sets():
        kernels.set_instruction_set(name)
        param = torch.zeros(len(master), dtype=dtype)
        # lr 0: the master stays, and the param becomes its copy.
        segment = Segment(torch.zeros(len(master)), param, master=master.clone())
        UpdateTask("write", Algorithm.SGD, [segment], Hyper(lr=0)).run()
        assert torch.equal(param.view(torch.int16), master.to(dtype).view(torch.int16))
        widened = torch.zeros(len(grads))
        UpdateTask("read", Algorithm.SGD, [Segment(grads, widened)], Hyper(lr=-1)).run()
        assert torch.equal(widened, grads.float())


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    n = 1 << 16
    value = 1.0 + 0.3 * 2**-7  # bf16 has 1 and 1 + 2**-7 here: up in 30% of the cases

    def ups(seed: int, step: float) -> torch.Tensor:
        m = torch.ones(n, dtype=torch.bfloat16)
        segment = Segment(torch.full((n,), value), torch.zeros(n), m, step=torch.tensor(step), seed=seed)
        UpdateTask("round", Algorithm.LION, [segment], Hyper(beta2=0.0)).run()
        assert set(m.float().unique().tolist()) == {1.0, 1.0 + 2**-7}
        return m > 1

    first = ups(1, 0.0)
    assert torch.equal(first, ups(1, 0.0))
    sigma = (0.3 * 0.7 / n) ** 0.5
    draws = [first, ups(1, 1.0), ups(2, 0.0)]
    for draw in draws:
        assert abs(draw.float().mean().item() - 0.3) < 5 * sigma
        # Neighbours, and elements a power of two apart, are independent: both up in 9% of the cases.
        for lag in (1, 2, 16, 4096):
            both = (draw[lag:] & draw[:-lag]).float().mean().item()
            assert abs(both - 0.09) < 5 * (0.09 * 0.91 / n) ** 0.5 * 1.5
    for other in draws[1:]:
        assert abs((first & other).float().mean().item() - 0.09) < 5 * (0.09 * 0.91 / n) ** 0.5


@native_only
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_fallback_agrees(algorithm: Algorithm) -> None:
    # One unit in the last place of the narrower dtype, where fp32 results fall on two sides of a tie.
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    for index, (grad, param, master, state) in enumerate(CASES):
        ours, theirs = (
            make_segment(777, algorithm, grad=grad, param=param, master=master, state=state, seed=index, separate=True)
            for _ in range(2)
        )
        run(algorithm, ours)
        assert fallback.update(algorithm.name, [theirs], Hyper(**HYPERS[algorithm]), None, None)
        a, b = outputs(ours), outputs(theirs)
        if master == "remainder":
            a["param"], b["param"] = (join_master(x["param"], x.pop("master")) for x in (a, b))
        for name, x in a.items():
            close = torch.isclose(x.float(), b[name].float(), rtol=tolerance[x.dtype], atol=tolerance[x.dtype] / 2)
            # Lion's sign flips where rounding decides it.
            assert close.float().mean() >= (0.99 if algorithm == Algorithm.LION else 1), (name, grad, param, master)


def test_random_bits_beyond_32_bit_indices() -> None:
    results = []
    for first_element in ((1 << 32) - 50, 1 << 32, 0):
        segment = Segment(
            torch.randn(100, generator=torch.Generator().manual_seed(0)),
            torch.zeros(100),
            torch.zeros(100, dtype=torch.bfloat16),
            step=torch.zeros(()),
            first_element=first_element,
        )
        run(Algorithm.LION, segment)
        assert segment.exp_avg is not None
        results.append(segment.exp_avg.clone())
    assert not torch.equal(results[1], results[2])
    expected = fallback._random_bits(Segment(torch.zeros(100), torch.zeros(100), first_element=(1 << 32) - 50), 0.0)
    assert len(expected.unique()) == 100


def test_hyperparameters_and_segments_can_be_changed() -> None:
    segment = make_segment(10)
    task = UpdateTask("test", Algorithm.ADAMW, [segment], Hyper(lr=0.0))
    before = segment.param.clone()
    task.run()
    assert torch.equal(segment.param, before)
    task.hyper.lr = 1.0
    task.run()
    assert not torch.equal(segment.param, before)
    other = make_segment(12, seed=5)
    untouched, before = segment.param.clone(), other.param.clone()
    task.set_segment(0, other)
    task.run()
    assert task.segments == (other,)
    assert torch.equal(segment.param, untouched)
    assert not torch.equal(other.param, before)


@native_only
def test_an_exception_in_the_fallback_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.native, "library", lambda: None)
    segment = Segment(torch.ones(4), torch.ones(4))
    task = UpdateTask("update of w", Algorithm.SGD, [segment], Hyper(lr=0.5))
    task._segments = [None]  # type: ignore[list-item]
    task.run()
    task._segments = [segment]
    task.run()
    assert task.status() == -1, "it stays"
    assert isinstance(task.error, AttributeError)
    with pytest.raises(RuntimeError, match="update of w: the torch fallback raised an exception"):
        task.raise_for_status()
    task.clear_status()
    assert (task.status(), task.error) == (0, None)
    task.raise_for_status()


def test_status_names_the_segment() -> None:
    tensors = torch.ones(4), torch.ones(4), torch.ones(4)
    segments = [Segment(*tensors, hyper=Hyper()), Segment(*tensors[:2])]
    task = UpdateTask("chunk 7", Algorithm.SGD, segments, Hyper())
    task.hyper.momentum = 0.9
    task.run()
    assert task.status() == 4
    with pytest.raises(RuntimeError, match=r"chunk 7: a tensor is missing .* \(momentum\) needs in segment 1"):
        task.raise_for_status()
    assert task.num_runs == 0


@native_only
def test_addresses_can_be_called_without_python() -> None:
    import ctypes

    segment = make_segment(100)
    task = UpdateTask("test", Algorithm.ADAMW, [segment], Hyper())
    before = segment.param.clone()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(task.function_address)(task.argument_address)
    assert not torch.equal(segment.param, before)
    assert (task.num_runs, task.status()) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(3)}, "grad has 3 elements, but 4 are needed"),
        ({"grad": torch.zeros(4, dtype=torch.float64)}, "grad is torch.float64; it must be torch.float32 or"),
        ({"grad": torch.zeros(8)[::2]}, "grad must be contiguous"),
        ({"grad": torch.zeros(4, device="meta")}, "grad is on meta, but host updates work on CPU memory"),
        ({"grad": torch.zeros(4).to_sparse()}, "host updates take dense tensors only"),
        ({"grad": None}, "grad must be a tensor, not NoneType"),
        ({"exp_avg": torch.zeros(4, dtype=torch.float16)}, "exp_avg is torch.float16"),
        ({"exp_avg": None}, "exp_avg_sq is given without exp_avg"),
        ({"step": torch.zeros(4)}, "step has 4 elements, but 1 are needed"),
        ({"step": None, "exp_avg": torch.zeros(4, dtype=torch.bfloat16), "exp_avg_sq": None}, "needs a step"),
        ({"master": torch.zeros(4, dtype=torch.int16)}, "lower half of a bfloat16 param, but param is torch.float32"),
        ({"master_out": torch.zeros(4)}, "master_out is given without master"),
        ({"param_out": torch.zeros(4, dtype=torch.bfloat16)}, "param_out is torch.bfloat16"),
        ({"first_element": -1}, "must not be negative"),
        ({"seed": 1 << 64}, r"must be in \[0, 2\*\*64\)"),
    ],
)
def test_segment_errors(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "grad": torch.zeros(4),
        "param": torch.zeros(4),
        "exp_avg": torch.zeros(4),
        "exp_avg_sq": torch.zeros(4),
        "step": torch.zeros(()),
    }
    with pytest.raises(ValueError, match=message):
        Segment(**(fields | change))


def test_other_errors() -> None:
    memory = torch.zeros(8)
    with pytest.raises(ValueError, match="param_out overlaps param"):
        Segment(torch.zeros(4), memory[:4], param_out=memory[2:6])
    plain = Segment(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match="chunk 3: ADAMW needs exp_avg and exp_avg_sq and step, but segment 0"):
        UpdateTask("chunk 3", Algorithm.ADAMW, [plain], Hyper())
    with pytest.raises(ValueError, match="SGD needs exp_avg"):
        UpdateTask("chunk 3", Algorithm.SGD, [plain], Hyper(momentum=0.9))
    with pytest.raises(ValueError, match="LION has no exp_avg_sq"):
        UpdateTask("chunk 3", Algorithm.LION, [make_segment(4)], Hyper())
    with pytest.raises(ValueError, match="found_inf has 2 elements"):
        UpdateTask("chunk 3", Algorithm.SGD, [plain], Hyper(), found_inf=torch.zeros(2))
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        kernels.set_num_threads(0)
    with pytest.raises(ValueError, match="instruction set 'sse9' is not available"):
        kernels.set_instruction_set("sse9")
    with pytest.raises(ValueError, match=r"master must be torch\.float32"):
        split_master(torch.zeros(2, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"param must be torch\.bfloat16 and remainder torch\.int16"):
        join_master(torch.zeros(2), torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ValueError, match="kind must be one of copy, update"):
        kernels.stream_bandwidth(1 << 20, "sideways")


def test_stream_bandwidth_measures() -> None:
    assert kernels.stream_bandwidth(1 << 20) > 0
    assert kernels.stream_bandwidth(1 << 20, "copy", repeats=1) > 0


def in_subprocess(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


SMALL = """
import logging, torch
from forebay.host import kernels as k
w = torch.ones(40_000); g = torch.ones_like(w); step = torch.zeros(())
segment = k.Segment(g, w, torch.zeros_like(w), torch.zeros_like(w), step)
task = k.UpdateTask("t", k.Algorithm.ADAMW, [segment], k.Hyper(lr=0.5))
"""


@native_only
def test_a_forked_child_can_update() -> None:
    code = SMALL + (
        "import os\n"
        "k.set_num_threads(2)\n"
        "task.run()\n"
        "pid = os.fork()\n"
        "task.run()\n"
        # Single elements: torch's own threads do not survive a fork.
        "assert task.status() == 0 and step.item() == 2 and w[0].item() < 0.1 and w[-1].item() < 0.1\n"
        "if pid == 0: os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = in_subprocess(code, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


@native_only
def test_several_threads_can_update_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    kernels.set_num_threads(2)
    segments = [make_segment(50_000, seed=i % 2) for i in range(8)]
    tasks = [UpdateTask(str(i), Algorithm.ADAMW, [s], Hyper()) for i, s in enumerate(segments)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda task: [task.run() for _ in range(5)], tasks))
    for segment in segments[2:]:
        assert_same_bits(outputs(segments[segments.index(segment) % 2]), outputs(segment))


def test_fallback_can_be_asked_for_and_is_silent_then() -> None:
    done = in_subprocess(
        SMALL + "task.run()\n"
        "print(k.backend(), task.function_address, task.argument_address, step.item(), round(w[0].item(), 5))",
        FOREBAY_NATIVE="0",
    )
    assert done.stdout.split() == ["torch", "0", "0", "1.0", "0.5"]
    assert done.stderr == ""


def test_missing_library_is_noted_once_or_an_error() -> None:
    hide = "import forebay.host._native_library as n; n._path = lambda: None\n"
    done = in_subprocess(hide + SMALL + "task.run(); print(k.backend())", FOREBAY_NATIVE="")
    assert done.stdout == "torch\n"
    assert done.stderr.count("without its native host kernels") == 1
    done = in_subprocess(hide + SMALL, FOREBAY_NATIVE="1")
    assert "RuntimeError: FOREBAY_NATIVE=1, but forebay was installed without" in done.stderr


@native_only
def test_environment_variables() -> None:
    code = "from forebay.host import kernels as k; print(k.backend(), k.num_threads())"
    done = in_subprocess(code, FOREBAY_NATIVE_ISA="scalar", FOREBAY_NUM_THREADS="3")
    assert done.stdout.split() == ["native-scalar", "3"], done.stderr
    for name, value, message in (
        (
            "FOREBAY_NATIVE_ISA",
            "mmx",
            "ValueError: FOREBAY_NATIVE_ISA='mmx' is not available on this CPU; choose one of",
        ),
        ("FOREBAY_NUM_THREADS", "many", "ValueError: FOREBAY_NUM_THREADS must be a positive whole number, not 'many'"),
        ("FOREBAY_NATIVE", "yes", "ValueError: FOREBAY_NATIVE must be 0 (torch), 1 (native) or unset"),
    ):
        assert message in in_subprocess(code, **{name: value}).stderr
