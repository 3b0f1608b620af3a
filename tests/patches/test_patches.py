"""A publisher and subscribers in one process: bits, ids, checks and refusals."""

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


def _pair():
    """(weights, a publisher, receiving tensors, a subscriber that has loaded a full copy)."""
    weights = initial()
    publisher, received = WeightPublisher(weights), receiver(weights)
    subscriber = WeightSubscriber(received)
    subscriber.load(publisher.full())
    return weights, publisher, received, subscriber


def test_every_version_has_the_bits_of_the_weights():
    weights, publisher, received, subscriber = _pair()
    assert_bits(bits(received), published(weights))
    assert (subscriber.id, subscriber.version) == (publisher.id, 0)
    for version, share in enumerate(SHARES, 1):
        step(weights, share, version)
        patch = publisher.diff(weights.items())
        expected = published(weights)
        step(weights, 0.5, 100)  # the patch does not share memory with the weights
        publisher.confirm(patch)
        subscriber.apply(patch)
        assert_bits(bits(received), expected)
        assert_bits(bits({p.name: p.values for p in publisher.full().parts}), _flat(expected))
        assert patch.version == publisher.version == subscriber.version == version
        assert patch.id == publisher.id == subscriber.id


def _flat(raw):
    return {name: values.reshape(-1) for name, values in raw.items()}


def test_an_independent_reader_of_the_bytes():
    weights, publisher, _, _ = _pair()
    raw = _flat(published(weights))
    for seed, share in enumerate(SHARES):
        step(weights, share, seed)
        patch = publisher.diff(weights)
        data = patch.to_bytes()
        publisher.confirm(patch)
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
        assert_bits(raw, _flat(published(weights)))


def test_a_tensor_is_sent_whole_if_that_is_smaller():
    weights = {"few": torch.ones(9000), "all": torch.ones(9000), "tiny": torch.ones(3)}
    weights["double"] = torch.ones(9000).double()
    publisher = WeightPublisher(weights, dtype=torch.float16)
    weights["few"][5] = 2
    weights["all"].copy_(torch.rand(9000))
    patch = publisher.diff(weights)
    whole = {part.name: part.whole for part in patch.parts}
    assert whole == {"few": False, "all": True, "tiny": True, "double": True}
    sizes = {part.name: part.data.numel() for part in patch.parts}
    # A header, numbers of 3 blocks, an entry and a full value.
    assert sizes == {"few": 64 + 3 * 4 + 2 * 2, "all": 18000, "tiny": 6, "double": 72000}
    assert patch.nbytes == sum(sizes.values())


def test_diff_reads_numbers_from_the_device_once(monkeypatch):
    weights, publisher, _, _ = _pair()
    calls = []
    to_host = dct_patches.publisher.to_host
    monkeypatch.setattr(
        dct_patches.publisher, "to_host", lambda numbers: calls.append(1) or to_host(numbers)
    )

    class Synchronizations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function)
            return function(*args, **(kwargs or {}))

    with Synchronizations():
        publisher.diff(weights)
    assert calls == [1]


def test_a_patch_that_was_not_confirmed_is_forgotten():
    weights, publisher, received, subscriber = _pair()
    step(weights, 0.1, 1)
    forgotten = publisher.diff(weights)
    subscriber.apply(forgotten)
    step(weights, 0.1, 2)
    patch = publisher.diff(weights)
    assert (patch.base, patch.version) == (forgotten.base, 1) and patch.id != forgotten.id
    for wrong in (forgotten, replace(patch, id="0" * 32)):
        with pytest.raises(ValueError, match=r"patch must be the last patch of diff"):
            publisher.confirm(wrong)
    before = bits(received)
    with pytest.raises(ValueError, match="load a full copy"):
        subscriber.apply(patch)
    assert_bits(bits(received), before)
    publisher.confirm(patch)
    with pytest.raises(ValueError, match=f"patch must be the last patch .* got {patch.id}"):
        publisher.confirm(patch)
    subscriber.load(publisher.full())
    step(weights, 0.1, 3)
    subscriber.apply(publisher.diff(weights))
    assert_bits(bits(received), published(weights))


def _flip(part, at):
    data = part.data.clone()
    data[at] ^= 0x10
    return replace(part, data=data)


def _part(patch, name, changed):
    parts = [changed(part) if part.name == name else part for part in patch.parts]
    return replace(patch, parts=parts)


WEIGHT = "layer.weight"
WRONG = {
    "a full copy": (lambda p, publisher: publisher.full(), "be a patch"),
    "base": (lambda p, _: replace(p, base="0" * 32), "be a patch with base .*load a full copy"),
    "missing name": (
        lambda p, _: replace(p, parts=p.parts[1:]),
        "elements.* for layer.weight, got None",
    ),
    "extra name": (
        lambda p, _: replace(p, parts=[*p.parts, replace(p.parts[0], name="other")]),
        "None for other, got",
    ),
    "shape": (lambda p, _: _part(p, WEIGHT, lambda q: replace(q, shape=(70, 130))), WEIGHT),
    "dtype": (lambda p, _: _part(p, WEIGHT, lambda q: replace(q, dtype=torch.half)), WEIGHT),
    "range": (lambda p, _: _part(p, WEIGHT, lambda q: replace(q, numel=9000)), "9100"),
    "twice": (lambda p, _: replace(p, parts=[*p.parts, p.parts[0]]), "9100"),
    "numel in the payload": (lambda p, _: _part(p, WEIGHT, lambda q: _flip(q, 8)), WEIGHT),
    "count in the payload": (lambda p, _: _part(p, WEIGHT, lambda q: _flip(q, 20)), WEIGHT),
    "values": (lambda p, _: _part(p, "double", lambda q: _flip(q, 30)), "double"),
}


