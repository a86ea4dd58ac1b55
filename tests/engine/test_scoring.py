"""Scores of given completions are those of a plain forward over prompt and completion, however they are batched."""

import random

import pytest
import torch

from cbexp.engine import EngineError, Sampling, Scores, scoring
from tests.engine.driving import check_cache_at_rest, drive
from tests.engine.forward.models import build, with_lora
from tests.engine.models import VOCAB_SIZE


def random_completions(lengths, seed=1):
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in lengths]


@torch.no_grad()
def score_plainly(model, prompt, completion, temperature):
    ids = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    targets = ids[0, len(prompt) :, None]
    return [(logits / t).log_softmax(-1).gather(1, targets)[:, 0].tolist() for t in (temperature, 1)]


def check_scores(driver, model, prompts, completions, temperature=0.7, tolerance=1e-4):
    scores = driver.score(prompts, completions, temperature=temperature)
    assert len(scores) == len(prompts)
    for prompt, completion, own in zip(prompts, completions, scores, strict=True):
        expected = score_plainly(model, prompt, completion, temperature)
        assert own.logprobs_model == pytest.approx(expected[0], abs=tolerance)
        assert own.logprobs_raw == pytest.approx(expected[1], abs=tolerance)
    check_cache_at_rest(driver)
    return scores


# Groups of three, of one, of two, of a prompt of one token; the first group once more; a completion of one token.
GROUP_SIZES = {0: 3, 1: 1, 2: 2, 3: 3}


