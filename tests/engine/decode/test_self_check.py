"""The self-check: passes for what is right, names what is wrong, and leaves buffers and cache as they were."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

from cbexp.engine.buffers import allocate_buffers
from cbexp.engine.decode.self_check import (
    SelfCheckResult,
    Tolerance,
    _rounding_noise,
    check_bucket,
    summarize_errors,
)
from cbexp.engine.decode.step import run_step
from cbexp.engine.forward import PlainForward
from cbexp.engine.sampling import advance, choose
from cbexp.engine.types import EngineError
from tests.engine.decode_fixtures import (
    VOCAB_SIZE,
    build_buffers,
    build_decode_model,
    build_pools,
    set_rows,
    state_of,
)
from tests.engine.driving import drive

NAN = float("nan")
FAMILIES = ("qwen3", "gemma2")


@pytest.fixture(scope="module")
def models():
    return {family: build_decode_model(family) for family in FAMILIES}


class Setting:
    """A model, and buffers in the middle of a burst; `check` takes a step or a forward in place of the right one."""

    def __init__(self, model, family="qwen3", max_rows=7, num_blocks=30):
        self.model = model
        pools = build_pools(num_blocks, family=family, dtype=model.dtype)
        self.buffers = build_buffers(max_rows, pools=pools, family=family)
        self.forward = PlainForward(model, self.buffers.layers)
        set_rows(self.buffers, [3, 9, -1, 17])

    def right_step(self, rows):
        run_step(self.forward, rows)

    def check(self, bucket=6, *, step=right_step, forward=None, tolerance=None):
        """`step(setting, rows of the bucket)` runs a step; `forward` is the eager one."""
        runner = SimpleNamespace(run=lambda bucket, num_steps: step(self, self.buffers.rows(bucket)))
        asked = {"bucket": bucket, "mode": "some_mode", "tolerance": tolerance}
        asked |= {"vocab_size": VOCAB_SIZE, "max_positions": 256}
        return check_bucket(runner, forward or self.forward, self.forward, self.buffers, **asked)

    def require_fault(self, message, bucket=6, **parts):
        """The check fails with `message`, and everything is as before."""
        before = state_of(self.buffers)
        with pytest.raises(EngineError, match=f"some_mode, batch of {bucket} rows: ({message})"):
            self.check(bucket, **parts)
        assert all(map(torch.equal, state_of(self.buffers), before))


@pytest.fixture
def setting(models):
    return Setting(models["qwen3"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bucket", "positions"), [(1, [8]), (6, [8, 7, 6, 5, 4, -1])])
def test_a_right_step_passes_and_leaves_no_trace(models, family, bucket, positions):
    """Its rows are at different positions, on pages of their own, and the first one opens its second page."""
    setting, seen = Setting(models[family], family), {}
    buffers = setting.buffers

    def step(setting, rows):
        seen["positions"] = rows.positions.tolist()
        seen["first_pages"] = [
            page for table in rows.block_tables.values() for page in table[:bucket, 0].tolist()
        ]
        setting.right_step(rows)

    before, tables = state_of(buffers), [table.clone() for table in buffers.block_tables.values()]
    result = setting.check(bucket, step=step)
    assert (result.bucket, result.num_rows, result.num_other_tokens) == (bucket, max(1, bucket - 1), 0)
    assert result.max_logprob_error == result.max_logit_error == result.max_cache_error == 0.0
    assert all(map(torch.equal, state_of(buffers), before))
    assert all(map(torch.equal, buffers.block_tables.values(), tables))
    assert seen["positions"] == positions
    assert len(set(seen["first_pages"])) == bucket * len(buffers.block_tables)
    assert min(seen["first_pages"]) >= buffers.pools["full_attention"].trash_page  # never sector 0


def test_a_token_without_keys_and_values_is_no_fault():
    """Transformers starts the embedding of a padding token as zeros."""
    model = build_decode_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:32] = 0
    setting = Setting(model)
    setting.check()

    def write_a_key(rows):
        layer = rows.layers[0]
        layer.pages[layer.block_table[1, 0] + layer.page_offset, 7] += (
            1e-3  # of the second row, at position 7
        )

    setting.require_fault("keys or values in the cache differ", step=faulty(after=write_a_key))


# What is wrong with the forward, or the step


@pytest.mark.parametrize(("factor", "error"), [(1.01, r"[\d.]+"), (NAN, "nan")])
def test_wrong_logits_of_the_forward_are_named(setting, factor, error):
    message = f"log-probabilities differ by up to {error}"
    setting.require_fault(message, forward=lambda *inputs: setting.forward(*inputs) * factor)


def test_a_reference_that_is_not_finite_is_the_models_fault():
    model = build_decode_model()
    with torch.no_grad():
        model.lm_head.weight[3] = NAN
    with pytest.raises(EngineError, match="model's own logits are not finite: look at its weights"):
        Setting(model).check()


def faulty(ids=lambda ids: ids, logits=lambda logits: logits, after=lambda rows: None):
    """A right step, but for a change of the tokens, of the logits that it leaves behind, or of all state."""

    def step(setting, rows):
        next_ids, best_logits = choose(setting.forward(rows.token_ids, rows.positions))
        advance(rows, ids(next_ids), logits(best_logits))
        after(rows)

    return step


def poisoning(row):
    return faulty(logits=lambda logits: logits.index_fill(0, torch.tensor(row), NAN))


def moving(name):
    return faulty(after=lambda rows: getattr(rows, name).add_(1))


def leave_none(setting, rows):
    """What an earlier step has left there is not taken for its own."""
    before = rows.best_logits.clone()
    setting.right_step(rows)
    rows.best_logits.copy_(before)


def write_no_keys(setting, rows):
    """A bucket that was captured without its cache write would read what the last run left there."""
    layer = rows.layers[1]
    pages = layer.pages[layer.page_offset.item() :: 6]
    kept = pages.clone()
    setting.right_step(rows)
    pages.copy_(kept)


def write_to_the_inactive_rows_slot(rows):
    rows.layers[2].pages[rows.block_tables["full_attention"][5, 0] + 4, 0] = 0.0


NO_WRITE = "the step changed keys or values in layer 2 that were not its to write"
NOT_A_NUMBER = "the step's best logits differ by up to nan"
NOT_ADVANCED = "the rows did not advance as their tokens say"
WRONG = r"the step's best logits differ (by up to|on average by) [\d.]+"
FAULTS = {
    "another token": (faulty(ids=lambda ids: (ids + 1) % VOCAB_SIZE), "a token is less likely than the best"),
    "an unknown token": (faulty(ids=lambda ids: ids * 0 + 61), "token 61 is not in the vocabulary"),
    "no keys": (write_no_keys, "keys or values in the cache differ by up to"),
    "another's slot": (faulty(after=write_to_the_inactive_rows_slot), NO_WRITE),
    "no logits": (leave_none, NOT_A_NUMBER),
    "NaN in the first row": (poisoning(0), NOT_A_NUMBER),
    "NaN in the last row": (poisoning(4), NOT_A_NUMBER),
    "smaller logits": (faulty(logits=lambda logits: logits * 0.8), WRONG),
    "larger logits": (faulty(logits=lambda logits: logits + 0.01), WRONG),
    "negative logits": (faulty(logits=lambda logits: -logits), WRONG),
    **{f"other {name}": (moving(name), NOT_ADVANCED) for name in ("positions", "remaining", "step")},
    "other outputs": (faulty(after=lambda rows: rows.outputs.clamp_(min=0)), NOT_ADVANCED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_step_is_named(setting, name):
    step, message = FAULTS[name]
    setting.check(6)
    setting.require_fault(message, step=step)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def wide_setting(request, models):
    """Of rows enough for a mean."""
    return Setting(copy.deepcopy(models["qwen3"]).to(request.param), max_rows=48, num_blocks=200)


# In the last layer or behind it: what is wrong there leaves nothing in the cache.
WRONG_PARTS = {
    "no attention": ("self_attn", lambda output: (0 * output[0], *output[1:])),
    "half the attention": ("self_attn", lambda output: (output[0] / 2, *output[1:])),
    "scaled logits": ("lm_head", lambda logits: logits * 0.8),
    "noisy logits": (
        "lm_head",
        lambda logits: logits + 0.1 * torch.randn(logits.shape, generator=torch.Generator()).to(logits.dtype),
    ),
}


@pytest.mark.parametrize("part", WRONG_PARTS)
@pytest.mark.parametrize("has_right_tokens", [True, False])
def test_a_step_with_a_right_cache_and_wrong_logits_is_found(wide_setting, part, has_right_tokens):
    (name, change), model, forward = WRONG_PARTS[part], wide_setting.model, wide_setting.forward
    module = model.lm_head if name == "lm_head" else model.model.layers[-1].self_attn

    def step(setting, rows):
        next_ids = forward(rows.token_ids, rows.positions).argmax(-1)
        hook = module.register_forward_hook(lambda module, args, output: change(output))
        logits = forward(rows.token_ids, rows.positions)
        hook.remove()
        next_ids = next_ids if has_right_tokens else logits.argmax(-1)
        advance(rows, next_ids, logits.gather(1, next_ids[:, None])[:, 0].float())

    message = WRONG if has_right_tokens else f"a token is less likely than the best|{WRONG}"
    wide_setting.require_fault(message, bucket=48, step=step)
    wide_setting.check(48)


# What is no fault


def test_a_token_as_good_as_the_best_is_no_error(setting):
    def step(setting, rows):
        values, ids = setting.forward(rows.token_ids, rows.positions).topk(2)
        advance(rows, ids[:, 1], values[:, 1])

    loose = Tolerance(mean_logprob=1e-4, max_logprob=100.0, cache=1e-3)
    result = setting.check(6, step=step, tolerance=loose)
    # The logits are those of the tokens that the step chose.
    assert (result.num_other_tokens, result.max_logit_error) == (5, 0.0)


def test_logits_of_inactive_rows_may_be_anything(setting):
    assert setting.check(6, step=poisoning(5)).max_logit_error == 0.0


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(1, 0), (3, 2)])
def test_a_small_cache_is_checked_with_fewer_rows_or_not_at_all(models, num_blocks, num_rows):
    """Two blocks for the first row, one for the inactive ones, of which one may be the write trash."""
    setting = Setting(models["qwen3"])
    sizes = {"max_rows": 40, "max_burst": 1, "eos_token_ids": (), "device": torch.device("cpu")}
    setting.buffers = allocate_buffers(build_pools(num_blocks), **sizes)
    setting.forward = PlainForward(setting.model, setting.buffers.layers)
    if num_rows:
        assert setting.check(40).num_rows == num_rows
        return
    with pytest.raises(EngineError, match="raise num_blocks, or set self_check=False"):
        setting.check(1)


# Figures


def test_errors_of_logits_within_their_bounds_are_returned(models):
    setting = Setting(models["qwen3"], max_rows=48, num_blocks=200)
    error = torch.zeros(48)
    error[2] = -5e-4
    right_but_for = faulty(logits=lambda logits: logits + error[: len(logits)])
    result = setting.check(6, step=right_but_for)
    assert result.max_logit_error == pytest.approx(5e-4, rel=0.01)
    assert result.mean_logit_error == pytest.approx(1e-4, rel=0.01)
    assert result.max_logprob_error == 0.0
    # On all of many rows it is too much.
    error.fill_(5e-4)
    assert setting.check(32, step=right_but_for).num_rows == 31
    message = r"the step's best logits differ on average by 0\.0005"
    setting.require_fault(message, bucket=33, step=right_but_for)


def test_rounding_noise_is_that_of_a_rounded_residual_stream():
    num_layers = 36
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    exact, head = draw(16, 256).bfloat16().float(), draw(256, 2000) / 16
    streams = [exact.bfloat16(), exact.bfloat16()]
    for _ in range(2 * num_layers):
        added = draw(16, 256)
        exact = exact + added
        # Each side has computed what it adds in an order of its own, and rounded that.
        noisy = [added * (1 + 2**-9 * draw(16, 256)) for _ in streams]
        streams = [stream + own.bfloat16() for stream, own in zip(streams, noisy, strict=True)]
    logits = [functional.rms_norm(s.float(), (256,)) @ head for s in streams]
    difference = (logits[0] - logits[1]).abs().mean()
    assert difference < _rounding_noise(logits[0].bfloat16(), num_layers) < 3 * difference


def test_the_average_error_is_over_rows_not_over_batch_sizes():
    def result(num_rows, error):
        errors = (error, 2 * error, error / 10, error / 5)
        return SelfCheckResult(num_rows, num_rows, 0, *errors, *[0.0] * 4)

    errors = {"mean_logprob_error": 0.18, "max_logprob_error": 1.8}
    errors |= {"mean_logit_error": 0.018, "max_logit_error": 0.18}
    assert summarize_errors([result(1, 0.9), result(9, 0.1)]) == pytest.approx(errors)
    assert summarize_errors([]) == dict.fromkeys(errors)


# Small models


@pytest.mark.parametrize("fusion", ["projections", "layers"])
def test_a_vocabulary_and_positions_of_a_few(new_model, make_driver_anywhere, greedy, fusion):
    """Of neither does a check leave what the model has, nor does timing."""
    sizes = {"vocab_size": 5, "max_position_embeddings": 8, "hidden_size": 32, "head_dim": 16}
    learned = GPT2Config(vocab_size=5, n_positions=8, n_embd=16, n_layer=2, n_head=2, eos_token_id=None)
    models = [new_model("qwen3", **sizes)]
    if fusion == "projections":
        models.append(AutoModelForCausalLM.from_config(learned).eval())
    for model in models:
        driver = make_driver_anywhere(model, page_size=256, num_blocks=40, buckets=(1, 8, 32), fusion=fusion)
        driver.warmup()
        assert [result["num_rows"] for result in driver.resolved["self_check_results"]] == [31, 7, 1]
        prompts = [[4, 1], [3]]
        expected = [greedy(model, prompt, 6) for prompt in prompts]
        assert drive(driver, prompts, max_new_tokens=6) == expected
        assert len(driver.time_decode_steps(32, context=6, num_steps=4, num_bursts=1)) == 1
        with pytest.raises(EngineError, match="takes 9 positions, and the model has 8: lower one of them"):
            driver.time_decode_steps(1, context=8, num_steps=4)
