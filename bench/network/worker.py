"""Runs one rank of bench.link, which sets the environment variables that torchrun would set.

The arguments are the options as JSON, and the file for the results.
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
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from bench.experiments.dp_tasks import BATCH_TEXTS, CONTEXT, Transformer, next_character_loss
from dct_embeddings import plan_shards
from dct_parallel import process_group
from dlrm.data.features import Rows, table_rows
from dlrm.data.synthetic import Generator
from dlrm.models.dlrm import BOTTOM, DLRM, TOP
from dlrm.models.sharded import ShardedDLRM
from wire_meter import WireMeter

from .methods import METHODS, SHARDED, Method

ROUNDS = 3  # each round runs all modes, so other work on the machine affects all modes
WARMUP_STEPS = 6  # DDP rebuilds its buckets, compression starts, TCP windows grow
MIN_STEPS = 5
LEARNING_RATE = 0.1
BATCHES = 16  # number of generated batches, which are used in turn
CHARACTERS = 97
TRANSFER_BYTES = 64 * 2**20
_PR_SET_PDEATHSIG = 1


class Worker:
    """Trains in all modes on this rank's batches of generated rows or texts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.counters = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.ranks))
        size = options.batch_size
        numbers = np.arange(BATCHES * size) * self.ranks + self.rank
        block = Generator(0).rows(numbers)
        rows = table_rows(options.hash_size)
        encoded = Rows.encode(block.labels, block.ints, block.values, rows)
        self.batches = [encoded.take(slice(i * size, (i + 1) * size)) for i in range(BATCHES)]
        generator = torch.Generator().manual_seed(self.rank)
        shape = (BATCHES, BATCH_TEXTS, CONTEXT + 1)
        self.texts = torch.randint(CHARACTERS, shape, generator=generator)

    def measure(self) -> dict:
        """Return the description of the model, the link's rate, and each mode's measurements."""
        model = self._model(self.options.modes[0])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model = {"parameters": parameters, "threads_per_rank": torch.get_num_threads()}
        link, rounds = self._transfer(), {mode: [] for mode in self.options.modes}
        dist.init_process_group("gloo")
        for _ in range(ROUNDS):
            for mode, measured in rounds.items():
                measured.append(self._train(mode))
                gc.collect()  # free the hook's state before the next mode
        dist.destroy_process_group()
        return {"model": model, "link": link, "rounds": rounds}

    def _transfer(self) -> dict | None:
        """Send a TCP stream from rank 0 to rank 1, which measures the rate of the stream."""
        address = (os.environ["MASTER_ADDR"], self.options.transfer_port)
        if self.rank == 0:
            with socket.create_server(address) as server, server.accept()[0] as peer:
                peer.sendall(bytes(TRANSFER_BYTES))
        elif self.rank == 1:
            with _connect(address) as peer:
                return {"bits_per_second": _receive(peer)}
        return None

    def _model(self, mode: str) -> DLRM | Transformer:
        options = self.options
        torch.manual_seed(0)
        if mode in SHARDED:
            return Transformer(CHARACTERS, width=384, layers=6, heads=6)
        rows = table_rows(options.hash_size)
        return DLRM(rows, options.embedding_dim, BOTTOM, TOP)

    def _parallel_model(self, mode: str, method: Method) -> tuple[torch.nn.Module, object]:
        """The model, and the state of its hook, averager or shards."""
        model = self._model(mode)
        if method.period or mode in SHARDED:
            return model, method.register(model, self.options)
        if method.exchange is None:
            group = None
            if method.group:
                process_group.configure(format=method.group)
                group = dist.new_group(backend=process_group.NAME)
            model = ddp = self._replicated(model, group)
        else:
            plan = plan_shards(table_rows(self.options.hash_size), self.ranks)
            model = ShardedDLRM(model, plan, method.exchange(self.options), method.dedup)
            ddp = model.mlps = self._replicated(model.mlps)
        return model, method.register(ddp, self.options)

    def _replicated(
        self, model: torch.nn.Module, group: dist.ProcessGroup | None = None
    ) -> DistributedDataParallel:
        with warnings.catch_warnings():
            # torch 2.13 renamed `broadcast_buffers` and warns about the old name. All versions
            # accept the old name.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model,
                process_group=group,
                bucket_cap_mb=self.options.bucket_mb,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )

    def _train(self, mode: str) -> dict:
        """Run one round of a mode. Slow modes run fewer steps than --steps, down to MIN_STEPS."""
        method = METHODS[mode]
        model, state = self._parallel_model(mode, method)
        if mode in SHARDED:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True)

        def step(number: int) -> float:
            start = time.perf_counter()
            optimizer.zero_grad()
            if mode in SHARDED:
                loss = next_character_loss(model, self.texts[number % BATCHES])
            else:
                batch = self.batches[number % BATCHES]
                logits = model(batch.ints, batch.ids)
                loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            optimizer.step()
            if method.period:
                state.average_parameters()
            return time.perf_counter() - start

        warm = [step(number) for number in range(WARMUP_STEPS)]
        longest = torch.tensor(statistics.median(warm[WARMUP_STEPS // 2 :]))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # all ranks need the same number of steps
        fitting = int(self.options.seconds / ROUNDS / longest.item())
        steps = min(math.ceil(self.options.steps / ROUNDS), max(MIN_STEPS, fitting))
        period = max(1, method.period)  # results are means over complete periods
        steps = period * math.ceil(steps / period)
        dist.barrier()
        before = self._counted()
        with WireMeter() as meter:
            times = [step(number) for number in range(WARMUP_STEPS, WARMUP_STEPS + steps)]
            sent = meter.take()
        dist.barrier()  # wait until all ranks have sent their last messages
        after = self._counted()
        if method.period:
            state.flush()
        if isinstance(model, ShardedDLRM):
            model.close()
        return {
            "seconds": _means(times, period),
            "payload_bytes": sent / period,
            "wire_bytes": (after[0] - before[0]) / period,
            "packets": (after[1] - before[1]) / period,
        }

    def _counted(self) -> tuple[int, int]:
        """Read (bytes sent, packets sent) from the counters of the interface."""
        sent = (self.counters / name for name in ("tx_bytes", "tx_packets"))
        return tuple(int(path.read_text()) for path in sent)


def _means(values: list[float], period: int) -> list[float]:
    """The means of consecutive groups of `period` values."""
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
    """Receive the stream. Return payload bits per second, measured from the first byte."""
    buffer = bytearray(2**20)
    received = first = peer.recv_into(buffer)
    start = time.perf_counter()
    while received < TRANSFER_BYTES:
        received += peer.recv_into(buffer)
    return 8 * (TRANSFER_BYTES - first) / (time.perf_counter() - start)


def main() -> None:
    # If the parent is killed, the kernel also kills this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # The warning is about in-place changes of the output, which this program does not make.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(Worker(options).measure()))


if __name__ == "__main__":
    main()
