"""The cost model against closed forms, published sizes, and bytes that were measured elsewhere."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch

from dct_parallel import DCTAverager
from examples.dlrm.data.features import table_rows
from examples.dlrm.models.dlrm import DLRM
from bench.scaling import shapes
from bench.scaling.break_even import GRID, paying_rates
from bench.scaling.cost_model import Cluster, Kernels, Model, union_density
from bench.scaling.links import GLOO, RDMA, TCP, Link, all_gather, all_reduce, all_to_all, link_of
from bench.scaling.methods import LOCAL_PERIOD, METHODS, called, methods_for

FREE = Kernels(*[math.inf] * 5, "free")
NOWHERE = Link(0.0, math.inf)


def _flat(ranks, link):
    return Cluster(ranks, 1, link, NOWHERE)


def test_a_ring_all_reduce_sends_its_tensor_nearly_twice():
    # 3 ranks, 6 bytes: 4 messages of 2 bytes, each 1 + 2 / 2 seconds.
    assert all_reduce(Link(1.0, 2.0), 3, 6) == 8.0
    assert all_reduce(Link(1.0, 2.0), 1, 6) == 0.0


def test_many_ranks_go_by_a_tree():
    # A ring would take 2 x 1023 messages; a tree takes 2 x 10, and moves the tensor twice.
    assert all_reduce(Link(1.0, 1e6), 1024, 1e6) == pytest.approx(22.0)


def test_all_gather_and_all_to_all_by_hand():
    # 8 ranks, 4 bytes each: 3 messages; 28 bytes arrive at 2 bytes a second.
    assert all_gather(Link(1.0, 2.0), 8, 4) == 3 + 14
    assert all_to_all(Link(0.0, 2.0), 8, 4) == 14  # pairwise: every byte once
    assert all_to_all(Link(1.0, 1e9), 8, 4) == pytest.approx(3)  # Bruck: 3 messages


def test_the_union_of_two_masks():
    assert union_density(0.25, 2) == 0.4375  # by inclusion and exclusion
    assert union_density(0.1, 1) == pytest.approx(0.1)


def test_the_union_of_masks_that_are_drawn():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(16, 200_000, generator=generator) < 0.05
    drawn = masks.any(dim=0).double().mean().item()
    assert union_density(0.05, 16) == pytest.approx(drawn, abs=0.005)


def test_models_have_their_published_sizes():
    assert shapes.numel(shapes.transformer()) == 124_439_808  # GPT-2 small
    model = DLRM(table_rows(4000), 16, [512, 256, 64], [512, 256])
    assert sorted(shapes.dlrm()) == sorted(tuple(p.shape) for p in model.parameters())


@pytest.mark.parametrize(
    "method, sent",
    # What train_dlrm.py counts on the same model with 2 ranks: docs/results/link_few_bits.md.
    # And docs/results/link_few_bits.md, less a tenth of the 8 bytes that say it has arrived.
    [
        *(("dense", 5_523_396), ("bf16", 2_761_698), ("powersgd1", 248_732), ("dct", 34_944)),
        *(("dct-int4", 733_920), ("local-ternary", 32_382.4)),
    ],
    ids=lambda value: str(value),
)
def test_bytes_are_those_that_training_counts(method, sent):
    step = Model(shapes.dlrm(), 0.0, FREE, 0.005).step(method, _flat(2, NOWHERE))
    assert step.wire_bytes == sent


def test_bytes_of_shard_do_not_grow_with_ranks_but_those_of_gather_do():
    model = Model(shapes.transformer(), 0.0, FREE, 0.005)
    few, many = (model.step("dct-reduce-scatter", _flat(p, NOWHERE)).wire_bytes for p in (8, 64))
    assert many / few == pytest.approx((63 / 64) / (7 / 8), rel=0.03)
    few, many = (model.step("dct", _flat(p, NOWHERE)).wire_bytes for p in (8, 64))
    assert many / few == pytest.approx(63 / 7, rel=0.03)


def test_shard_sends_158_times_less_than_a_float32_ring():
    # 4 bytes an element, over 4 bytes an entry at 1.25 x 0.5 %, and the starts of blocks.
    model = Model([(10_000, 10_000)], 0.0, FREE, 0.005)
    dense, shard = (
        model.step(m, _flat(8, NOWHERE)).wire_bytes for m in ("dense", "dct-reduce-scatter")
    )
    assert dense / shard == pytest.approx(158, rel=0.01)


def test_one_owner_of_everything_gets_the_payload():
    model = Model(shapes.dlrm(), 0.0, FREE, 0.005)
    assert model.plan("dct-reduce-scatter", 1).payload_bytes == model.plan("dct", 1).payload_bytes


def test_a_step_adds_up():
    kernels = Kernels(1e9, 2e9, 4e9, math.inf, math.inf, "")
    model = Model([(1000, 1000)], 0.5, kernels, 0.01)
    step = model.step("dct", _flat(2, Link(0.0, 1e6)))
    payload = model.plan("dct", 2).payload_bytes
    assert step.pack == 12e6 / 2e9
    assert step.unpack == (4e6 + 2 * payload) / 4e9
    assert step.wire == pytest.approx(payload / 1e6)
    assert step.seconds == step.compute + step.pack + step.wire + step.unpack
    assert step.compute == 0.5


# Of 1,000,000 elements in ternary: a header and 977 rows of 207 bytes, padded to 16.
LOCAL_PAYLOAD = 64 + 977 * 240


def test_local_steps_by_hand():
    kernels = FREE._replace(copy=4e9, quantize=2e9, dequantize=1e9)
    model = Model([(1000, 1000)], 0.5, kernels, 0.01)
    # After the optimizer's step: compute that could hide an exchange is over by then.
    step = model.step("local-ternary", Cluster(2, 1, Link(1e-3, 1e6), NOWHERE, overlap=1.0))
    # Once in ten steps; unpacking depends on the ranks.
    packed, unpacked = 12e6 + LOCAL_PAYLOAD, 4e6 + 2 * LOCAL_PAYLOAD
    assert step.pack == pytest.approx((12e6 / 4e9 + packed / 2e9) / 10)
    assert step.wire == pytest.approx((1e-3 + LOCAL_PAYLOAD / 1e6) / 10)
    assert step.unpack == pytest.approx((20e6 / 4e9 + unpacked / 1e9) / 10)
    assert step.wire_bytes == LOCAL_PAYLOAD / 10
    assert step.compute == 0.5


def test_local_steps_of_nodes():
    """8 ranks on 2 nodes. Of 10,000 elements, which are few, all ranks gather all payloads: 4 come
    into a node, 7 to each rank."""
    nodes = Cluster(2, 4, Link(1e-3, 1e6), Link(0.0, 1e7))
    step = Model([(100, 100)], 0.0, FREE, 0.01).step("local-ternary", nodes)
    payload = 64 + 10 * 240  # 10 rows of 240 bytes
    assert step.wire == pytest.approx((3e-3 + 4 * payload / 1e6 + 7 * payload / 1e7) / 10)
    assert step.wire_bytes == 4 * payload / 10


def test_local_steps_of_nodes_by_reduce_scatter():
    """Of 1,000,000 elements each of the 8 ranks owns 8 blocks, 128 rows."""
    nodes = Cluster(2, 4, Link(1e-3, 1e6), Link(0.0, 1e7))
    kernels = FREE._replace(copy=4e9, quantize=2e9, dequantize=1e9)
    step = Model([(1000, 1000)], 0.0, kernels, 0.01).step("local-ternary", nodes)
    payload = 64 + 128 * 240
    # To the owners, of a node's 4 ranks by one link: by Bruck's algorithm 3 times half of them.
    owners = min(7 * (1e-3 + 4 * payload / 1e6), 3 * (1e-3 + 4 * 4 * payload / 1e6))
    results = 3e-3 + 4 * payload / 1e6 + 7 * payload / 1e7
    assert step.wire == pytest.approx((owners + results) / 10)
    assert step.wire_bytes == (4 * 4 * payload + 4 * payload) / 10
    assert step.pack == pytest.approx((12e6 / 4e9 + (12e6 + 8 * payload) / 2e9) / 10)
    # The owner sums 8 payloads and packs a ninth, with its residual; then all is unpacked.
    moved = 9 * payload + 8 * 0.125e6 + 4e6 + 8 * payload
    assert step.unpack == pytest.approx((20e6 / 4e9 + moved / 1e9) / 10)


def test_every_entry_by_hand():
    """1,000,000 elements in int4, 1,024 of them in 544 bytes: on 2 ranks one payload each way."""
    kernels = FREE._replace(quantize=2e9, dequantize=1e9)
    model = Model([(1000, 1000)], 0.0, kernels, 0.01)
    payload = 64 + 977 * 544
    step = model.step("dct-int4", _flat(2, Link(1e-3, 1e6, per_byte=1e-7, gathered=0.5)))
    assert step.pack == pytest.approx((12e6 + payload) / 2e9)
    assert step.wire == pytest.approx(1e-3 + payload * (2e-6 + 1e-7))
    assert step.unpack == pytest.approx((4e6 + 2 * payload) / 1e9)
    assert step.wire_bytes == payload
    # In bfloat16 as many bytes as torch's hook, but for headers and whole blocks.
    ours, torchs = (
        model.step(m, _flat(4, Link(0.0, 1e6))).wire_bytes for m in ("dct-bfloat16", "bf16")
    )
    assert ours == pytest.approx(torchs, rel=0.05)


def test_messages_follow_the_link_and_the_device():
    assert link_of("cpu", 1e9) == GLOO._replace(bandwidth=1.25e8)
    assert link_of("gpu", 25e9).alpha == TCP.alpha > link_of("gpu", 100e9).alpha == RDMA.alpha


def test_gloos_costs_are_those_of_the_run_that_they_name():
    """What its wire times take beyond the plain transfer's rate, in milliseconds."""
    path = Path(__file__).parents[2] / "bench/results/2026-11-25-cpu/link_few_bits.json"
    (run,) = json.loads(path.read_text())["runs"]
    rates = {link["rate"]: link["bits_per_second"] / 8 for link in run["links"]}
    wire = {(c["mode"], c["rate"]): c["phases_ms"]["wire"] / 1e3 for c in run["cells"]}
    sent = {c["mode"]: c["payload_bytes"] for c in run["cells"]}
    for rate, bandwidth in rates.items():
        link = GLOO._replace(bandwidth=bandwidth)
        for mode, messages in (("dense", 2), ("bf16", 2)):
            assert all_reduce(link, 2, sent[mode]) == pytest.approx(
                messages * GLOO.alpha + sent[mode] * (1 / bandwidth + GLOO.per_byte)
            )
            assert all_reduce(link, 2, sent[mode]) == pytest.approx(wire[mode, rate], rel=0.06)
        for mode in ("dct", "dct-int4"):
            assert all_gather(link, 2, sent[mode]) == pytest.approx(wire[mode, rate], rel=0.25)


