"""Collectives, the executors that run them, and the meter that counts their bytes."""

import contextlib
import gc
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dct_parallel import collectives
from dct_parallel.exchange import executors
from dct_parallel.exchange.executors import InlineExecutor, StreamExecutor, ThreadExecutor
from dct_parallel.exchange.ledger import Step
from support.ranks import on_ranks
from wire_meter import WireMeter


@on_ranks(2)
def test_all_gather_with_old_and_new_names(rank):
    expected = torch.arange(6, dtype=torch.float32).view(2, 3)
    for names in (("all_gather_single", "all_gather_into_tensor"), ("all_gather_into_tensor",)):
        if "all_gather_single" not in names and hasattr(dist, "all_gather_single"):
            del dist.all_gather_single  # absent before torch 2.13
            warnings.simplefilter("ignore", FutureWarning)
        output = torch.zeros(2, 3)
        collectives.all_gather(output, expected[rank].clone(), dist.group.WORLD)
        assert torch.equal(output, expected), names


@on_ranks(2)
def test_dense_mean(rank):
    mean = collectives.dense_mean(torch.tensor([1.0, 6.0]) + rank, torch.bfloat16, dist.group.WORLD)
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [1.5, 6.5]


STEP = Step(0, torch.ones(1), torch.full((1,), 0.5))


class _Reduction:
    """Records its calls. The fifth one fails."""

    def __init__(self, done, index):
        self._done, self._index = done, index

    def start(self, buffer, inv_scale):
        assert inv_scale is STEP.inv_scale
        time.sleep(0.002 * (self._index % 3))
        self._done.append(("start", self._index, threading.current_thread().name))
        if self._index == 5:
            raise ValueError("reduction 5 fails")

    def finish(self, out, scale):
        assert scale is STEP.scale
        self._done.append(("finish", self._index))


def test_thread_executor_keeps_order_and_raises_errors():
    """Each reduction is finished before the next one starts."""
    worker, done, out = ThreadExecutor(), [], torch.ones(3)
    futures = [worker.submit(_Reduction(done, index), out, STEP) for index in range(10)]
    worker.run_after(lambda: done.append("after")).wait()
    with pytest.raises(RuntimeError, match="reduction 5 fails"):
        futures[5].wait()
    assert all(f.wait() is out for f in futures if f is not futures[5])
    expected = []
    for index in range(10):
        expected += [("start", index, "dct"), *([("finish", index)] if index != 5 else [])]
    assert done == [*expected, "after"]
    worker.close()
    assert worker.run_after(lambda: done.append("closed")) is None and done[-1] == "closed"


def test_inline_executor_starts_and_finishes_in_order():
    inline, done, out = InlineExecutor(), [], torch.ones(3)
    name = threading.current_thread().name
    futures = [inline.submit(_Reduction(done, index), out, STEP) for index in range(3)]
    with pytest.raises(ValueError, match="reduction 5 fails"):
        inline.submit(_Reduction(done, 5), out, STEP)
    assert done == [("start", index, name) for index in (0, 1, 2, 5)]
    assert not any(future.done() for future in futures)
    assert inline.run_after(lambda: done.append("after")) is None
    assert done[4:] == [("finish", 0), ("finish", 1), ("finish", 2), "after"]
    assert all(future.wait() is out for future in futures)


def test_thread_executor_ends_with_its_owner_and_keeps_nothing_alive():
    before = set(threading.enumerate())  # some of these threads may end during the test
    worker, owned = ThreadExecutor(), torch.ones(3)
    watch = weakref.ref(owned)
    worker.submit(_Reduction([], 0), owned, STEP).wait()
    del owned
    for _ in range(100):  # the thread drops a job shortly after it completes the job's future
        gc.collect()
        if watch() is None:
            break
        time.sleep(0.01)
    assert watch() is None
    (thread,) = set(threading.enumerate()) - before
    del worker
    thread.join(timeout=20)
    assert not thread.is_alive()


class _Stream:
    """A CUDA stream that knows which calls have finished when its next call starts."""

    def __init__(self, device=None, priority=0):
        self.priority, self.finished = priority, set()

    def wait_stream(self, other):
        self.finished |= other.finished


