"""Drawing tokens: which are kept, how often each is drawn, its log-probabilities, and how rows end then."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbexp.engine.buffers import NOT_FINITE, SamplingColumn, allocate_buffers, allocate_sampling
from cbexp.engine.sampling import HeadInputs, advance, finish_step, philox, sample
from tests.engine.kernels.cases import mostly_slow, randn

CPU = torch.device("cpu")
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


def bits_of(ids, vocab):
    words = torch.zeros(-(-vocab // 32), dtype=torch.int64)
    for i in ids:
        words[i // 32] |= 1 << (i % 32)
    return words.int()


class Case:
    """Arguments of `sample` for rows of the same settings, each of a generation of its own."""

    def __init__(self, logits, positions=None, seen=(), sets=((),), key=(7, -9), **settings):
        rows, vocab = logits.shape
        own = allocate_sampling(max_rows=rows, max_burst=2, vocab_size=vocab, device=CPU)
        floats = own.settings.view(torch.float32)
        for name, value in (DEFAULTS | settings).items():
            column = SamplingColumn[name.upper()]
            (floats if isinstance(value, float) else own.settings)[:, column] = value
        own.settings[:, SamplingColumn.GENERATION] = torch.arange(rows, dtype=torch.int32)
        own.seen.copy_(bits_of(seen, vocab))
        for line, ids in zip(own.token_sets, sets, strict=False):
            line.copy_(bits_of(ids, vocab))
        own.key.copy_(torch.tensor(key))
        self.buffers, self.logits = own, logits
        self.positions = torch.full((rows,), 5, dtype=torch.int32) if positions is None else positions

    def draw(self, rows=slice(None)):
        own = self.buffers
        return sample(
            self.logits[rows],
            own.settings[rows],
            self.positions[rows],
            own.seen[rows],
            own.token_sets,
            own.key,
        )


def expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seen=()):
    """By transformers, float64: the distribution [vocab]."""
    scores = logits[None].double()
    if repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(torch.tensor([list(seen)]), scores)
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores[0].softmax(-1)


def check_frequencies(ids, probabilities):
    """Pearson's chi-square, rare tokens as one; five standard deviations."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    wanted = probabilities * len(ids)
    assert not counts[probabilities == 0].any()
    is_rare = wanted < 5
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    wanted = torch.cat([wanted[~is_rare], wanted[is_rare].sum()[None]])
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    degrees = max(1, len(wanted) - 1)
    assert ((counts - wanted) ** 2 / wanted).sum() < degrees + 5 * math.sqrt(2 * degrees) + 5


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7, "seen": (0, 3, 40)},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.6, "seen": (1, 2)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_and_logprobs(settings):
    """In a vocabulary of several tiles, the last one short."""
    logits = randn(1, 300) * 2
    probabilities = expected(logits[0], **settings)
    case = Case(logits.expand(4000, -1), **settings)
    ids, of_ids, logprobs = case.draw()
    check_frequencies(ids, probabilities)
    assert of_ids.equal(logits[0, ids])
    model = (logits[0].double() / settings.get("temperature", 1.0)).log_softmax(-1)
    kept_mass = model.exp()[probabilities > 0].sum().expand(len(ids))
    wanted = [model[ids], probabilities.log()[ids], logits[0].double().log_softmax(-1)[ids], kept_mass]
    torch.testing.assert_close(logprobs, torch.stack(wanted, 1).float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("num_draws", mostly_slow(10, 400))
def test_frequencies_in_a_large_vocabulary(num_draws):
    logits = randn(1, 151_936) * 3
    check_frequencies(Case(logits.expand(num_draws, -1), top_p=0.5).draw()[0], expected(logits[0], top_p=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_tokens_are_those_of_transformers(dtype):
    """By the mass that is kept, ties at the edge aside; in bfloat16 they are many."""
    logits = randn(40, 1000, seed=3).to(dtype)
    for settings in SETTINGS[3:7]:
        kept_mass = Case(logits, **settings).draw()[2][:, 3]
        for row, mass in zip(logits, kept_mass, strict=True):
            kept = expected(row, **settings) > 0
            tied = row.float() >= row[kept].float().min()
            torch.testing.assert_close(mass, row.float().softmax(-1)[tied].sum(), rtol=1e-5, atol=1e-6)


def test_rows_are_independent():
    """The same bits alone, among others, beside rows that are not finite, and again."""
    logits = randn(9, 70_000, seed=1)
    case = Case(logits, top_k=40, top_p=0.9, repetition_penalty=1.2, seen=(3, 4))
    clean = case.draw()
    alone = [torch.cat(each) for each in zip(*(case.draw(slice(n, n + 1)) for n in range(9)), strict=True)]
    assert all(map(torch.equal, clean, alone))
    logits[4, 17] = math.nan
    logits[5, 60_000] = math.inf
    logits[6] = -math.inf
    others = [0, 1, 2, 3, 7, 8]
    poisoned = case.draw()
    assert poisoned[0][4:7].tolist() == [NOT_FINITE] * 3
    assert all(now[others].equal(before[others]) for now, before in zip(poisoned, clean, strict=True))


def test_suppressed_and_banned_tokens():
    logits = randn(500, 40)
    settings = {"sets": ((), (0, 5), range(40)), "stop_set": 1, "first_stop": 7}
    positions = torch.tensor([5, 6] * 250, dtype=torch.int32)
    ids, _, logprobs = Case(logits, positions, **settings).draw()
    assert not torch.isin(ids[::2], torch.tensor([0, 5])).any()
    assert torch.isin(ids[1::2], torch.tensor([0, 5])).any()
    of_rest = 1 - logits.softmax(-1)[:, [0, 5]].sum(1)
    torch.testing.assert_close(logprobs[::2, 3], of_rest[::2])
    assert (Case(logits, sets=settings["sets"], suppressed_set=2).draw()[0] == NOT_FINITE).all()


def test_temperature_zero_is_greedy():
    logits = randn(20, 300).bfloat16()
    logits[:, [7, 200]] = 9.0
    ids, _, logprobs = Case(logits, temperature=0.0, top_p=0.1, top_k=3).draw()
    assert ids.tolist() == [7] * 20
    of_token = logits.float().log_softmax(-1)[:, 7]
    wanted = torch.stack([of_token, torch.zeros(20), of_token, of_token.exp()], 1)
    torch.testing.assert_close(logprobs, wanted)


@pytest.mark.parametrize(
    ("word", "expected_words"),
    [
        (0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (-1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_known_answers(word, expected_words):
    """Of the authors' Random123."""
    words = philox([torch.tensor([word])] * 4, torch.tensor([word, word], dtype=torch.int32))
    assert " ".join(f"{int(each):08x}" for each in words) == expected_words


def test_sampled_rows_advance():
    """By their last token, a stop id that is allowed, a logit that is not finite; what was seen, what is stored."""
    own = allocate_sampling(max_rows=6, max_burst=2, vocab_size=40, device=CPU)
    own.token_sets[1] = bits_of([33], 40)
    own.settings[:, SamplingColumn.STOP_SET] = 1
    own.settings[1, SamplingColumn.FIRST_STOP] = 12
    own.settings[4].view(torch.float32)[SamplingColumn.REPETITION_PENALTY] = 1.5
    plain = allocate_buffers({}, max_rows=6, max_burst=2, eos_token_ids=(), device=CPU)
    buffers = type(plain)(**(vars(plain) | {"sampling": own}))
    buffers.positions.copy_(torch.tensor([10, 10, 10, -1, 10, 10]))
    buffers.remaining.copy_(torch.tensor([5, 5, 5, 5, 5, 1]))
    logprobs = randn(6, 4)
    advance(buffers, torch.tensor([33, 33, NOT_FINITE, 1, 39, 2]), torch.zeros(6), logprobs)
    assert buffers.outputs[0].tolist() == [33, 33, NOT_FINITE, -1, 39, 2]
    assert buffers.positions.tolist() == [-1, 11, -1, -1, 11, -1]
    assert buffers.token_ids.tolist() == [0, 33, 0, 0, 39, 0]
    assert own.logprobs[0].equal(logprobs)
    assert own.seen.equal(torch.stack([bits_of([39] if row == 4 else [], 40) for row in range(6)]))
    finish_step(buffers, HeadInputs(randn(6, 16), randn(40, 16, seed=1)))
    assert buffers.outputs[1, [0, 2, 3, 5]].tolist() == [-1] * 4
    assert (buffers.outputs[1, [1, 4]] >= 0).all()


def test_greedy_rows_end_where_their_best_logit_is_not_finite():
    buffers = allocate_buffers({}, max_rows=3, max_burst=1, eos_token_ids=(), device=CPU)
    buffers.positions.fill_(3)
    buffers.remaining.fill_(9)
    logits = randn(3, 20)
    logits[1, 4] = math.nan
    finish_step(buffers, logits)
    assert buffers.outputs[0].tolist() == [int(logits[0].argmax()), NOT_FINITE, int(logits[2].argmax())]
    assert buffers.positions.tolist() == [4, -1, 4]
