# SPDX-License-Identifier: Apache-2.0
"""Kernel names fall into the families that a reader expects, and none of ours is left out."""

import ast
from pathlib import Path

import pytest
from hopper.profile import family, short

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# What a folder's kernels may count as; an activation's rows are quantized by two kernels of one name.
EXPECTED = {
    "attention": {"attention"}, "indexer": {"indexer"}, "latent": {"kv records"}, "linear": {"fp8 linear", "norm, rope, swiglu"},
    "mhc": {"mhc"}, "moe": {"experts", "routing"},
}


def launched() -> list[tuple[str, str]]:
    """(folder, name) of each Triton kernel that a source launches on a grid."""
    found = set()
    for path in KERNELS.rglob("triton_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                found.add((path.parent.name, node.func.value.id))
    return sorted(found)


def jitted() -> set[str]:
    """Names of all functions of Triton's."""
    trees = [ast.parse(path.read_text()) for path in KERNELS.rglob("triton_*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}


@pytest.mark.parametrize("folder, kernel", launched())
def test_ours_are_known(folder, kernel):
    assert kernel in jitted() and short(kernel) == kernel
    assert family(kernel) in EXPECTED[folder] or (kernel, family(kernel)) == ("_quantize", "fp8 linear")


def test_the_sources_are_read():
    assert {folder for folder, _ in launched()} == set(EXPECTED) and len(launched()) > 20


@pytest.mark.parametrize("kernel, name", [
    ("void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960>(int4 const*)", "experts"),
    ("void marlin::Marlin<__nv_bfloat16, 1125899906909960>(int4 const*)", "fp8 linear"),
    ("mhc_pre_big_fuse_tilelang_kernel", "mhc"),
    ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<A>(B)", "attention"),
    ("void deep_gemm::sm90_fp8_paged_mqa_logits<2u, 64u>(unsigned int)", "indexer"),
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "other matmul"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "torch element-wise"),
    ("void at::native::reduce_kernel<512, 1, A>(B)", "torch element-wise"),
    ("Memcpy DtoD (Device -> Device)", "copies"),
    ("something_unheard_of", "other"),
])
def test_families(kernel, name):
    assert family(kernel) == name


def test_short_names():
    assert short("void marlin::Marlin<__nv_bfloat16, 1>(int4 const*)") == "Marlin"
