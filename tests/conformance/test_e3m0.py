"""Payload version 2, "e3m0": what differs from version 1."""

import math

import numpy as np
import pytest
import torch
from emulation import backend as emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import e3m0, floats, payload
from oracle.payload import Geometry
from ptx import backend as ptx

import dct_kernels
from conformance import bits, calls, samples
from conformance.arguments import placed

FLT_MAX, TINY = 2.0**128 - 2.0**104, 2.0**-149
SIZES = (*samples.SIZES, 4095, 4096, 4097, 3 * 4096 + 1)
BLOCKS_AND_A_BIT = 3 * 16384 + 100
CUT_AS_OF = {
    "emulated": emulated.cut_as_of,
    "ptx-cuda": lambda times: ptx.executor().cut_as_of(times),
}


def pack(backend, residual, grad=None, threshold=(0.0,), **options):
    residual = torch.as_tensor(residual, dtype=torch.float32)
    return calls.mask_pack(backend, residual, grad, threshold, value_dtype="e3m0", **options)


def sent_of(packed):
    """float32 [numel], what the payloads say."""
    sent = np.zeros(packed.geometry.numel, np.float32)
    for r, content in enumerate(packed.contents):
        low, _ = packed.geometry.bounds(r)
        index = [low + i for i in payload.indices(content)]
        sent[index] = e3m0.decode(content.values, content.scale)
    return sent


def assert_conserved(packed, acc):
    """In float32, and exactly."""
    sent, left = sent_of(packed), packed.residual.numpy()
    finite = np.isfinite(acc)
    assert np.array_equal((sent + left)[finite], acc[finite])
    exact = sent.astype(float) + left.astype(float)
    assert np.array_equal(exact[finite], acc[finite].astype(float))


@pytest.mark.parametrize("grad_dtype", (None, *bits.FLOATS), ids=bits.name)
@pytest.mark.parametrize("numel", SIZES)
def test_sizes_and_dtypes(backend, numel, grad_dtype):
    residual = samples.hard(numel)
    grad = None if grad_dtype is None else samples.hard(numel, grad_dtype, seed=1)
    packed = pack(backend, residual, grad, [0.25], scale=[0.3])
    assert_conserved(packed, floats.accumulate(bits.numbers(residual), bits.numbers(grad), None))
    for out in bits.FLOATS:
        before = samples.hard(numel, out, seed=2)
        for accumulate in (False, True):
            calls.scatter_unpack(backend, [packed.rows], packed.geometry, before, 0.5, accumulate)


