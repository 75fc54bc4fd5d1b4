"""How the CUDA engine calls the runtime, checked on a CPU against the rules of stream capture."""

from __future__ import annotations

import gc

import pytest
import torch
from fake_cuda import COMPUTE, DETOURS, STREAMS, UNJOINED, EngineOnFake

from forebay.engine import Lane
from forebay.engine.base import SIDE_LANES
from forebay.engine.cuda_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE


class Task:
    label, function_address, argument_address = "update w", 7, 8

    def run(self):
        raise AssertionError("a native task does not run in Python")

    def status(self):
        return 0


class PythonTask(Task):
    function_address = 0


class Bench(EngineOnFake):
    def round_trip(self):
        """A gradient down, a host task, a weight up, and the compute lane waits for it."""
        engine = self.engine
        tensors = [torch.zeros(8) for _ in range(4)]
        engine.wait(Lane.DOWN, engine.record(Lane.COMPUTE))
        engine.copy(Lane.DOWN, tensors[0], tensors[1])
        engine.wait(Lane.HOST, engine.record(Lane.DOWN))
        engine.host_task(Task())
        engine.wait(Lane.UP, engine.record(Lane.HOST))
        engine.copy(Lane.UP, tensors[2], tensors[3])
        uploaded = engine.record(Lane.UP)
        engine.wait(Lane.COMPUTE, uploaded)
        return uploaded


@pytest.fixture
def bench():
    return Bench()


def test_copies_and_tasks_go_to_their_streams(bench):
    host, device = torch.zeros(6), torch.zeros(6)
    bench.engine.copy(Lane.DOWN, host[2:], device[:4])
    bench.engine.copy(Lane.UP, device, host)
    bench.engine.copy(Lane.UP, device[:0], host[:0])
    bench.engine.host_task(Task())
    assert bench.cuda.calls == [
        ("copy", host.data_ptr() + 8, device.data_ptr(), 16, DEVICE_TO_HOST, STREAMS[Lane.DOWN], 0),
        ("copy", device.data_ptr(), host.data_ptr(), 24, HOST_TO_DEVICE, STREAMS[Lane.UP], 0),
        ("launch", STREAMS[Lane.HOST], 7, 8, 0),
    ]


def test_a_large_copy_leaves_a_gap_over_another_stream(bench):
    large = torch.zeros(1 << 20)
    bench.engine.copy(Lane.UP, large, large.clone())
    assert [call[0] for call in bench.cuda.calls] == ["copy", "record", "wait", "record", "wait"]
    assert {call[1] for call in bench.cuda.calls if call[0] == "wait"} == {STREAMS[Lane.UP], DETOURS[Lane.UP]}


def test_event_handles_are_used_again(bench):
    for _ in range(200):
        bench.round_trip()
        bench.cuda.done.update(bench.cuda._events)
    gc.collect()
    assert bench.cuda.count("create") < 150  # timers included; without a pool it would be 800 and more


def test_a_wait_that_an_earlier_one_implies_is_left_out(bench):
    engine = bench.engine
    first, second = (engine.record(Lane.DOWN) for _ in range(2))
    engine.wait(Lane.HOST, second)
    engine.wait(Lane.HOST, first)
    engine.wait(Lane.HOST, second)
    engine.wait(Lane.DOWN, second)
    assert [call[1] for call in bench.cuda.calls if call[0] == "wait"] == [STREAMS[Lane.HOST]]
    # Another lane, a later event, and another stream of the caller's are something else.
    engine.wait(Lane.UP, first)
    engine.wait(Lane.HOST, engine.record(Lane.DOWN))
    engine.wait(Lane.COMPUTE, second)
    bench.stream = 200
    engine.wait(Lane.COMPUTE, second)
    waits = [call[1] for call in bench.cuda.calls if call[0] == "wait"]
    assert waits == [STREAMS[Lane.HOST], STREAMS[Lane.UP], STREAMS[Lane.HOST], COMPUTE, 200]


def test_what_a_copy_uses_is_kept_until_its_event_passes(bench):
    engine = bench.engine
    engine.copy(Lane.DOWN, torch.zeros(4), torch.zeros(4))
    event = engine.record(Lane.DOWN)
    engine._poll()
    assert [len(use.on_device) + len(use.on_host) for use in engine._in_use[Lane.DOWN]] == [2]
    engine.wait(Lane.COMPUTE, event)  # the allocator may have the device side back from here on
    assert [len(use.on_device) + len(use.on_host) for use in engine._in_use[Lane.DOWN]] == [1]
    bench.cuda.done.add(event.handle)
    engine._poll()
    assert not engine._in_use[Lane.DOWN]


