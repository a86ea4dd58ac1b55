"""On a CUDA device: the fused operators at the sizes of Qwen3-4B against plain torch in fp32, and steps in a graph."""

from __future__ import annotations

import pytest
import torch
import transformers

from cbexp.engine import fused_ops, fused_reference, sampling
from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.attention_reference import paged_decode_reference
from cbexp.engine.decode_buffers import allocate_decode_buffers
from cbexp.engine.fused_forward import FusedForward
from cbexp.engine.fused_layers import read_fused_model
from cbexp.engine.fused_ops import MAX_SKINNY_ROWS
from cbexp.engine.fused_weights import FusedWeights
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.page_layout import PagePool
from tests.engine.fused_kernel_cases import EPS, randn, rotary_tables
from tests.engine.paged_attention_cases import build_case

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
# A kernel of each tile (16, 32 and 64 rows), both sides of the bound from which products are the vendor's, and a batch
# that fills a device. Each is compiled anew for each type, which takes a second: the other types have a tile and a
# vendor's product each.
SIZES = [
    *((rows, torch.bfloat16) for rows in (1, 4, 32, MAX_SKINNY_ROWS, MAX_SKINNY_ROWS + 1, 256)),
    (4, torch.float16),
    (4, torch.float32),
    (MAX_SKINNY_ROWS + 1, torch.float32),
]
# For variants of what the sizes above have gone through.
FEW_SIZES = [(32, torch.bfloat16), (MAX_SKINNY_ROWS + 1, torch.bfloat16)]
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 3e-2, "atol": 4e-2},
    torch.float16: {"rtol": 4e-3, "atol": 8e-3},
}