@pytest.mark.many_programs
def test_a_million_elements(backend):
    residual, grad = samples.normal(samples.LARGE), samples.normal(samples.LARGE, seed=1)
    packed = pack(backend, residual, grad, [3.0], capacity=samples.LARGE // 20, scale=[3.0])
    assert packed.contents[0].flags == 0
    calls.scatter_unpack(backend, [packed.rows] * 2, packed.geometry, scale=0.5)


SCALES = (0.0, -0.0, TINY, 2.0**-127, 2.0**-126, 1.4999, 1.5, -1.0, 2.0**97, 3e38, math.inf)


@pytest.mark.many_launches
@pytest.mark.parametrize("scale", [*SCALES, math.nan])
@pytest.mark.parametrize("threshold", [0.0, math.nan])
def test_conservation_over_all_exponents(backend, scale, threshold):
    """Any float may be a scale; whatever it is, nothing of any finite entry is lost."""
    acc = samples.patterns(60_000)
    packed = pack(backend, acc, None, [threshold], scale=[scale])
    assert_conserved(packed, acc.numpy())
    assert packed.contents[0].count > 100
    assert packed.seen.item() > packed.contents[0].count
    assert packed.contents[0].flags == 0


def test_codes_by_hand(backend):
    """Ties go to the larger; half the scale is sent, nothing below; the largest saturates."""
    below = float(np.nextafter(np.float32(1.5), np.float32(0)))
    acc = [0.5, 1.0, below, 1.5, -2.0, 2.999, 3.0, -128.0, 191.9, -192.0, 1e6, 0.4999, -0.0]
    packed = pack(backend, acc, scale=[1.2])
    content = packed.contents[0]
    assert (content.version, content.dtype_code, content.reserved[0]) == (2, 3, 127)
    assert content.values == [0, 0, 0, 1, 8 + 1, 1, 2, 8 + 7, 7, 8 + 7, 7]
    assert content.positions == list(range(11))
    assert packed.seen.tolist() == [12]
    assert packed.residual[-3:].tolist() == [1e6 - 128, float(np.float32(0.4999)), 0.0]
    assert math.copysign(1, packed.residual[-1]) == -1
    # The first entries as bytes: position << 4 | negative << 3 | exponent.
    at = packed.geometry.positions
    assert packed.rows[0][at : at + 10] == bytes([0, 0, 16, 0, 32, 0, 49, 0, 73, 0])


def test_the_ends_of_float32(backend):
    """Subnormals down to half the smallest scale; scales up to where codes would overflow."""
    smallest = 2.0**-127
    packed = pack(backend, [smallest, smallest - TINY, -smallest, TINY], scale=[0.0])
    assert packed.contents[0].positions == [0, 2]
    assert packed.residual.tolist() == [-smallest, smallest - TINY, smallest, TINY]
    packed = pack(backend, [FLT_MAX, -FLT_MAX, 2.0**119, 2.0**118], scale=[math.inf])
    assert packed.contents[0].values == [7, 15, 0]
    assert sent_of(packed).tolist() == [2.0**127, -(2.0**127), 2.0**120, 0]
    # Its last place is 128, the largest code; above, a subtraction would not be exact.
    packed = pack(backend, [2.0**31 - 128, 2.0**31, -FLT_MAX], scale=[1.0])
    assert packed.contents[0].positions == [0]
    assert packed.residual.tolist() == [2.0**31 - 256, 2.0**31, -FLT_MAX]


@pytest.mark.many_launches
def test_entries_far_apart_both_arrive(backend):
    """Of 10^4 scales, 128 a step: in 78 steps, and the 16 that are left in another."""
    residual, arrived, steps = torch.tensor([1e4, 1.0]), torch.zeros(2), 0
    while residual.abs().max() >= 0.5:
        packed = pack(backend, residual, None, [0.5], scale=[1.0])
        residual, steps = packed.residual, steps + 1
        arrived += torch.from_numpy(sent_of(packed))
    assert steps == 79
    assert arrived.tolist() == [1e4, 1.0]


def test_what_is_not_finite_is_said_not_sent(backend):
    """By flag 2 alone: the first element of its range becomes NaN for whoever reads it."""
    numel = 2 * 16384
    residual = torch.zeros(numel)
    residual[:4] = torch.tensor([2.0, math.nan, 2.0, 3.0])
    grad = torch.zeros(numel)
    grad[2] = -math.inf
    packed = pack(backend, residual, grad, [1.0], ranges=2, capacity=9, scale=[1.0, 1.0])
    assert packed.seen.tolist() == [4]
    assert [content.flags for content in packed.contents] == [payload.NON_FINITE, 0]
    assert packed.contents[0].positions == [0, 3]
    assert packed.residual[:4].tolist() == [0.0, 0.0, 2.0, -1.0]
    for rows, where in [(packed.rows, 0), ([packed.rows[1], packed.rows[0]], 16384)]:
        out, status = calls.scatter_unpack(backend, [rows], packed.geometry)
        assert status == [0]
        assert out.isnan().nonzero().flatten().tolist() == [where]


@pytest.mark.parametrize("flags", range(8))
def test_flags(backend, flags):
    residual = [4.0, math.nan if flags & payload.NON_FINITE else 1.0, 4.0, 4.0]
    capacity = 2 if flags & payload.OVERFLOW else 4
    status = [0, flags & payload.DAMAGE]
    packed = pack(backend, residual, capacity=capacity, status=status, scale=[4.0])
    assert packed.contents[0].flags == flags
    info = dct_kernels.payload_info(torch.frombuffer(bytearray(packed.rows[0]), dtype=torch.uint8))
    assert (info.value_dtype, info.scale, info.numel) == ("e3m0", 4.0, 4)
    assert (info.overflow, info.non_finite, info.damage) == tuple(
        bool(flags & f) for f in (1, 2, 4)
    )


@pytest.mark.parametrize("ranges", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 5, 16384, 16385, 3 * 16384 + 4097])
def test_ranges_overflow_one_by_one(backend, numel, ranges):
    """Each has its own scale, count, flags and room; what does not fit is late."""
    residual, grad = samples.hard(numel), samples.hard(numel, torch.bfloat16, seed=1)
    scale = [0.01, 7.0, 1e-3, 300.0, 1.0][: ranges or 1]
    thresholds, segments = [0.5, 0.01, -1.0, 1.0], [0, numel // 3, numel // 2, numel // 2, numel]
    for capacity in (1, 3000):
        packed = pack(
            backend, residual, grad, thresholds, segments=segments, capacity=capacity,
            ranges=ranges, scale=scale, inv_scale=torch.tensor(0.5), status=[0, 3],
        )  # fmt: skip
        acc = floats.accumulate(bits.numbers(residual), bits.numbers(grad), 0.5)
        assert_conserved(packed, np.where(np.arange(numel) < numel, acc, 0))
        calls.scatter_unpack(backend, [packed.rows] * 3, packed.geometry, three_dims=True)


@pytest.mark.many_launches
@pytest.mark.parametrize("short_of", [0, 1, 5000, 16384])
def test_everything_passes(backend, short_of):
    """Full sub-blocks, whose counts need 13 bits; the second call sends what did not fit."""
    numel = 2 * 16384 + 5000
    acc = samples.normal(numel).sign() * 8
    packed = pack(backend, acc, capacity=numel - short_of, scale=[8.0], offset=1)
    assert packed.contents[0].sub_starts[:3] == [4096, 8192, 12288]
    assert packed.contents[0].flags == (payload.OVERFLOW if short_of else 0)
    late = pack(backend, packed.residual, capacity=numel, scale=[8.0])
    assert late.contents[0].count == short_of
    assert np.array_equal(sent_of(packed) + sent_of(late), acc.numpy())


@pytest.mark.many_launches
@pytest.mark.parametrize("capacity", [40_000, 700, 250])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32, torch.bfloat16], ids=bits.name)
@pytest.mark.parametrize("times", [1, 64, 128], ids=["4096", "8192", "16384"])
def test_tiles(backend, request, times, grad_dtype, capacity):
    """Of all sizes, in ranges and segments; entries that cannot be sent between others.

    Nothing but zeros is below the threshold of the second segment, and most is too small to send.
    """
    numel, name = 5 * 16384 + 4096 + 700, request.node.callspec.params["backend"]
    residual = samples.normal(numel)
    residual[torch.arange(0, numel, 501)] = 2.0**40
    residual[16384 + 5], residual[3 * 16384 + 70] = math.nan, math.inf
    grad = samples.normal(numel, grad_dtype, seed=1) if grad_dtype else None
    segments = [0, 30_000, 36_000, 36_000, 36_100, 70_000, numel]
    few = torch.arange(30_000, 36_000) % 40 > 0
    for x in (residual, grad):
        if x is not None:
            x[30_000:36_000][few] = 0
    if name in CUT_AS_OF:
        CUT_AS_OF[name](times)
    try:
        packed = pack(
            backend, residual, grad, [3.0, 0.0, 9.0, -1.0, 3.0, 3.5], segments=segments,
            capacity=capacity, ranges=2, scale=[3.0, 4.0],
        )  # fmt: skip
    finally:
        if name in CUT_AS_OF:
            CUT_AS_OF[name](1)
    acc = floats.accumulate(bits.numbers(residual), bits.numbers(grad), None)
    skipped = (np.arange(numel) >= 36_000) & (np.arange(numel) < 36_100)
    assert_conserved(packed, np.where(skipped, bits.numbers(residual), acc))


