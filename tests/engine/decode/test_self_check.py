"""The self-check: passes for what is right, names what is wrong, and leaves buffers and cache as they were."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

from cbexp.engine.attention.reference import paged_decode_reference
from cbexp.engine.buffers import allocate_buffers, allocate_sampling
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

    def __init__(self, model, family="qwen3", max_rows=7, num_blocks=30, *, is_sampled=False):
        self.model, self.max_positions = model, 256
        pools = build_pools(num_blocks, family=family, dtype=model.dtype)
        self.buffers = build_buffers(max_rows, pools=pools, family=family)
        if is_sampled:
            sampling = allocate_sampling(
                max_rows=max_rows, max_burst=8, vocab_size=VOCAB_SIZE, device=torch.device("cpu")
            )
            self.buffers = replace(self.buffers, sampling=sampling)
        self.forward = PlainForward(model, self.buffers.layers)
        set_rows(self.buffers, [3, 9, -1, 17])

    def use(self, max_rows, **pools):
        """Buffers without rows on other pools."""
        sizes = {"max_rows": max_rows, "max_burst": 4, "eos_token_ids": (), "device": torch.device("cpu")}
        self.buffers = allocate_buffers(pools, **sizes)
        self.forward = PlainForward(self.model, self.buffers.layers)

    def right_step(self, rows):
        run_step(self.forward, rows)

    def check(self, bucket=6, *, step=right_step, run=None, forward=None, tolerance=None):
        """`step(setting, rows of the bucket)` runs a step, `run(take, num_steps)` a burst; `forward` is the eager one.

        `take()` runs a step.
        """

        def run_burst(bucket, num_steps):
            rows = self.buffers.rows(bucket)
            run_right = lambda take, num_steps: [take() for _ in range(num_steps)]  # noqa: E731
            (run or run_right)(lambda: step(self, rows), num_steps)

        runner = SimpleNamespace(run=run_burst)
        asked = {"bucket": bucket, "mode": "some_mode", "tolerance": tolerance}
        asked |= {"vocab_size": VOCAB_SIZE, "max_positions": self.max_positions}
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
@pytest.mark.parametrize(("bucket", "positions"), [(1, [16]), (6, [16, 1, 2, 3, 4, 5])])
def test_a_right_step_passes_and_leaves_no_trace(models, family, bucket, positions):
    """Its rows are at different positions, on pages of their own, and the first one opens its last page.

    Steps are few: one, a burst, and one more burst that ends with an EOS.
    """
    setting, seen = Setting(models[family], family), []
    buffers = setting.buffers

    def step(setting, rows):
        first_pages = [page for table in rows.block_tables.values() for page in table[:bucket, 0].tolist()]
        seen.append((int(rows.step), rows.positions.tolist(), rows.eos_ids.tolist(), first_pages))
        setting.right_step(rows)

    before, tables = state_of(buffers), [table.clone() for table in buffers.block_tables.values()]
    result = setting.check(bucket, step=step)
    assert (result.bucket, result.num_rows, result.num_other_tokens) == (bucket, bucket, 0)
    assert result.max_logprob_error == result.max_logit_error == result.max_cache_error == 0.0
    assert all(map(torch.equal, state_of(buffers), before))
    assert all(map(torch.equal, buffers.block_tables.values(), tables))
    assert [step for step, *_ in seen] == [0, 0, 1, 2, 0, 1, 2]
    assert [eos for _, _, (eos,), _ in seen[:4]] == [-1] * 4
    (eos,), at_the_end = seen[4][2], seen[6][1]
    assert eos >= 0
    assert at_the_end[0] == -1
    for _, at, _, first_pages in (seen[0], seen[1], seen[4]):
        assert at == positions
        assert len(set(first_pages)) == bucket * len(buffers.block_tables)
        assert min(first_pages) >= buffers.pools["full_attention"].trash_page  # never sector 0
    # In the burst's last step, those that have ended by their limits are gone.
    assert seen[3][1] == ([18] if bucket == 1 else [18, 3, -1, -1, 6, 7])


@pytest.mark.parametrize("bucket", [1, 6])
def test_right_sampled_steps_pass_and_leave_no_trace(models, bucket):
    """Half of the rows draw their tokens, and rows end by a stop id of theirs."""
    setting = Setting(models["qwen3"], is_sampled=True)
    sampling = setting.buffers.sampling
    seen, before = [], [sampling.settings.clone(), sampling.token_sets.clone(), *state_of(setting.buffers)]

    def step(setting, rows):
        seen.append(
            (
                rows.sampling.settings.view(torch.float32)[:, 0].tolist(),
                int(rows.sampling.token_sets[1].sum()),
            )
        )
        setting.right_step(rows)

    result = setting.check(bucket, step=step)
    assert max(result.max_logprob_error, result.max_logit_error, result.max_cache_error) < 1e-6
    assert [temperatures for temperatures, _ in seen] == [[0.0, 1.0] * (bucket // 2) or [0.0]] * 7
    assert [stops == 0 for _, stops in seen] == [True] * 4 + [False] * 3
    after = [sampling.settings, sampling.token_sets, *state_of(setting.buffers)]
    assert all(map(torch.equal, after, before))


def test_faults_of_sampled_steps_are_named(models):
    def at_another_temperature(setting, rows):
        settings, kept = rows.sampling.settings.view(torch.float32), rows.sampling.settings.clone()
        settings[1::2, 0] = 1.5
        setting.right_step(rows)
        rows.sampling.settings.copy_(kept)

    def with_logprobs_exchanged(setting, rows):
        line = int(rows.step)
        setting.right_step(rows)
        rows.sampling.logprobs[line] = rows.sampling.logprobs[line].roll(1, 0)

    def without_logprobs(setting, rows):
        kept = rows.sampling.logprobs.clone()
        setting.right_step(rows)
        rows.sampling.logprobs.copy_(kept)

    setting = Setting(models["qwen3"], is_sampled=True)
    for step in (at_another_temperature, with_logprobs_exchanged, without_logprobs):
        setting.require_fault("log-probabilities differ by up to", step=step)
    setting.require_fault(NOT_FINITE, step=poisoning(5))


def test_a_token_without_keys_and_values_is_no_fault():
    """Transformers starts the embedding of a padding token as zeros."""
    model = build_decode_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:32] = 0
    setting = Setting(model)
    setting.check()

    def write_a_key(rows):
        layer = rows.layers[0]
        layer.pages[layer.block_table[1, 0] + layer.page_offset, 1] += (
            1e-3  # of the second row, at position 1
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


def write_to_another_rows_slot(rows):
    rows.layers[2].pages[rows.block_tables["full_attention"][5, 0] + 4, 0] = 0.0


def feeding(change):
    """The step reads other tokens, or positions: `change(token_ids, positions)`, copies of the rows' own."""

    def step(setting, rows):
        token_ids, positions = rows.token_ids.clone(), rows.positions.clone()
        change(token_ids, positions, rows)
        advance(rows, *choose(setting.forward(token_ids, positions)))

    return step


