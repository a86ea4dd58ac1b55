"""The engine's attention: each path against transformers' eager functions, and whole models driven through it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from cbexp.engine import EngineError, UnsupportedModelError
from cbexp.engine.attention import ATTENTION_NAME, attention, describe_attention_path, read_spans, reference
from cbexp.engine.buffers import LayerPages
from cbexp.engine.forward import PlainForward

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
SCALING = HEAD_DIM**-0.5
# (queries, keys) of each sequence: whole prompts, decoding rows, chunks with a past, one token alone.
LENGTHS = ((5, 5), (1, 9), (4, 20), (1, 1), (17, 17), (3, 4))
CUDA = torch.device("cuda:0")


def packed_batch(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = (sum(column) for column in zip(*lengths, strict=True))
    query = torch.randn(1, NUM_HEADS, total_q, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, total_k, HEAD_DIM, generator=generator)
    return query, key, value


def step_kwargs(lengths=LENGTHS, device="cpu"):
    ends_q, ends_k = (
        torch.tensor([0, *column], device=device).cumsum(0).int() for column in zip(*lengths, strict=True)
    )
    max_q, max_k = (max(column) for column in zip(*lengths, strict=True))
    return {"cu_seq_lens_q": ends_q, "cu_seq_lens_k": ends_k, "max_length_q": max_q, "max_length_k": max_k}


def attend_eagerly(query, key, value, lengths, window, softcap, sinks):
    """Transformers' own function, sequence by sequence, with a mask made here."""
    module = SimpleNamespace(num_key_value_groups=NUM_HEADS // NUM_KV_HEADS, training=False, sinks=sinks)
    eager = modeling_gemma2 if sinks is None else modeling_gpt_oss
    outputs, start_q, start_k = [], 0, 0
    for len_q, len_k in lengths:
        queries, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        mask = torch.full((len_q, len_k), float("-inf"))
        for i in range(len_q):
            last = len_k - len_q + i
            mask[i, max(0, last - window + 1) if window else 0 : last + 1] = 0.0
        extra = {} if softcap is None else {"softcap": softcap}
        output, _ = eager.eager_attention_forward(
            module, query[:, :, queries], key[:, :, keys], value[:, :, keys], mask, scaling=SCALING, **extra
        )
        outputs.append(output)
        start_q, start_k = queries.stop, keys.stop
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize(
    ("softcap", "sinks"),
    [(None, None), (0.5, None), (None, torch.tensor([0.0, 3.0, -2.0, 8.0]))],
    ids=["plain", "softcap", "sinks"],
)
@pytest.mark.parametrize("max_scores", [reference.MAX_SCORES, 150])
def test_packed_sequences_equal_transformers_eager(monkeypatch, window, softcap, sinks, max_scores):
    monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
    packed = packed_batch()
    output, weights = attention.attend(
        None,
        *packed,
        None,
        scaling=SCALING,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        **step_kwargs(),
    )
    expected = attend_eagerly(*packed, LENGTHS, window, softcap, sinks)
    assert weights is None
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


def test_lengths_may_come_by_layer_type():
    packed, kwargs = packed_batch(), step_kwargs()
    expected = attend_eagerly(*packed, LENGTHS, 6, None, None)
    for name in ("cu_seq_lens_k", "max_length_k"):
        kwargs[name] = {"full_attention": "not for this layer", "sliding_attention": kwargs[name]}
    output, _ = attention.attend(None, *packed, None, scaling=SCALING, sliding_window=6, **kwargs)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_padding_gets_zeros_and_changes_nothing(softcap):
    """As transformers pads: sequences of no length at the end, queries and keys that belong to none."""
    packed, kwargs = packed_batch(), step_kwargs()
    expected, _ = attention.attend(None, *packed, None, scaling=SCALING, softcap=softcap, **kwargs)
    padded = [pad(tensor, (0, 0, 0, 3), value=float("nan")) for tensor in packed]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        kwargs[name] = torch.cat([kwargs[name], kwargs[name][-1:].expand(2)])
    output, _ = attention.attend(None, *padded, None, scaling=SCALING, softcap=softcap, **kwargs)
    assert output[:, :-3].equal(expected)
    assert not output[:, -3:].any()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_nan_stays_in_its_sequence(softcap):
    query, key, value = packed_batch()
    first_q, first_k = LENGTHS[0]
    for tensor, length in ((query, first_q), (key, first_k), (value, first_k)):
        tensor[:, :, :length] = float("nan")
    output, _ = attention.attend(
        None, query, key, value, None, scaling=SCALING, softcap=softcap, **step_kwargs()
    )
    assert output[:, :first_q].isnan().all()
    assert output[:, first_q:].isfinite().all()


# One kernel for all sequences: its call is checked without a GPU, on tensors without data.


@pytest.fixture
def varlen_calls(monkeypatch):
    """Calls of torch's variable-length attention, each of which its own shape function has accepted."""
    calls = []

    def recorded(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    real = attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", recorded)
    monkeypatch.setattr(attention, "choose_attention_path", lambda *features: "varlen")
    return calls


@pytest.mark.parametrize(("sliding_window", "window_size"), [(None, (-1, 0)), (1, (0, 0)), (6, (5, 0))])
def test_varlen_reads_nothing_from_the_device(varlen_calls, sliding_window, window_size):
    """A meta tensor has no data, so a look at it by the host would raise."""
    packed = [tensor.to("meta", torch.bfloat16) for tensor in packed_batch()]
    kwargs = step_kwargs(device="meta")
    output, _ = attention.attend(None, *packed, None, scaling=0.3, sliding_window=sliding_window, **kwargs)
    assert output.shape == (1, packed[0].shape[2], NUM_HEADS, HEAD_DIM)
    [(args, named)] = varlen_calls
    assert [tensor.shape[1:] for tensor in args[:3]] == [(heads, HEAD_DIM) for heads in (4, 2, 2)]
    assert args[3:] == tuple(kwargs.values())
    assert (named["scale"], named["window_size"]) == (0.3, window_size)


def test_varlen_traces_as_one_graph(varlen_calls):
    graphs = []

    def capture(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def layer(query, key, value, **kwargs):
        return attention.attend(None, query, key, value, None, scaling=SCALING, **kwargs)[0]

    packed = [tensor.to("meta", torch.bfloat16) for tensor in packed_batch()]
    output = torch.compile(layer, backend=capture, fullgraph=True)(*packed, **step_kwargs(device="meta"))
    assert output.shape == (1, packed[0].shape[2], NUM_HEADS, HEAD_DIM)
    assert len(graphs) == 1


# Which path is taken


@pytest.fixture
def capability(monkeypatch):
    def set_capability(*version):
        attention._choose.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)

    yield set_capability
    attention._choose.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "softcap", "sinks", "version", "path"),
    [
        (CUDA, torch.bfloat16, 128, False, False, (9, 0), "varlen"),
        (CUDA, torch.float16, 256, False, False, (8, 0), "varlen"),
        (CUDA, torch.float16, 128, False, False, (7, 5), "per_sequence"),
        (CUDA, torch.float32, 128, False, False, (9, 0), "per_sequence"),
        (CUDA, torch.bfloat16, 512, False, False, (9, 0), "per_sequence"),
        (CUDA, torch.bfloat16, 100, False, False, (9, 0), "per_sequence"),
        (CUDA, torch.bfloat16, 128, True, False, (9, 0), "reference"),
        (CUDA, torch.bfloat16, 64, False, True, (9, 0), "reference"),
        (torch.device("cpu"), torch.bfloat16, 128, False, False, None, "per_sequence"),
        (torch.device("cpu"), torch.float32, 128, False, True, None, "reference"),
    ],
)
def test_the_path_of_a_device_and_a_model(capability, device, dtype, head_dim, softcap, sinks, version, path):
    capability(*(version or ()))
    assert attention.choose_attention_path(device, dtype, head_dim, softcap, sinks) == path