@pytest.mark.parametrize("wrong, message", WRONG.values(), ids=WRONG)
def test_a_refused_patch_changes_nothing(wrong, message):
    weights, publisher, received, subscriber = _pair()
    step(weights, 0.05, 1)
    patch = publisher.diff(weights)
    before = bits(received)
    with pytest.raises(ValueError, match=rf"^dct::WeightSubscriber.apply: patch must .*{message}"):
        subscriber.apply(wrong(patch, publisher))
    assert_bits(bits(received), before)
    subscriber.apply(patch)
    assert_bits(bits(received), published(weights))


def test_refused_orders():
    weights, publisher, received, subscriber = _pair()
    fresh = WeightSubscriber(receiver(weights))
    patches = []
    for seed in range(2):
        step(weights, 0.05, seed)
        patches.append(publisher.diff(weights))
        publisher.confirm(patches[-1])
    with pytest.raises(ValueError, match="patch with base None"):
        fresh.apply(patches[0])
    with pytest.raises(ValueError, match=r"must be a full copy \(publisher.full\(\)\), got"):
        fresh.load(patches[0])
    with pytest.raises(ValueError, match="patch with base .* load a full copy"):
        subscriber.apply(patches[1])
    subscriber.apply(patches[0])
    with pytest.raises(ValueError, match="patch with base .* load a full copy"):
        subscriber.apply(patches[0])
    received[WEIGHT][3, 3] += 1
    before = bits(received)
    with pytest.raises(
        ValueError, match=rf"the present values as base .*1 differ: .'{WEIGHT}', 0, 9100"
    ):
        subscriber.apply(patches[1])
    assert_bits(bits(received), before)
    subscriber.load(publisher.full())
    assert_bits(bits(received), published(weights))


def test_a_damaged_full_copy_changes_nothing():
    _, publisher, received, subscriber = _pair()
    before = bits(received)
    for name in ("layer.bias", "mask", "position"):
        with pytest.raises(
            ValueError, match=f"patch must have undamaged data .*got False; 1 differ: .'{name}'"
        ):
            subscriber.load(_part(publisher.full(), name, lambda part: _flip(part, 1)))
    assert_bits(bits(received), before)
    assert subscriber.id == publisher.id


def test_a_wrong_result_is_an_error_until_a_full_copy_is_loaded():
    weights, publisher, received, subscriber = _pair()
    step(weights, 0.05, 1)
    patch = publisher.diff(weights)
    with pytest.raises(
        RuntimeError, match=f"the new values .else load a full copy.* differ: .'{WEIGHT}', 0"
    ):
        subscriber.apply(_part(patch, WEIGHT, lambda part: replace(part, new=part.new + 1)))
    assert subscriber.id is None
    with pytest.raises(ValueError, match="patch with base None"):
        subscriber.apply(patch)
    publisher.confirm(patch)
    subscriber.load(publisher.full())
    assert_bits(bits(received), published(weights))


def test_a_changed_snapshot_is_an_error():
    weights, publisher, _, _ = _pair()
    publisher._snapshot["half"].values[7] += 1
    with pytest.raises(RuntimeError, match="snapshot must be unchanged in 'half'"):
        publisher.diff(weights)


def test_tensors_of_a_module():
    """Non-contiguous and tied parameters that require gradients."""

    def module(dtype):
        made = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).to(dtype)
        made[1].weight = made[0].weight
        made[0].bias = nn.Parameter(torch.rand(160, dtype=dtype)[::2])
        return made

    trained, received = module(torch.float32), module(torch.bfloat16)
    assert not received[0].bias.is_contiguous()
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
    weights, publisher, _, _ = _pair()
    wrong = {
        "got None": {n: t for n, t in weights.items() if n != "mask"},
        r"\(200,\), 0, 200, torch.bfloat16.* got \(\(100,": {
            **weights,
            "layer.bias": torch.ones(100),
        },
        "torch.bfloat16.* got .*torch.float16": {**weights, "layer.bias": torch.ones(200).half()},
        "plain dense tensor": {**weights, "mask": torch.ones(3, device="meta")},
    }
    for message, tensors in wrong.items():
        with pytest.raises((ValueError, TypeError), match=rf"^dct::.* named_tensors.*{message}"):
            publisher.diff(tensors)
    with pytest.raises(ValueError, match="different names.*, got 'a' twice"):
        WeightSubscriber([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(ValueError, match="different names, also after rename, got 'a' twice"):
        WeightPublisher({"mask": torch.ones(1), "b": torch.ones(1)}, rename=lambda name: "a")


def test_renamed_tensors():
    def rename(name):
        return f"model.{name}"

    weights = initial()
    received = {rename(name): tensor for name, tensor in receiver(weights).items()}
    publisher, subscriber = WeightPublisher(weights, rename=rename), WeightSubscriber(received)
    subscriber.load(publisher.full())
    step(weights, 0.1, 0)
    subscriber.apply(publisher.diff(weights))
    assert_bits(bits(received), {rename(n): raw for n, raw in published(weights).items()})


def test_damaged_bytes_are_refused():
    weights, publisher, received, subscriber = _pair()
    step(weights, 0.05, 1)
    patch = publisher.diff(weights)
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
    subscriber.apply(WeightPatch.from_bytes(data))
    assert_bits(bits(received), published(weights))