def test_nothing_passes(backend):
    packed = pack(backend, samples.normal(20000), None, [9.0], scale=[9.0], capacity=10)
    content = packed.contents[0]
    assert (content.count, content.starts, content.sub_starts) == (0, [0, 0, 0], [0] * 6)


@settings(max_examples=100)
@given(data=st.data())
def test_laws(backend, data):
    """Nothing small is packed, nothing is lost, and everything sent is the nearest code."""
    any_float = st.floats(width=32) | st.sampled_from([FLT_MAX, -TINY, -0.0, 1.5, 2.0**-127])
    values = data.draw(st.lists(any_float, max_size=20))
    grads = data.draw(st.lists(any_float, min_size=len(values), max_size=len(values)))
    tau, capacity = data.draw(st.floats(0, width=32)), data.draw(st.integers(1, 25))
    near = [v for v in values if math.isfinite(v)] or [1.0]
    scale = data.draw(any_float | st.sampled_from(near))
    residual, grad = torch.tensor(values), torch.tensor(grads)
    packed = pack(backend, residual, grad, [tau], capacity=capacity, scale=[scale])
    acc = floats.accumulate(bits.numbers(residual), bits.numbers(grad), None)
    assert_conserved(packed, acc)
    content, sent = packed.contents[0], sent_of(packed)
    for i in payload.indices(content):
        a, v = abs(float(acc[i])), abs(float(sent[i]))
        assert a >= tau
        assert a >= content.scale / 2
        assert v in content.scale * e3m0.CODES
        assert 0.75 * v <= a < 1.5 * v or v == content.scale > a or v == 128 * content.scale < a
        assert math.copysign(1, acc[i]) == math.copysign(1, sent[i])


