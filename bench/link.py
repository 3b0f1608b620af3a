"""Measures step time and bytes of training over throttled links."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import files, provenance
from bench.cli import (
    Parser,
    UsageError,
    announce_backend,
    count,
    density,
    exit_status,
    make_folder,
    number,
    positive,
    several,
)
from bench.network import report
from bench.network.methods import METHODS, REPLICATED, SHARDED
from bench.network.namespaces import Loopback, Namespaces
from bench.rates import UNLIMITED, describe_rate, parse_rate
from dct_parallel.formats import ROW_FORMATS
from dlrm.arguments import names

ROOT = Path(__file__).parents[1]
DESCRIPTION = """\
Train over throttled links. Measure the time of a step, and the bytes that leave a rank's interface.
The model is DLRM on generated rows, with several ways of averaging gradients, or a sharded
transformer.

Every rank is a process in a network namespace. A link is a veth pair with a token bucket filter at
both ends, so each direction has the full rate. A bridge joins the links. Bytes are read from the
interface's counters. Namespaces need root, and the commands ip and tc (Debian, Ubuntu: apt-get
install iproute2). --loopback uses no namespaces, but has no rate limit. The program removes the
namespaces when it ends, also after Ctrl-C. The next run removes the namespaces of a killed run.
"""
EPILOG = """\
examples:
  sudo $(which python) -m bench.link
      2 ranks, rates from 100 Mbit/s to unlimited, all replicated modes
  sudo $(which python) -m bench.link --ranks 2,4 --rates 1gbit,5gbit,10gbit --modes dense,bf16,dct
      find the rate up to which DCT is faster than both all-reduces
  sudo $(which python) -m bench.link --embedding-dim 64 --rates 1gbit --row-format int4,sign \\
      --modes hybrid-dense,hybrid-dct,hybrid-format-dedup
      sharded tables with quantized rows; each distinct row is sent once
  sudo $(which python) -m bench.link --modes fsdp-bfloat16,fsdp-int8,fsdp-int8-int4 --seconds 60
      FSDP2: 10.7 million parameters, 512 tokens per rank and step
  python -m bench.link --loopback
      without root: the cost of each mode on a very fast network
"""


def parser() -> Parser:
    """Make a parser that, on an error, prints the argument, rule and value, and exits with 2."""
    parser = Parser(prog="python -m bench.link", description=DESCRIPTION, epilog=EPILOG)
    measured = parser.add_argument_group("measurements")
    measured.add_argument(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 64, "an integer in [2, 64]")),
        default="2",
        metavar="N,...",
        help="numbers of ranks; ranks share this machine's cores, so they compute more slowly if "
        "there are more ranks than cores",
    )
    measured.add_argument(
        "--rates",
        type=several(parse_rate),
        metavar="R,...",
        help="link rates, such as 2.5gbit, or unlimited (default: 100mbit,1gbit,10gbit,unlimited; "
        "unlimited with --loopback)",
    )
    measured.add_argument(
        "--modes",
        type=several(str, METHODS),
        default=",".join(REPLICATED),
        metavar="M,...",
        help="modes to compare. dense and bf16 use an all-reduce. powersgd1 uses rank-1 PowerSGD. "
        "dct uses dct_hook. dct-int4 sends all entries in int4. local-ternary uses DCTAverager, "
        "with results as means over 10 steps. hybrid-dense, hybrid-dct and hybrid-format shard the "
        "embedding tables, and send rows in float32, the largest entries of rows, or quantized "
        "rows. -dedup sends each distinct row once. fsdp-torch trains a sharded transformer in "
        "bfloat16. fsdp-bfloat16, fsdp-int8 and fsdp-int8-int4 (the latter with int4 gradients) "
        "add compress_fully_shard. With -kept, weights are gathered once per step",
    )
    measured.add_argument(
        "--loopback",
        action="store_true",
        help="use 127.0.0.1 instead of namespaces and links. Needs no root, has no rate limit, "
        "and counts all bytes that this machine sends to itself",
    )
    extent = parser.add_argument_group("duration")
    extent.add_argument("--steps", type=count, default=60, help="timed steps per mode, in 3 rounds")
    extent.add_argument(
        "--seconds",
        type=positive,
        default=15.0,
        help="approximate maximum seconds of the timed steps of a mode. On slow links, fewer than "
        "--steps steps are timed, but at least 15",
    )
    extent.add_argument(
        "--timeout",
        type=positive,
        default=120.0,
        help="at each rate, the run fails after this many seconds per mode",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--bucket-mb",
        type=positive,
        default=1024.0,
        help="DDP's bucket size in MiB. With the default, there is one bucket. With several "
        "buckets, exchanges overlap with the backward pass",
    )
    model.add_argument("--batch-size", type=count, default=128, help="rows per rank and step")
    model.add_argument("--hash-size", type=count, default=4000, help="maximum rows per table")
    model.add_argument("--embedding-dim", type=count, default=16, help="width of an embedding")
    model.add_argument(
        "--density",
        type=density,
        default=0.005,
        help="dct: fraction of gradient entries that is sent",
    )
    model.add_argument(
        "--row-density",
        type=density,
        default=0.05,
        help="hybrid-dct: fraction of entries that is sent, for each pooled embedding and for its "
        "gradient; the number of entries is rounded up",
    )
    model.add_argument(
        "--row-format",
        type=names(ROW_FORMATS, 2),
        default="int4",
        metavar="FORMAT[,BACKWARD]",
        help="hybrid-format: number format of pooled embeddings. BACKWARD is the format of their "
        "gradients, if different",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/link"),
        metavar="DIR",
        help="folder for link.json, which contains all measurements",
    )
    return parser


def run(options: argparse.Namespace) -> int:
    if options.rates is None:
        default = [UNLIMITED] if options.loopback else ["100mbit", "1gbit", "10gbit", UNLIMITED]
        options.rates = [parse_rate(text) for text in default]
    if options.loopback and options.rates != [None]:
        raise UsageError(f"--loopback has no rate limit: --rates must be {UNLIMITED}")
    if len({mode in SHARDED for mode in options.modes}) > 1:
        raise UsageError("--modes must train one model: all modes must be fsdp-..., or none")
    announce_backend("cpu")
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
                    result["cells"].append(report.merge(ranks, rate, mode, rounds, shared))
                # Written after each rate, so that an interrupted run keeps its results.
                files.write_json(options.out / "link.json", result)
                print(f"measured {ranks} ranks at {describe_rate(rate)}", flush=True)
    print(f"\n{report.render(result)}\n\n{report.NOTE}\nResults: {options.out}/link.json")
    return 0


def _measure(network: Namespaces | Loopback, ranks: int, options: argparse.Namespace) -> list[dict]:
    """Run one process per rank, and return the measurements of each rank.

    Raises:
        UsageError: a rank failed or took too long.
    """
    settings = vars(options) | {"out": None, "transfer_port": _free_port()}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": network.interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise torch warns about addresses without a name
    }
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, str(rank)) for rank in range(ranks)]
        program = [sys.executable, "-m", "bench.network.worker", json.dumps(settings)]
        processes = [
            subprocess.Popen(
                network.command(rank, [*program, str(out)]),
                env=environment | {"RANK": str(rank)},
                start_new_session=True,  # so that only this process gets Ctrl-C
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
    """Wait until all processes have ended without an error."""
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


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("link", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
