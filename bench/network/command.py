"""bench.link: step time and bytes of training over links of a set rate."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import files, provenance
from bench.cli import UsageError, make_folder
from bench.rates import UNLIMITED, describe_rate, parse_rate
from bench.tables import aligned

from . import report
from .cells import merge
from .namespaces import Loopback, Namespaces

ROOT = Path(__file__).parents[2]


def run(options: argparse.Namespace) -> int:
    if options.rates is None:
        default = [UNLIMITED] if options.loopback else ["100mbit", "1gbit", "10gbit", UNLIMITED]
        options.rates = [parse_rate(text) for text in default]
    if options.loopback and options.rates != [None]:
        raise UsageError(f"--loopback has no rate limit: --rates must be {UNLIMITED}")
    make_folder(options.out)
    print(report.announce(options), flush=True)
    plain = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    result = {"provenance": provenance.describe(), "options": plain, "links": [], "cells": []}
    for ranks in options.ranks:
        with (Loopback if options.loopback else Namespaces)(ranks) as network:
            for rate in options.rates:
                network.set_rate(rate)
                measured = _measure(network, ranks, options)
                result["model"] = measured[0]["model"]
                link = measured[1]["link"]
                result["links"].append({"ranks": ranks, "rate": rate} | link)
                shared = ranks if options.loopback else 1
                for mode in options.modes:
                    rounds = list(zip(*(rank["rounds"][mode] for rank in measured), strict=True))
                    result["cells"].append(merge(ranks, rate, mode, rounds, shared))
                # Now, so that an interrupted run keeps its results.
                files.write_json(options.out / "link.json", result)
                print(f"{ranks} ranks at {describe_rate(rate)} are measured", flush=True)
    print(f"\n{aligned(report.render(result))}\n\n{report.NOTE}\nin {options.out}: link.json")
    return 0


def _measure(network: Namespaces | Loopback, ranks: int, options: argparse.Namespace) -> list[dict]:
    """What every rank measured, in a process each.

    Raises:
        UsageError: a rank failed, or took too long.
    """
    keys = ("batch_size", "hash_size", "embedding_dim", "bottom", "top", "density", "row_density")
    keys += ("row_format", "bucket_mb", "modes", "steps", "seconds")
    settings = {key: getattr(options, key) for key in keys} | {"transfer_port": _free_port()}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": network.interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of addresses without a name
    }
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, str(rank)) for rank in range(ranks)]
        program = [sys.executable, "-m", "bench.network.worker", json.dumps(settings)]
        processes = [
            subprocess.Popen(
                network.command(rank, [*program, str(out)]),
                env=environment | {"RANK": str(rank)},
                start_new_session=True,  # Ctrl-C reaches this process alone, which cleans up
            )
            for rank, out in enumerate(outs)
        ]
        try:
            _wait(processes, options.timeout * len(options.modes))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(out.read_text()) for out in outs]


def _wait(processes: list[subprocess.Popen], timeout: float) -> None:
    """Until all have ended without an error."""
    deadline = time.monotonic() + timeout
    while (ended := [process.poll() for process in processes]) != [0] * len(processes):
        for rank, status in enumerate(ended):
            if status:
                raise UsageError(f"rank {rank} failed with exit status {status}")
        if time.monotonic() > deadline:
            late = [rank for rank, status in enumerate(ended) if status is None]
            raise UsageError(f"ranks {late} have not ended in {timeout:g} seconds (--timeout)")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
