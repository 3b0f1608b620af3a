"""Compares the cost model with closed forms, with measured bytes, and with the pages."""

import json
import math
import re

import pytest

from bench import scale
from bench.cost_model import Kernels, Link, Model, all_gather, all_reduce, all_to_all
from support.programs import ROOT

FREE = Kernels(*[math.inf] * 5)
RESULTS = ROOT / "bench" / "results"
(RUN,) = json.loads((RESULTS / "2026-11-28-cpu/link_methods.json").read_text())["runs"]


def test_collectives_by_hand():
    # In a ring of 3, a rank sends 4 messages of 2 bytes, which take 1 + 2 / 2 seconds each.
    assert all_reduce(Link(1.0, 2.0), 3, 6) == 8.0
    # A tree of 1,024 ranks takes 2 x 10 messages in sequence, and sends the tensor twice.
    assert all_reduce(Link(1.0, 1e6), 1024, 1e6) == pytest.approx(22.0)
    # With 4 bytes per rank, each of 8 ranks receives 3 messages with 28 bytes in total.
    assert all_gather(Link(1.0, 2.0), 8, 4) == 3 + 14
    assert all_to_all(Link(0.0, 2.0), 8, 4) == 14  # pairwise, every byte is sent once
    assert all_to_all(Link(1.0, 1e9), 8, 4) == pytest.approx(3)  # Bruck's algorithm, 3 messages


def test_parameters_may_have_a_unit(capsys):
    for text in ("50000000", "5e7", "50M", "0.05b"):
        assert scale.parser().parse_args(["--parameters", text]).parameters == 50_000_000
    for text in ("1.5", "50X", "inf", "0M"):
        with pytest.raises(SystemExit):
            scale.parser().parse_args(["--parameters", text])
        assert f"in [1, 2^40], such as 50M, got {text!r}" in capsys.readouterr().err


def test_step_time_is_the_sum_of_its_phases():
    model = Model(10**6, 0.5, Kernels(1e9, 2e9, 4e9, math.inf, math.inf), 0.01)
    step = model.step("dct", 2, Link(0.0, 1e6))
    payload = model.plan("dct", 2).payload_bytes
    assert step.pack == 12e6 / 2e9
    assert step.unpack == (4e6 + 2 * payload) / 4e9
    assert step.wire == pytest.approx(payload / 1e6)
    assert step.seconds == step.compute + step.pack + step.wire + step.unpack


def test_host_time_of_hooks():
    for numel, buckets in ((10**6, 1), (6_750_000, 2)):  # 4 MB and 27 MB, in buckets of 25 MiB
        for name, added in (("int4", 0.25 * buckets), ("dense", 0.0), ("local", 0.0)):
            free, slow = (Model(numel, 0.5, FREE._replace(host=host)) for host in (0.0, 0.25))
            more = slow.step(name, 2, Link(0.0)).seconds - free.step(name, 2, Link(0.0)).seconds
            assert more == added, name


def test_dense_formats_and_local_steps_by_hand():
    """1,000,000 elements fill 977 rows. A row has 544 bytes in int4 and 240 in ternary."""
    kernels = FREE._replace(copy=4e9, quantize=2e9, dequantize=1e9)
    model = Model(10**6, 0.5, kernels, overlap=1.0)
    link = Link(1e-3, 1e6, per_byte=1e-7, gathered=0.5)
    payload = 64 + 977 * 544
    step = Model(10**6, 0.5, kernels).step("int4", 2, link)
    assert step.pack == pytest.approx((12e6 + payload) / 2e9)
    assert step.wire == pytest.approx(1e-3 + payload * (2e-6 + 1e-7))
    assert step.unpack == pytest.approx((4e6 + 2 * payload) / 1e9)
    # With local steps, ranks exchange every ten steps, after the optimizer's step, without overlap.
    payload = 64 + 977 * 240
    step = model.step("local", 2, link)
    assert step.pack == pytest.approx((12e6 / 4e9 + (12e6 + payload) / 2e9) / 10)
    assert step.wire == pytest.approx((1e-3 + payload * (2e-6 + 1e-7)) / 10)
    assert step.unpack == pytest.approx((20e6 / 4e9 + (4e6 + 2 * payload) / 1e9) / 10)
    assert step.wire_bytes == payload / 10
    assert model.step("dense", 2, Link(0.0, 1e7)).wire == 0.0  # hidden behind compute