@pytest.fixture(autouse=True)
def _exact_fp32():
    """TF32 would round the two sides differently."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def tensor(*shape, dtype, seed=0):
    return randn(*shape, dtype=dtype, device=DEVICE, seed=seed)


def matrix(out_features, in_features, dtype, seed=1):
    """Scaled so that products are about one, as behind a norm."""
    return (tensor(out_features, in_features, dtype=torch.float32, seed=seed) / in_features**0.5).to(dtype)


def norm_weight(size, dtype, seed=2):
    return 1 + 0.1 * tensor(size, dtype=dtype, seed=seed)


def widened(arguments):
    return [
        each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in arguments
    ]


def check(name, *arguments, dtype):
    """An operator against its reference in fp32, from the same rounded inputs."""
    actual = getattr(fused_ops, name)(*arguments)
    expected = getattr(fused_reference, name)(*widened(arguments))
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    for own, plain in pairs:
        assert own.dtype == dtype
        torch.testing.assert_close(own.float(), plain, **TOLERANCES[dtype])


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_embedding(rows, dtype):
    token_ids = torch.arange(rows, device=DEVICE) * 7919 % 4000
    table = tensor(4000, HIDDEN, dtype=dtype)
    check("embed_norm", token_ids, table, norm_weight(HIDDEN, dtype), EPS, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "in_features"),
    [
        *((*size, HEADS * HEAD_DIM) for size in SIZES),
        *((*size, in_features) for size in FEW_SIZES for in_features in (INTERMEDIATE, 2576)),
    ],
    ids=str,
)
def test_projection_and_residual(rows, in_features, dtype):
    x, weight = tensor(rows, in_features, dtype=dtype), matrix(HIDDEN, in_features, dtype)
    residual = tensor(rows, HIDDEN, dtype=dtype, seed=3)
    bias = tensor(HIDDEN, dtype=dtype, seed=4) if in_features == 2576 else None
    check("project_add_norm", x, weight, bias, residual, norm_weight(HIDDEN, dtype), EPS, dtype=dtype)


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_gate_and_up(rows, dtype):
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(2 * INTERMEDIATE, HIDDEN, dtype)
    check("gated_projection", x, weight, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "is_qwen3"),
    [*((*size, True) for size in SIZES), *((*size, False) for size in FEW_SIZES)],
    ids=str,
)
def test_queries_keys_and_values(rows, is_qwen3, dtype):
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(WIDTH, HIDDEN, dtype)
    bias = None if is_qwen3 else tensor(WIDTH, dtype=dtype, seed=3)
    norms = [norm_weight(HEAD_DIM, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
    positions = (torch.arange(rows, device=DEVICE, dtype=torch.int32) * 37) % 500 - 1
    rotary = rotary_tables(500, HEAD_DIM, dtype, DEVICE)
    arguments = [x, weight, bias, positions, *rotary, *norms, EPS, HEADS, KV_HEADS]
    check("rotated_projection", *arguments, dtype=dtype)


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_best_token(rows, dtype):
    """Of logits that differ by less than a rounding, any may be chosen."""
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(VOCABULARY, HIDDEN, dtype)
    logits = x.float() @ weight.float().T
    chosen = fused_ops.best_tokens(x, weight)
    shortfall = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
    assert shortfall.max() <= TOLERANCES[dtype]["atol"]


@pytest.mark.parametrize("rows", [4, MAX_SKINNY_ROWS, MAX_SKINNY_ROWS + 1])
def test_of_equal_logits_the_lowest_id_wins(rows):
    x = torch.ones(rows, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.zeros(32003, 64, device=DEVICE, dtype=torch.bfloat16)
    for ids in ([32002, 17], [63, 64], [4095, 4096], [5, 6, 7]):
        weight.zero_()[ids] = 1.0
        assert fused_ops.best_tokens(x, weight).tolist() == [min(ids)] * rows


@pytest.mark.parametrize("rows", [4, MAX_SKINNY_ROWS + 1])
def test_nan_of_one_row_stays_there(rows):
    """Its token is one of the vocabulary: the next step looks its embedding up."""
    dtype, num_tokens = torch.bfloat16, 32003
    x = tensor(rows, HIDDEN, dtype=dtype)
    head, gate_up, down = (matrix(n, HIDDEN, dtype) for n in (num_tokens, 2 * 1024, HIDDEN))
    residual, norm = tensor(rows, HIDDEN, dtype=dtype, seed=3), norm_weight(HIDDEN, dtype)

    def run(x):
        return [
            fused_ops.best_tokens(x, head),
            fused_ops.gated_projection(x, gate_up),
            *fused_ops.project_add_norm(x, down, None, residual, norm, EPS),
        ]

    clean = run(x)
    x[0] = float("nan")
    poisoned = run(x)
    assert 0 <= int(poisoned[0][0]) < num_tokens
    for before, after in zip(clean, poisoned, strict=True):
        assert after[1:].equal(before[1:])


# Attention


def attention_arguments(positions, dtype, *, is_qwen3=True, head_dim=HEAD_DIM, window=0, page_size=64):
    """Of `fused_ops.attend_new_token`; every slot that no row has written holds NaN."""
    rows, width = len(positions), (HEADS + 2 * KV_HEADS) * head_dim
    paged = build_case(
        positions,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=DEVICE,
        window=window,
    )
    norms = [norm_weight(head_dim, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
    projection = [tensor(rows, HIDDEN, dtype=dtype), matrix(width, HIDDEN, dtype), None, paged.positions]
    rotary = rotary_tables(max(positions) + 1, head_dim, dtype, DEVICE)
    arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=DEVICE)
    cache = [paged.pages, paged.block_table, paged.page_offset, arrivals]
    return [*projection, *rotary, *norms, *cache, EPS, head_dim**-0.5, window, HEADS]


def expected_attention(arguments):
    """In fp32 from the same rounded inputs: the output, and the pages left behind."""
    *projection, pages, block_table, page_offset, _, eps, scaling, window, heads = widened(arguments)
    positions, pages = arguments[3], pages.clone()
    qkv = fused_reference.rotated_projection(*projection, eps, heads, KV_HEADS)
    query, key, value = qkv.split([heads, KV_HEADS, KV_HEADS], dim=1)
    output = paged_decode_reference(
        query, key, value, pages, block_table, positions, page_offset, scaling=scaling, window=window
    )
    return output.flatten(1), pages


def check_attention(arguments, dtype):
    expected, expected_pages = expected_attention(arguments)
    before = arguments[8].clone()
    output = fused_ops.attend_new_token(*arguments)
    torch.testing.assert_close(output.float(), expected, **TOLERANCES[dtype])
    pages = arguments[8]
    torch.testing.assert_close(pages.float(), expected_pages, **TOLERANCES[dtype], equal_nan=True)
    # Old keys and values, and slots of nobody, are bit for bit what they were.
    is_new = expected_pages.ne(before.float()) & ~(expected_pages.isnan() & before.isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    is_kept = pages.view(bits).eq(before.view(bits)).all(-1)
    assert (is_kept | is_new.any(-1)).all()
    inactive = arguments[3] < 0
    assert not output[inactive].any()
    assert not arguments[11].any()


def spread_positions(rows):
    """Empty, full and partly filled pages, with inactive rows between; the first is active."""
    return [400 if row == 0 else (row * 53) % 402 - 1 for row in range(rows)]


@pytest.mark.parametrize(
    ("rows", "dtype", "is_qwen3"),
    [*((*size, True) for size in SIZES), *((*size, False) for size in FEW_SIZES)],
    ids=str,
)
def test_attention(rows, is_qwen3, dtype):
    check_attention(attention_arguments(spread_positions(rows), dtype, is_qwen3=is_qwen3), dtype)


@pytest.mark.parametrize(
    ("rows", "window", "page_size"),
    [(4, 0, 16), (64, 100, 16), (4, 256, 32), (64, 0, 32), (4, 100, 256), (64, 256, 256)],
)
def test_attention_in_pages_and_windows(rows, window, page_size):
    dtype = torch.bfloat16
    arguments = attention_arguments(spread_positions(rows), dtype, window=window, page_size=page_size)
    check_attention(arguments, dtype)


@pytest.mark.parametrize(("rows", "head_dim"), [(64, 64), (64, 80), (64, 96), (64, 256), (4, 80), (4, 256)])
def test_attention_of_other_head_sizes(rows, head_dim):
    dtype = torch.bfloat16
    check_attention(attention_arguments(spread_positions(rows), dtype, head_dim=head_dim), dtype)


@pytest.mark.parametrize(("rows", "longest"), [(1, 9000), (2, 5000), (16, 3001), (64, 4500), (256, 2000)])
def test_attention_of_rows_of_all_lengths(rows, longest):
    """Rows of many chunks beside rows of one, twice: the second run finds what the first has left."""
    dtype = torch.bfloat16
    positions = [longest - 1, *((row * 7919) % (longest // (1 + row % 7)) for row in range(1, rows))]
    arguments = attention_arguments(positions, dtype)
    check_attention(arguments, dtype)
    arguments[3] -= (arguments[3] > 0).int()
    check_attention(arguments, dtype)


@pytest.mark.parametrize("rows", [4, 64])
def test_nan_of_one_row_stays_there_in_attention(rows):
    dtype = torch.bfloat16
    positions = [300] * rows
    clean = fused_ops.attend_new_token(*attention_arguments(positions, dtype))
    arguments = attention_arguments(positions, dtype)
    arguments[0][1] = float("nan")
    entries = arguments[9][1].long()
    for page in (*entries + 2, *entries + 3):
        arguments[8][page] = float("nan")
    output = fused_ops.attend_new_token(*arguments)
    others = [row for row in range(rows) if row != 1]
    assert output[1].isnan().all()
    assert output[others].equal(clean[others])


# Whole steps


@pytest.mark.parametrize("rows", [1, 70, 1024])
def test_rows_advance_as_in_plain_torch(rows):
    """Which is what runs on the CPU."""
    generator = torch.Generator().manual_seed(rows)

    def draw(high, low=0):
        return torch.randint(low, high, (1030,), generator=generator)

    start = {"token_ids": draw(10), "positions": draw(30, -3).clamp(min=-1), "remaining": draw(5)}
    plain, own = (
        allocate_decode_buffers(
            {}, max_rows=1030, max_burst=6, eos_token_ids=(2, 5), device=torch.device(device)
        )
        for device in ("cpu", DEVICE)
    )
    for buffers in (plain, own):
        for name, value in start.items():
            getattr(buffers, name).copy_(value)
    for _ in range(6):
        next_ids = draw(10)[:rows]
        sampling.advance(plain, next_ids)
        sampling.advance(own, next_ids.to(DEVICE))
        for name in ("token_ids", "positions", "remaining", "outputs", "step"):
            assert getattr(own, name).cpu().equal(getattr(plain, name)), name


def build_model(dtype):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=2003,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM._from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15)
    model.config._attn_implementation = ATTENTION_NAME
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def build_buffers(model, num_rows, max_burst):
    page_size, width, num_layers = 16, 8, model.config.num_hidden_layers
    pages_per_block = 2 * num_layers
    shape = ((num_rows * width + 1) * pages_per_block, page_size, 4, 64)
    pages = torch.full(shape, float("nan"), dtype=model.dtype, device=DEVICE)
    pool = PagePool(tuple(range(num_layers)), pages, pages_per_block, 0, width, 0)
    buffers = allocate_decode_buffers(
        {"full_attention": pool},
        max_rows=num_rows,
        max_burst=max_burst,
        eos_token_ids=(),
        device=torch.device(DEVICE),
    )
    blocks = 1 + torch.randperm(num_rows * width, generator=torch.Generator().manual_seed(0))
    table = (blocks * pages_per_block).view(num_rows, width)
    buffers.block_tables["full_attention"].copy_(table)
    return buffers


def start_rows(buffers):
    """A token each; every seventh row is not there, some end early."""
    rows = torch.arange(buffers.max_rows, device=DEVICE)
    buffers.token_ids.copy_(rows * 31 % 2003)
    buffers.positions.copy_(torch.where(rows % 7 == 3, -1, 0))
    buffers.remaining.copy_(torch.where(rows % 5 == 1, 9, 1000))
    buffers.step.zero_()
    buffers.outputs.fill_(-1)


def capture(step):
    """A graph of `step`, after two calls of it on a stream of its own, as torch's notes on graphs have it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.fixture
