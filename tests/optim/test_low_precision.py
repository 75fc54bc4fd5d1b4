"""Moments in bf16 and 8 bits: the same bits in every placement, lossless in a state dict, right on average."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from tiny import assert_bitwise, assert_nonfinite_step_changes_nothing, build, train, weights
from torch import nn

import forebay
from forebay.engine.sim import SimEngine
from forebay.host import kernels
from forebay.optim import low_precision
from forebay.optim.low_precision import Noise
from forebay.optim.options import plan_memory

SEEDS = range(12)  # the schedule is fp32's, which test_adamw.py runs under many more
CHUNK = 4096
LOW = ("bf16", "8bit")


def run(engine=None, *, steps=8, first_step=0, max_norm=0.1, dtype=torch.bfloat16, make_only=False, **kwargs):
    engine = engine or SimEngine(0)
    model = build(dtype)
    kwargs = {"lr": 1e-2, "weight_decay": 0.1, "chunk_elements": CHUNK} | kwargs
    optimizer = forebay.AdamW(model.parameters(), engine=engine, **kwargs)
    if make_only:
        return model, optimizer
    losses = train(model, optimizer, num_steps=steps, first_step=first_step, max_norm=max_norm, watch=engine)
    return losses, weights(model), optimizer


@pytest.fixture(scope="module")
def resident():
    return {state_dtype: run(state_dtype=state_dtype)[:2] for state_dtype in LOW}


class TestPlacementsAgree:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("state_dtype", LOW)
    def test_streamed_is_bitwise_device(self, state_dtype, seed, resident):
        fraction = [1.0, 0.5, 0.25, 0.77][seed % 4]
        losses, actual, _ = run(
            SimEngine(seed), offload_fraction=fraction, placement="streamed", state_dtype=state_dtype
        )
        assert torch.equal(losses, resident[state_dtype][0])
        assert_bitwise(actual, resident[state_dtype][1])

    @pytest.mark.skipif(kernels.backend() == "torch", reason="only the native kernel promises the same bits")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_host_is_bitwise_device(self, dtype):
        expected, expected_weights, _ = run(dtype=dtype, state_dtype="bf16")
        for host_share in (1.0, 0.4):
            losses, actual, _ = run(dtype=dtype, state_dtype="bf16", offload_fraction=0.9, host_share=host_share)
            assert torch.equal(losses, expected)
            assert_bitwise(actual, expected_weights)

    @pytest.mark.parametrize("state_dtype", LOW)
    def test_how_tensors_are_cut_changes_no_bit(self, state_dtype, resident):
        losses, actual, _ = run(
            state_dtype=state_dtype, offload_fraction=0.6, placement="streamed", chunk_elements=9000
        )
        assert torch.equal(losses, resident[state_dtype][0])
        assert_bitwise(actual, resident[state_dtype][1])


class TestArithmetic:
    @pytest.mark.parametrize(("state_dtype", "tolerance"), [("bf16", 0.01), ("8bit", 0.02)])
    def test_trains_like_fp32_moments(self, state_dtype, tolerance):
        # The curves differ by noise of the size of a moment's rounding (2**-8; a 255th of a block's largest).
        exact, _, _ = run(steps=40, lr=1e-3)
        losses, _, _ = run(steps=40, lr=1e-3, state_dtype=state_dtype)
        assert not torch.equal(losses, exact)
        assert (losses - exact).abs().max() < tolerance * exact[0]

    @pytest.mark.parametrize("state_dtype", LOW)
    @pytest.mark.parametrize("name", low_precision.MOMENTS)
    def test_rounding_is_right_on_average(self, state_dtype, name):
        num_elements, num_draws = 256, 2000
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(num_elements, generator=generator)
        values = values if name == "exp_avg" else values.square()
        fields = {
            key: torch.zeros(field.num_values(num_elements), dtype=field.dtype)
            for fields in (low_precision.moment_fields(state_dtype), low_precision.scale_fields(state_dtype))
            for key, field in fields.items()
        }
        total = torch.zeros(num_elements)
        spread = torch.zeros(num_elements)
        for draw in range(num_draws):
            key = low_precision.mix_keys(torch.tensor([draw]))
            bits = low_precision.random_bits(Noise(key, 0), num_elements)
            low_precision.store_moment(fields, name, values, bits >> 16)
            loaded = low_precision.load_moment(fields, name)
            total += loaded
            spread += (loaded - values).square()
        error = total / num_draws - values
        # Five standard errors of the mean. Companding is unbiased in the root, so the value has a bias of its
        # rounding's variance on top: below a quarter of a code's square.
        bias = 0.0 if state_dtype == "bf16" else 2.0 / 127**2
        bound = 5 * (spread / num_draws).sqrt() / num_draws**0.5 + bias * values.abs().max() + 1e-7
        assert (error.abs() <= bound).all()

    @pytest.mark.parametrize("state_dtype", LOW)
    def test_what_is_too_small_for_nearest_still_arrives(self, state_dtype):
        # With betas (0.9, 0.999), exp_avg_sq moves by a thousandth of the gap: nearest rounding stops far too early.
        param = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
        optimizer = forebay.AdamW([param], lr=0.0, state_dtype=state_dtype, engine=SimEngine(0))
        for _ in range(1000):
            param.grad = torch.ones_like(param)
            optimizer.step()
        reached = optimizer.state_dict()["state"][0]["exp_avg_sq"].float().mean()
        assert abs(float(reached) - (1 - 0.999**1000)) < 0.02

    @pytest.mark.parametrize("state_dtype", LOW)
    def test_a_second_moment_never_becomes_zero_beside_a_first_one(self, state_dtype):
        param = nn.Parameter(torch.zeros(256, dtype=torch.float32))
        optimizer = forebay.AdamW([param], lr=1e-2, state_dtype=state_dtype, engine=SimEngine(0))
        grad = torch.full((256,), 1e-6)
        grad[0] = 1.0  # its block's scale
        for _ in range(20):
            param.grad = grad.clone()
            optimizer.step()
        # An 8-bit first moment is at least 127**-2 of its block's largest, the root of a second one 255**-2: a step
        # is at most their ratio, 4.04, times the learning rate.
        assert param.detach().abs().max() < 20 * 1e-2 * 4.1

    @pytest.mark.parametrize("state_dtype", LOW)
    def test_nan_stays_visible(self, state_dtype):
        param = nn.Parameter(torch.ones(300))
        optimizer = forebay.AdamW([param], state_dtype=state_dtype, engine=SimEngine(0))
        param.grad = torch.ones(300)
        param.grad[7] = float("nan")
        optimizer.step()
        assert param[7].isnan()
        moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
        assert not moment[7].isfinite()

    @pytest.mark.parametrize("placement", ["streamed", "host"])
    def test_nonfinite_gradient_leaves_everything_untouched(self, placement):
        for state_dtype in LOW if placement == "streamed" else ("bf16",):
            _, before, optimizer = run(
                state_dtype=state_dtype, offload_fraction=0.6, placement=placement, skip_nonfinite=True
            )
            assert_nonfinite_step_changes_nothing(optimizer, before)


class TestState:
    @pytest.mark.parametrize("state_dtype", LOW)
    @pytest.mark.parametrize("source", [(0.0, "auto"), (1.0, "streamed"), (0.6, "streamed")])
    @pytest.mark.parametrize("target", [(0.0, "auto"), (1.0, "streamed")])
    def test_resumes_bit_for_bit_in_any_placement(self, state_dtype, source, target, resident):
        _, _, optimizer = run(steps=4, state_dtype=state_dtype, offload_fraction=source[0], placement=source[1])
        stream = io.BytesIO()
        torch.save({"state": optimizer.state_dict(), "params": optimizer.param_groups[0]["params"]}, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        model, resumed = run(make_only=True, state_dtype=state_dtype, offload_fraction=target[0], placement=target[1])
        with torch.no_grad():
            for param, value in zip(model.parameters(), saved["params"], strict=True):
                param.copy_(value)
        resumed.load_state_dict(saved["state"])
        losses = train(model, resumed, num_steps=4, first_step=4, max_norm=0.1)
        assert torch.equal(losses, resident[state_dtype][0][4:])
        assert_bitwise(weights(model), resident[state_dtype][1])

    @pytest.mark.parametrize("state_dtype", LOW)
    def test_loads_fp32_moments_and_is_loaded_by_torch(self, state_dtype):
        model, optimizer = run(make_only=True, state_dtype=state_dtype, offload_fraction=1.0, placement="streamed")
        plain_model = build(torch.float32)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
        train(plain_model, plain, num_steps=3)
        optimizer.load_state_dict(plain.state_dict())
        expected = plain.state_dict()["state"]
        for index, entry in optimizer.state_dict()["state"].items():
            assert float(entry["step"]) == 3
            for name in low_precision.MOMENTS:
                whole = expected[index][name]
                # A stored value is off by at most half a step of bf16, or of a code at the block's largest.
                bound = whole.abs() * 2.0**-8 if state_dtype == "bf16" else whole.abs().max() * (4 / 127)
                assert ((entry[name].float() - whole).abs() <= bound + 1e-12).all(), name
        train(model, optimizer, num_steps=1)
        plain.load_state_dict(optimizer.state_dict())
        train(plain_model, plain, num_steps=1)

    @pytest.mark.parametrize(("state_dtype", "most"), [("fp32", 10.0), ("bf16", 6.0), ("8bit", 4.07)])
    def test_bytes_per_element_are_as_documented(self, state_dtype, most):
        param = nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
        plan = plan_memory([param], offload_fraction=1.0, placement="streamed", state_dtype=state_dtype)
        optimizer = forebay.AdamW(
            [param], offload_fraction=1.0, placement="streamed", state_dtype=state_dtype, engine=SimEngine(0)
        )
        optimizer.allocate()
        state = optimizer.engine.ledger.num_bytes("pinned")
        assert plan["pinned"]["optimizer_state"] == state
        assert state / param.numel() <= most

    def test_copies_keep_it(self):
        _, _, optimizer = run(steps=2, state_dtype="8bit")
        assert pickle.loads(pickle.dumps(optimizer))._state_dtype == "8bit"


class TestRefused:
    def test_unknown_dtype(self):
        with pytest.raises(ValueError, match="unknown state_dtype 'fp8'; choose one of fp32, bf16, 8bit"):
            forebay.AdamW([nn.Parameter(torch.zeros(8))], state_dtype="fp8", engine=SimEngine(0))

    @pytest.mark.parametrize("options", [{"placement": "host"}, {"host_share": 0.5}])
    def test_host_updates_of_8bit_state(self, options):
        param = nn.Parameter(torch.zeros(8192))
        optimizer = forebay.AdamW([param], state_dtype="8bit", offload_fraction=1.0, engine=SimEngine(0), **options)
        with pytest.raises(ValueError, match=r"has no host kernel.*placement='streamed'"):
            optimizer.allocate()