@pytest.mark.parametrize("ranks", [0, 1, 5])
@pytest.mark.parametrize("ranges", [1, 2, 3])
def test_unpack_ranks_and_ranges(backend, ranges, ranks):
    for numel in (0, 5, 4096, 4097, 16385, 3 * 16384 + 9000):
        geometry = Geometry(numel, 900, "e3m0", ranges)
        for density in (0.0, 0.02, 1.0):
            rows = [calls.random_payload(geometry, density, seed) for seed in range(ranks)]
            out = samples.normal(numel, torch.bfloat16)
            _, status = calls.scatter_unpack(
                backend, rows, geometry, out, 1 / 3, True, torch.tensor(0.1), three_dims=True
            )
            assert status == [0] * ranks


@pytest.mark.many_programs
def test_unpack_a_million_elements(backend):
    geometry = Geometry(samples.LARGE, 5000, "e3m0")
    rows = [calls.random_payload(geometry, 0.004, seed) for seed in range(2)]
    calls.scatter_unpack(backend, rows, geometry, scale=0.5, offset=1)


# Damage. The bad payload always stands between two sound ones.


def status_of(backend, geometry, rows):
    ranks = [
        calls.random_payload(geometry, 0.002, 1),
        rows,
        calls.random_payload(geometry, 0.002, 2),
    ]
    out = torch.full((geometry.numel,), 0.5)
    _, (before, status, after) = calls.scatter_unpack(
        backend, ranks, geometry, out, accumulate=True
    )
    assert (before, after) == (0, 0)
    return status


def rewritten(geometry, r=0, **changes):
    """A sound payload with these fields of range r's content changed."""
    rows = [bytearray(row) for row in calls.random_payload(geometry, 0.002, 0)]
    content = payload.read(rows[r], geometry, r)
    changes = {name: f(content) if callable(f) else f for name, f in changes.items()}
    payload.write(rows[r], geometry, content.but(**changes))
    return [bytes(row) for row in rows]