def fused_forward():
    made = []

    def make(model, buffers):
        weights = FusedWeights(model)
        made.append(weights)
        weights.refresh()
        return FusedForward(read_fused_model(model, weights, 128), buffers.layers)

    yield make
    for weights in made:
        weights.close()


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_rows", "is_captured"), [(1, True), (4, False), (33, True), (65, False), (200, True)]
)
def test_steps_choose_what_the_models_own_code_does(num_rows, is_captured, fused_forward):
    """In fp32, but for logits that differ by less than their rounding; both go on from the same tokens."""
    num_steps, model = 30, build_model(torch.float32)
    own_buffers, buffers = (build_buffers(model, num_rows, num_steps) for _ in range(2))
    own, fused = ModelForward(model, own_buffers.layers), fused_forward(model, buffers)

    def step():
        sampling.advance(buffers, fused(buffers.token_ids, buffers.positions))

    run = capture(step).replay if is_captured else step
    # Rows that are not there have left nothing behind.
    assert all(layer.pages.isnan().all() for layer in buffers.layers)
    start_rows(own_buffers)
    start_rows(buffers)
    for index in range(num_steps):
        is_active = own_buffers.positions >= 0
        logits = own.logits(own_buffers.token_ids, own_buffers.positions)
        run()
        chosen = buffers.outputs[index].long()
        assert (chosen >= 0).equal(is_active)
        shortfall = logits.amax(1) - logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
        assert shortfall[is_active].max() < 1e-3
        sampling.advance(own_buffers, chosen.clamp(min=0))
        assert buffers.token_ids.equal(own_buffers.token_ids)
        assert buffers.positions.equal(own_buffers.positions)
    for layer, expected in zip(buffers.layers, own_buffers.layers, strict=True):
        torch.testing.assert_close(layer.pages, expected.pages, rtol=1e-3, atol=1e-3, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        (1, torch.bfloat16),
        (33, torch.bfloat16),
        (MAX_SKINNY_ROWS, torch.bfloat16),
        (33, torch.float32),
    ],
    ids=str,
)
def test_steps_replayed_back_to_back_equal_single_ones(num_rows, dtype, fused_forward):
    """Bit for bit, while every kernel may start before its predecessor has ended: sums have one order."""
    num_steps, model = 100, build_model(dtype)
    single, replayed = (build_buffers(model, num_rows, num_steps) for _ in range(2))
    forwards = [fused_forward(model, buffers) for buffers in (single, replayed)]
    start_rows(single)
    for _ in range(num_steps):
        next_ids = forwards[0](single.token_ids, single.positions)
        torch.cuda.synchronize()
        sampling.advance(single, next_ids)
        torch.cuda.synchronize()
    graph = capture(lambda: sampling.advance(replayed, forwards[1](replayed.token_ids, replayed.positions)))
    start_rows(replayed)
    for _ in range(num_steps):
        graph.replay()
    assert len(single.outputs.unique()) > 1
    assert replayed.outputs.equal(single.outputs)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for layer, expected in zip(replayed.layers, single.layers, strict=True):
        assert layer.pages.view(bits).equal(expected.pages.view(bits))


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [4, 65])
def test_logits_are_as_close_as_the_models_own(num_rows, fused_forward):
    exact_model = build_model(torch.float32)
    inputs = torch.arange(num_rows, device=DEVICE), torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    exact = ModelForward(exact_model, build_buffers(exact_model, num_rows, 1).layers).logits(*inputs)
    model = build_model(torch.bfloat16)
    own = ModelForward(model, build_buffers(model, num_rows, 1).layers).logits(*inputs)
    fused = fused_forward(model, build_buffers(model, num_rows, 1)).logits(*inputs)
    own_error, fused_error = ((logits - exact).abs().mean() for logits in (own, fused))
    assert fused_error <= 1.25 * own_error