@pytest.fixture(scope="module")
def cases(make_prompts):
    distinct = make_prompts((17, 40, 9, 1))
    prompts = [distinct[i] for i, size in GROUP_SIZES.items() for _ in range(size)]
    prompts += [distinct[0], distinct[0]]
    completions = random_completions((5, 30, 1, 20, 9, 0, 3, 1, 12, 7, 30))
    completions[-1] = completions[1]  # whose tokens a cache that shares would have
    return prompts, completions


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_batch_tokens": 11, "allow_block_sharing": True}),
        ("qwen3", {"num_blocks": 9, "max_batch_tokens": 24, "allow_block_sharing": True}),
        ("llama", {"num_blocks": 11, "max_requests_per_batch": 2, "scheduler": "prefill_first"}),
        ("llama", {"attn_implementation": "eager", "max_batch_tokens": 16}),
        ("gemma2", {"max_batch_tokens": 13}),
        ("gemma3", {"num_blocks": 12}),
        ("mistral", {"max_batch_tokens": 19}),
        ("qwen2", {"fusion": "projections"}),
        ("qwen3, wide heads", {"fusion": "layers", "max_batch_tokens": 24}),
    ],
    ids=str,
)
def test_scores_are_those_of_a_plain_forward(
    shared_model, make_driver_anywhere, cases, family, settings, monkeypatch
):
    """In chunks of prompts and of logits, in groups, forked and crowded, beside what a cache would share."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 7 * 4 * VOCAB_SIZE)
    model = shared_model(family)
    check_scores(make_driver_anywhere(model, **settings), model, *cases)


@pytest.fixture
def count_tokens(monkeypatch):
    """Model -> a list of the tokens that each of its batches has read."""

    def count(model):
        counts = []
        embed = model.get_input_embeddings().forward
        monkeypatch.setattr(
            model.get_input_embeddings(), "forward", lambda ids: counts.append(ids.numel()) or embed(ids)
        )
        return counts

    return count


def test_a_groups_prompt_is_read_once_and_logits_are_few(new_model, make_driver, make_prompts, count_tokens):
    model = new_model("qwen3")
    driver, counts, most = make_driver(model), count_tokens(model), []
    model.lm_head.register_forward_hook(lambda head, args, logits: most.append(logits.shape[-2]))
    prompts, completions = make_prompts((40, 30)), random_completions((5, 6, 7, 8))
    driver.score([prompts[0]] * 3 + [prompts[1]], completions)
    assert counts == [39 + 30 + 7, 5 + 6 + 7]
    assert sum(most) == sum(map(len, completions))
    assert scoring.rows_at_once(151_936) == 220


def test_with_and_without_the_adapter(make_driver, make_prompts):
    """Runners stay: the next drive finds all as it was. What is scored is what drives have chosen, or would not."""
    model = with_lora(build("Qwen3"))
    driver = make_driver(model, num_blocks=60)
    prompts = make_prompts((12, 12, 30))
    completions = drive(driver, prompts)
    decoder = driver._engine.decoder
    runner, prepared = decoder._greedy.runner, set(decoder._greedy.prepared)
    adapted = check_scores(driver, model, prompts, completions)
    with model.disable_adapter():
        plain = check_scores(driver, model, prompts, completions)
        assert plain != adapted
    driver.add_requests(prompts)  # they wait
    driver.sleep()
    assert check_scores(driver, model, prompts, completions) == adapted
    assert [completion.completion_ids for completion in driver.drive_until_empty().values()] == completions
    assert (decoder._greedy.runner, decoder._greedy.prepared) == (runner, prepared)
    assert driver._engine.decoder is decoder
    assert max(max(one.logprobs_raw) for one in adapted) <= 0


def test_the_temperature_is_that_of_the_model_distribution(shared_model, make_driver, make_prompts):
    model, prompts, completions = shared_model("qwen3"), make_prompts((5,)), random_completions((6,))
    driver = make_driver(model)
    for temperature in (None, 0, 1, 1.0):
        [scores] = driver.score(prompts, completions, temperature=temperature)
        assert scores.logprobs_model == scores.logprobs_raw
    check_scores(driver, model, prompts, completions, temperature=0.01, tolerance=2e-3)
    for temperature in (-1, float("nan"), float("inf"), "hot", True):
        with pytest.raises(ValueError, match=r"score: temperature=.* must be a number of at least 0"):
            driver.score(prompts, completions, temperature=temperature)
    sampled = make_driver(model, sampling=Sampling(temperature=0.7, top_k=3))
    assert sampled.score(prompts, completions) == driver.score(prompts, completions, temperature=0.7)


@pytest.mark.parametrize(
    "settings", [{}, {"fusion": "layers"}, {"fusion": "layers", "fp32_head": True}], ids=str
)
def test_scores_of_sampled_completions_are_their_log_probabilities(
    new_model, make_driver_anywhere, make_prompts, settings
):
    model = new_model("qwen3, wide heads")
    if "fp32_head" in settings:
        model.bfloat16()
    sampling = Sampling(temperature=0.6, top_p=0.9, repetition_penalty=1.2)
    driver = make_driver_anywhere(model, sampling=sampling, logprobs=True, max_batch_tokens=24, **settings)
    driver.add_requests(make_prompts((30, 3)), num_generations=2)
    completions = list(driver.drive_until_empty().values())
    scores = driver.score([one.prompt_ids for one in completions], completions)
    tolerance = 0.2 if "fp32_head" in settings else 1e-4
    for completion, own in zip(completions, scores, strict=True):
        assert own.logprobs_model == pytest.approx(completion.logprobs_model, abs=tolerance)
        assert own.logprobs_raw == pytest.approx(completion.logprobs_raw, abs=tolerance)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1]], [], "There are 1 prompts and 0 completions: one each."),
        ([[1], []], [[1], [1]], r"prompts\[1\] is empty"),
        ([[1], [2]], [[1], [1, 97]], r"completions\[1\]\[1\] is 97: token ids of this model are 0 to 96"),
        ([[1]], [["a"]], r"completions\[0\]\[0\] is 'a' \(str\)"),
        ([[1]], [None], r"completions\[0\] is not a sequence of token ids: None"),
        ([[1]], iter([[1]]), r"completions=.* must be a list of lists of token ids"),
        (
            [[1], [1] * 200],
            [[1], [1] * 57],
            r" 200 \+ 57 = 257 tokens, which exceed the model's 256",
        ),
        ([[1] * 33], [[1] * 33], "= 66 tokens, and the cache holds 64 of one request: raise num_blocks"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_index(shared_model, make_driver, prompts, completions, message):
    driver = make_driver(shared_model("qwen3"), num_blocks=8)
    with pytest.raises(ValueError, match=message):
        driver.score(prompts, completions)


def test_the_ends_of_what_can_be_scored(shared_model, make_driver, new_model):
    model = shared_model("qwen3")
    driver = make_driver(model)
    assert driver.score([], []) == []
    assert driver.score([[1], [2]], [[], ()]) == [Scores((), ())] * 2
    assert driver._engine is None
    check_scores(driver, model, [[1] * 200, [3]], random_completions((56, 255)))
    check_scores(make_driver(model, num_blocks=8), model, [[1] * 33], random_completions((32,)))
    broken = new_model("qwen3")
    with torch.no_grad():
        broken.get_input_embeddings().weight[7] = float("nan")
    scores = make_driver(broken).score([[7, 1], [2, 3]], [[4, 5], [6, 8]])
    assert all(value != value for value in scores[0].logprobs_raw)
    assert scores[1].logprobs_raw == pytest.approx(score_plainly(broken, [2, 3], [6, 8], 1)[1], abs=1e-4)


def test_an_error_on_the_way_leaves_the_driver_usable(new_model, make_driver, make_prompts, references):
    model, prompts = new_model("qwen3"), make_prompts((17, 40))
    refused = []

    def score(index, info):
        with pytest.raises(EngineError, match=r"score\(\) was called inside a drive"):
            driver.score(prompts, prompts)
        refused.append(index)

    driver = make_driver(model, on_step=score, max_batch_tokens=24, num_blocks=60)

    def fail(head, args):
        raise ArithmeticError

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        driver.score(prompts, prompts)
    check_cache_at_rest(driver)
    assert "forward" not in vars(model.model)
    hook.remove()
    check_scores(driver, model, prompts, prompts)
    assert drive(driver, prompts) == references("qwen3", prompts)
    assert refused


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{"compile_mode": "cuda_graph"}, {"compile_mode": "reduce_overhead"}], ids=str
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.usefixtures("exact_fp32")
def test_graphs_outlive_another_state_of_the_model(
    make_driver, cases, make_prompts, settings, dtype, tolerance
):
    prompts = make_prompts((12, 12, 30))
    for model in (with_lora(build("Qwen3", weight_std=0.1)), build("Qwen3", weight_std=0.1)):
        model.to("cuda", dtype)
        driver = make_driver(model, num_blocks=60, **settings)
        expected = drive(driver, prompts)
        stats = driver.compile_stats
        check_scores(driver, model, *cases, tolerance=tolerance)
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                check_scores(driver, model, *cases, tolerance=tolerance)
        assert drive(driver, prompts) == expected
        for name in ("graphs", "programs", "recompiles", "capture_s"):
            assert driver.compile_stats[name] == stats[name]
