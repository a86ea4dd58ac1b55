"""The self-check: passes for what is right, names what is wrong, and leaves buffers and cache as they were."""

from __future__ import annotations

import copy

import pytest
import torch

from cbexp.engine.compile_modes import build_step_runner
from cbexp.engine.buffers import allocate_buffers
from cbexp.engine.decode_step import cut_rows
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.sampling import advance
from cbexp.engine.self_check import Tolerance, check_bucket
from cbexp.engine.types import EngineError
from tests.engine.decode_fixtures import build_buffers, build_decode_model, build_pools, set_rows, state_of

FAMILIES = ("qwen3", "gemma2")


@pytest.fixture(scope="module")
def models():
    return {family: build_decode_model(family) for family in FAMILIES}


class Setting:
    """A model, buffers in the middle of a burst, and an eager runner; `check` runs one with parts replaced."""

    def __init__(self, model, family, max_rows=7, num_blocks=30):
        self.pools = build_pools(num_blocks, family=family, dtype=model.dtype)
        self.buffers = build_buffers(max_rows, pools=self.pools, family=family)
        set_rows(self.buffers, [3, 9, -1, 17][:max_rows])
        self.forward = ModelForward(model, self.buffers.layers)

    def use_pools(self, pools, max_rows):
        self.pools = pools
        self.buffers = allocate_buffers(
            pools, max_rows=max_rows, max_burst=1, eos_token_ids=(), device=torch.device("cpu")
        )
        self.forward = ModelForward(self.forward.model, self.buffers.layers)

    def run(self, step):
        """A runner that calls `step(buffers of the bucket)`."""
        outer = self

        class Runner:
            def run(self, bucket, num_steps):
                for _ in range(num_steps):
                    step(cut_rows(outer.buffers, bucket))

        return Runner()

    def right_step(self, rows):
        advance(rows, *self.forward(rows.token_ids, rows.positions))

    def step_with_logits(self, change):
        """A right step, but for the logits that it leaves behind: `change` of them."""

        def step(rows):
            next_ids, best_logits = self.forward(rows.token_ids, rows.positions)
            advance(rows, next_ids, change(best_logits))

        return step

    def check(self, bucket=6, *, step=None, forward=None, tolerance=None):
        runner = self.run(step or self.right_step)
        return check_bucket(
            runner,
            forward or self.forward,
            self.forward.logits,
            self.buffers,
            self.pools,
            bucket=bucket,
            mode="some_mode",
            tolerance=tolerance,
        )


@pytest.fixture
def setting(models):
    return Setting(models["qwen3"], "qwen3")


def broken(setting, match, **parts):
    before = state_of(setting.buffers)
    with pytest.raises(EngineError, match=rf"(?s)some_mode, batch of 6 rows: .*{match}"):
        setting.check(6, **parts)
    assert all(map(torch.equal, state_of(setting.buffers), before))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bucket", [1, 2, 7])
