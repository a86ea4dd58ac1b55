"""The self-check: passes for what is right, names what is wrong, and leaves buffers and cache as they were."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from cbexp.engine.compile_modes import build_step_runner
from cbexp.engine.decode_buffers import allocate_decode_buffers
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.sampling import advance
from cbexp.engine.self_check import (
    SelfCheckResult,
    Tolerance,
    _rounding_noise,
    average_logprob_error,
    check_bucket,
)
from cbexp.engine.types import EngineError
from tests.engine.decode_fixtures import build_buffers, build_decode_model, build_pools, set_rows, state_of

FAMILIES = ("qwen3", "gemma2")


@pytest.fixture(scope="module")
def models():
    return {family: build_decode_model(family) for family in FAMILIES}


class Setting:
    """A model, buffers in the middle of a burst, and an eager runner; `check` runs one with parts replaced."""

    def __init__(self, model, family, max_rows=7):
        self.pools = build_pools(30, family=family)
        self.buffers = build_buffers(max_rows, pools=self.pools, family=family)
        set_rows(self.buffers, [3, 9, -1, 17][:max_rows])
        self.forward = ModelForward(model, self.buffers.layers)

    def use_pools(self, pools, max_rows):
        self.pools = pools
        self.buffers = allocate_decode_buffers(
            pools, max_rows=max_rows, max_burst=1, eos_token_ids=(), device=torch.device("cpu")
        )
        self.forward = ModelForward(self.forward.model, self.buffers.layers)

    def run(self, step):
        """A runner that calls `step(buffers of the bucket)`."""
        outer = self

        class Runner:
            def run(self, bucket, num_steps):
                for _ in range(num_steps):
                    b = outer.buffers
                    step(
                        dataclasses.replace(
                            b,
                            token_ids=b.token_ids[:bucket],
                            positions=b.positions[:bucket],
                            remaining=b.remaining[:bucket],
                            outputs=b.outputs[:, :bucket],
                        )
                    )

        return Runner()

    def right_step(self, rows):
        advance(rows, self.forward(rows.token_ids, rows.positions))

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
    assert result.max_logprob_error == result.max_cache_error == 0.0
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
        next_ids = setting.forward(rows.token_ids, rows.positions)
        advance(rows, (next_ids + 1) % 61)

    broken(setting, "a token is less likely than the best by", step=step)


def test_a_token_outside_of_the_vocabulary_is_named(setting):
    broken(
        setting, "token 61 is not in the vocabulary", step=lambda rows: advance(rows, rows.token_ids * 0 + 61)
    )


def test_a_token_as_good_as_the_best_is_no_error(setting):
    def step(rows):
        logits = setting.forward.logits(rows.token_ids, rows.positions)
        advance(rows, logits.topk(2).indices[:, 1])

    loose = Tolerance(mean_logprob=1e-4, max_logprob=100.0, cache=1e-3)
    assert setting.check(6, step=step, tolerance=loose).num_other_tokens == 5


def test_keys_that_are_not_written_are_named(setting):
    """A bucket that was captured without its cache write would read what the last run left there."""

    def step(rows):
        kept = rows.layers[1].pages.clone()
        next_ids = setting.forward(rows.token_ids, rows.positions)
        pages = slice(rows.layers[1].page_offset.item(), None, 6)
        rows.layers[1].pages[pages] = kept[pages]
        advance(rows, next_ids)

    broken(setting, "keys or values in the cache differ by up to", step=step)


def test_a_write_to_anothers_slot_is_named(setting):
    def step(rows):
        next_ids = setting.forward(rows.token_ids, rows.positions)
        rows.layers[2].pages[rows.block_tables["full_attention"][5, 0] + 4, 0] = 0.0  # the inactive row's
        advance(rows, next_ids)

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

    broken(setting, "differ by up to nan", forward=NaN(setting.forward.model, setting.buffers.layers))


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


@pytest.mark.parametrize("num_layers", [4, 36])
def test_rounding_noise_is_that_of_a_rounded_residual_stream(num_layers):
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
        return SelfCheckResult(num_rows, num_rows, 0, error, error, 0.0, 0.0, 0.0, 0.0)

    assert average_logprob_error([result(1, 0.9), result(9, 0.1)]) == pytest.approx(0.18)
    assert average_logprob_error([]) is None
