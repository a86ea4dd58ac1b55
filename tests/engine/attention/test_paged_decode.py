"""Paged decode attention on the CPU, where the operator that models call runs the reference, against its definition."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cbexp.engine.attention import paged_decode_attention
from tests.engine.kernels.cases import attend_naively, build_paged_case, is_same

# Page size 4: before, on and after boundaries, a first token, a row that is done.
POSITIONS = [0, 3, 4, -1, 7, 11, 12, 20]

VARIANTS = [
    {},
    {"kv_heads": 1},
    {"kv_heads": 4},
    {"page_size": 32, "head_dim": 10},
    {"table_width": 16, "softcap": 2.0},
    {"sinks": True, "heads": 6},
    {"window": 8},
    {"window": 1},
    {"window": 6, "softcap": 2.0, "sinks": True, "heads": 6},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_attends_and_stores_as_defined(variant):
    case = build_paged_case(POSITIONS, dtype=torch.float64, **variant)
    expected, expected_pages = case.run(attend_naively)
    output, pages = case.run(paged_decode_attention)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert is_same(pages, expected_pages).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_end_alone(dtype):
    case = build_paged_case(POSITIONS, dtype=dtype)
    expected, _ = case.run(attend_naively)
    output, pages = case.run(paged_decode_attention)
    assert (output.dtype, pages.dtype) == (dtype, dtype)
    torch.testing.assert_close(output, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("positions", [[8, -1, 12], [-1, -1, -1]], ids=["some", "all"])
def test_an_inactive_row_changes_no_page_and_gives_zeros(positions):
    """Its pages may be another's: here the live row is about to write where the inactive one's table begins."""
    case = build_paged_case(positions, table_width=4)
    case.block_table[1] = case.block_table[0, 2]
    case.query[1] = case.key[1] = case.value[1] = float("nan")
    expected, expected_pages = case.run(attend_naively)
    output, pages = case.run(paged_decode_attention)
    assert not output[1].any()
    torch.testing.assert_close(output, expected.float())
    assert is_same(pages, expected_pages).all()


def test_compiles_into_one_graph_for_all_batches():
    def step(*tensors, **options):
        return paged_decode_attention(*tensors, **options) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, positions in enumerate([[3, 4, -1, 0, 2], [9, 1, 0], POSITIONS]):
            case = build_paged_case(positions, table_width=6, seed=seed)
            expected, expected_pages = case.run(step)
            output, pages = case.run(compiled)
            torch.testing.assert_close(output, expected)
            assert is_same(pages, expected_pages).all()


def test_operator_is_registered_soundly():
    """Schema, fake tensors and autograd registration, as torch checks them."""
    case = build_paged_case([3, 4], sinks=True)
    with torch.no_grad():
        torch.library.opcheck(paged_decode_attention, (*case.tensors(), 0.25, 0, 0.0, case.options["sinks"]))


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from cbexp.engine.attention import paged_decode_attention\n"
        "from tests.engine.kernels.cases import build_paged_case\n"
        "output, _ = build_paged_case([3, 4]).run(paged_decode_attention)\n"
        "assert output.isfinite().all()\n"
        "import cbexp.engine.forward\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=120)