def set_last(values, to):
    values[-1] = to


def later(step):
    """From the second step of a burst on."""

    def from_the_second_on(setting, rows):
        (step if int(rows.step) else Setting.right_step)(setting, rows)

    return from_the_second_on


def with_positions_for_the_model(change):
    """Other rotary positions, with each key in its place."""

    def step(setting, rows):
        hook = setting.model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"position_ids": change(kwargs["position_ids"].clone())}),
            with_kwargs=True,
        )
        setting.right_step(rows)
        hook.remove()

    return step


def with_tables(change):
    def step(setting, rows):
        saved = {name: table.clone() for name, table in rows.block_tables.items()}
        for table in rows.block_tables.values():
            table[: len(rows.positions)] = change(table[: len(rows.positions)].clone())
        setting.right_step(rows)
        for name, table in saved.items():
            rows.block_tables[name].copy_(table)

    return step


def exchange_first_two(table):
    table[:2] = table[:2].flip(0)
    return table


def give_the_last_the_firsts(table):
    table[-1] = table[0]
    return table


def with_attention(change):
    """`change(positions, block_table)` is what attention reads by, while it writes as it should."""

    def attend(query, key, value, pages, block_table, positions, *others):
        paged_decode_reference(query, key, value, pages, block_table, positions, *others)
        positions, block_table = change(positions, block_table)
        return paged_decode_reference(query, key, value, pages.clone(), block_table, positions, *others)

    def step(setting, rows):
        with mock.patch("cbexp.engine.attention.attention.paged_decode_attention", attend):
            setting.right_step(rows)

    return step


