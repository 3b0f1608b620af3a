"""The formats of inference engines, with readers that were written from their descriptions."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
import zstandard

import dct_patches.engines
from dct_patches import WeightPublisher
from support.weights import assert_bits, initial, published, step

CHANGES = [0.01, 0.3, 0]


def _weights():
    return {n: t for n, t in initial().items() if n not in ("position", "mask", "double")}


def _follow(folder, checkpoint, version):
    """Apply one version of a delta checkpoint to {name: uint8 array}, as its readers do."""
    path = folder / f"weight_v{version:06d}"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    assert (int(metadata["version"]), int(metadata["base_version"])) == (version, version - 1)
    assert (metadata["compression_format"], metadata["checksum_format"]) == ("zstd", "xxh3-128")
    read = set()
    for file in path.glob("*.safetensors"):
        sums = safetensors.safe_open(file, framework="np").metadata() or {}
        for name, compressed in safetensors.numpy.load_file(file).items():
            difference = zstandard.ZstdDecompressor().decompress(compressed.tobytes())
            if metadata["delta_encoding"] == "xor":
                checkpoint[name] ^= np.frombuffer(difference, np.uint8)
            else:
                (count,) = struct.unpack("<I", difference[:4])
                at = np.frombuffer(difference, "<u4", count, 4)
                assert (np.diff(at.astype(np.int64)) > 0).all()
                checkpoint[name][at] = np.frombuffer(difference, np.uint8, count, 4 + 4 * count)
            assert xxhash.xxh3_128(checkpoint[name].tobytes()).hexdigest() == sums[name]
            assert index["weight_map"][name] == file.name
            read.add(name)
    assert read == index["weight_map"].keys()
    return read


def _raw(weights):
    return {name: raw.reshape(-1).view(np.uint8).copy() for name, raw in published(weights).items()}


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_delta_checkpoints(tmp_path, encoding):
    weights, folder = _weights(), tmp_path / "chain"
    publisher, checkpoint = WeightPublisher(weights), _raw(weights)
    for version, share in enumerate(CHANGES, 1):
        step(weights, share, version)
        patch = publisher.diff(weights)
        publisher.save_delta_checkpoint(patch, folder, encoding)
        publisher.confirm(patch)
        read = _follow(folder, checkpoint, version)
        assert (read == set()) == (share == 0)
        assert_bits(checkpoint, _raw(weights))
    names = {path.name for path in folder.iterdir()}
    assert names == {f"weight_v00000{version}" for version in (1, 2, 3)}


def test_refused_delta_checkpoints(tmp_path, monkeypatch):
    weights = _weights()
    publisher = WeightPublisher(weights)
    step(weights, 0.1, 1)
    forgotten = publisher.diff(weights)
    publisher.save_delta_checkpoint(forgotten, tmp_path)
    patch = publisher.diff(weights)
    for error, message, *arguments in [
        (FileExistsError, "folder must have no folder of this version", patch, tmp_path),
        (ValueError, "patch must be the last patch of diff", forgotten, tmp_path),
        (ValueError, "encoding must be 'overwrite' or 'xor', got 'sp", patch, tmp_path, "sparse"),
    ]:
        with pytest.raises(error, match=message):
            publisher.save_delta_checkpoint(*arguments)

    def no_space(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(dct_patches.engines, "write_tensors", no_space)
    with pytest.raises(OSError, match="No space"):
        publisher.save_delta_checkpoint(patch, tmp_path / "other")
    assert not [*(tmp_path / "other").iterdir()]


def test_indices_and_values():
    weights = _weights()
    publisher = WeightPublisher(weights, rename=lambda name: f"model.{name}")
    checkpoint = {f"model.{name}": raw.reshape(-1) for name, raw in published(weights).items()}
    for share in CHANGES:
        step(weights, share, 7)
        patch = publisher.diff(weights)
        entries = publisher.to_indices_and_values(patch)
        publisher.confirm(patch)
        for name, indices, values, full_shape in entries:
            assert indices.dtype == torch.int32 and len(indices) == len(values) > 0
            assert full_shape == weights[name.removeprefix("model.")].shape
            at, raw = indices.numpy(), values.view(torch.int16).numpy()
            assert (at[1:] > at[:-1]).all()
            assert (checkpoint[name][at] != raw).all()  # only changed entries
            checkpoint[name][at] = raw
        expected = {f"model.{name}": raw.reshape(-1) for name, raw in published(weights).items()}
        assert_bits(checkpoint, expected)
        assert len({entry.name for entry in entries}) == len(entries)


def test_refused_indices():
    weights = {"a": torch.ones(5000), "n": torch.arange(3)}
    publisher = WeightPublisher(weights)

    def refused(message):
        with pytest.raises(ValueError, match=message):
            publisher.to_indices_and_values(publisher.diff(weights))

    weights["a"][4098] = float("nan")
    refused("patch must have values without NaN, got NaN in 'a' at 4098")
    weights["a"][4098] = 2
    assert len(publisher.to_indices_and_values(publisher.diff(weights))) == 1
    weights["n"][0] = 9
    refused("patch must be of floating-point tensors, like 'n', got int64")
    large = replace(publisher.full().parts[0], shape=(2**31,)), torch.zeros(2), torch.ones(2)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 elements .*'a', got 2147483648"):
        dct_patches.engines.indices_and_values("op", [large])
