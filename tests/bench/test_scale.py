"""scale.py: its output, its inputs, and the validation against a made-up run."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from bench import cli
from bench.cli import UsageError
from bench.scaling import answer, kernel_rates
from bench.scaling.cost_model import Cluster, Kernels, Model, Step
from bench.scaling.links import GLOO, Link
from bench.scaling.methods import METHODS
from bench.scaling.shapes import dlrm
from bench.scaling.validation import load, median_error, validate

ROOT = Path(__file__).parents[2]
SIZES = {"hash_size": 100, "embedding_dim": 8, "bottom": [16], "top": [16]}
FREE = Kernels(*[math.inf] * 5, "free")
MODES = ("dense", "bf16", "powersgd1", "dct", "dct-reduce-scatter")


def _cell(mode, rate, wire_ms, compute_ms=4.0):
    phases = {"compute": compute_ms, "pack": 0.5, "wire": wire_ms, "unpack": 0.25}
    total = sum(phases.values())
    cell = {"ranks": 2, "rate": rate, "mode": mode, "failed": None, "payload_bytes": 1000.0}
    return cell | {"step_ms": [total, total, total], "phases_ms": phases}


def _run_of_the_model(alpha, rates):
    """A link.json whose wire times are the model's own."""
    model = Model(dlrm(**SIZES), 0.0, FREE, 0.005)
    nowhere = Link(0.0, math.inf)
    cells = []
    for rate, mode in itertools.product(rates, MODES):
        link = Link(alpha, rate / 8, per_byte=2e-9, gathered=GLOO.gathered)
        cluster = Cluster(2, 1, link, nowhere)
        cells.append(_cell(mode, rate, 1e3 * model.step(mode, cluster).wire))
    return {
        "provenance": {"cpu": "made up"},
        "options": SIZES | {"density": 0.005},
        "model": {"parameters": 1000},
        "links": [{"ranks": 2, "rate": rate, "bits_per_second": rate} for rate in rates],
        "cells": cells,
    }


def test_a_run_that_follows_the_model_is_predicted():
    points = validate(_run_of_the_model(2e-4, [1e8, 1e9]))
    assert len(points) == 10
    assert [p.calibrating for p in points] == [False] * 5 + [True] * 5
    assert all(abs(p.error) < 1e-9 for p in points)
    assert median_error(points) < 1e-9


def test_a_run_that_does_not_is_told():
    run = _run_of_the_model(2e-4, [1e8, 1e9])
    run["cells"][0]["step_ms"] = [0, 2 * run["cells"][0]["step_ms"][1], 0]
    (wrong,) = [p for p in validate(run) if abs(p.error) > 1e-9]
    assert wrong.error == pytest.approx(-0.5)


def test_one_rate_cannot_validate():
    with pytest.raises(UsageError, match="must have dct or hybrid-dct and two rates at least"):
        validate(_run_of_the_model(2e-4, [1e9]))


def test_modes_that_the_model_does_not_know_are_left_out():
    run = _run_of_the_model(2e-4, [1e8, 1e9])
    expected = validate(run)
    others = [cell | {"mode": "topk"} for cell in run["cells"]]
    assert validate(run | {"cells": run["cells"] + others}) == expected
    with pytest.raises(UsageError, match=r"must have dct .*, got \['topk'\]"):
        validate(run | {"cells": others})


def test_hybrid_modes_are_predicted_from_their_bytes(tmp_path, capsys):
    """On 2 ranks all that a rank sends goes to the other, and each collective starts once."""
    run = _run_of_the_model(0.0, [1e8, 1e9])
    sent = {"counts": 0.0, "ids": 2e3, "mp_forward": 9e3, "mp_backward": 8e3, "dp": 7e4}
    alpha = 3e-4
    # Gradients by a ring: 2 messages. Ids, rows there and rows back; counts that send nothing.
    messages = {"hybrid-dense": 2 + 3, "hybrid-dct": 1 + 3}
    reduced = {"hybrid-dense": 7e4, "hybrid-dct": 0}  # the rest goes at a part of the rate
    wire = {
        (mode, rate): starts * alpha
        + (reduced[mode] + (89e3 - reduced[mode]) / GLOO.gathered) / (rate / 8)
        for rate in (1e8, 1e9)
        for mode, starts in messages.items()
    }
    cells = [
        _cell(mode, rate, 1e3 * seconds) | {"purpose_bytes": sent}
        for (mode, rate), seconds in wire.items()
    ]
    points = validate(run | {"cells": cells})
    assert [(p.mode, p.calibrating) for p in points][:2] == [(m, False) for m in messages]
    assert all(abs(p.error) < 1e-9 for p in points)
    (tmp_path / "link.json").write_text(json.dumps(run | {"cells": cells}))
    assert cli.main("scale", ["--validate", str(tmp_path / "link.json")]) == 0
    assert "hybrid, float32" in capsys.readouterr().out