def first_slots(num_slots):
    return with_attention(lambda positions, table: (positions.clamp(max=num_slots - 1), table))


def on_first_line(setting, rows):
    """Tokens of all steps go to the first line of the outputs."""
    step = rows.step.clone()
    rows.step.zero_()
    setting.right_step(rows)
    rows.step.copy_(step + 1)


def without_end(name, neutral):
    """A step that does not read what ends its rows."""

    def step(setting, rows):
        tensor = getattr(rows, name)
        saved, was_active = tensor.clone(), rows.positions >= 0
        tensor.fill_(neutral)
        setting.right_step(rows)
        tensor.copy_(saved)
        if name == "remaining":
            tensor.sub_(was_active.int())

    return step


def write_after_the_end(setting, rows):
    """A row that has ended in the second step writes once more in the third."""
    is_second, before = int(rows.step) == 1, rows.positions.clone()
    setting.right_step(rows)
    if is_second:
        ended = (before >= 0) & (rows.positions < 0)
        setting.forward(rows.token_ids, torch.where(ended, before + 1, -1))


NO_WRITE = "the step changed keys or values in layer . that were not its to write"
NOT_A_NUMBER = "the step's best logits differ by up to nan"
NOT_FINITE = "the step's logits are not finite"
NOT_ADVANCED = "the rows did not advance as their tokens say"
WRONG = r"the step's best logits differ (by up to|on average by) [\d.]+"
WRONG_CACHE = "keys or values in the cache differ by up to"
LESS_LIKELY = "a token is less likely than the best"
# What it is -> step, message.
FAULTS = {
    "another token": (faulty(ids=lambda ids: (ids + 1) % VOCAB_SIZE), LESS_LIKELY),
    "an unknown token": (faulty(ids=lambda ids: ids * 0 + 61), "token 61 is not in the vocabulary"),
    "no keys": (write_no_keys, WRONG_CACHE),
    "another's slot": (faulty(after=write_to_another_rows_slot), NO_WRITE),
    "no logits": (leave_none, NOT_A_NUMBER),
    "NaN in the first row": (poisoning(0), NOT_FINITE),
    "NaN in the last row": (poisoning(5), NOT_FINITE),
    "smaller logits": (faulty(logits=lambda logits: logits * 0.8), WRONG),
    "larger logits": (faulty(logits=lambda logits: logits + 0.01), WRONG),
    "negative logits": (faulty(logits=lambda logits: -logits), WRONG),
    **{f"other {name}": (moving(name), NOT_ADVANCED) for name in ("positions", "remaining", "step")},
    "other outputs": (faulty(after=lambda rows: rows.outputs.clamp_(min=0)), NOT_ADVANCED),
    "a token beyond the rows": (faulty(after=lambda rows: rows.outputs.t()[-1].fill_(5)), NOT_ADVANCED),
    # The last row
    "the last is fed token 0": (feeding(lambda ids, at, rows: set_last(ids, 0)), WRONG_CACHE),
    "the last is fed at 0": (feeding(lambda ids, at, rows: set_last(at, 0)), NO_WRITE),
    "the last is turned as at 0": (
        with_positions_for_the_model(lambda at: set_last(at, 0) or at),
        WRONG_CACHE,
    ),
    "the last has the first's blocks": (with_tables(give_the_last_the_firsts), NO_WRITE),
    "the last makes token 0": (faulty(ids=lambda ids: set_last(ids, 0) or ids), LESS_LIKELY),
    # Rows exchanged
    "tables exchanged": (with_tables(exchange_first_two), NO_WRITE),
    "fed one off": (feeding(lambda ids, at, rows: ids.copy_(ids.roll(1))), WRONG_CACHE),
    "placed one off": (faulty(ids=lambda ids: ids.roll(1)), LESS_LIKELY),
    "placed one off in a burst": (later(faulty(ids=lambda ids: ids.roll(1))), LESS_LIKELY),
    # Bursts
    "one line of outputs": (on_first_line, NOT_ADVANCED),
    "EOS ignored": (without_end("eos_ids", -1), NOT_ADVANCED),
    "limits ignored": (without_end("remaining", 99), NOT_ADVANCED),
    "an ended row writes": (write_after_the_end, NO_WRITE),
    "other tokens in a burst": (later(faulty(ids=lambda ids: (ids + 1) % VOCAB_SIZE)), LESS_LIKELY),
    "no token fed on in a burst": (later(feeding(lambda ids, at, rows: ids.fill_(60))), WRONG_CACHE),
    "no keys in a burst": (later(write_no_keys), WRONG_CACHE),
    # Far positions
    "slots beyond 16 forgotten": (first_slots(16), WRONG_CACHE),
    "slots beyond 8 forgotten": (first_slots(8), WRONG_CACHE),
    "positions up to 15": (with_positions_for_the_model(lambda at: at.clamp(max=15)), WRONG_CACHE),
    "the first block alone": (
        with_attention(lambda at, table: (at, table[:, :1].expand_as(table))),
        WRONG_CACHE,
    ),
    "no first block": (with_attention(lambda at, table: (at, table.roll(-1, 1))), WRONG_CACHE),
}
FAULTS_OF_ONE_ROW = [
    "another token",
    "one line of outputs",
    "EOS ignored",
    "limits ignored",
    "other tokens in a burst",
    "slots beyond 16 forgotten",
    "positions up to 15",
    "the first block alone",
]
EACH = [(name, 6) for name in FAULTS] + [(name, 1) for name in FAULTS_OF_ONE_ROW]