@pytest.mark.parametrize(
    ("name", "ranks", "in_nodes", "call"),
    [
        ("dct", 2, False, "DCTState(ddp, density=0.005)"),
        ("dct", 64, False, 'DCTState(ddp, density=0.005, transport="all_gather")'),
        ("dct-reduce-scatter", 64, False, "DCTState(ddp, density=0.005)"),
        ("dct-int4", 2, True, 'DCTState(ddp, format="int4", mesh=node_mesh())'),
        ("local-ternary", 2, True, "DCTAverager(model, period=10)"),
    ],
)
def test_methods_are_called_as_the_guide_has_them(name, ranks, in_nodes, call):
    model = Model([(10_000, 10_000)], 0.0, FREE, 0.005)
    assert called(name, 0.005, model.default_transport(ranks), in_nodes) == call


def test_an_optimizer_has_its_methods():
    adamw = ["dense", "bf16", "dct-bfloat16", "dct-int8", "dct-int4", "local-ternary"]
    assert methods_for("adamw", with_shapes=True) == adamw
    assert methods_for("sgd", with_shapes=True) == list(METHODS)
    assert not [name for name in methods_for("sgd", with_shapes=False) if "powersgd" in name]


def test_local_steps_are_the_averagers():
    defaults = inspect.signature(DCTAverager).parameters
    assert defaults["density"].default is defaults["format"].default is None  # all, in ternary
    assert defaults["period"].default == LOCAL_PERIOD