def test_validation_on_the_command_line(tmp_path, capsys):
    (tmp_path / "link.json").write_text(json.dumps(_run_of_the_model(2e-4, [1e8, 1e9])))
    assert cli.main("scale", ["--validate", str(tmp_path / "link.json")]) == 0
    assert "median error of the points that do not calibrate: 0 %" in capsys.readouterr().out


def test_prediction(tmp_path, capsys):
    arguments = ["--ranks", "2,64", "--rates", "1gbit,100gbit", "--device", "gpu"]
    arguments += ["--out", str(tmp_path)]
    assert cli.main("scale", arguments) == 0
    shown = capsys.readouterr().out
    assert "compute: 5 ms, assumed, not measured" in shown
    assert "NVIDIA H200 (bench/results/2026-11-26-h200/bench.json)" in shown
    result = json.loads((tmp_path / "scale.json").read_text())
    assert len(result["steps"]) == 2 * 2 * len(METHODS)
    for step in result["steps"]:
        parts = sum(step[phase] for phase in ("compute", "pack", "wire", "unpack"))
        assert step["seconds"] == pytest.approx(parts)
    assert result["union_density"]["2"] == pytest.approx(2 * 0.005 - 0.005**2)


def test_measured_kernels_are_named(tmp_path, capsys):
    (tmp_path / "link.json").write_text(json.dumps(_run_of_the_model(2e-4, [1e8, 1e9])))
    kernels = ["--kernels", str(tmp_path / "link.json"), "--compute-ms", "3"]
    assert cli.main("scale", [*kernels, "--ranks", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "kernels: measured: bench/link.py's pack and unpack" in shown
    assert "compute: 3 ms, as given" in shown


def test_rates_of_a_link_run():
    path_free = kernel_rates._of_link(_run_of_the_model(2e-4, [1e8, 1e9]))
    assert path_free.mask_pack == 1e3 * 12 * 1000 / 0.5
    assert path_free.scatter_unpack == 1e3 * (4 * 1000 + 2 * 1000) / 0.25


def test_rates_of_the_microbenchmark(tmp_path):
    def result(op, case, numel, nbytes, cpp, copy):
        ms = {name: {"median": of} for name, of in (("copy", copy), ("eager", 99.0), ("cpp", cpp))}
        return {"op": op, "case": case, "numel": numel, "bytes": nbytes, "ms": ms}

    results = [
        result("mask_pack", "float32 grad, bfloat16 values", 2000, 1, 1.0, 1.0),
        result("mask_pack", "float32 grad, float32 values", 4000, 1, 1.0, 1.0) | {"graphs": True},
        result("mask_pack", "float32 grad, float32 values", 2000, 2e6, 4.0, 2.0),
        result("mask_pack", "float32 grad, float32 values", 1000, 1, 1.0, 1.0),
        result("scatter_unpack", "P=2", 2000, 3e6, 1.0, 1.0),
        result("scatter_unpack", "P=8", 2000, 1, 1.0, 1.0),
    ]
    about = {"provenance": {"cpu": "a CPU", "gpu": "a GPU that was not used"}}
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(about | {"results": results}))
    kernels = kernel_rates.load(path, "cpu")
    assert (kernels.copy, kernels.mask_pack, kernels.scatter_unpack) == (1e9, 5e8, 3e9)
    assert kernels.quantize == kernels.dequantize == kernels.copy  # not timed
    source = f"measured: bench/kernels.py, cpp, 2,000 elements, a CPU ({path})"
    assert kernels.source == f"{source}; every entry in few bits: as fast as a copy, assumed"
    results += [
        result("quantize_pack", "float32 grad, int4", 2000, 4e6, 2.0, 1.0),
        result("dequantize_sum", "P=2, int4", 2000, 5e6, 1.0, 1.0),
    ]
    path.write_text(json.dumps(about | {"results": results}))
    kernels = kernel_rates.load(path, "cpu")
    assert (kernels.quantize, kernels.dequantize, kernels.source) == (2e9, 5e9, source)


def test_the_rates_of_a_gpu_are_those_of_the_run_on_an_h200():
    # docs/results/kernels_h200.md: 2^28 elements, microseconds of a copy and of kernels.
    rates = kernel_rates.load(None, "gpu")
    pack, unpack = 12.06 * 2**28, (4 + 2 * 0.01 * 4) * 2**28
    assert rates.copy == pytest.approx(pack / 756.4e-6, rel=1e-3)
    assert rates.mask_pack == pytest.approx(pack / 916.2e-6, rel=1e-3)
    assert rates.scatter_unpack == pytest.approx(unpack / 291.7e-6, rel=2e-3)
    assert rates.quantize == pytest.approx(12.53125 * 2**28 / 850.9e-6, rel=2e-3)


def test_the_answer_is_a_sentence(tmp_path, monkeypatch, capsys):
    """1,000,000 parameters: 4 MB, 2 MB and 25,344 bytes at 125 MB/s, of local steps 23,454; 50 us a
    message."""
    monkeypatch.chdir(tmp_path)
    command = ["--parameters", "1000000", "--compute-ms", "50", "--ranks", "2", "--device", "gpu"]
    assert cli.main("scale", [*command, "--rates", "1gbit"]) == 0
    said = capsys.readouterr().out
    assert (
        "\nIt helps: on 2 ranks at 1 Gbit/s a step with DCTState(ddp, density=0.005) takes 50.3 ms "
        "and sends 25.3 kB a rank, 1.63x as fast as float32 DDP (82.1 ms, 4.00 MB) and 1.32x as "
        "fast as DDP with bf16_compress_hook (66.1 ms, 2.00 MB); assumed: 50 ms of compute, 0 % of "
        "which hide the exchange, no contention, and the costs of kernels and messages above.\n"
    ) in said
    assert re.search(r"DCTAverager\(model, period=10\) +50.2 ms +1.64x +23.5 kB *\n", said)
    assert "with PowerSGD" not in said and "nodes:" not in said
    assert cli.main("scale", [*command, "--rates", "400gbit"]) == 0
    assert (
        "It does not help: on 2 ranks at 400 Gbit/s a step with float32" in capsys.readouterr().out
    )
    assert not list(tmp_path.iterdir())


def test_under_adamw_the_sparse_hook_is_left_out(capsys):
    command = ["--compute-ms", "50", "--ranks", "16", "--rates", "1gbit", "--optimizer", "adamw"]
    assert cli.main("scale", [*command, "--device", "cpu", "--gpus-per-node", "8"]) == 0
    said = capsys.readouterr().out
    assert 'DCTState(ddp, format="int4", mesh=node_mesh())' in said
    assert "density=0.005" not in said and "with PowerSGD" not in said
    assert "nodes: 8 ranks, 10 GB/s each way inside" in said and "guide/transformers.md" in said


def test_the_costs_of_cpus_are_those_of_gloo(capsys):
    """Of 2 busy cores, where nothing else was said; 2 messages of 1.5 ms and 5 ns a byte."""
    command = ["--parameters", "1000000", "--compute-ms", "50", "--ranks", "2", "--device", "cpu"]
    assert cli.main("scale", [*command, "--rates", "1gbit"]) == 0
    said = capsys.readouterr().out
    assert "AMD EPYC (bench/results/2026-11-25-cpu/link_few_bits.json)" in said
    # 32 ms at the link's rate, 3 of messages, 20 of bytes; .7 of dividing 4 MB at 11 GB/s.
    assert re.search(r"float32 DDP +106 ms", said)


def test_measured_steps_are_predicted():
    """The run on the page of few bits, whose 1 Gbit/s gives the costs: docs/design/measuring.md."""
    path = ROOT / "bench/results/2026-11-25-cpu/link_few_bits.json"
    points = [point for point in load(path) if not point.calibrating]
    assert {point.mode for point in points} >= {"dense", "bf16", "powersgd1", "dct", "dct-int4"}
    assert median_error(points) < 0.03
    assert max(abs(point.error) for point in points) < 0.08


def _step(seconds):
    return Step(seconds, 0.0, 0.0, 0.0, 5e4)


@pytest.mark.parametrize(
    "seconds, taken, verdict",
    [
        ((1.0, 0.9, 0.8, 0.5, 0.4), "local-ternary", "It helps"),
        ((1.0, 0.9, 0.3, 0.5, 0.4), "powersgd1", "Another method helps more"),
        ((1.0, 0.9, 0.88, 0.86, 0.86), "bf16", "It does not help"),
        ((1.0, 0.98, 0.97, 0.96, 0.96), "dense", "It does not help"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), "dense", "It does not help"),
    ],
    ids=["ours", "PowerSGD", "bf16 is as fast", "dense is as fast", "all alike"],
)
def test_the_method_to_take(seconds, taken, verdict):
    methods = ("dense", "bf16", "powersgd1", "dct", "local-ternary")
    steps = {method: _step(s) for method, s in zip(methods, seconds, strict=True)}
    steps["dct-reduce-scatter"] = _step(2.0)
    assert answer.best(steps) == taken
    names = {method: f"<{method}>" for method in steps}
    said = answer.sentence(2, 1e9, steps, names)
    assert said.startswith(f"{verdict}: on 2 ranks at 1 Gbit/s a step with <{taken}> takes ")
    assert {"<dense>", "<bf16>"} < set(re.findall("<.*?>", said)) | {taken}