def test_shards_of_fsdp2_by_hand():
    """A rank of 4 sends 3/4 of two copies of the weights and of one of the gradients."""
    model = Model(10**6, 0.5, FREE._replace(quantize=2e9, dequantize=1e9))
    step = model.shards_step("FSDP2 in bfloat16", 4, Link(1e-3, 1e6))
    assert step.wire_bytes == 0.75 * 6e6 and step.pack == step.unpack == 0.0
    # Gathers take 2 messages each, and the scatter of gradients 3 (pairwise) or 2 (Bruck).
    assert step.wire == pytest.approx(2 * (2e-3 + 1.5) + 3e-3 + 1.5)
    step = model.shards_step("compress_fully_shard(model)", 4, Link(0.0, 1e6))
    assert step.wire_bytes == pytest.approx(0.75 * 3.09375e6)
    assert step.pack == pytest.approx((2 * 5.03125 * 0.25e6 + 3.03125e6) / 2e9)
    assert step.unpack == pytest.approx((2 * 3.03125e6 + 1.03125e6 + 1e6) / 1e9)


def test_a_table_of_several_rates_has_times_in_bfloat16(capsys):
    """Each row has the times of the tables of one rate, and factors against bfloat16."""
    given = ["--parameters", "50M", "--ranks", "4", "--device", "gpu", "--rates"]
    assert scale.main([*given, "10gbit,1gbit"]) == 0
    (row,) = re.findall(r"^\| 4 .*\| 10 Gbit/s +\|(.*)\|$", capsys.readouterr().out, re.M)
    assert scale.main([*given, "10gbit"]) == 0
    printed = capsys.readouterr().out
    (dense, _), (bfloat16, _), (ours, factor), _, (fsdp2, _), (shards, fewer) = re.findall(
        r"^\| \S.*? \| +(\S+) ms +\| (\S+) ", printed, re.M
    )
    cells = [cell.strip() for cell in row.split("|")]
    assert cells == [dense, bfloat16, f"dct {ours}", factor, fsdp2, shards, fewer]
    assert f"{bfloat16} ms in bfloat16, {ours} ms with" in printed
    assert "(on a click model with 1.4 million parameters, not on yours;" in printed


MODES = {
    "dense": "dense",
    "bf16": "bf16",
    "dct": "dct",
    "int4": "dct-int4",
    "local": "local-ternary",
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_match_the_measured_ones(ranks):
    sent = {c["mode"]: c["payload_bytes"] for c in RUN["cells"] if c["ranks"] == ranks}
    model = Model(RUN["model"]["parameters"], 0.0, FREE)
    for method, mode in MODES.items():
        step = model.step(method, ranks, Link(0.0))
        # Each averaging of local steps also sends 8 bytes that say whether all weights are finite.
        assert step.wire_bytes == pytest.approx(sent[mode], abs=2), method


def test_the_prediction_in_the_readme(capsys):
    readme = (ROOT / "README.md").read_text()
    (options,) = re.findall(r"^python -m bench\.scale (.*)$", readme, re.M)
    assert scale.main(options.split()) == 0
    predicted = re.findall(r"^\| \S.*? \| +(\S+) ms", capsys.readouterr().out, re.M)
    stated = re.findall(r"^\| predicted.* \| (\d+) \| (\d+) \| (\d+), `", readme, re.M)
    assert [round(float(ms)) for ms in predicted] == [int(ms) for row in stated for ms in row]


GUIDE = (ROOT / "docs" / "guide" / "which_method.md").read_text()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_recommendations_and_losses_are_those_of_the_guide(optimizer, ranks, capsys):
    name = {"sgd": "SGD", "adamw": "AdamW"}[optimizer]
    rows = re.findall(rf"^\| {name}(?:,.*?)? \| (.*) \| (.*) \|$", GUIDE, re.M)
    recommended = set(re.findall(r"`(DCT\w+\(.*?\))`", " ".join(r[ranks > 2] for r in rows)))
    given = ["--ranks", str(ranks), "--rates", "1gbit", "--device", "gpu"]
    assert scale.main([*given, "--optimizer", optimizer]) == 0
    printed = capsys.readouterr().out
    compared = set(re.findall(r"^\| (DCT\S+\(.*?\)) ", printed, re.M))
    assert compared == recommended != set()
    ((fastest, loss),) = re.findall(r"^The loss with (.*), minus float32's: (.*)$", printed, re.M)
    assert fastest in compared and f"a step with {fastest} takes" in printed
    row = rf"^\| `{re.escape(fastest)}` \| (?:{name}|the same),.* (\S+ ± \S+) \|$"
    figures = re.findall(r"[+-][\d.]+ ± [\d.]+", loss)
    assert figures and set(figures) <= set(re.findall(row, GUIDE, re.M))
