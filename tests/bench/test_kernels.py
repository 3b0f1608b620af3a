"""bench.kernels: all requested cases are measured, and wrong results are not timed."""

import json

import pytest
import torch

from bench import kernels as program
from bench.microbench import cases
from bench.microbench import command as kernels
from bench.microbench.arguments import TIMED
from dct_kernels import backend_of


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch):
    monkeypatch.setattr(cases, "COLD_BYTES", 1)


@pytest.mark.large
def test_all_ops_and_peers(tmp_path, capsys):
    command = ["--device", "cpu", "--sizes", "8192", "--density", "0.01,0.1"]
    command += ["--row-widths", "64", "--rounds", "1", "--threads", "1"]
    command += ["--json", str(tmp_path / "k.json")]
    assert program.main(command) == 0
    results = json.loads((tmp_path / "k.json").read_text())["results"]
    assert {result["op"] for result in results} == set(TIMED)
    assert {result["density"] for result in results if result["op"] == "mask_pack"} == {0.01, 0.1}
    peers = {name for result in results for name in result["ms"]}
    assert peers >= {"copy", "eager", "topk", "torch.topk"}
    for result in results:
        assert all(0 < ms["q20"] <= ms["median"] <= ms["q80"] for ms in result["ms"].values())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Backend on cpu: {backend_of('cpu')}"
    assert len(lines) == 3 + 2 + len(results)  # heading lines, and two lines of the table header
    assert {line.count("|") for line in lines[3:]} == {11}


def test_bytes_of_cases_by_hand():
    case = cases.mask_pack("cpu", 1000, 0.1, torch.float32, torch.bfloat16)
    assert case.nbytes == 1000 * 12 + 100 * 4
    case = cases.scatter_unpack("cpu", 1000, 0.1, 8)
    assert case.nbytes == 1000 * 4 + 8 * 100 * 4
    case = cases.row_pack("cpu", 10, 64, 0.05)
    assert case.nbytes == 10 * (64 * 4 + 4 * 4 + 4)
    case = cases.row_pack("cpu", 10, 64, 0.05, torch.bfloat16)
    assert case.nbytes == 10 * (64 * 2 + 4 * 2 + 4)


def test_a_backend_that_differs_is_not_timed():
    case = cases.scatter_unpack("cpu", 1000, 0.1, 2)
    good = cases.backends("cpu")["eager"]

    class Wrong:
        @staticmethod
        def scatter_unpack(payloads, out, *rest):
            status = good.scatter_unpack(payloads, out, *rest)
            out[7] += 1
            return status

    with pytest.raises(SystemExit, match="wrong differs from eager"):
        kernels._check(case, {"eager": good, "wrong": Wrong})