class TestCapture:
    def test_everything_is_captured_and_joined(self, bench):
        bench.round_trip()
        bench.cuda.calls.clear()
        bench.cuda.begin_capture(COMPUTE)
        bench.round_trip()
        bench.engine.join()
        copied = [call[-1] for call in bench.cuda.calls if call[0] in ("copy", "launch")]
        assert copied == [1, 1, 1]
        assert bench.cuda.count("query") == bench.cuda.count("synchronize event") == 0
        assert bench.cuda.end_capture() == 0
        assert not bench.engine.capturing

    def test_every_side_lane_is_part_of_it_whichever_is_used_first(self, bench):
        bench.cuda.begin_capture(COMPUTE)
        bench.engine.copy(Lane.UP, torch.zeros(4), torch.zeros(4))
        assert set(bench.cuda.captures) == {COMPUTE, *STREAMS.values()}

    def test_garbage_that_is_collected_meanwhile_is_unpinned(self, bench):
        buffer = bench.engine.empty_host(4096, "weights")
        bench.cuda.begin_capture(COMPUTE)
        del buffer  # a refusal would be an error in a finalizer, which fails the test
        gc.collect()
        assert bench.engine.ledger.num_bytes("pinned") == 0
        assert bench.cuda.capture_mode == 0

    def test_without_join_it_does_not_end_well(self, bench):
        bench.cuda.begin_capture(COMPUTE)
        bench.round_trip()
        bench.engine.copy(Lane.DOWN, torch.zeros(4), torch.zeros(4))
        assert bench.cuda.end_capture() == UNJOINED

    @pytest.mark.parametrize("lane", list(Lane))
    def test_events_from_before_are_not_waited_for(self, bench, lane):
        before = [bench.engine.record(other) for other in Lane]
        bench.cuda.begin_capture(COMPUTE)
        for event in before:
            bench.engine.wait(lane, event)
        assert set(bench.cuda.captures) == {COMPUTE}, "nothing was forked for it"
        bench.round_trip()
        for event in before:
            bench.engine.wait(lane, event)
        bench.engine.join()
        assert bench.cuda.end_capture() == 0

    @pytest.mark.parametrize("lane", SIDE_LANES)
    def test_an_event_of_a_graph_stands_for_its_launches(self, bench, lane):
        bench.cuda.begin_capture(COMPUTE)
        event = bench.round_trip()
        bench.engine.join()
        assert bench.cuda.end_capture() == 0
        bench.cuda.calls.clear()
        bench.engine.wait(lane, event)
        (recorded,) = [call for call in bench.cuda.calls if call[0] == "record"]
        assert recorded[2] == COMPUTE
        assert ("wait", STREAMS[lane], recorded[1]) in bench.cuda.calls
        bench.cuda.calls.clear()
        bench.engine.wait(Lane.COMPUTE, event)
        assert not bench.cuda.calls
        event.synchronize()
        assert bench.cuda.calls == [("synchronize stream", COMPUTE)]
        assert event.query()

    def test_two_captures_with_no_call_in_between(self, bench):
        for number in (1, 2):
            bench.cuda.begin_capture(COMPUTE)
            bench.round_trip()
            bench.engine.join()
            assert bench.cuda.end_capture() == 0, number
        bench.round_trip()

    def test_a_capture_on_another_stream_than_the_steps_before(self, bench):
        before = bench.round_trip()
        bench.stream = 200
        bench.cuda.begin_capture(200)
        bench.engine.wait(Lane.UP, before)
        bench.round_trip()
        bench.engine.join()
        assert bench.cuda.end_capture() == 0
        bench.stream = COMPUTE
        bench.engine.wait(Lane.COMPUTE, before)
        bench.round_trip()

    def test_references_to_eager_work_outlast_a_capture(self, bench):
        bench.engine.copy(Lane.DOWN, torch.zeros(4), torch.zeros(4))
        bench.cuda.begin_capture(COMPUTE)
        bench.round_trip()
        bench.engine.join()
        assert bench.cuda.end_capture() == 0
        assert not bench.engine.capturing
        assert [len(use.on_host) for use in bench.engine._in_use[Lane.DOWN]] == [1]

    def test_what_would_break_it_is_refused(self, bench):
        event = bench.engine.record(Lane.DOWN)
        bench.cuda.begin_capture(COMPUTE)
        for call in (event.query, event.synchronize, bench.engine.synchronize):
            with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                call()
        with pytest.raises(RuntimeError, match="allocating host memory for weights while a CUDA graph is being captur"):
            bench.engine.empty_host(16, "weights")
        with pytest.raises(RuntimeError, match=r"'update w' is Python code, which a CUDA graph cannot hold"):
            bench.engine.host_task(PythonTask())


def test_a_failing_call_names_what_failed(bench):
    bench.cuda._MemcpyAsync = lambda *arguments: 700
    bench.engine.runtime._memcpy = bench.cuda._MemcpyAsync
    with pytest.raises(RuntimeError, match=r"copying 16 bytes failed: CUDA error 700 \(code 700\)"):
        bench.engine.copy(Lane.DOWN, torch.zeros(4), torch.zeros(4))