@pytest.mark.many_launches
def test_every_byte_of_the_header(backend):
    """Every value of the version, of the dtype and of the scale; three bits of every other byte."""
    geometry = Geometry(500, 60, "e3m0")
    (sound,) = calls.random_payload(geometry, 0.05, 0)
    hit, expected = [], []
    for byte in range(64):
        for value in range(256) if byte in (4, 6, 24) else (1, 0x10, 0x80):
            row = bytearray(sound)
            row[byte] ^= value
            right = row[byte] == sound[byte] or (byte == 24 and 1 <= row[24] <= 247)
            right |= byte == 7 and value == 1  # flags
            count = int.from_bytes(row[20:24], "little")
            fewer = byte in range(20, 24) and count <= geometry.capacity
            hit.append([bytes(row)])
            expected.append(0 if right else 2 if fewer else 1)
    _, status = calls.scatter_unpack(backend, hit, geometry)
    assert status == expected


def start(section, b, value):
    """Start b replaced: by a number, or by a function of the content."""

    def change(content):
        starts = list(getattr(content, section))
        starts[b] = value(content) if callable(value) else value
        return starts

    return {section: change}


WRONG_STARTS = {
    "first not 0": start("starts", 0, 1),
    "last below count": start("starts", -1, lambda c: c.count - 1),
    "last past count": start("starts", -1, lambda c: c.count + 1),
    "all ones": start("starts", 2, 2**32 - 1),
    "descending": start("starts", 2, lambda c: c.starts[1] - 1),
    "count one less": {"count": lambda c: c.count - 1},
    "sub-start past its block": start("sub_starts", 2, lambda c: c.starts[1] + 1),
    "sub-start all ones": start("sub_starts", 3, 2**16 - 1),
    "sub-starts descending": start("sub_starts", 1, lambda c: c.sub_starts[0] - 1),
    "sub-starts of the last block": start("sub_starts", -1, 7),
}


@pytest.mark.parametrize("changes", WRONG_STARTS.values(), ids=WRONG_STARTS)
def test_wrong_starts_void_their_blocks(backend, changes):
    geometry = Geometry(BLOCKS_AND_A_BIT, 120, "e3m0")
    status = status_of(backend, geometry, rewritten(geometry, **changes))
    assert status & 2
    assert not status & 1


def test_a_bad_sub_block_voids_its_block_alone(backend):
    geometry = Geometry(2 * 16384, 10, "e3m0")
    content = payload.content(geometry, 0, np.array([5, 4100, 4200, 16384 + 7]), [0, 1, 2, 3])
    for positions, status in [([5, 4, 104, 7], 0), ([5, 104, 104, 7], 4), ([5, 104, 4, 7], 4)]:
        row = bytearray(geometry.nbytes)
        payload.write(row, geometry, content.but(positions=positions))
        out, found = calls.scatter_unpack(backend, [[bytes(row)]], geometry)
        assert found == [status]
        where = [16384 + 7] if status else [5, 4100, 4200, 16384 + 7]
        assert out.nonzero().flatten().tolist() == where


@pytest.mark.parametrize(("numel", "position", "status"), [
    (16384 + 4096 + 100, 99, 0), (16384 + 4096 + 100, 100, 4), (16384 + 4096 + 100, 4095, 4),
    (16384 + 4096, 0, 4), (16384 + 100, 0, 4),
])  # fmt: skip
def test_the_last_block_is_short(backend, numel, position, status):
    """An entry of its second sub-block, of which there are 100 elements or none."""
    geometry = Geometry(numel, 10, "e3m0")
    content = payload.content(geometry, 0, np.array([3, 16384]), [1, 2])
    content = content.but(sub_starts=[1, 1, 1, 0, 1, 1], positions=[3, position])
    row = bytearray(geometry.nbytes)
    payload.write(row, geometry, content)
    assert status_of(backend, geometry, [bytes(row)]) == status