@pytest.mark.parametrize(
    ("model_type", "values", "path"),
    [
        ("qwen3", {}, "varlen"),
        ("llama", {"hidden_size": 4096, "num_attention_heads": 8}, "per_sequence"),
        ("gemma2", {}, "reference"),
        ("gemma2", {"attn_logit_softcapping": None}, "varlen"),
        ("gpt_oss", {}, "reference"),
    ],
)
def test_the_path_of_a_config(capability, model_type, values, path):
    capability(9, 0)
    config = AutoConfig.for_model(model_type, **values)
    assert describe_attention_path(config, CUDA, torch.bfloat16) == path
    assert describe_attention_path(config, torch.device("cpu"), torch.float32) != "varlen"


def test_every_model_type_with_sinks_is_known():
    """The others that hand sinks to an attention function are refused, or are no causal language models."""
    elsewhere = {"deepseek_v4", "hy_v4", "hy_v4_vl", "mimo_v2_flash", "openai_privacy_filter"}
    models = Path(transformers.__file__).parent / "models"
    with_sinks = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"s_aux=self\.sinks", path.read_text(encoding="utf-8"))
    }
    assert with_sinks == attention.MODEL_TYPES_WITH_SINKS | elsewhere


# Inside transformers


def test_the_function_is_registered_without_a_mask_function():
    from transformers import AttentionMaskInterface

    assert AttentionInterface()[ATTENTION_NAME] is attention.attend
    assert ATTENTION_NAME not in AttentionMaskInterface()


