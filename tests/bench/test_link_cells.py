"""From the ranks' answers to a table: merging, crossings, rates."""

import argparse

import pytest

from bench.network.cells import Cell, merge
from bench.network.report import crossings, describe_crossings, render
from bench.rates import describe_rate, parse_rate


def _answer(seconds, wire):
    """Steps of these times, half compute and half wire, with `wire` bytes counted in each."""
    steps, half, none = len(seconds), [s / 2 for s in seconds], [0.0] * len(seconds)
    a_step = {"payload_bytes": 1000, "wire_bytes": wire, "packets": 2, "node_bytes": 7}
    return {name: steps * count for name, count in a_step.items()} | {
        "seconds": seconds,
        "phases": {"compute": half, "pack": none, "wire": half, "unpack": none},
        "purpose_bytes": {"ids": 3 * steps},
    }


def test_a_step_takes_as_long_as_its_slowest_rank():
    rounds = [
        [_answer([0.001, 0.002], 1132), _answer([0.003, 0.001], 1132)],
        [_answer([0.004], 1132), _answer([0.005], 1132)],
    ]
    cell = merge(2, 1e9, "dct", rounds, 1, None)
    assert cell.steps == 3
    assert cell.step_ms[1] == pytest.approx(3.0)  # of 3, 2 and 5
    # The one step between the quantiles is the first: 1 ms on one rank, 3 ms on the other.
    assert cell.phases_ms["compute"] == pytest.approx(1.0)
    assert cell.phases_ms["wire"] == pytest.approx(1.0)
    assert cell.purpose_bytes == {"ids": 3} and cell.node_bytes == 7


def test_counted_bytes_are_held_against_payload_and_headers():
    cell = merge(2, 1e9, "dct", [[_answer([0.001] * 4, 1132)] * 2], 1, None)
    assert (cell.payload_bytes, cell.wire_bytes, cell.packets) == (1000, 1132, 2)
    run = {"links": [], "cells": [cell.as_json()], "options": {"density": 0.005}}
    assert "| DCT, 0.5 % | 1,000 | 1,132 | 1.000 | 2 |" in render([run])  # 1000 + 2 * 66


def test_a_counter_that_ranks_share_is_divided():
    cell = merge(2, None, "dct", [[_answer([0.001], 2264)] * 2], 2, None)
    assert (cell.wire_bytes, cell.packets) == (1132, 1)


def test_a_cell_without_rounds_has_failed():
    cell = merge(2, 1e9, "dct", [], 1, "rank 1 died")
    assert cell.failed == "rank 1 died" and cell.step_ms is None


def _cells(mode, medians):
    return [Cell(2, rate, mode, None, 1, (0, ms, 0), {}) for rate, ms in medians.items()]


def test_the_rate_above_which_dct_no_longer_pays():
    # 2 times faster at 1 Gbit/s, 2 times slower at 4: on a logarithmic scale that is at 2.
    cells = _cells("dense", {1e9: 20, 4e9: 5}) + _cells("dct", {1e9: 10, 4e9: 10})
    (found,) = crossings(cells)
    assert found["pays_up_to"] == pytest.approx(2e9)
    assert found == found | {"ranks": 2, "against": "dense", "between": [1e9, 4e9]}
    assert not found["regains"]


def test_like_is_held_against_like():
    medians = {"dense": 20, "dct": 10, "hybrid-dense": 30, "hybrid-dp": 4, "hybrid-dct": 5}
    cells = [cell for mode, ms in medians.items() for cell in _cells(mode, {1e9: ms})]
    found = {crossing["against"]: crossing["pays_up_to"] for crossing in crossings(cells)}
    assert found == {"dense": None, "hybrid-dense": None, "hybrid-dp": 0}


def test_dct_that_pays_everywhere_or_nowhere():
    always = _cells("dense", {1e9: 20, None: 15}) + _cells("dct", {1e9: 10, None: 10})
    assert crossings(always)[0]["pays_up_to"] is None
    never = _cells("dense", {1e9: 9, None: 5}) + _cells("dct", {1e9: 10, None: 10})
    assert crossings(never)[0]["pays_up_to"] == 0


def test_a_second_crossing_is_told():
    dense = {1e9: 20, 2e9: 5, 4e9: 12}
    cells = _cells("dense", dense) + _cells("dct", dict.fromkeys(dense, 10))
    assert crossings(cells)[0]["regains"]


def _said(cells):
    (said,) = describe_crossings(crossings(cells))
    return said


def test_a_crossing_below_an_unlimited_rate_has_no_number_to_interpolate_to():
    cells = _cells("dense", {1e9: 20, None: 5}) + _cells("dct", {1e9: 10, None: 10})
    assert crossings(cells)[0]["pays_up_to"] == 1e9
    assert _said(cells) == (
        "2 ranks, DCT against dense float32: pays at 1 Gbit/s, no longer on an unlimited link: "
        "somewhere between it stops"
    )


def test_a_crossing_between_two_rates_is_told_with_a_number():
    cells = _cells("dense", {1e9: 20, 4e9: 5}) + _cells("dct", {1e9: 10, 4e9: 10})
    told = "pays up to a rate between 1 Gbit/s and 4 Gbit/s, at about 2.00 Gbit/s"
    assert _said(cells).endswith(told)


@pytest.mark.parametrize(
    "text, rate, described",
    [
        ("100mbit", 1e8, "100 Mbit/s"),
        ("2.5gbit", 2.5e9, "2.5 Gbit/s"),
        ("unlimited", None, "unlimited"),
    ],
)
def test_rates_are_read_and_written(text, rate, described):
    assert parse_rate(text) == rate
    assert describe_rate(rate) == described


@pytest.mark.parametrize("text", ["", "1", "gbit", "1gb", "-1gbit", "0mbit", "nangbit", "500gbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be 1mbit to 400gbit or unlimited"):
        parse_rate(text)