def test_wire_hides_behind_compute_as_far_as_allowed():
    model = Model([(1000, 1000)], 1.0, FREE, 0.01)
    link = Link(0.0, 1e6)  # dense: 4 seconds on the wire
    assert model.step("dense", Cluster(2, 1, link, NOWHERE, overlap=0.5)).wire == 3.5
    fast = Link(0.0, 1e9)
    assert model.step("dense", Cluster(2, 1, fast, NOWHERE, overlap=0.5)).wire == 0.0


def test_inside_a_node_everything_is_dense():
    model = Model([(1000, 1000)], 0.0, FREE, 0.01)
    inside = Link(0.0, 1e6)
    one_node = Cluster(1, 4, NOWHERE, inside)
    assert model.step("dense", one_node).wire == 6.0  # 2 x 3/4 x 4 MB
    assert model.step("dct", one_node).wire == 6.0
    assert model.step("dct", one_node).wire_bytes == 0


def test_the_rate_at_which_dct_stops_paying():
    kernels = FREE._replace(mask_pack=1e9)
    model = Model([(1000, 1000)], 0.0, kernels, 0.01)
    sent = model.plan("dct", 2).payload_bytes + 2
    ranges = paying_rates(model, lambda rate: _flat(2, Link(0.0, rate / 8)), "dct", "dense")
    # Dense takes 4 MB / rate, DCT 12 ms more than its payload's time, and that 1.05 times pays.
    exact = 8 * (4e6 - 1.05 * sent) / (1.05 * 12e-3)
    ((low, high),) = ranges
    assert low == GRID[0] and high <= exact < high * 10 ** (1 / 50)
    other = paying_rates(model, lambda rate: _flat(2, Link(0.0, rate / 8)), "dense", "dct")
    exact = 8 * (1.05 * 4e6 - sent) / 12e-3
    assert other == [(next(r for r in GRID if r > exact), GRID[-1])]