def test_a_right_step_passes_and_leaves_no_trace(models, family, bucket):
    setting = Setting(models[family], family)
    before = state_of(setting.buffers)
    tables = {name: table.clone() for name, table in setting.buffers.block_tables.items()}
    result = setting.check(bucket)
    assert (result.bucket, result.num_rows) == (bucket, max(1, bucket - 1))
    assert result.num_other_tokens == 0
    assert result.max_logprob_error == result.max_logit_error == result.max_cache_error == 0.0
    assert all(map(torch.equal, state_of(setting.buffers), before))
    assert all(torch.equal(setting.buffers.block_tables[name], table) for name, table in tables.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_at_different_positions_on_pages_of_their_own(models, family):
    setting = Setting(models[family], family)
    seen = {}

    def step(rows):
        seen["positions"] = rows.positions.tolist()
        seen["tables"] = {name: table[:6].clone() for name, table in rows.block_tables.items()}
        setting.right_step(rows)

    setting.check(6, step=step)
    assert seen["positions"] == [8, 7, 6, 5, 4, -1]  # the first one opens its second page
    pages = [
        page
        for name, table in seen["tables"].items()
        for entry in [*table[:, 0].tolist(), *([table[0, 1].item()] if name == "full_attention" else [])]
        for page in range(entry, entry + setting.pools[name].pages_per_block)
    ]
    assert len(set(pages)) == len(pages)
    assert min(pages) >= setting.pools["full_attention"].trash_page  # never sector 0


def test_wrong_logits_of_the_forward_are_named(setting):
    class Shifted(ModelForward):
        def logits(self, token_ids, positions):
            return super().logits(token_ids, positions) * 1.01

    broken(
        setting,
        r"log-probabilities differ by up to [\d.]+",
        forward=Shifted(setting.forward.model, setting.buffers.layers),
    )


def test_another_token_than_the_reference_chose_is_named(setting):
    def step(rows):
        next_ids, best_logits = setting.forward(rows.token_ids, rows.positions)
        advance(rows, (next_ids + 1) % 61, best_logits)

    broken(setting, "a token is less likely than the best by", step=step)


def test_a_token_outside_of_the_vocabulary_is_named(setting):
    broken(
        setting,
        "token 61 is not in the vocabulary",
        step=lambda rows: advance(rows, rows.token_ids * 0 + 61, rows.best_logits),
    )


def test_a_token_as_good_as_the_best_is_no_error(setting):
    def step(rows):
        logits = setting.forward.logits(rows.token_ids, rows.positions)
        values, ids = logits.topk(2)
        advance(rows, ids[:, 1], values[:, 1])

    loose = Tolerance(mean_logprob=1e-4, max_logprob=100.0, cache=1e-3)
    result = setting.check(6, step=step, tolerance=loose)
    # The logits are those of the tokens that the step chose.
    assert (result.num_other_tokens, result.max_logit_error) == (5, 0.0)


WRONG = r"the step's best logits differ (by up to|on average by) [\d.]+"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def wide_setting(request, models):
    """Of rows enough for a mean."""
    return Setting(copy.deepcopy(models["qwen3"]).to(request.param), "qwen3", max_rows=48, num_blocks=200)


WRONG_PARTS = {
    "attention of the last layer is left out": (
        lambda model: model.model.layers[-1].self_attn,
        lambda output: (torch.zeros_like(output[0]), *output[1:]),
    ),
    "attention of the last layer is halved": (
        lambda model: model.model.layers[-1].self_attn,
        lambda output: (output[0] / 2, *output[1:]),
    ),
    "logits are scaled": (lambda model: model.lm_head, lambda output: output * 0.8),
    "logits are noisy": (
        lambda model: model.lm_head,
        lambda output: (
            output + 0.1 * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        ).to(output.dtype),
    ),
}


@pytest.mark.parametrize("part", WRONG_PARTS)
@pytest.mark.parametrize("has_right_tokens", [True, False])
def test_a_step_with_a_right_cache_and_wrong_logits_is_found(wide_setting, part, has_right_tokens):
    """What is wrong from the last layer on leaves nothing in the cache."""
    find_module, change = WRONG_PARTS[part]
    forward = wide_setting.forward

    def step(rows):
        right_ids, _ = forward(rows.token_ids, rows.positions)
        hook = find_module(forward.model).register_forward_hook(lambda module, args, output: change(output))
        logits = forward.logits(rows.token_ids, rows.positions)
        hook.remove()
        next_ids = right_ids if has_right_tokens else logits.argmax(-1)
        advance(rows, next_ids, logits.gather(1, next_ids[:, None])[:, 0].float())

    message = WRONG if has_right_tokens else f"a token is less likely than the best|{WRONG}"
    with pytest.raises(EngineError, match=f"batch of 48 rows: ({message})"):
        wide_setting.check(48, step=step)
    wide_setting.check(48)


@pytest.mark.parametrize("change", [lambda b: b * 0.8, lambda b: b + 0.01, lambda b: -b])
def test_wrong_logits_of_few_rows_are_found(setting, change):
    broken(setting, WRONG, step=setting.step_with_logits(change))


def test_errors_of_logits_are_told_within_their_bounds(models):
    setting = Setting(models["qwen3"], "qwen3", max_rows=48, num_blocks=200)
    error = torch.zeros(48)
    error[2] = -5e-4
    result = setting.check(6, step=setting.step_with_logits(lambda best_logits: best_logits + error[:6]))
    assert result.max_logit_error == pytest.approx(5e-4, rel=0.01)
    assert result.mean_logit_error == pytest.approx(1e-4, rel=0.01)
    assert result.max_logprob_error == 0.0
    # On all of many rows it is too much.
    assert setting.check(32, step=setting.step_with_logits(lambda b: b + 5e-4)).num_rows == 31
    with pytest.raises(EngineError, match=r"the step's best logits differ on average by 0\.0005"):
        setting.check(33, step=setting.step_with_logits(lambda b: b + 5e-4))


def test_keys_that_are_not_written_are_named(setting):
    """A bucket that was captured without its cache write would read what the last run left there."""

    def step(rows):
        kept = rows.layers[1].pages.clone()
        chosen = setting.forward(rows.token_ids, rows.positions)
        pages = slice(rows.layers[1].page_offset.item(), None, 6)
        rows.layers[1].pages[pages] = kept[pages]
        advance(rows, *chosen)

    broken(setting, "keys or values in the cache differ by up to", step=step)


def test_a_write_to_anothers_slot_is_named(setting):
    def step(rows):
        chosen = setting.forward(rows.token_ids, rows.positions)
        rows.layers[2].pages[rows.block_tables["full_attention"][5, 0] + 4, 0] = 0.0  # the inactive row's
        advance(rows, *chosen)

    broken(setting, "the step changed keys or values in layer 2 that were not its to write", step=step)


@pytest.mark.parametrize("name", ["positions", "remaining", "step", "outputs"])
def test_rows_that_advance_wrongly_are_named(setting, name):
    def step(rows):
        setting.right_step(rows)
        tensor = getattr(rows, name)
        tensor += (tensor == -1) if name == "outputs" else 1

    broken(setting, "the rows did not advance as their tokens say", step=step)


def test_nan_is_an_error(setting):
    class NaN(ModelForward):
        def logits(self, token_ids, positions):
            return super().logits(token_ids, positions) * float("nan")

    broken(
        setting,
        "probabilities differ by up to nan",
        forward=NaN(setting.forward.model, setting.buffers.layers),
    )


@pytest.mark.parametrize("row", [0, 4])
def test_nan_of_one_row_of_the_step_is_an_error(setting, row):
    def poison(best_logits):
        best_logits[row] = float("nan")
        return best_logits

    broken(setting, "best logits differ by up to nan", step=setting.step_with_logits(poison))


def test_a_step_that_leaves_no_logits_is_an_error(setting):
    """What an earlier step has left there is not taken for its own."""
    setting.check(6)

    def step(rows):
        before = rows.best_logits.clone()
        setting.right_step(rows)
        rows.best_logits.copy_(before)

    broken(setting, "best logits differ by up to nan", step=step)


def test_logits_of_inactive_rows_may_be_anything(setting):
    def step(rows):
        setting.right_step(rows)
        rows.best_logits[5] = float("nan")

    assert setting.check(6, step=step).max_logit_error == 0.0


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(2, 1), (3, 2)])
def test_a_small_cache_is_checked_with_fewer_rows(setting, num_blocks, num_rows):
    """Two blocks for the first row, one for the inactive ones, of which one may be the write trash."""
    setting.use_pools(build_pools(num_blocks), max_rows=40)
    assert setting.check(40).num_rows == num_rows


def test_a_cache_without_room_for_a_row_says_so(setting):
    setting.use_pools(build_pools(1), max_rows=1)
    with pytest.raises(EngineError, match="raise num_blocks, or set self_check=False"):
        setting.check(1)


def test_a_step_runner_passes(setting):
    runner = build_step_runner(setting.forward, setting.buffers, "eager")
    runner.prepare(6)
    check_bucket(
        runner,
        setting.forward,
        setting.forward.logits,
        setting.buffers,
        setting.pools,
        bucket=6,
        mode="eager",
    )