def paged_layers(model, num_rows, num_tokens, page_size=4):
    """Pages for every layer and a block table each, in the cache's layout: the keys' page, then the values'."""
    config = model.config
    layers = []
    for layer in model.model.layers:
        window = layer.self_attn.sliding_window or 0
        width = -(-min(num_tokens, window or num_tokens) // page_size)
        entries = 2 * torch.randperm(num_rows * width, dtype=torch.int32).view(num_rows, width)
        pages = torch.full((2 * num_rows * width + 1, page_size, 2, config.head_dim), float("nan"))
        layers.append(LayerPages(pages, entries, torch.tensor(1, dtype=torch.int32), window))
    return layers


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_decode_steps_equal_generate(new_model, make_prompts, reference, family):
    """Two rows are fed token by token, prompt and completion alike, beyond the window; one of them ends early."""
    model, num_new = new_model(family), 12
    prompts = make_prompts((25, 18))
    expected = [reference(family, prompt, num_new) for prompt in prompts]
    model.config._attn_implementation = ATTENTION_NAME
    forward = PlainForward(model, paged_layers(model, len(prompts), num_tokens=25 + num_new))
    tokens = [list(prompt) for prompt in prompts]
    for position in range(25 + num_new - 1):
        is_active = [position < len(prompt) + num_new - 1 for prompt in prompts]
        ids = [t[position] if active else 0 for t, active in zip(tokens, is_active, strict=True)]
        places = [position if active else -1 for active in is_active]
        with torch.no_grad():
            chosen = forward(torch.tensor(ids), torch.tensor(places, dtype=torch.int32)).argmax(-1)
        for row, active in enumerate(is_active):
            if active and position + 1 == len(tokens[row]):
                tokens[row].append(int(chosen[row]))
    assert [tuple(t[len(p) :]) for t, p in zip(tokens, prompts, strict=True)] == expected


def test_decode_traces_as_one_graph(new_model):
    model = new_model("gemma2")
    model.config._attn_implementation = ATTENTION_NAME
    inputs = torch.tensor([5, 6]), torch.tensor([0, -1], dtype=torch.int32)
    layers = paged_layers(model, num_rows=2, num_tokens=8)
    compiled = torch.compile(PlainForward(model, layers), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), PlainForward(model, layers)(*inputs))


def test_a_window_that_the_model_does_not_pass_is_refused(new_model):
    model = new_model("gemma3")
    layers = [replace(layer, window=0) for layer in paged_layers(model, num_rows=1, num_tokens=1)]
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(UnsupportedModelError, match=r"over a window of 16 tokens, while .* keeps all tokens"):
        PlainForward(model, layers)(torch.tensor([1]), torch.tensor([0], dtype=torch.int32))


def test_a_call_without_a_paged_cache_is_told_why(new_model):
    model = new_model("qwen3")
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(EngineError, match="'cbexp_flash' runs inside SyncCBDriver alone"):
        model(torch.tensor([[1, 2, 3]]))


def test_spans_leave_out_sequences_without_queries():
    spans = read_spans(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 5, 5, 9]))
    assert [(s.queries, s.keys, s.num_past) for s in spans] == [
        (slice(0, 2), slice(0, 5), 3),
        (slice(2, 3), slice(5, 9), 3),
    ]