@pytest.mark.parametrize(("name", "bucket"), EACH)
def test_a_fault_of_the_step_is_named(setting, name, bucket):
    step, message = FAULTS[name]
    setting.require_fault(message, bucket, step=step)


def test_sound_steps_pass_in_the_same_ways(setting):
    """What plants the faults is no fault."""
    for step in (
        faulty(),
        feeding(lambda ids, at, rows: None),
        later(faulty()),
        with_positions_for_the_model(lambda at: at),
        with_tables(lambda table: table),
        with_attention(lambda at, table: (at, table)),
    ):
        setting.check(step=step)


def feed_no_token_on(take, num_steps, buffers):
    first = buffers.token_ids.clone()
    for _ in range(num_steps):
        buffers.token_ids.copy_(first)
        take()


# `run(take, num_steps, buffers)`: what is wrong with a burst of right steps.
FAULTS_OF_BURSTS = {
    "one step short": (lambda take, n, _: [take() for _ in range(max(1, n - 1))], NOT_ADVANCED),
    "one step long": (lambda take, n, _: [take() for _ in range(n + (n > 1))], NOT_ADVANCED),
    "a single step": (lambda take, n, _: take(), NOT_ADVANCED),
    "no step": (lambda take, n, _: None, NOT_ADVANCED),
    "no token fed on": (feed_no_token_on, NOT_ADVANCED),
}


@pytest.mark.parametrize("bucket", [1, 6])
@pytest.mark.parametrize("name", FAULTS_OF_BURSTS)
def test_a_fault_of_a_burst_is_named(setting, name, bucket):
    run, message = FAULTS_OF_BURSTS[name]
    setting.require_fault(message, bucket, run=lambda take, n: run(take, n, setting.buffers))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def wide_setting(request, models):
    """Of rows enough for a mean, where right steps pass."""
    setting = Setting(copy.deepcopy(models["qwen3"]).to(request.param), max_rows=33, num_blocks=100)
    setting.check(32)
    return setting


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
    wide_setting.require_fault(message, bucket=32, step=step)


# What is no fault


def test_a_token_as_good_as_the_best_is_no_error(setting):
    def step(setting, rows):
        values, ids = setting.forward(rows.token_ids, rows.positions).topk(2)
        advance(rows, ids[:, 1], values[:, 1])

    loose = Tolerance(mean_logprob=1e-4, max_logprob=100.0, cache=1e-3)
    result = setting.check(6, step=step, tolerance=loose)
    # The logits are those of the tokens that the step chose.
    assert (result.num_other_tokens, result.max_logit_error) == (6, 0.0)


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(0, 0), (1, 1), (3, 3)])
def test_a_small_cache_is_checked_with_fewer_rows_or_not_at_all(models, num_blocks, num_rows):
    """Two blocks for the first row, of which one may be the write trash; then the last ones have one each.

    Logits of inactive rows may be anything.
    """
    setting = Setting(models["qwen3"])
    setting.use(40, **build_pools(num_blocks))
    if num_rows:
        result = setting.check(40, step=poisoning(1))
        assert (result.num_rows, result.max_logit_error) == (num_rows, 0.0)
        if num_rows > 1:
            setting.require_fault(LESS_LIKELY, 40, step=faulty(ids=lambda ids: set_last(ids, 0) or ids))
        return
    with pytest.raises(EngineError, match="raise num_blocks, or set self_check=False"):
        setting.check(1)


