"""One rank of bench/link.py: takes requests as JSON lines on stdin, answers on stdout.

Started by ranks.py with RANK, WORLD_SIZE, MASTER_ADDR and GLOO_SOCKET_IFNAME in its environment.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import signal
import socket
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dct_embeddings import plan_shards
from dct_parallel import DCTState
from dlrm.data.features import Rows, table_rows
from dlrm.data.synthetic import Generator
from dlrm.models.dlrm import DLRM
from dlrm.models.sharded import ShardedDLRM
from dlrm.traffic import Traffic

from .methods import METHODS, Method
from .phases import PHASES, Phases

WARMUP_STEPS = 6  # DDP rebuilds its buckets, compression starts, TCP's windows open
MIN_STEPS = 5
BATCHES = 16  # of generated rows, used in turn
TRANSFER_BYTES = 64 * 2**20
PINGS = 50
_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers requests; each method but `__init__` is one kind of request."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.counters = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.ranks))

    def setup(self, options: dict) -> dict:
        """Generate this rank's batches; answers what the model is."""
        self.options = argparse.Namespace(**options)
        size = self.options.batch_size
        numbers = np.arange(BATCHES * size) * self.ranks + self.rank
        block = Generator(0).rows(numbers)
        rows = table_rows(self.options.hash_size)
        encoded = Rows.encode(block.labels, block.ints, block.values, rows)
        self.batches = [encoded.take(slice(i * size, (i + 1) * size)) for i in range(BATCHES)]
        parameters = sum(parameter.numel() for parameter in self._model().parameters())
        return {"parameters": parameters, "threads_per_rank": torch.get_num_threads()}

    def transfer(self, port: int) -> dict | None:
        """A plain TCP stream from rank 0 to the next node's first, and pings; that one answers."""
        address = (os.environ["MASTER_ADDR"], port)
        if self.rank == 0:
            with socket.create_server(address) as server, server.accept()[0] as peer:
                peer.sendall(bytes(TRANSFER_BYTES))
                _no_delay(peer)
                while ping := peer.recv(1):
                    peer.sendall(ping)
        elif self.rank == self.options.node_ranks:
            with _connect(address) as peer:
                return {"bits_per_second": _receive(peer), "latency_us": _ping(peer)}
        return None

    def train(self, mode: str, port: int, steps: int, seconds: float) -> dict:
        """Up to `steps` timed steps, fewer (but 5) where they would take more than `seconds`."""
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
        try:
            with Phases() as phases:
                return self._train(mode, steps, seconds, phases)
        finally:
            gc.collect()  # the model ends before its group, and a lane's thread with its state
            dist.destroy_process_group()

    def _model(self) -> DLRM:
        options = self.options
        torch.manual_seed(0)
        rows = table_rows(options.hash_size)
        return DLRM(rows, options.embedding_dim, options.bottom, options.top)

    def _parallel_model(self, method: Method, phases: Phases) -> tuple[torch.nn.Module, object]:
        """The model, and the state of its hook, or its averager, if it has one."""
        model = self._model()
        if method.period:
            return model, method.register(model, self.options)
        if method.exchange is None:
            model = ddp = self._replicated(model)
        else:
            plan = plan_shards(table_rows(self.options.hash_size), self.ranks)
            exchange = phases.timed(method.exchange(self.options))
            model = ShardedDLRM(model, plan, exchange, method.dedup)
            ddp = model.mlps = self._replicated(model.mlps)
        phases.watch(ddp)
        return model, method.register(ddp, self.options)

    def _replicated(self, model: torch.nn.Module) -> DistributedDataParallel:
        with warnings.catch_warnings():
            # The model's buffer is a constant and need not be sent. What says so was renamed in
            # torch 2.13, with a warning; the old name is the one that every version knows.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model,
                bucket_cap_mb=self.options.bucket_mb,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )

    def _train(self, mode: str, steps: int, seconds: float, phases: Phases) -> dict:
        method = METHODS[mode]
        leaving = method.leaving(self.ranks, self.options.node_ranks)
        model, state = self._parallel_model(method, phases)
        node_group = state.node_group if isinstance(state, DCTState) else None
        average = phases.timed_call(state.average_parameters) if method.period else None
        optimizer = torch.optim.SGD(model.parameters(), lr=self.options.lr, fused=True)

        def step(number: int, traffic: Traffic) -> float:
            batch = self.batches[number % BATCHES]
            start = time.perf_counter()
            optimizer.zero_grad()
            logits = model(batch.ints, batch.ids)
            traffic.forward_done()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            optimizer.step()
            if average is not None:
                average()
            took = time.perf_counter() - start
            traffic.step_done()
            return took

        with Traffic(model, node_group) as traffic:
            warm = [step(number, traffic) for number in range(WARMUP_STEPS)]
        longest = torch.tensor(statistics.median(warm[WARMUP_STEPS // 2 :]))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # ranks must agree
        steps = min(steps, max(MIN_STEPS, int(seconds / longest.item())))
        period = max(1, method.period)  # of whole periods a step's mean is told
        steps = period * math.ceil(steps / period)
        dist.barrier()
        phases.take(0)
        before = self._counted()
        times, split = [], []
        with Traffic(model, node_group) as traffic:
            for number in range(WARMUP_STEPS, WARMUP_STEPS + steps):
                times.append(step(number, traffic))
                split.append(phases.take(times[-1]))
        inside = sum(traffic.purposes.pop("node", []))
        dist.barrier()  # what others still send is on its way, too
        after = self._counted()
        return {
            "seconds": _means(times, period),
            "phases": {phase: _means([part[phase] for part in split], period) for phase in PHASES},
            "payload_bytes": leaving * sum(traffic.wire) / period,
            "node_bytes": inside,
            "purpose_bytes": {name: sum(sent) for name, sent in traffic.purposes.items()},
            "wire_bytes": (after[0] - before[0]) / period,
            "packets": (after[1] - before[1]) / period,
        }

    def _counted(self) -> tuple[int, int]:
        """(bytes, packets) that left through the interface, ever."""
        sent = (self.counters / name for name in ("tx_bytes", "tx_packets"))
        return tuple(int(path.read_text()) for path in sent)


def _means(values: list[float], period: int) -> list[float]:
    """Of every `period` values, one after the other."""
    return [statistics.mean(values[i : i + period]) for i in range(0, len(values), period)]


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _receive(peer: socket.socket) -> float:
    """Payload bits per second of the stream, from its first byte on."""
    buffer = bytearray(2**20)
    received = first = peer.recv_into(buffer)
    start = time.perf_counter()
    while received < TRANSFER_BYTES:
        received += peer.recv_into(buffer)
    return 8 * (TRANSFER_BYTES - first) / (time.perf_counter() - start)


def _ping(peer: socket.socket) -> float:
    """Microseconds one way: half of the median round trip of a byte."""
    _no_delay(peer)
    trips = []
    for _ in range(PINGS):
        start = time.perf_counter()
        peer.sendall(b"p")
        peer.recv(1)
        trips.append(time.perf_counter() - start)
    return 1e6 * statistics.median(trips) / 2


def _no_delay(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main() -> None:
    # A killed parent cannot end its ranks: the kernel does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not come between answers
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(worker, request.pop("do"))(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