def test_a_slower_way_of_ours_is_named_beside_what_is_faster():
    seconds = {
        "dense": 1.0,
        "bf16": 0.2,
        "dct": 0.3,
        "dct-reduce-scatter": 0.4,
        "local-ternary": 2.0,
    }
    steps = {method: _step(s) for method, s in seconds.items()}
    said = answer.sentence(8, 1e8, steps, {m: m for m in METHODS})
    assert said == (
        "It does not help: on 8 ranks at 100 Mbit/s a step with bf16 takes 200 ms and sends 50.0 "
        "kB a rank, 5.00x as fast as dense (1,000 ms, 50.0 kB) and 1.50x as fast as dct (300 ms, "
        "50.0 kB)"
    )


def test_results_are_replaced_only_if_asked(tmp_path, capsys):
    (tmp_path / "scale.json").write_text("precious")
    command = ["--ranks", "2", "--rates", "1gbit", "--out", str(tmp_path)]
    assert cli.main("scale", command) == 1
    assert "--out must be without a scale.json" in capsys.readouterr().err
    assert (tmp_path / "scale.json").read_text() == "precious"
    assert cli.main("scale", [*command, "--overwrite"]) == 0
    assert json.loads((tmp_path / "scale.json").read_text())["options"]["ranks"] == [2]