def test_a_long_table_is_of_few_blocks(models):
    """The first row's, far beyond the cache; what is only read is there many times, what is written is there once."""
    (pool,) = build_pools(40).values()
    setting = Setting(models["qwen3"])
    setting.use(1, full_attention=replace(pool, table_width=600))
    setting.max_positions = 4000
    table = []

    def step(setting, rows):
        table[:] = rows.block_tables["full_attention"][0].tolist()
        assert rows.positions.tolist()[0] in (3992, 3993, 3994, -1)
        setting.right_step(rows)

    setting.check(1, step=step)
    assert table.count(table[499]) == 1
    assert 30 <= len(set(table)) <= 42
    for faulty_step in (
        first_slots(64),
        first_slots(2000),
        with_positions_for_the_model(lambda at: at.clamp(max=2047)),
        with_attention(lambda at, table: (at, table.roll(1, 1))),
    ):
        setting.require_fault(WRONG_CACHE, 1, step=faulty_step)


# Figures


def test_errors_of_logits_within_their_bounds_are_returned(models):
    setting = Setting(models["qwen3"], max_rows=48, num_blocks=200)
    error = torch.zeros(48)
    error[2] = -5e-4
    right_but_for = faulty(logits=lambda logits: logits + error[: len(logits)])
    result = setting.check(6, step=right_but_for)
    assert result.max_logit_error == pytest.approx(5e-4, rel=0.01)
    assert result.mean_logit_error == pytest.approx(5e-4 / 6, rel=0.01)
    assert result.max_logprob_error == 0.0
    # On all of many rows it is too much.
    error.fill_(5e-4)
    assert setting.check(31, step=right_but_for).num_rows == 31
    message = r"the step's best logits differ on average by 0\.0005"
    setting.require_fault(message, bucket=32, step=right_but_for)


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
        assert [result["num_rows"] for result in driver.resolved["self_check_results"]] == [32, 8, 1]
        prompts = [[4, 1], [3]]
        expected = [greedy(model, prompt, 6) for prompt in prompts]
        assert drive(driver, prompts, max_new_tokens=6) == expected
        assert len(driver.time_decode_steps(32, context=6, num_steps=4, num_bursts=1)) == 1
        with pytest.raises(EngineError, match="takes 9 positions, and the model has 8: lower one of them"):
            driver.time_decode_steps(1, context=8, num_steps=4)


NATURAL = {"batch_shape": "natural", "max_requests_per_batch": 3, "page_size": 8, "num_blocks": 40}
CROWDED = {"buckets": (1, 4), "page_size": 4, "num_blocks": 3}
FEW = {"buckets": (1, 2), "num_blocks": 9}
SIZES = [
    *[(family, {}, NATURAL, [(3, 3), (2, 2), (1, 1)]) for family in ("mistral", "gemma3")],
    # Room for all active rows but one, and of two kinds of layers for the least.
    ("qwen3", {}, CROWDED, [(4, 3), (1, 1)]),
    ("qwen2, sliding", {}, CROWDED, [(4, 2), (1, 1)]),
    ("qwen3", {}, FEW | {"max_burst": 1}, [(2, 2), (1, 1)]),
    *[
        ("qwen3", {"max_position_embeddings": n, "vocab_size": 1 + n}, FEW, [(2, 2), (1, 1)])
        for n in (1, 2, 3)
    ],
]


@pytest.mark.parametrize(("family", "shape", "settings", "expected"), SIZES)
def test_every_batch_size_is_checked_with_what_there_is(
    new_model, make_driver, family, shape, settings, expected
):
    driver = make_driver(new_model(family, **shape), fusion="projections", **settings)
    driver.warmup()
    results = driver.resolved["self_check_results"]
    assert [(result["bucket"], result["num_rows"]) for result in results] == expected