def test_more_entries_than_a_sub_block_has_elements(backend):
    geometry = Geometry(2 * 16384, 2 * 16384, "e3m0")
    content = payload.content(geometry, 0, np.arange(8192), [1] * 8192)
    row = bytearray(geometry.nbytes)
    payload.write(row, geometry, content.but(sub_starts=[8192, 8192, 8192, 0, 0, 0]))
    assert status_of(backend, geometry, [bytes(row)]) == 4


@pytest.mark.many_launches
def test_garbage_behind_a_sound_header(backend):
    """Random starts, sub-starts and entries, more or less sound; any 16 bits are an entry."""
    geometry = Geometry(BLOCKS_AND_A_BIT, 30, "e3m0")
    rng, statuses = np.random.default_rng(0), set()
    for _ in range(100):
        count = int(rng.integers(0, 31))
        starts = [0, *np.sort(rng.integers(0, count + 1, 3)).tolist(), count]
        if rng.random() < 0.3:
            starts[rng.integers(5)] = int(rng.integers(0, 32))
        lengths = np.maximum(np.diff(starts), 0)
        sub_starts = [int(s) for n in lengths for s in np.sort(rng.integers(0, n + 1, 3))]
        if rng.random() < 0.3:
            sub_starts[rng.integers(12)] = int(rng.integers(0, 2**16))
        positions = np.sort(rng.integers(0, 100, count))
        if rng.random() < 0.3:
            positions = rng.integers(0, 4096, count)
        row = bytearray(rng.bytes(geometry.nbytes))
        content = payload.content(geometry, 0, np.array([], int), [])
        content = content.but(count=count, starts=starts, sub_starts=sub_starts)
        content = content.but(positions=positions.tolist(), values=[9] * count)
        payload.write(row, geometry, content)
        statuses.add(status_of(backend, geometry, [bytes(row)]))
        hit = bytearray(calls.random_payload(geometry, 0.002, 0)[0])
        hit[rng.integers(rng.choice([64, geometry.positions, geometry.nbytes]))] ^= (
            1 << rng.integers(8)
        )
        status_of(backend, geometry, [bytes(hit)])
    assert statuses == {0, 2, 4, 6}


def test_versions_refuse_each_other(backend):
    """As headers that are wrong; payloads of one size, so that nothing else can tell them apart."""
    first, second = Geometry(20000, 50, "bfloat16"), Geometry(20000, 98, "e3m0")
    assert first.nbytes == second.nbytes
    for sent, read in [(first, second), (second, first)]:
        rows = calls.random_payload(sent, 0.002, 0, samples.normal(9, torch.bfloat16))
        _, status = calls.scatter_unpack(backend, [rows], read)
        assert status == [1]


# Around the kernels.


def test_layout_by_hand():
    # 2 blocks: starts 64 to 76, sub-starts to 88; entries from 96; 9 of them end at 114.
    assert dct_kernels.payload_layout(16385, 9, "e3m0") == (128, 64, 96, 96)
    assert dct_kernels.payload_layout(16385, 9, "e3m0", ranges=2) == (112, 64, 80, 80)
    assert dct_kernels.payload_layout(0, 1, "e3m0") == (96, 64, 80, 80)
    for numel in (*SIZES, samples.LARGE, 2**40):
        for capacity, ranges in [(1, 1), (8, 2), (9, 5), (2**32 - 1, 3)]:
            layout = dct_kernels.payload_layout(numel, capacity, "e3m0", ranges)
            geometry = Geometry(numel, capacity, "e3m0", ranges)
            assert (layout.nbytes, layout.positions) == (geometry.nbytes, geometry.positions)


