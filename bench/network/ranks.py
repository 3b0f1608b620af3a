"""Starts the ranks of bench/link.py, asks them, ends them."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from .namespaces import Loopback, Namespaces

_BENCH = Path(__file__).parents[1]

_STARTUP_SECONDS = 120  # to import torch and generate rows, all ranks on few cores


class RankError(Exception):
    """A rank failed or took too long; the text says which and why."""


class Ranks:
    """A context: one worker process per rank, in the network's namespaces; killed at its end.

    After a RankError the processes are gone, and the next request starts new ones.
    """

    def __init__(self, network: Namespaces | Loopback, ranks: int, options: dict) -> None:
        self._network = network
        self._ranks = ranks
        self._options = options
        self._processes: list[subprocess.Popen] = []
        self._answers: queue.SimpleQueue = queue.SimpleQueue()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def setup(self) -> dict:
        """What the model is; starts the processes."""
        self._end()
        self._answers = queue.SimpleQueue()
        for rank in range(self._ranks):
            process = self._start(rank)
            self._processes.append(process)
            reader = threading.Thread(
                target=_read, args=(rank, process, self._answers), daemon=True
            )
            reader.start()
        return self._ask_running(_STARTUP_SECONDS, do="setup", options=self._options)[0]

    def ask(self, timeout: float, **request: object) -> list:
        """Every rank's answer to a request.

        Raises:
            RankError: a rank failed, or `timeout` seconds have passed. All ranks are ended.
        """
        if not self._processes:
            self.setup()
        return self._ask_running(timeout, port=_free_port(), **request)

    def _ask_running(self, timeout: float, **request: object) -> list:
        try:
            for process in self._processes:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            return self._collect(timeout)
        except BrokenPipeError:
            self._end()
            raise RankError("a rank died before its request") from None
        except BaseException:
            self._end()
            raise

    def _collect(self, timeout: float) -> list:
        deadline = time.monotonic() + timeout
        answers: dict[int, object] = {}
        while len(answers) < self._ranks:
            try:
                rank, line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = sorted(set(range(self._ranks)) - set(answers))
                raise RankError(f"no answer from ranks {late} in {timeout:g} s") from None
            if line is None:
                raise RankError(f"rank {rank} died")
            answer = json.loads(line)
            if "error" in answer:
                raise RankError(f"rank {rank}: {answer['error'].strip()}")
            answers[rank] = answer["result"]
        return [answers[rank] for rank in range(self._ranks)]

    def _start(self, rank: int) -> subprocess.Popen:
        path = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_BENCH), *([path] if path else [])]),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": self._network.address(0),
            "GLOO_SOCKET_IFNAME": self._network.interface,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of addresses without a name: these have none
        }
        command = self._network.command(rank, [sys.executable, "-m", "network.worker"])
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which cleans up
        )

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # of a request that was not flushed
                process.stdin.close()
        self._processes.clear()


def _read(rank: int, process: subprocess.Popen, answers: queue.SimpleQueue) -> None:
    for line in process.stdout:
        answers.put((rank, line))
    answers.put((rank, None))


def _free_port() -> int:
    """Free on this machine just now; in new namespaces every port is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
