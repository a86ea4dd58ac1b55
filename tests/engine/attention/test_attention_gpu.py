"""On a CUDA device: attention at real shapes against plain torch there, over packed sequences and over pages."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

from cbexp.engine.attention import attend_plainly, paged_decode_attention, paged_decode_reference, read_spans
from cbexp.engine.attention.attention import attend, choose_attention_path
from cbexp.engine.kernels.tiles import TILES
from tests.engine.kernels.cases import build_paged_case, is_same, packed_batch, step_kwargs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

NUM_HEADS, NUM_KV_HEADS = 8, 2
# (queries, keys): whole prompts, decoding rows with a long past, a chunk of a prompt, one token alone.
LENGTHS = ((300, 300), (1, 900), (64, 1000), (1, 1), (129, 129), (7, 40))
MIXES = {"mixed": LENGTHS, "decode only": tuple((1, n) for n in (1, 17, 500)), "one prompt": ((2000, 2000),)}


@contextmanager
def host_synchronisation_as_error():
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def inputs(lengths, head_dim, dtype):
    sizes = NUM_HEADS, NUM_KV_HEADS, head_dim
    return packed_batch(lengths, *sizes, dtype, "cuda"), step_kwargs(lengths, "cuda")


def expected_output(packed, kwargs, **options):
    spans = read_spans(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    return attend_plainly(*(tensor.squeeze(0).float() for tensor in packed), spans, **options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((head_dim, torch.bfloat16) for head_dim in (64, 80, 128, 256)), (128, torch.float16)],
    ids=str,
)
def test_half_precision_runs_in_one_kernel(mix, window, head_dim, dtype):
    if choose_attention_path(torch.device("cuda", 0), dtype, head_dim, False, False) != "varlen":
        pytest.skip("needs compute capability 8.0")
    lengths, scaling = MIXES[mix], head_dim**-0.5
    packed, kwargs = inputs(lengths, head_dim, dtype)
    with host_synchronisation_as_error():
        output, _ = attend(None, *packed, None, scaling=scaling, sliding_window=window, **kwargs)
        # Longest lengths may be rounded up, as a compiled prefill does.
        kwargs |= {"max_length_q": 4096, "max_length_k": 4096}
        rounded, _ = attend(None, *packed, None, scaling=scaling, sliding_window=window, **kwargs)
    expected = expected_output(packed, kwargs, scaling=scaling, window=window or 0)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(output[0].float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rounded, output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (5.0, False), (0.0, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_caps_sinks_and_fp32(mix, window, softcap, has_sinks, dtype):
    packed, kwargs = inputs(MIXES[mix], 64, dtype)
    sinks = torch.linspace(-2.0, 6.0, NUM_HEADS, device="cuda") if has_sinks else None
    asked = {"scaling": 0.125, "sliding_window": window, "softcap": softcap or None, "s_aux": sinks}
    output, _ = attend(None, *packed, None, **asked, **kwargs)
    options = {"scaling": 0.125, "window": window or 0, "softcap": softcap, "sinks": sinks}
    expected = expected_output(packed, kwargs, **options)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output[0].float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["per_sequence", "reference"])
def test_lengths_are_read_once_a_step(softcap):
    """The layers after the first ask nothing of the device; lengths written anew are read anew."""
    packed, kwargs = inputs(LENGTHS, 64, torch.float32)
    first, _ = attend(None, *packed, None, scaling=0.125, softcap=softcap, **kwargs)
    with host_synchronisation_as_error():
        second, _ = attend(None, *packed, None, scaling=0.125, softcap=softcap, **kwargs)
        with pytest.raises(RuntimeError, match="synchronizing"):
            kwargs["cu_seq_lens_k"].tolist()
    assert second.equal(first)
    kwargs["cu_seq_lens_q"][1:] = kwargs["cu_seq_lens_q"][-1].clone()
    kwargs["cu_seq_lens_k"][1:] = kwargs["cu_seq_lens_k"][-1].clone()
    joined, _ = attend(None, *packed, None, scaling=0.125, softcap=softcap, **kwargs)
    expected = expected_output(packed, kwargs, scaling=0.125, softcap=softcap or 0.0)
    torch.testing.assert_close(joined[0], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(joined, first)


# Decode over pages, in one kernel

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}


def random_positions(rows, longest, seed=0):
    """Lengths from one token to `longest`, which occurs; every eighth row is inactive."""
    draw = random.Random(seed)
    positions = [draw.randint(0, longest) if row % 8 != 5 else -1 for row in range(rows)]
    positions[0] = longest
    return positions


def build(positions, **options):
    defaults = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 256, "dtype": torch.bfloat16}
    return build_paged_case(positions, device="cuda", **(defaults | options))


def check(case, attend=paged_decode_attention, **more):
    expected, expected_pages = case.run(paged_decode_reference)
    output, pages = case.run(attend, **more)
    torch.testing.assert_close(output, expected, **TOLERANCES[output.dtype])
    assert is_same(pages, expected_pages).all()


# Rows, the most tokens that one of them has stored, and what is not as in Qwen3-4B. Few rows are split where they are
# long.
CASES = [
    *((rows, longest, {}) for rows, longest in [(1, 500), (3, 9_000), (32, 4_000), (256, 600)]),
    *((rows, longest, {"heads": 8}) for rows, longest in [(1, 32_767), (1024, 300)]),
    *((16, 1_000, {"head_dim": head_dim}) for head_dim in (64, 80, 256)),
    (16, 1_000, {"head_dim": 96, "dtype": torch.float16}),
    *((16, 1_000, {"head_dim": head_dim, "dtype": torch.float32}) for head_dim in (64, 128, 256)),
    *((16, 1_000, {"heads": 2 * group, "kv_heads": 2}) for group in (1, 3, 8, 24)),
    (64, 3_000, {"window": 128}),
    (2, 3_000, {"window": 1_000}),
    (64, 3_000, {"softcap": 50.0}),
    *((rows, 3_000, {"sinks": True, "head_dim": 64}) for rows in (2, 64)),
    (2, 3_000, {"sinks": True, "window": 128, "softcap": 30.0}),
    *((rows, 1_000, {"page_size": page_size}) for rows in (2, 64) for page_size in (4, 32, 48, 256)),
]


@pytest.mark.parametrize(("rows", "longest", "options"), CASES, ids=str)
def test_batches_lengths_and_kinds_of_attention(rows, longest, options):
    page_size = options.get("page_size")
    ends = [-1, 0, page_size - 1, page_size, page_size + 1, 3 * page_size - 1] if page_size else []
    check(build(ends + random_positions(rows, longest), **options))


@pytest.mark.parametrize(
    "asked", [*({"num_splits": n} for n in (1, 7, 64)), *({"tile": tile} for tile in TILES)], ids=str
)
def test_any_number_of_splits_and_every_tile(asked):
    """Of which some are longer than a page."""
    from cbexp.engine.kernels.paged_attention import paged_decode_attention as attend

    check(build(random_positions(16, 2_000), page_size=32, head_dim=64), attend, **asked)


@pytest.mark.parametrize("rows", [3, 64])
def test_a_nan_stays_in_its_row(rows):
    case = build([700] * rows)
    clean, _ = case.run(paged_decode_attention)
    case.key[1] = float("nan")
    output, _ = case.run(paged_decode_attention)
    assert output[1].isnan().all()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(output[others], clean[others])


def test_a_cache_of_more_elements_than_32_bits_count():
    case = build([300, 40])
    page_elements = case.pages[0].numel()
    num_pages = 2**32 // page_elements + len(case.pages)
    if torch.cuda.mem_get_info()[0] < 4 * num_pages * page_elements:
        pytest.skip("needs 17 GB for the cache and its copy")
    expected, expected_pages = case.run(paged_decode_reference)
    pages = case.pages.new_empty(num_pages, *case.pages.shape[1:])
    tail = pages[-len(case.pages) :]
    tail.copy_(case.pages)
    tensors = case.tensors()
    tensors[3], tensors[4] = pages, case.block_table + (num_pages - len(case.pages))
    output = paged_decode_attention(*tensors, **case.options)
    torch.testing.assert_close(output, expected, **TOLERANCES[output.dtype])
    assert is_same(tail, expected_pages).all()


@pytest.mark.parametrize("rows", [2, 64])
def test_steps_in_a_row_read_what_the_one_before_wrote(rows):
    """Nothing stands between the kernels, so that each may start while its predecessor drains."""
    steps = 40
    case = build([500] * rows, table_width=3)
    positions = [case.positions + step for step in range(steps)]
    packed = torch.randn(steps, rows, 48, 128, device="cuda", dtype=torch.bfloat16)

    def run(attend, pages):
        outputs = []
        for step in range(steps):
            new = packed[step].split([32, 8, 8], dim=1)
            place = case.block_table, positions[step], case.page_offset
            outputs.append(attend(*new, pages, *place, **case.options))
        return torch.stack(outputs)

    expected = run(paged_decode_reference, case.pages.clone())
    run(paged_decode_attention, case.pages.clone())  # compiles
    output = run(paged_decode_attention, case.pages.clone())
    torch.testing.assert_close(output, expected, **TOLERANCES[torch.bfloat16])
