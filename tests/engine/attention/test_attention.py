"""Attention over packed sequences: each path against transformers' eager functions, and which path is taken."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from cbexp.engine import EngineError, UnsupportedModelError
from cbexp.engine.attention import ATTENTION_NAME, attention, describe_attention_path, reference
from cbexp.engine.forward import PlainForward
from tests.engine.forward.models import build_buffers
from tests.engine.kernels.cases import packed_batch, step_kwargs

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
SCALING = HEAD_DIM**-0.5
# (queries, keys) of each sequence: whole prompts, decoding rows, chunks with a past, one token alone.
LENGTHS = ((5, 5), (1, 9), (4, 20), (1, 1), (17, 17), (3, 4))


def attend_eagerly(query, key, value, lengths, window, softcap, sinks):
    """Transformers' own function, sequence by sequence, with a mask made here."""
    module = SimpleNamespace(num_key_value_groups=NUM_HEADS // NUM_KV_HEADS, training=False, sinks=sinks)
    eager = modeling_gemma2 if sinks is None else modeling_gpt_oss
    outputs, start_q, start_k = [], 0, 0
    for len_q, len_k in lengths:
        queries, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        age = torch.arange(len_k - len_q, len_k)[:, None] - torch.arange(len_k)
        mask = torch.where((age >= 0) & (age < (window or len_k)), 0.0, float("-inf"))
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
    packed = packed_batch(LENGTHS)
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    output, weights = attention.attend(None, *packed, None, **options, **step_kwargs(LENGTHS))
    expected = attend_eagerly(*packed, LENGTHS, window, softcap, sinks)
    assert weights is None
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (6, 30.0)])
def test_nan_and_padding_change_no_other_sequence(window, softcap):
    """A first sequence of NaN; at the end, as transformers pads, sequences of no length and tokens that belong to none.

    Lengths of the keys come by the type of the layer.
    """
    packed, kwargs = packed_batch(LENGTHS), step_kwargs(LENGTHS)
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap}
    expected, _ = attention.attend(None, *packed, None, **options, **kwargs)
    first = LENGTHS[0][0]
    for tensor in packed:
        tensor[:, :, :first] = float("nan")
    padded = [pad(tensor, (0, 0, 0, 3), value=float("nan")) for tensor in packed]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        kwargs[name] = torch.cat([kwargs[name], kwargs[name][-1:].expand(2)])
    own, other = ("full_attention", "sliding_attention")[:: -1 if window else 1]
    for name in ("cu_seq_lens_k", "max_length_k"):
        kwargs[name] = {other: "not for this layer", own: kwargs[name]}
    output, _ = attention.attend(None, *padded, None, **options, **kwargs)
    assert output[:, :first].isnan().all()
    assert output[:, first:-3].equal(expected[:, first:])
    assert not output[:, -3:].any()


# One kernel for all sequences: its call is checked without a GPU, on tensors without data.


@pytest.mark.parametrize(("sliding_window", "window_size"), [(None, (-1, 0)), (1, (0, 0)), (6, (5, 0))])
def test_varlen_reads_nothing_from_the_device(monkeypatch, sliding_window, window_size):
    """A meta tensor has no data, so a look at it by the host would raise; a compiler takes the call as it is."""
    calls = []

    def recorded(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    def layer(query, key, value):
        return attention.attend(None, query, key, value, None, **options)[0]

    real = attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", recorded)
    monkeypatch.setattr(attention, "choose_attention_path", lambda *features: "varlen")
    lengths = step_kwargs(LENGTHS, "meta")
    options = {"scaling": 0.3, "sliding_window": sliding_window, **lengths}
    packed = [tensor.to("meta") for tensor in packed_batch(LENGTHS, dtype=torch.bfloat16)]
    assert layer(*packed).shape == (1, packed[0].shape[2], NUM_HEADS, HEAD_DIM)
    [(args, named)] = calls
    assert [tensor.shape[1:] for tensor in args[:3]] == [(heads, HEAD_DIM) for heads in (4, 2, 2)]
    assert args[3:] == tuple(lengths.values())
    assert (named["scale"], named["window_size"]) == (0.3, window_size)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert compiled(*packed).shape == (1, packed[0].shape[2], NUM_HEADS, HEAD_DIM)


# Which path is taken


@pytest.mark.parametrize(
    ("model_type", "values", "dtype", "capability", "path"),
    [
        ("qwen3", {"head_dim": 256}, torch.float16, (8, 0), "varlen"),
        ("gemma2", {"attn_logit_softcapping": None}, torch.bfloat16, (9, 0), "varlen"),
        ("qwen3", {}, torch.float16, (7, 5), "per_sequence"),
        ("qwen3", {}, torch.float32, (9, 0), "per_sequence"),
        ("qwen3", {"head_dim": 100}, torch.bfloat16, (9, 0), "per_sequence"),
        ("llama", {"hidden_size": 4096, "num_attention_heads": 8}, torch.bfloat16, (9, 0), "per_sequence"),
        ("gemma2", {}, torch.bfloat16, (9, 0), "reference"),
        ("gpt_oss", {}, torch.bfloat16, (9, 0), "reference"),
    ],
)
def test_the_path_of_a_model_and_a_device(monkeypatch, model_type, values, dtype, capability, path):
    monkeypatch.setattr(attention, "_choose", attention._choose.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = AutoConfig.for_model(model_type, **values)
    assert describe_attention_path(config, torch.device("cuda:0"), dtype) == path
    on_cpu = "reference" if path == "reference" else "per_sequence"
    assert describe_attention_path(config, torch.device("cpu"), dtype) == on_cpu


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


def test_a_window_that_the_model_does_not_pass_is_refused(new_model):
    """Such a model would window its attention through masks alone."""
    model = new_model("gemma3")
    layers = [replace(layer, window=0) for layer in build_buffers(model, 1).layers]
    with pytest.raises(UnsupportedModelError, match=r"over a window of 16 tokens, while .* keeps all tokens"):
        PlainForward(model, layers)(torch.tensor([1]), torch.tensor([0], dtype=torch.int32))


def test_a_call_without_a_paged_cache_is_told_why(new_model):
    model = new_model("qwen3")
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(EngineError, match="'cbexp_flash' runs inside SyncCBDriver alone"):
        model(torch.tensor([[1, 2, 3]]))
