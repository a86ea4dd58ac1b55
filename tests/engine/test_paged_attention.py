"""Paged decode attention on the CPU: the reference against its definition, and the operator that models call."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cbexp.engine.attention_reference import paged_decode_reference
from cbexp.engine.paged_attention_op import paged_decode_attention
from tests.engine.paged_attention_cases import attend_naively, build_case, run_operator

# Page size 4: before, on and after boundaries, a first token, a row that is done.
POSITIONS = [0, 3, 4, -1, 7, 11, 12, 20]

VARIANTS = {
    "plain": {},
    "one key-value head": {"kv_heads": 1},
    "as many key-value heads": {"kv_heads": 4},
    "three queries a key-value head": {"heads": 6},
    "large pages": {"page_size": 32},
    "odd head size": {"head_dim": 10},
    "wide table": {"table_width": 16},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "window of whole pages": {"window": 8},
    "window across pages": {"window": 6},
    "window of one": {"window": 1},
    "everything": {"window": 7, "softcap": 2.0, "sinks": True, "heads": 6},
}


@pytest.mark.parametrize("attend", [paged_decode_reference, run_operator], ids=["reference", "operator"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_attends_and_stores_as_defined(variant, attend):
    case = build_case(POSITIONS, dtype=torch.float64, **variant)
    expected, expected_pages = case.run(attend_naively)

    output, pages = case.run(attend)

    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_end_alone(dtype):
    case = build_case(POSITIONS, dtype=dtype)
    expected, _ = case.run(attend_naively)

    output, pages = case.run(paged_decode_reference)

    assert output.dtype == dtype
    assert pages.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_steps_of_a_ring_attend_to_the_last_tokens():
    """Twelve steps through a ring of five slots, against attention over the last five tokens."""
    steps, window = 12, 5
    case = build_case([0], heads=2, kv_heads=1, window=window, table_width=2, dtype=torch.float64)
    query, key, value = (torch.randn(steps, heads, 16, dtype=torch.float64) for heads in (2, 1, 1))
    for position in range(steps):
        output = paged_decode_reference(
            query[position, None],
            key[position, None],
            value[position, None],
            case.pages,
            case.block_table,
            torch.tensor([position], dtype=torch.int32),
            case.page_offset,
            **case.options,
        )
        last = slice(max(0, position + 1 - window), position + 1)
        weights = (key[last, 0] @ query[position].T * case.options["scaling"]).softmax(0)
        torch.testing.assert_close(output[0], weights.T @ value[last, 0])


@pytest.mark.parametrize("positions", [[8, -1, 12], [-1, -1, -1]], ids=["some", "all"])
def test_an_inactive_row_changes_no_page_and_gives_zeros(positions):
    """Its pages may be another's: here the live row is about to write where the inactive one's table begins."""
    case = build_case(positions, table_width=4)
    case.block_table[1] = case.block_table[0, 2]
    case.query[1] = case.key[1] = case.value[1] = float("nan")
    expected, expected_pages = case.run(attend_naively)

    output, pages = case.run(paged_decode_reference)

    assert torch.equal(output[1], torch.zeros_like(output[1]))
    torch.testing.assert_close(output, expected.float())
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0, equal_nan=True)


def test_a_nan_stays_in_its_row():
    case = build_case(POSITIONS)
    clean, _ = case.run(paged_decode_reference)
    case.key[2] = float("nan")

    output, _ = case.run(paged_decode_reference)

    assert output[2].isnan().all()
    others = [row for row in range(len(POSITIONS)) if row != 2]
    assert torch.equal(output[others], clean[others])


def test_reads_as_many_rows_as_there_are_queries():
    """Buffers have room for the largest batch."""
    case = build_case(POSITIONS)
    expected, _ = case.run(paged_decode_reference)
    case.query, case.key, case.value = case.query[:3], case.key[:3], case.value[:3]

    output, pages = case.run(run_operator)

    torch.testing.assert_close(output, expected[:3])
    changed = (pages != case.pages) & ~(pages.isnan() & case.pages.isnan())
    assert changed.flatten(1).any(1).sum() == 6  # a page of keys and one of values for each of three rows


@pytest.mark.parametrize("attend", [paged_decode_reference, run_operator], ids=["reference", "operator"])
def test_compiles_into_one_graph_for_all_batches(attend):
    def step(*tensors, **options):
        return attend(*tensors, **options) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, positions in enumerate([[3, 4, -1, 0, 2], [9, 1, 0], POSITIONS]):
            case = build_case(positions, table_width=6, seed=seed)
            expected, expected_pages = case.run(step)
            output, pages = case.run(compiled)
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0, equal_nan=True)


def test_operator_is_registered_soundly():
    """Schema, fake tensors and autograd registration, as torch checks them."""
    case = build_case([3, 4], sinks=True)
    tensors = (case.query, case.key, case.value, case.pages, case.block_table, case.positions)
    arguments = (*tensors, case.page_offset, 0.25, 0, 0.0, case.options["sinks"])
    with torch.no_grad():
        torch.library.opcheck(paged_decode_attention, arguments)


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tests.engine.paged_attention_cases import build_case, run_operator\n"
        "output, _ = build_case([3, 4]).run(run_operator)\n"
        "assert output.isfinite().all()\n"
        "import cbexp.engine.kernels\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
