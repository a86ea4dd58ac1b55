"""On a CUDA device: the paths of packed attention against the plain one in fp32, and what they ask of the host."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from cbexp.engine.attention import attend_plainly, read_spans
from cbexp.engine.attention.attention import attend, choose_attention_path
from tests.engine.kernels.cases import packed_batch, step_kwargs

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
