"""The kernels that sample on a GPU, at the size of a real vocabulary, against plain torch."""

import pytest
import torch

from cbexp.engine.sampling import sample, sample_plainly
from tests.engine.kernels.cases import build_sampling_case, check_sampled

VOCAB_SIZE = 151_936
ROWS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "penalty": 1.3, "suppressed": True, "is_early": True},
    {"temperature": 1.0, "top_p": 0.0},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_kernels_choose_what_plain_torch_chooses(num_rows, spread, dtype):
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = (spread * torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator)).to(dtype)
    case = build_sampling_case(logits, [ROWS[(index + 1) % len(ROWS)] for index in range(num_rows)], "cuda")
    actual = sample(*case)
    check_sampled(actual, sample_plainly(*case))
    # The same bits alone, and in another place.
    alone = sample(*(tensor[:1] for tensor in case[:4]), *case[4:])
    assert all(torch.equal(a, b[:1]) for a, b in zip(alone, actual, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS[1:6], ids=str)
def test_draws_have_the_distribution_that_was_asked_for(row):
    """Chi-square over the most likely tokens and the rest, of half a million draws."""
    generator = torch.Generator("cuda").manual_seed(5)
    logits = 3 * torch.randn(1, VOCAB_SIZE, device="cuda", generator=generator)
    num_rows, counts = 512, torch.zeros(VOCAB_SIZE, device="cuda")
    case = build_sampling_case(logits.expand(num_rows, -1).contiguous(), [row] * num_rows, "cuda")
    for position in range(1000):
        case[2].fill_(position)
        counts += torch.bincount(sample(*case)[0], minlength=VOCAB_SIZE)
    num_draws = 1000 * num_rows
    kept = logits[0].double() / row["temperature"]
    if "top_k" in row:
        kept = kept.masked_fill(kept < kept.topk(row["top_k"]).values[-1], -torch.inf)
    if "top_p" in row:
        ordered, order = kept.softmax(0).sort(descending=True)
        kept = kept.masked_fill(
            torch.zeros_like(kept, dtype=torch.bool).scatter(
                0, order, ordered.cumsum(0) - ordered >= row["top_p"]
            ),
            -torch.inf,
        )
    expected = kept.softmax(0) * num_draws
    assert counts[expected == 0].sum() == 0
    often = expected >= 50
    groups = torch.cat([counts[often].double(), counts[~often].sum()[None].double()])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    groups, wanted = groups[wanted > 5], wanted[wanted > 5]
    statistic = ((groups - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert abs(float(statistic) - degrees) < 5 * (2 * degrees) ** 0.5
