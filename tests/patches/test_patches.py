"""A publisher and a subscriber in one process: bits, ids, checks and refusals."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from oracle import patch as oracle
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dct_patches.publisher
from dct_patches import WeightPatch, WeightPublisher, WeightSubscriber
from support.weights import assert_bits, bits, initial, published, receiver, step

SHARES = [0, 0.01, 0.3, 1]
WEIGHT = "layer.weight"


class Pair:
    """A publisher, and a subscriber that has loaded a full copy."""

    def __init__(self, prefix=""):
        self.weights, self.prefix = initial(), prefix
        self.publisher = WeightPublisher(self.weights, rename=lambda name: prefix + name)
        self.received = {prefix + name: t for name, t in receiver(self.weights).items()}
        self.subscriber = WeightSubscriber(self.received)
        self.subscriber.load(self.publisher.full())

    def diff(self, share=0.05, seed=1):
        step(self.weights, share, seed)
        return self.publisher.diff(self.weights.items())

    def expected(self):
        return {self.prefix + name: raw for name, raw in published(self.weights).items()}

    def check(self):
        assert_bits(bits(self.received), self.expected())

    def refuses(self, message, patch, error=ValueError):
        """The subscriber raises an error, and no tensor changes."""
        before, call = bits(self.received), "load" if patch.base is None else "apply"
        with pytest.raises(error, match=rf"^dct::WeightSubscriber.{call}: patch must .*{message}"):
            getattr(self.subscriber, call)(patch)
        assert_bits(bits(self.received), before)


def test_every_version_has_the_bits_of_the_weights():
    pair = Pair("model.")
    pair.check()
    assert (pair.subscriber.id, pair.subscriber.version) == (pair.publisher.id, 0)
    for version, share in enumerate(SHARES, 1):
        patch, expected = pair.diff(share, version), pair.expected()
        step(pair.weights, 0.5, 100)  # the patch does not share memory with the weights
        pair.publisher.confirm(patch)
        pair.subscriber.apply(patch)
        assert_bits(bits(pair.received), expected)
        full = {part.name: part.values for part in pair.publisher.full().parts}
        assert_bits(bits(full), {name: raw.reshape(-1) for name, raw in expected.items()})
        assert patch.version == pair.publisher.version == pair.subscriber.version == version
        assert patch.id == pair.publisher.id == pair.subscriber.id


def test_an_independent_reader_of_the_bytes():
    pair = Pair()
    raw = {name: values.reshape(-1) for name, values in pair.expected().items()}
    for seed, share in enumerate(SHARES):
        patch = pair.diff(share, seed)
        data = patch.to_bytes()
        pair.publisher.confirm(patch)
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        content = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["dct_patch"][8:])
        for index, part in enumerate(content["parts"]):
            name, data_bytes = part["name"], tensors[str(index)].numpy().tobytes()
            if part["whole"]:
                raw[name] = np.frombuffer(data_bytes, raw[name].dtype).copy()
            else:
                old = raw[name].view(np.uint16)
                assert part["old"] == oracle.checksum(old)
                status, new = oracle.patch_apply(data_bytes, old, part["dtype"])
                assert (status, part["new"]) == (0, oracle.checksum(new))
                raw[name] = new.view(np.int16)
        assert_bits(raw, {name: values.reshape(-1) for name, values in pair.expected().items()})


def test_a_tensor_is_sent_whole_if_that_is_smaller():
    weights = {"few": torch.ones(9000), "all": torch.ones(9000), "tiny": torch.ones(3)}
    weights["double"] = torch.ones(9000).double()
    publisher = WeightPublisher(weights, dtype=torch.float16)
    weights["few"][5] = 2
    weights["all"].copy_(torch.rand(9000))
    patch = publisher.diff(weights)
    found = {part.name: (part.whole, part.data.numel()) for part in patch.parts}
    # The payload has a header, numbers of 3 blocks, an entry and a full value.
    expected = {"few": (False, 64 + 3 * 4 + 2 * 2), "all": (True, 18000), "tiny": (True, 6)}
    assert found == expected | {"double": (True, 72000)}
    assert patch.nbytes == sum(nbytes for _, nbytes in found.values())


def test_diff_reads_numbers_from_the_device_once(monkeypatch):
    pair, calls, to_host = Pair(), [], dct_patches.publisher.to_host
    monkeypatch.setattr(dct_patches.publisher, "to_host", lambda t: calls.append(1) or to_host(t))

    class Synchronizations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function)
            return function(*args, **(kwargs or {}))

    with Synchronizations():
        pair.publisher.diff(pair.weights)
    assert calls == [1]


def test_a_patch_that_was_not_confirmed_is_forgotten():
    pair = Pair()
    forgotten = pair.diff(seed=1)
    pair.subscriber.apply(forgotten)
    patch = pair.diff(seed=2)
    assert (patch.base, patch.version) == (forgotten.base, 1) and patch.id != forgotten.id
    pair.refuses("patch with base .* load a full copy", patch)
    for wrong in (forgotten, replace(patch, id="0" * 32), patch):
        if wrong is patch:
            pair.publisher.confirm(patch)
        with pytest.raises(ValueError, match=f"patch must be the last patch .* got {wrong.id}"):
            pair.publisher.confirm(wrong)
    pair.subscriber.load(pair.publisher.full())
    pair.subscriber.apply(pair.diff(seed=3))
    pair.check()


def _flip(part, at):
    data = part.data.clone()
    data[at] ^= 0x10
    return replace(part, data=data)


def _part(patch, name, changed):
    parts = [changed(part) if part.name == name else part for part in patch.parts]
    return replace(patch, parts=parts)


WRONG = {
    "base": (lambda p: replace(p, base="0" * 32), "patch with base .*load a full copy"),
    "missing name": (lambda p: replace(p, parts=p.parts[1:]), f"for {WEIGHT}, got None"),
    "extra name": (
        lambda p: replace(p, parts=[*p.parts, replace(p.parts[0], name="other")]),
        "None for other, got",
    ),
    "shape": (lambda p: _part(p, WEIGHT, lambda q: replace(q, shape=(70, 130))), WEIGHT),
    "dtype": (lambda p: _part(p, WEIGHT, lambda q: replace(q, dtype=torch.half)), WEIGHT),
    "range": (lambda p: _part(p, WEIGHT, lambda q: replace(q, numel=9000)), f"9100.* {WEIGHT}"),
    "twice": (lambda p: replace(p, parts=[*p.parts, p.parts[0]]), f"9100.* {WEIGHT}"),
    "numel in the payload": (lambda p: _part(p, WEIGHT, lambda q: _flip(q, 8)), WEIGHT),
    "count in the payload": (lambda p: _part(p, WEIGHT, lambda q: _flip(q, 20)), WEIGHT),
    "values": (lambda p: _part(p, "double", lambda q: _flip(q, 30)), "double"),
}


@pytest.mark.parametrize("wrong, message", WRONG.values(), ids=WRONG)
def test_a_refused_patch_changes_nothing(wrong, message):
    pair = Pair()
    patch = pair.diff()
    pair.refuses(message, wrong(patch))
    pair.subscriber.apply(patch)
    pair.check()


def test_refused_orders_and_results():
    pair, patches = Pair(), []
    for seed in range(2):
        patches.append(pair.diff(seed=seed))
        pair.publisher.confirm(patches[-1])
    fresh = WeightSubscriber(receiver(pair.weights))
    for call, patch, message in [
        (fresh.apply, patches[0], "patch with base None"),
        (fresh.load, patches[0], r"a full copy \(publisher.full\(\)\), got"),
        (pair.subscriber.apply, pair.publisher.full(), "a patch with base"),
    ]:
        with pytest.raises(ValueError, match=f"patch must be (a )?{message}"):
            call(patch)
    pair.refuses("patch with base", patches[1])
    pair.subscriber.apply(patches[0])
    pair.refuses("patch with base", patches[0])  # applied twice
    pair.received[WEIGHT][3, 3] += 1
    pair.refuses(rf"the present values as base .*1 differ: .'{WEIGHT}', 0, 9100", patches[1])
    for name in ("layer.bias", "mask", "position"):
        full = _part(pair.publisher.full(), name, lambda part: _flip(part, 1))
        pair.refuses(f"undamaged data .*got False; 1 differ: .'{name}'", full)
    pair.subscriber.load(pair.publisher.full())
    pair.check()

    patch = pair.diff()
    wrong = _part(patch, WEIGHT, lambda part: replace(part, new=part.new + 1))
    with pytest.raises(
        RuntimeError, match=f"new values .else load a full .* 1 differ: .'{WEIGHT}'"
    ):
        pair.subscriber.apply(wrong)
    assert pair.subscriber.id is None
    pair.refuses("patch with base None", patch)
    pair.publisher.confirm(patch)
    pair.subscriber.load(pair.publisher.full())
    pair.check()
    pair.publisher._snapshot["half"].values[7] += 1
    with pytest.raises(RuntimeError, match="snapshot must be unchanged in 'half'"):
        pair.diff()


def test_tensors_of_a_module():
    """Non-contiguous and tied parameters that require gradients."""

    def module(dtype):
        made = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).to(dtype)
        made[1].weight = made[0].weight
        made[0].bias = nn.Parameter(torch.rand(160, dtype=dtype)[::2])
        return made

    trained, received = module(torch.float32), module(torch.bfloat16)
    publisher = WeightPublisher(trained.state_dict())
    subscriber = WeightSubscriber(received.named_parameters(remove_duplicate=False))
    subscriber.load(publisher.full())
    for _ in range(2):
        with torch.no_grad():
            trained[0].weight[::3] *= 1.01
            trained[0].bias[::3] *= 1.01
        patch = publisher.diff(trained.state_dict())
        assert not all(part.whole for part in patch.parts)
        publisher.confirm(patch)
        subscriber.apply(patch)
        assert_bits(bits(received.state_dict()), published(trained.state_dict()))


def test_wrong_tensors():
    weights, ones = initial(), torch.ones(200)
    publisher = WeightPublisher(weights)
    wrong = {
        r"\(3,\), 0, 3, .* for mask, got None": {n: t for n, t in weights.items() if n != "mask"},
        r"\(200,\), 0, 200, torch.bfloat16.* got \(\(100,": {**weights, "layer.bias": ones[:100]},
        "torch.bfloat16.* got .*torch.float16": {**weights, "layer.bias": ones.half()},
        "plain dense tensor": {**weights, "mask": torch.ones(3, device="meta")},
    }
    for message, tensors in wrong.items():
        with pytest.raises((ValueError, TypeError), match=rf"^dct::.* named_tensors.*{message}"):
            publisher.diff(tensors)
    with pytest.raises(ValueError, match=r"different names, also after rename, got 'a' twice"):
        WeightPublisher({"mask": ones, "b": ones}, rename=lambda name: "a")


def test_damaged_bytes_are_refused():
    pair = Pair()
    patch = pair.diff()
    data = patch.to_bytes()
    for at in [*range(0, len(data), 37), len(data) - 1]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            read = WeightPatch.from_bytes(bytes(damaged))
        except ValueError as error:
            assert re.match("dct::WeightPatch.from_bytes: data must be", str(error))
        else:  # only the names of types in the outer header, which are not used
            assert (read.header(), read.id) == (patch.header(), patch.id), at
    for length in range(0, len(data), 499):
        with pytest.raises(ValueError, match="data must be undamaged"):
            WeightPatch.from_bytes(data[:length])
    pair.subscriber.apply(WeightPatch.from_bytes(data))
    pair.check()
