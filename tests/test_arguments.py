"""Errors for a wrong type at every entry point name the argument, and show None as None."""

import inspect
import re
import warnings

import pytest
import torch
from conformance.arguments import OPS, arguments
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_embeddings
import dct_kernels
import dct_parallel
import dct_patches

PACKAGES = dct_kernels, dct_parallel, dct_embeddings, dct_patches
X, IDS, LENGTHS = torch.randn(4, 64), torch.tensor([0, 1]), torch.tensor([[1, 1]])
VALUES, POSITIONS = dct_parallel.pack_rows(X, 3)
# `optimizer` is used only with a scaler, and torch.optim.Optimizer checks `params`.
UNCHECKED = [("DCTState", "optimizer"), ("dct_fully_shard_hook", "optimizer")]
UNCHECKED += [(name, "params") for name in ("RowWiseAdagrad", "MomentumScaledRowWiseAdagrad")]


def _valid_arguments():
    """{public name, or method or instance of a public class: valid arguments}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from DeviceMesh and FSDP
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        hooked, more = (fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]) for _ in range(2))
    plan, weight = dct_embeddings.plan_shards([8], 1), nn.Parameter(torch.ones(8, 4))
    bags = dct_embeddings.ShardedEmbeddingBags([torch.ones(8, 4)], plan, mesh)
    rows = dct_embeddings.FeatureRows(torch.ones(8, 1))
    layer = dct_embeddings.EquivalentSubstitution(rows, [dct_embeddings.LinearTerms()])
    dynamic = dct_embeddings.DynamicFeatureRows(4, 8)
    optimizer = torch.optim.SGD([bags.weight], 0.1)
    adagrad = dct_embeddings.RowWiseAdagrad([weight])
    compressor, out = dct_parallel.Compressor(8, density=1), torch.ones(8)
    payloads = compressor.payload[None]
    half = torch.zeros(8, dtype=torch.bfloat16)
    patch = torch.zeros(dct_kernels.patch_bytes(8, 8), dtype=torch.uint8)
    dct_kernels.diff_pack(half, half, patch, None, 8)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    state = dct_parallel.DCTState(ddp)
    averager = dct_parallel.DCTAverager(nn.Linear(4, 4))
    replicas = dct_parallel.dct_fully_shard_hook(hooked, mesh=mesh)
    quantize = dct_parallel.RowQuantize("int4")
    rows_of = {"x": X, "format": "int4"}
    tensors, folder = {"a": torch.ones(8)}, "no folder"
    publisher = dct_patches.WeightPublisher(tensors)
    subscriber = dct_patches.WeightSubscriber({"a": torch.ones(8).bfloat16()})
    changes, full = publisher.diff(tensors), publisher.full()
    return {
        **{op: arguments(op) for op in OPS},
        "payload_layout": {"numel": 8, "capacity": 8, "value_dtype": torch.float32},
        "quantized_payload_bytes": {"numel": 8, "format": "int4"},
        "payload_info": {"payload": compressor.payload},
        "patch_bytes": {"numel": 8, "capacity": 8},
        "patch_info": {"patch": patch},
        "backend_of": {"device": "cpu"},
        "Compressor": {"numel": 8},
        compressor.pack: {"grad": out},
        compressor.unpack: {"payloads": payloads, "out": out},
        "DCTState": {"ddp": ddp},
        state.load_state_dict: {"state": {}},
        "dct_hook": {"state": state, "bucket": None},
        "DCTAverager": {"module": nn.Linear(4, 4)},
        averager.load_state_dict: {"state": {}},
        "dct_fully_shard_hook": {"model": more, "mesh": mesh},
        replicas.load_state_dict: {"state": {}},
        "compress_fully_shard": {"model": more},
        replicas.load_merged: {"folder": "no folder"},
        "all_reduce_compressed": {"tensor": out, "format": "int4"},
        "merge_states": {"states": "no folder"},
        "node_mesh": {"local_size": 1},
        "all_to_all_rows": {"splits": [4], **rows_of},
        "all_to_all_rows_async": {"splits": [4], **rows_of},
        "all_gather_rows": rows_of,
        "all_gather_rows_async": rows_of,
        "pack_rows": {"x": X, "k": 3},
        "unpack_rows": {"values": VALUES, "positions": POSITIONS, "width": 64},
        "RowQuantize": {"format": "int4"},
        quantize: {"x": X},
        "RowDequantize": {"width": 64, "format": "int4"},
        dct_parallel.RowDequantize(64, "int4"): {"message": quantize(X)},
        "RowUnpack": {"width": 64},
        dct_parallel.RowUnpack(64): {"values": VALUES, "positions": POSITIONS},
        "RowPack": {"density": 0.1},
        dct_parallel.RowPack(0.1): {"x": X},
        "RowFormat": {},
        "plan_shards": {"rows": [8], "ranks": 1},
        "ShardedEmbeddingBags": {"tables": [torch.ones(8, 4)], "plan": plan, "mesh": mesh},
        bags: {"ids": IDS, "lengths": LENGTHS},
        "ReplicaSync": {"bags": bags, "optimizer": optimizer},
        "RowWiseAdagrad": {"params": [weight]},
        adagrad.to_average: {"weight": weight},
        adagrad.averaged: {"weight": weight, "rows": IDS},
        "MomentumScaledRowWiseAdagrad": {"params": [weight], "scale": 2.0},
        "FeatureRows": {"weight": torch.ones(8, 1)},
        "DynamicFeatureRows": {"width": 4, "capacity": 8},
        dynamic.initial: {"ids": IDS},
        dynamic.attach: {"name": "a", "optimizer": adagrad, "key": "sum"},
        "merge_feature_rows": {"states": []},
        "EquivalentSubstitution": {"rows": rows, "operators": [dct_embeddings.LinearTerms()]},
        layer: {"ids": IDS, "lengths": LENGTHS},
        "LinearTerms": {},
        "SumPooledEmbedding": {"width": 4},
        "FactorizationMachine": {"width": 4},
        "WeightPublisher": {"named_tensors": tensors},
        dct_patches.WeightPublisher.resume: {"folder": folder, "named_tensors": tensors},
        publisher.diff: {"named_tensors": tensors},
        publisher.confirm: {"patch": changes},
        publisher.to_indices_and_values: {"patch": changes},
        publisher.save_delta_checkpoint: {"patch": changes, "folder": folder},
        "WeightSubscriber": {"named_tensors": tensors},
        subscriber.load: {"patch": full},
        subscriber.apply: {"patch": changes},
        subscriber.update: {"folder": folder},
        full.save: {"folder": folder},
        dct_patches.WeightPatch.load: {"folder": folder},
        dct_patches.WeightPatch.from_bytes: {"data": b""},
        "broadcast_patch": {"patch": full, "src": 0},
        "FirstLayer": {"fields": 1, "width": 4, "out_features": 2},
    }


def _has_no_checks(value):
    """Whether a public name is an abstract class, or has only fields."""
    fields = (tuple, dct_patches.WeightPatch)
    return inspect.isclass(value) and (issubclass(value, fields) or inspect.isabstract(value))


def test_every_public_name_is_tried(one_rank):
    public = {n for p in PACKAGES for n in p.__all__ if not _has_no_checks(getattr(p, n))}
    assert public == {name for name in _valid_arguments() if isinstance(name, str)}


WRONG = {"none": None, "list": [None], "object": object(), "sparse": torch.eye(4).to_sparse()}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(one_rank, wrong):
    failed = []
    for name, valid in _valid_arguments().items():
        function = name
        if isinstance(name, str):
            function = next(getattr(p, name) for p in PACKAGES if name in p.__all__)
        called = function.forward if isinstance(function, nn.Module) else function
        for argument, parameter in inspect.signature(called).parameters.items():
            optional = parameter.default is None or "None" in str(parameter.annotation)
            if (name, argument) in UNCHECKED or (wrong is None and optional):
                continue
            try:
                function(**{**valid, argument: wrong})
                text = "accepted"
            except (TypeError, ValueError, RuntimeError) as error:
                text = str(error)
            named = re.match(rf"dct::\S+: .*\b{argument.removesuffix('s')}.* must .*, got", text)
            if not named or (wrong is None and "got None" not in text):
                failed.append(f"{name}({argument}=): {text}")
    assert not failed, "\n".join(failed)


def test_keyword_arguments_given_by_position_are_named():
    tried = set()
    for package in PACKAGES:
        for name in package.__all__:
            parameters = inspect.signature(getattr(package, name)).parameters.values()
            keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            if keywords:
                tried.add(name)
                positions = [None] * (len(parameters) - len(keywords))
                first, second = keywords[:2]
                rule = f"given by keyword (write {first}=2.5, {second}='x'), got it by position"
                with pytest.raises(TypeError) as error:
                    getattr(package, name)(*positions, 2.5, "x")
                assert str(error.value) == f"dct::{name}: {first} must be {rule}"
    assert len(tried) == 15
