"""Memory limits for visiting state, learned from one step."""

from __future__ import annotations

import pytest

from forebay.optim.tide import Tide


class FakeEngine:
    """Gives out the peaks it was made with."""

    def __init__(self, peaks):
        self.peaks = list(peaks)

    def take_peak_bytes(self):
        return self.peaks.pop(0)


KEYS = [1, 2, 3, -2]
# What is drawn when profiling begins, then the peaks of: turn to first tick, between ticks, last tick to turn.
PEAKS = [999, 10, 40, 100, 70, 30]


def profiled(staging_bytes=0):
    tide = Tide(FakeEngine(PEAKS), staging_bytes)
    assert tide.turn(), "the first step shows nothing, so the second is profiled"
    assert [tide.tick(key) for key in KEYS] == [(0, 0)] * 4, "nothing may visit while memory is profiled"
    assert not tide.turn()
    return tide


@pytest.mark.parametrize("staging_bytes", [0, 5])
def test_visits_fill_up_to_the_highest_peak_and_the_staging_budget(staging_bytes):
    tide = profiled(staging_bytes)
    limits = [tide.tick(key) for key in KEYS]
    hold = [100 - peak + staging_bytes for peak in (40, 100, 70, 30)]
    assert [limit[0] for limit in limits] == hold
    # What lasts until the update must fit every interval before it.
    assert [limit[1] for limit in limits] == [min(hold[i:]) for i in range(4)]
    assert tide.update_limit_bytes == hold[-1]
    assert not tide.turn(), "a step like the profiled one needs no new profile"


def test_before_anything_is_known_only_the_staging_budget_holds():
    tide = Tide(FakeEngine([]), 7)
    assert tide.tick(1) == (7, 7)
    assert tide.update_limit_bytes == 7


@pytest.mark.parametrize("keys", [[1, 3], [1, 2, 3, -2, 4], [5]])
def test_a_step_that_differs_falls_back_and_is_profiled_again(keys):
    tide = profiled(3)
    tide._engine.peaks = [1]
    limits = [tide.tick(key) for key in keys]
    assert limits[-1] == (3, 3)
    assert tide.turn()


def test_a_step_that_ends_early_is_profiled_again():
    tide = profiled()
    tide._engine.peaks = [1]
    tide.tick(1)
    assert tide.turn()