@pytest.mark.parametrize(
    "content, text",
    [
        ("not json", "must be a JSON file"),
        ("[]", "must be a JSON object"),
        ("{}", "must be the JSON of"),
        ('{"options": [1]}', "must be the JSON of"),
        ('{"options": {"local_size": "2"}}', "must be of nodes of one rank, got 2"),
    ],
    ids=["text", "list", "empty", "options", "nodes"],
)
def test_other_files_are_refused(tmp_path, capsys, content, text):
    path = tmp_path / "kernels.json"
    path.write_text(content)
    assert cli.main("scale", ["--kernels", str(path), "--out", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        {"device": "cpu", "results": []},
        {"options": [1]},
        _run_of_the_model(2e-4, [1e8]) | {"links": 1},
    ],
    ids=["kernels", "options", "links"],
)
def test_only_a_link_run_can_validate(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    assert cli.main("scale", ["--validate", str(path)]) == 1
    rule = "--validate must be the JSON of bench/link.py"
    assert capsys.readouterr().err == f"scale.py: {rule}, got {path}\n"


def test_where_results_cannot_be_written_the_tables_are_printed(tmp_path, capsys):
    (tmp_path / "scale.json.part").mkdir()
    assert cli.main("scale", ["--ranks", "2,4", "--rates", "1gbit", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err == f"scale.py: {tmp_path / 'scale.json'} cannot be written: Is a directory\n"
    assert "shard thresholds its sums" in said.out


def test_where_no_results_can_be_is_said_first(tmp_path, capsys):
    (tmp_path / "scale.json").mkdir()
    assert cli.main("scale", ["--ranks", "2", "--rates", "1gbit", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("scale.py: --out must be a folder that can be written to")
    assert str(tmp_path / "scale.json") in said.err and not said.out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--ranks", "12", "--gpus-per-node", "8"], "--ranks must be multiples of"),
        (["--rates", "unlimited"], "--rates must be numbers here, got unlimited"),
        (["--parameters", "9"], "--parameters must come with --compute-ms"),
    ],
    ids=["ranks", "rates", "parameters"],
)
def test_what_cannot_be_predicted_is_refused(tmp_path, capsys, arguments, text):
    (tmp_path / "scale.json").write_text("precious")
    assert cli.main("scale", [*arguments, "--overwrite", "--out", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err
    assert (tmp_path / "scale.json").read_text() == "precious"


def test_a_model_is_named_or_counted(capsys):
    with pytest.raises(SystemExit):
        cli.main("scale", ["--model", "transformer", "--parameters", "9", "--compute-ms", "1"])
    assert "--parameters: not allowed with argument --model" in capsys.readouterr().err
