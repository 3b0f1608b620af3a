"""bench/gpu/variants.py: patches, and the choice of timed variants, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from ptx import build, toolkit

from bench.gpu import variants
from bench.gpu.common import BF16, F32
from bench.microbench import cases
from dct_kernels import reference

nvcc = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)


def test_every_patch_replaces_text_and_a_wrong_one_is_refused(tmp_path):
    for i, variant in enumerate(variants.VARIANTS.values()):
        folder = variants.patched(toolkit.CSRC, variant, tmp_path / f"{i}")
        for where, old, new in variant.patches:
            left = [path.read_text().count(old) for path in folder.glob(where)]
            assert sum(left) == 0 or old in new
    wrong = variants.Variant((), (("**/mask_pack.cu", "no such text", ""),))
    with pytest.raises(
        ValueError, match=r"must replace a text of .*mask_pack.cu, got 'no such text'"
    ):
        variants.patched(toolkit.CSRC, wrong, tmp_path / "wrong")


def test_a_variant_with_different_bits_is_named_and_not_timed():
    def off(residual, *arguments):
        reference.mask_pack(residual, *arguments)
        residual[0] = torch.nextafter(residual[0], torch.tensor(9.0))

    case = cases.mask_pack("cpu", 1000, 0.01, torch.float32, torch.float32)
    ops = {name: SimpleNamespace(mask_pack=reference.mask_pack) for name in ("default", "same")}
    found = variants.compared(case, ops | {"off": SimpleNamespace(mask_pack=off)}, "cpu")
    assert found["wrong"] == ["off"] and set(found["ms"]) == {"default", "same"}


@nvcc
@pytest.mark.parametrize(
    "name, case",
    [
        # In this case, both kernels of mask_pack pack elements.
        ("128 threads", cases.mask_pack("cpu", 3 * 16384 + 5, 0.3, F32, BF16)),
        ("hidden sampling", variants.sampled_case("cpu", 5 * 16384 + 5)),
    ],
)
def test_a_variant_is_built_and_has_the_bits_of_the_default(name, case):
    nothing = torch.empty(0)
    results = [
        variants.results(case, variants.ops_of(case.op, variants.library(n, case.op), nothing))
        for n in (variants.DEFAULT, name)
    ]
    seen = results[0][-1].item()
    assert all(map(torch.equal, *results)) and seen > 100