def arguments(numel=100, capacity=10):
    nbytes = dct_kernels.payload_layout(numel, capacity, "e3m0").nbytes
    return {
        "residual": torch.ones(numel),
        "grad": samples.normal(numel),
        "segments": torch.tensor([0, numel]),
        "threshold": torch.ones(1),
        "payload": torch.zeros(nbytes, dtype=torch.uint8),
        "seen": torch.zeros(1, dtype=torch.int32),
        "capacity": capacity,
        "value_dtype": torch.bfloat16,
        "value_format": "e3m0",
        "scale": torch.ones(1),
    }


def test_opcheck():
    args = arguments()
    torch.library.opcheck(torch.ops.dct.mask_pack.default, (), args)
    payloads = args["payload"].repeat(2, 1)
    unpack = (payloads, torch.ones(100), 10, torch.bfloat16, 0.5, False, None, "e3m0")
    torch.library.opcheck(torch.ops.dct.scatter_unpack.default, unpack)


def test_compiled():
    """One step and its scale, in one graph."""

    def step(residual, grad, segments, payload, seen, out):
        threshold = dct_kernels.sample_threshold(grad, residual, segments, 0.02)
        largest = dct_kernels.sample_threshold(grad, residual, segments, 1e-9)
        scale = dct_kernels.value_scale(threshold, largest)
        dct_kernels.mask_pack(
            residual, grad, segments, threshold, payload, seen, 500, "e3m0", scale=scale
        )
        status = dct_kernels.scatter_unpack(payload.unsqueeze(0), out, 500, "e3m0")
        return status, residual + out

    results = []
    for function in (step, torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")):
        args = arguments(20000, 500)
        out = torch.zeros(20000)
        status, total = function(*(args[n] for n in ("residual", "grad", "segments", "payload")),
                                 args["seen"], out)  # fmt: skip
        assert torch.equal(total, 1 + args["grad"])
        assert args["seen"].item() >= 400
        results.append((status, args["payload"], args["residual"], out))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_value_scale():
    scale = dct_kernels.value_scale(torch.tensor([3.0, 0.0, math.inf]), torch.tensor([9.0, 512, 1]))
    assert scale.tolist() == [3.0, 4.0, math.inf]


WRONG = [
    ({"value_format": "e4m3"}, "value_format must be e3m0 or empty, got 'e4m3'"),
    ({"scale": None}, "scale must be a tensor for e3m0 values, got None"),
    ({"scale": torch.ones(2)}, "scale must have 1 element (one per range of payload), got 2"),
    ({"scale": torch.ones(1, 1)}, "scale must be 0-D or 1-D, got 2-D"),
    ({"scale": torch.ones(1).double()}, "scale must be float32, got float64"),
    ({"payload": torch.zeros(96, dtype=torch.uint8)},
     "payload must have 112 bytes per range for 100 elements and capacity 10, got 96"),
    ({"value_format": "", "capacity": 6, "payload": torch.zeros(112, dtype=torch.uint8)},
     "scale must be None except for e3m0 values, got a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_arguments(backend, change, text):
    args = {name: placed(a, backend.device) for name, a in (arguments() | change).items()}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        backend.mask_pack(**args)
    assert str(caught.value).partition("\n")[0].endswith(f"dct::mask_pack: {text}")
    assert args["residual"].eq(1).all()
    assert args["payload"].eq(0).all()


def test_public_functions_check_too():
    args = arguments()
    del args["value_format"]
    args["value_dtype"] = "e3m0"
    with pytest.raises(ValueError, match="scale must be a tensor for e3m0 values, got None"):
        dct_kernels.mask_pack(**args | {"scale": None})
    with pytest.raises(TypeError, match=r"value_dtype must be a torch\.dtype, got str"):
        dct_kernels.mask_pack(**args | {"value_dtype": "e4m3"})
    overlapping = args["residual"][:1]
    with pytest.raises(ValueError, match="scale must share no memory with residual, got 4 bytes"):
        dct_kernels.mask_pack(**args | {"scale": overlapping})
