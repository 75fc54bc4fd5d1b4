import math

import pytest
import torch

from forebay.train.schedule import build_scheduler, learning_rate_factor


def _rates(style, *, warmup=3, decay=10, steps=12, min_lr=0.1):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, lr=1.0, min_lr=min_lr, warmup_steps=warmup, decay_steps=decay, style=style)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_reaches_the_peak_and_the_end_the_minimum():
    for style in ("cosine", "linear"):
        rates = _rates(style)
        assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
        assert rates[9:] == pytest.approx([0.1] * 3)
        assert rates[2:10] == sorted(rates[2:10], reverse=True)
    assert _rates("constant")[2:] == [1.0] * 10


def test_shapes_in_the_middle():
    # Step 5 of 10 without warm-up has done half of the way.
    assert _rates("linear", warmup=0)[4] == pytest.approx(0.55)
    assert _rates("cosine", warmup=0)[4] == pytest.approx(0.55)
    assert _rates("cosine", warmup=0)[1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))


def test_warm_up_only():
    assert learning_rate_factor(4, warmup_steps=5, decay_steps=5, min_factor=0.0) == 1.0
    assert learning_rate_factor(5, warmup_steps=5, decay_steps=5, min_factor=0.0) == 0.0


def test_warm_up_longer_than_the_decay_is_finished_first():
    rates = _rates("cosine", warmup=8, decay=4, steps=10)
    assert rates == pytest.approx([k / 8 for k in range(1, 9)] + [0.1, 0.1])


def test_groups_keep_their_ratio():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=1.0)
    build_scheduler(optimizer, lr=1.0, min_lr=0.0, warmup_steps=4, decay_steps=8)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"style": "exponential"}, "unknown learning-rate decay 'exponential'; choose one of cosine, linear, constant"),
        ({"min_lr": 2.0}, "optimizer.lr=1.0 and optimizer.min_lr=2.0: need 0 <= min_lr <= lr"),
        ({"warmup_steps": -1}, "optimizer.lr_warmup_iters=-1 must not be negative"),
    ],
)
def test_bad_settings(changed, message):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, "decay_steps": 10, **changed}
    with pytest.raises(ValueError, match=message):
        build_scheduler(optimizer, **options)
