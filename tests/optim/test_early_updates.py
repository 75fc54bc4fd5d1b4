"""Early host updates: the same bits as updates at the step, whatever happens between backward and step."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import assert_bitwise, batch, build, loss_of, weights
from torch import nn

import forebay
from forebay.engine import HostTaskError, Lane
from forebay.engine.sim import RaceError, SimEngine
from forebay.host import kernels
from forebay.optim import early_updates, host_chunk, spares
from forebay.optim.early_updates import EarlyUpdates
from forebay.optim.layout import Placement
from forebay.optim.options import plan_memory

SEEDS = range(50)
CHUNK = 4096
CLIPPED, UNCLIPPED = 0.05, 1e9  # below and above the norm of every gradient here


@pytest.fixture(autouse=True)
def _spares_for_all(monkeypatch):
    monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", 20)


@pytest.fixture
def _never_paused(monkeypatch):
    monkeypatch.setattr(early_updates, "MOST_PAUSED_STEPS", 0)


def make(engine, *, attach=True, **kwargs):
    model = build(kwargs.pop("dtype", torch.bfloat16))
    kwargs = {"offload_fraction": 1.0, "placement": "host", "lr": 1e-2, "weight_decay": 0.1} | kwargs
    kwargs.setdefault("early_updates", True)
    optimizer = forebay.AdamW(model.named_parameters(), engine=engine, chunk_elements=CHUNK, **kwargs)
    if attach:
        optimizer.attach(model)
    optimizer.allocate()  # and so place hooks before the first backward, after which the next can be guessed
    return model, optimizer


def early_of(optimizer) -> EarlyUpdates:
    return optimizer.placed.shares[Placement.HOST]._early


def counts(optimizer) -> tuple[int, int, int]:
    """Early updates that were used as they were, made again, and dropped."""
    early = early_of(optimizer)
    tasks = early._resolving.values()
    again = sum(task.num_runs + task.num_skipped for task in tasks)
    return early._num_kept + sum(task.num_kept for task in tasks), again, early._num_dropped


def chunks_of(optimizer):
    return optimizer.placed.shares[Placement.HOST]._host_chunks


def state_of(optimizer) -> dict[str, torch.Tensor]:
    entries = copy.deepcopy(optimizer.state_dict())["state"]
    return {f"{index}.{name}": value for index, entry in entries.items() for name, value in entry.items()}


def train(engine, model, optimizer, norms, *, before_step=lambda step: None, first_step=0):
    """Train a step for each of ``norms``; return losses, weights and state."""
    losses = []
    with engine.watch():
        for step, norm in enumerate(norms, first_step):
            loss = loss_of(model, batch(step))
            loss.backward()
            before_step(step)
            if norm is not None:
                optimizer.clip_grad_norm_(norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    optimizer.synchronize()
    engine.synchronize()
    return {"losses": torch.stack(losses), **weights(model), **state_of(optimizer)}


def norms_of(kind: str) -> list[float | None]:
    generator = torch.Generator().manual_seed(5)
    bites = {"every": [True] * 8, "none": [False] * 8, "random": torch.rand(8, generator=generator) < 0.5}
    if kind == "not at all":
        return [None] * 8
    return [CLIPPED if bite else UNCLIPPED for bite in bites[kind]]


class TestClipping:
    KINDS = ("every", "none", "random", "not at all")

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        """What comes out without early updates."""
        found = {}
        for kind in cls.KINDS:
            engine = SimEngine(0)
            found[kind] = train(engine, *make(engine, early_updates=False), norms_of(kind))
        return found

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", SEEDS)
    def test_is_exact(self, seed, kind, expected, monkeypatch):
        if seed % 2:
            monkeypatch.setattr(early_updates, "MOST_PAUSED_STEPS", 0)
        if seed % 3 == 0:  # a few chunks have spares, the others are updated at the step
            monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", 5)
        engine = SimEngine(seed)
        model, optimizer = make(engine, attach=seed % 5 > 0)
        assert_bitwise(train(engine, model, optimizer, norms_of(kind)), expected[kind])
        kept, again, dropped = counts(optimizer)
        assert kept + again > 0
        assert dropped == 0
        assert (kept > 0) == (kind != "every")
        assert again == 0 or kind in ("every", "random")

    @pytest.mark.usefixtures("_never_paused")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("fraction", [1.0, 0.5])
    def test_any_dtype_and_fraction(self, dtype, state_dtype, fraction):
        found = []
        for seed, early in ((0, False), (3, True)):
            engine = SimEngine(seed)
            options = {"dtype": dtype, "state_dtype": state_dtype, "offload_fraction": fraction}
            model, optimizer = make(engine, early_updates=early, **options)
            found.append(train(engine, model, optimizer, norms_of("random")))
        assert sum(counts(optimizer)[:2]) > 0
        assert_bitwise(found[1], found[0])


@pytest.mark.usefixtures("_never_paused")
class TestBetweenBackwardAndStep:
    """What the early update read is not what the step means."""

    def unscale(self, model, optimizer, step):
        if step == 3:
            model.head.weight.grad.mul_(0.5)

    def clip_by_torch(self, model, optimizer, step):
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)

    def set_another_gradient(self, model, optimizer, step):
        if step == 3:
            model.head.weight.grad = model.head.weight.grad * 0.5

    def set_no_gradient(self, model, optimizer, step):
        if step in (3, 4):
            model.head.weight.grad = None

    def change_lr(self, model, optimizer, step):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 3e-3

    def change_betas(self, model, optimizer, step):
        if step == 3:
            optimizer.param_groups[0]["betas"] = (0.8, 0.95)

    def zero_without_a_step(self, model, optimizer, step):
        if step in (2, 4):
            optimizer.zero_grad(set_to_none=step == 4)
            loss_of(model, batch(50 + step)).backward()

    def another_backward(self, model, optimizer, step):
        if step in (2, 5):
            loss_of(model, batch(50 + step)).backward()

    def add_group(self, model, optimizer, step):
        if step == 3:
            model.extra = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
            optimizer.add_param_group({"params": [("extra", model.extra)], "lr": 5e-2})
        if step >= 3:
            model.extra.grad = torch.full_like(model.extra, 0.1)

    def other_group(self, model, optimizer, step):
        if step == 3:
            moved, name = optimizer.param_groups[0]["params"].pop(), optimizer.param_groups[0]["param_names"].pop()
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [moved], "param_names": [name]})
            optimizer.param_groups[1]["lr"] = 5e-2

    def read_state(self, model, optimizer, step):
        if step == 3:
            with torch.no_grad():
                assert_bitwise(state_of(optimizer), self.after_three_steps)

    def load_own_state(self, model, optimizer, step):
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())

    def write_a_weight(self, model, optimizer, step):
        if step == 3:
            optimizer.synchronize()
            with torch.no_grad():
                model.head.weight.mul_(0.5)

    def nan(self, model, optimizer, step):
        if step in (2, 4):
            model.head.weight.grad[0, 0] = float("nan")

    EVENTS = (
        *("unscale", "clip_by_torch", "set_another_gradient", "set_no_gradient", "change_lr", "change_betas"),
        *("zero_without_a_step", "another_backward", "add_group", "other_group", "read_state", "load_own_state"),
        *("write_a_weight", "nan"),
    )
    NORMS = (UNCLIPPED, CLIPPED, UNCLIPPED, UNCLIPPED, CLIPPED, None, None, UNCLIPPED)

    def go(self, seed, names, **kwargs):
        engine = SimEngine(seed)
        model, optimizer = make(engine, skip_nonfinite=True, **kwargs)

        def before_step(step):
            for name in names:
                getattr(self, name)(model, optimizer, step)

        self.after_three_steps = {}
        if names == ["read_state"]:
            other_engine = SimEngine(0)
            other = make(other_engine, skip_nonfinite=True, early_updates=False)
            done = train(other_engine, *other, self.NORMS[:3])
            self.after_three_steps = {name: value for name, value in done.items() if name[0].isdigit()}
        return train(engine, model, optimizer, self.NORMS, before_step=before_step), optimizer

    @pytest.mark.parametrize("name", EVENTS)
    def test_nothing_stale_is_used(self, name):
        expected, _ = self.go(0, [name], early_updates=False)
        for seed in range(4):
            found, optimizer = self.go(seed, [name])
            assert_bitwise(found, expected)
            kept, again, dropped = counts(optimizer)
            assert kept > 0
            assert again > 0
            assert dropped > 0 or name in ("add_group", "nan")

    @pytest.fixture(scope="class")
    @classmethod
    def all_together(cls):
        names = [name for name in cls.EVENTS if name not in ("read_state", "load_own_state")]
        return names, cls().go(0, names, early_updates=False)[0]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_all_together(self, seed, all_together):
        names, expected = all_together
        found, _ = self.go(seed, names)
        assert_bitwise(found, expected)

    def test_accumulation_with_a_wrong_guess_of_the_last_backward(self):
        def go(seed, **kwargs):
            engine = SimEngine(seed)
            model, optimizer = make(engine, **kwargs)
            with engine.watch():
                for step, num_backwards in enumerate([1, 1, 3, 1, 2, 2, 1, 1]):
                    for micro in range(num_backwards):
                        loss_of(model, batch(10 * step + micro)).backward()
                    optimizer.clip_grad_norm_(CLIPPED if step % 3 == 1 else UNCLIPPED)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
            optimizer.synchronize()
            return weights(model), counts(optimizer)

        expected, none = go(0, early_updates=False)
        assert none == (0, 0, 0)
        for seed in SEEDS:
            found, (kept, again, dropped) = go(seed)
            assert_bitwise(found, expected)
            assert min(kept, again, dropped) > 0

    def test_skipped_step_leaves_everything_untouched(self):
        for seed in range(5):
            engine = SimEngine(seed)
            model, optimizer = make(engine, skip_nonfinite=True)
            train(engine, model, optimizer, [UNCLIPPED] * 2)
            before = {**weights(model), **state_of(optimizer)}
            for norm in (UNCLIPPED, None):
                with engine.watch():
                    (loss_of(model, batch(3)) * float("nan")).backward()
                    assert any(chunk.is_early for chunk in chunks_of(optimizer))
                    if norm is not None:
                        optimizer.clip_grad_norm_(norm)
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.synchronize()
                assert_bitwise({**weights(model), **state_of(optimizer)}, before)
            train(engine, model, optimizer, [UNCLIPPED], first_step=4)
            assert float(optimizer.state_dict()["state"][0]["step"]) == 3

    def test_parameters_without_a_gradient_in_some_steps(self):
        def go(seed, *, early_updates=True):
            engine = SimEngine(seed)
            params = [nn.Parameter(torch.full((1500,), 0.5, dtype=torch.bfloat16)) for _ in range(6)]
            optimizer = forebay.AdamW(
                params,
                lr=1e-2,
                chunk_elements=CHUNK,
                engine=engine,
                offload_fraction=1.0,
                placement="host",
                early_updates=early_updates,
            )
            optimizer.allocate()
            with engine.watch():
                for step in range(9):
                    used = [param for index, param in enumerate(params) if index // 2 != step % 5]
                    torch.stack([(param * (step + 1)).sum() for param in used]).sum().backward()
                    optimizer.clip_grad_norm_(CLIPPED if step % 2 else UNCLIPPED)
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.synchronize()
            return dict(enumerate(p.detach().clone() for p in params)), state_of(optimizer), counts(optimizer)

        expected, expected_state, _ = go(0, early_updates=False)
        for seed in range(20):
            found, state, (kept, again, _) = go(seed)
            for index, value in expected.items():
                assert torch.equal(found[index], value)
            assert_bitwise(state, expected_state)
            assert min(kept, again) > 0

    @pytest.mark.skipif(kernels.backend() == "torch", reason="makes the native kernel refuse a task")
    def test_failure_is_named(self):
        engine = SimEngine(0)
        model, optimizer = make(engine)
        train(engine, model, optimizer, [None] * 7)  # after which the tasks are used again
        for chunk in chunks_of(optimizer):
            for place in (chunk.current, chunk.spare):
                for key, task in place.tasks.items():
                    if not key[2]:  # not in place
                        task._c_segments[0].num_elements = -1
        with pytest.raises(HostTaskError, match=r"update of .*' failed with status 3"):
            train(engine, model, optimizer, [None] * 2)


class TestPause:
    def test_grows_while_clipping_bites_and_ends_with_it(self):
        engine = SimEngine(0)
        model, optimizer = make(engine)
        started = []

        def before_step(step):
            if any(chunk.is_early for chunk in chunks_of(optimizer)):
                started.append(step)

        train(engine, model, optimizer, [CLIPPED] * 56, before_step=before_step)
        assert started == [1, 3, 6, 11, 20, 37, 54]
        started.clear()
        train(engine, model, optimizer, [UNCLIPPED] * 20, before_step=before_step, first_step=56)
        assert started == list(range(71, 76))


class TestPlantedFaults:
    """The tests above can fail."""

    def test_an_early_update_that_does_not_wait_is_noticed(self):
        class Impatient:
            def __init__(self, engine):
                self._engine = engine

            def wait(self, lane, event):
                assert lane is Lane.HOST

            def __getattr__(self, name):
                return getattr(self._engine, name)

        engine = SimEngine(0)
        model, optimizer = make(engine)
        early_of(optimizer)._engine = Impatient(engine)
        with pytest.raises(RaceError, match=r"update of .* reads memory that copy down"):
            train(engine, model, optimizer, [None] * 3)

    def test_weights_that_go_up_before_the_step_are_noticed(self, monkeypatch):
        """Without a task that settles, an early update may be over while the old weights are still read."""

        def go(engine):
            model, optimizer = make(engine)
            host = optimizer.placed.shares[Placement.HOST]
            wait = engine.wait

            def without_one(lane, event):
                if not (lane is Lane.UP and event is host._all_sent and self.leave_out):
                    wait(lane, event)

            monkeypatch.setattr(engine, "wait", without_one)
            read = lambda step: [param.detach().norm() for param in model.parameters()]  # noqa: E731
            train(engine, model, optimizer, [None] * 4, before_step=read)

        self.leave_out = False
        go(SimEngine(0))
        self.leave_out = True
        with pytest.raises(RaceError, match=r"copy up .* writes memory that aten"):
            go(SimEngine(0))

    @pytest.mark.parametrize("fault", ["never made again", "never compared", "spare written in place"])
    def test_results_differ(self, fault, monkeypatch):
        def go(**kwargs):
            engine = SimEngine(0)
            model, optimizer = make(engine, **kwargs)

            def before_step(step):
                if step == 3:
                    optimizer.param_groups[0]["lr"] = 5e-2

            norms = [UNCLIPPED, CLIPPED, UNCLIPPED, UNCLIPPED, UNCLIPPED]
            return train(engine, model, optimizer, norms, before_step=before_step)

        expected = go(early_updates=False)
        assert_bitwise(go(), expected)
        if fault == "never made again":
            task = host_chunk.HostChunk.task
            monkeypatch.setattr(
                host_chunk.HostChunk,
                "task",
                lambda self, *args, controls=(None, None), resolve=False, **kwargs: task(
                    self, *args, controls=(None, None) if resolve else controls, resolve=resolve, **kwargs
                ),
            )
        elif fault == "never compared":
            monkeypatch.setattr(EarlyUpdates, "_is_right", lambda *args: True)
        else:
            original = EarlyUpdates._task

            def in_place(self, chunk, *args, **kwargs):
                spare, chunk.spare = chunk.spare, chunk.current
                try:
                    return original(self, chunk, *args)  # without `resolve`, which refuses to work in place
                finally:
                    chunk.spare = spare

            monkeypatch.setattr(EarlyUpdates, "_task", in_place)
        with pytest.raises(AssertionError, match="differs"):
            assert_bitwise(go(), expected)


class TestMemory:
    @pytest.mark.parametrize("num_bytes", [0, 2, 5, 20])
    @pytest.mark.parametrize("options", [{"placement": "host"}, {"host_share": 0.5}, {"placement": "streamed"}])
    def test_ledger_follows_the_plan(self, num_bytes, options, monkeypatch):
        monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", num_bytes)
        engine = SimEngine(0)
        model = build()
        options = {"offload_fraction": 1.0, "early_updates": True} | options
        optimizer = forebay.AdamW(model.parameters(), engine=engine, chunk_elements=CHUNK, **options)
        optimizer.allocate()
        plan = plan_memory(model.parameters(), device="cpu", chunk_elements=CHUNK, **options)
        for tier in ("pinned", "pageable"):
            for purpose in ("optimizer_state", "weights", "gradients", "spares", "other"):
                assert engine.ledger.num_bytes(tier, purpose) == plan[tier].get(purpose, 0), (tier, purpose)
        has_spares = num_bytes > 0 and "streamed" not in options.values()
        assert bool(engine.ledger.num_bytes(purpose="spares")) == has_spares

    def test_stays_within_its_bound(self, monkeypatch):
        monkeypatch.undo()
        # The shapes of a 1.1 B Llama.
        layer = [(2048, 2048)] * 4 + [(8192, 2048)] * 3 + [(2048,)] * 2
        shapes = [(32000, 2048), *layer * 14, (2048,), (32000, 2048)]
        params = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        num_elements = sum(param.numel() for param in params)

        def bytes_per_element(**kwargs):
            plan = plan_memory(params, **({"offload_fraction": 1.0, "early_updates": True} | kwargs))
            return sum(sum(plan[tier].values()) for tier in ("pinned", "pageable")) / num_elements

        assert 12.0 < bytes_per_element() <= 12.5
        assert bytes_per_element(early_updates=False) <= 11.4
        # Without overlap nothing is sent during backward, so there are no spares.
        assert bytes_per_element(overlap=False) == bytes_per_element(early_updates=False, overlap=False)
        assert bytes_per_element(placement="host") <= 15.0

    def test_the_last_layers_have_the_spares(self, monkeypatch):
        monkeypatch.setattr(spares, "SPARE_BYTES_PER_ELEMENT", 5)
        _, optimizer = make(SimEngine(0))
        optimizer.allocate()
        has_spare = [chunk.spare is not None for chunk in chunks_of(optimizer)]
        assert has_spare == sorted(has_spare)
        assert 0 < sum(has_spare) < len(has_spare)


def test_fallback_makes_them_too(monkeypatch):
    """Without the native library a task is Python code, which runs when it is enqueued."""
    monkeypatch.setattr(kernels.native, "library", lambda: None)
    monkeypatch.setattr(early_updates, "MOST_PAUSED_STEPS", 0)
    found = []
    for early in (False, True):
        engine = SimEngine(1)
        model, optimizer = make(engine, early_updates=early, skip_nonfinite=True)
        found.append(train(engine, model, optimizer, norms_of("random")))
    assert min(counts(optimizer)[:2]) > 0
    assert_bitwise(found[1], found[0])