def test_stream_executor_packs_a_bucket_while_another_one_is_in_the_network(monkeypatch):
    before, streams = {}, [_Stream()]  # the last stream is the current one

    @contextlib.contextmanager
    def stream(chosen):
        streams.append(chosen)
        yield
        streams.pop()

    def run(*call):
        before[call] = {*streams[-1].finished}
        streams[-1].finished.add(call)

    class Reduction(SimpleNamespace):
        def start(self, buffer, inv_scale):
            assert streams[-1].priority == -1
            run("pack", *self.key)

        def finish(self, out, scale):
            assert streams[-1].priority == -1
            streams[-1].finished.add(("receive", *self.key))
            run("unpack", *self.key)

    class Future(_Stream):
        def set_result(self, value):
            self.value, self.finished = value, {*streams[-1].finished}

    cuda = {"Stream": _Stream, "stream": stream, "current_stream": lambda device: streams[-1]}
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(executors, "Future", lambda devices: Future())
    executor = StreamExecutor("cuda:0")
    for step in range(2):
        for bucket in range(2):
            run("gradient", step, bucket)
            future = executor.submit(Reduction(key=(step, bucket)), bucket, STEP)
            assert future.value == bucket and ("unpack", step, bucket) in future.finished
        posted = executor.run_after(lambda step=step: run("words", step))
        streams[0].wait_stream(future)  # as DDP does
    packed = {("gradient", 0, 0), ("pack", 0, 0), ("gradient", 0, 1)}
    assert before["pack", 0, 1] == packed
    received = {("pack", 0, 1), ("receive", 0, 0), ("unpack", 0, 0), ("receive", 0, 1)}
    assert before["unpack", 0, 1] == packed | received
    # Headers are copied after both streams, and overwritten after this copy: by the next step, and
    # by `take_back`, which waits for the future.
    assert before["words", 0] == before["unpack", 0, 1] | {("unpack", 0, 1)}
    assert ("words", 0) in before["pack", 1, 0] and ("words", 1) in posted.finished


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_meter_counts_bytes_per_rank(rank):
    """Compare the bytes of each collective with its formula. Most tensors have 840 bytes."""
    ranks = dist.get_world_size()
    x, parts = torch.ones(210), [torch.empty(210) for _ in range(ranks)]
    flat, short = torch.empty(210 * ranks), torch.empty(840 // 4 // ranks)
    even, sent = torch.ones(12, 5), torch.ones(10 + ranks - 1, 5)
    stays, goes = 10, 1  # rows that stay on this rank, and rows for each other rank
    splits = [stays if r == rank else goes for r in range(ranks)]
    received = torch.empty(stays + ranks - 1, 5)
    gather, reduce = (ranks - 1) * 840, (ranks - 1) * 840 // ranks
    calls = {
        "all_reduce": (2 * (ranks - 1) * 840 // ranks, lambda f: f(x.clone())),
        "all_gather": (gather, lambda f: f(parts, x)),
        "all_gather_into_tensor": (gather, lambda f: f(flat, x)),
        "all_gather_single": (gather, lambda f: f(flat, x)),
        "reduce_scatter_tensor": (reduce, lambda f: f(short, x[: short.numel() * ranks])),
        "reduce_scatter_single": (reduce, lambda f: f(short, x[: short.numel() * ranks])),
        "broadcast": (reduce, lambda f: f(x.clone(), src=0)),
        "all_to_all_single": ((ranks - 1) * 240 // ranks, lambda f: f(torch.empty(12, 5), even)),
    }
    if ranks == 4:  # 210 is not divisible by 4, so each rank gets 52 elements
        calls["reduce_scatter_tensor"] = (3 * 208, calls["reduce_scatter_tensor"][1])
        calls["reduce_scatter_single"] = (3 * 208, calls["reduce_scatter_single"][1])
    warnings.simplefilter("ignore", FutureWarning)  # torch deprecates the old names
    originals = {name: getattr(dist, name, None) for name in calls}
    with WireMeter() as meter:
        for name, (expected, call) in calls.items():
            if originals[name] is not None:
                assert getattr(dist, name) is not originals[name]
                call(getattr(dist, name))
                assert meter.take() == expected, name
        dist.all_to_all_single(received, sent, splits, splits)
        assert meter.take() == (ranks - 1) * goes * 5 * 4
        with WireMeter() as inner:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(100),))
            thread.start()
            thread.join()
        assert inner.take() == meter.take() == 2 * (ranks - 1) * 400 // ranks
        assert meter.take() == 0
        subgroup = dist.new_group([0, 1])
        warnings.simplefilter("ignore", UserWarning)  # torch warns on ranks outside the group
        dist.all_reduce(torch.ones(100), group=subgroup)
        assert meter.take() == (400 if dist.get_rank() in (0, 1) else 0)
    assert {name: getattr(dist, name, None) for name in calls} == originals
