"""Prompts of every kind of dataset, limits of new tokens, and what a user reads where something is amiss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from cbexp.config import DatasetConfig, ExperimentConfig, ModelConfig, SamplingConfig
from cbexp.dataset.completion_limits import draw_limits, load_completion_limits
from cbexp.dataset.prompts import PromptSet, load_prompts, needs_tokenizer
from cbexp.errors import ConfigError, DatasetError
from cbexp.planning import cache_sizing
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.planning.plan import build_plan
from tests.model_fixtures import QWEN3, build_tokenizer

TOKENIZER = build_tokenizer()
VOCAB_SIZE = 300
BOS_ID = 256
SYSTEM_CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def load(config: DatasetConfig, seed: int = 0, tokenizer: Any = TOKENIZER) -> PromptSet:
    return load_prompts(config, tokenizer, VOCAB_SIZE, seed)


def jsonl(path: Path, *rows: Any, **settings: Any) -> DatasetConfig:
    """The configuration of a JSON lines file with `rows` (objects, or lines as they are)."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings.setdefault("num_prompts", 1)
    return DatasetConfig(kind="jsonl", name="jsonl", path=str(path), prompt_field="prompt", **settings)


# Chat templates and tokens


def test_prompts_and_chats_are_rendered_with_a_single_bos(tmp_path):
    chat = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]
    rows = ({"prompt": "Hi"}, {"prompt": [*chat, {"role": "user", "content": "2?"}]})
    prompts = load(jsonl(tmp_path / "rows", *rows, num_prompts=2, system_prompt="Be brief."))
    texts = ["[user]Hi[assistant]", "[user]1?[assistant]1.[user]2?[assistant]"]
    assert prompts.texts == [f"<s>[system]Be brief.{text}" for text in texts]
    assert prompts.prompt_ids[0].count(BOS_ID) == 1
    assert prompts.prompt_ids[0][0] == BOS_ID
    assert TOKENIZER.decode(prompts.prompt_ids[0][1:]) == "[system]Be brief.[user]Hi[assistant]"
    assert (prompts.answers, prompts.verifier) == (None, None)


def test_a_template_from_a_file_goes_first_and_kwargs_reach_it(tmp_path):
    template = tmp_path / "bare.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{{ style }}{% endfor %}")
    settings = {"chat_template": str(template), "chat_template_kwargs": {"style": "!"}}
    config = jsonl(tmp_path / "rows", {"prompt": "Hi"}, **settings)
    prompts = load(config, tokenizer=build_tokenizer(chat_template=None))
    assert prompts.prompt_ids == [TOKENIZER("Hi!", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        ("absent", {}, "cannot be read: "),
        ("{% for %}", {}, "the chat template refuses line 1"),
        ("{{ raise_exception('no system role') }}", {}, "refuses line 1 of .*: no system role"),
        (None, {"enable_thinkin": True}, "does not read it. Did you mean 'enable_thinking'"),
    ],
)
def test_bad_templates_and_settings_without_effect_on_them_are_refused(tmp_path, template, kwargs, message):
    path = tmp_path / "template.jinja"
    if template not in (None, "absent"):
        path.write_text(template)
    settings = {"chat_template": str(path)} if template else {}
    with pytest.raises(DatasetError, match=message):
        load(jsonl(tmp_path / "rows", {"prompt": "Hi"}, chat_template_kwargs=kwargs, **settings))


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "message"),
    [
        (None, VOCAB_SIZE, "needs a tokenizer"),
        (build_tokenizer(chat_template=None), VOCAB_SIZE, r"no chat template .* dataset\.chat_template"),
        (TOKENIZER, 100, "token id 256, and the model knows 0 to 99: the tokenizer does not belong"),
    ],
)
def test_a_tokenizer_that_does_not_do_is_refused(tmp_path, tokenizer, vocab_size, message):
    config = jsonl(tmp_path / "rows", {"prompt": "Hi"})
    assert needs_tokenizer(config)
    with pytest.raises(DatasetError, match=message):
        load_prompts(config, tokenizer, vocab_size, seed=0)


# Arithmetic


def test_arithmetic_prompts_come_with_answers_and_follow_the_seed():
    config = DatasetConfig(kind="arithmetic", verifier="arithmetic", num_prompts=5)
    prompts, again, other = (load(config, seed) for seed in (0, 0, 1))
    assert prompts.texts == again.texts != other.texts
    assert len(prompts.prompt_ids) == 5
    assert all(prompts.verifier(f"= {answer}", answer) for answer in prompts.answers)


# JSON lines


def test_jsonl_fields_answers_and_blank_lines(tmp_path):
    rows = ({"q": "A", "a": 4}, "", {"q": "B", "a": "5 + 2 = <<5+2=7>>7\n#### 1,007"})
    config = jsonl(tmp_path / "rows", *rows, num_prompts=2, verifier="gsm8k", answer_field="a")
    config.prompt_field = "q"
    file = tmp_path / "rows"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark is no part of the first row
    prompts = load(config)
    assert prompts.answers == ["4", "1007"]
    assert prompts.verifier("So there are 1007 eggs.", "1007")


def test_jsonl_is_shuffled_by_its_seed_before_rows_are_taken(tmp_path):
    rows = [{"prompt": str(i)} for i in range(20)]
    configs = [
        jsonl(tmp_path / "rows", *rows, num_prompts=10, shuffle_seed=seed) for seed in (None, 3407, 3407)
    ]
    plain, shuffled, again = (load(config).texts for config in configs)
    assert plain == [f"<s>[user]{i}[assistant]" for i in range(10)]
    assert shuffled == again
    assert not set(shuffled) <= set(plain)


GSM8K = {"verifier": "gsm8k", "answer_field": "answer"}


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ("{broken", {}, "line 2 of .*rows is not valid JSON: .* at column 2"),
        ("[1]", {}, "line 2 of .*rows holds a JSON list"),
        ({"question": "?", "id": 1}, {}, "line 2 of .*rows has no field 'prompt'. Its fields: question, id"),
        ({"prompt": "  "}, {}, "line 2 of .*rows: its prompt is empty"),
        ({"prompt": [{"role": "user"}]}, {}, "line 2 of .*rows: a chat message needs a role and a content"),
        ({"prompt": SYSTEM_CHAT}, {"system_prompt": "S"}, "line 2 of .* its own system message"),
        ({"prompt": "?"}, GSM8K, "line 2 of .*has no field 'answer'. Its fields: prompt"),
        ({"prompt": "?", "answer": None}, GSM8K, r"line 2 .* no answer, and dataset\.verifier=gsm8k"),
        ({"prompt": "?", "answer": "x"}, GSM8K, "gsm8k cannot use its answer 'x': it holds no number"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, settings, message):
    with pytest.raises(DatasetError, match=message):
        load(jsonl(tmp_path / "rows", {"prompt": "fine", "answer": "4"}, row, num_prompts=2, **settings))


def test_files_that_cannot_be_read_or_are_too_short_are_explained(tmp_path):
    config = jsonl(tmp_path / "rows", {"prompt": "a"}, {"prompt": "b"}, num_prompts=3)
    with pytest.raises(DatasetError, match=r"num_prompts=3 are asked for, and .* has 2 rows"):
        load(config)
    (tmp_path / "rows").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DatasetError, match="is not UTF-8 text"):
        load(config)
    (tmp_path / "rows").unlink()
    with pytest.raises(DatasetError, match="rows cannot be read: "):
        load(config)


# Hub datasets, here as folders in the same format


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configurations, as DAPO-Math-17k-Processed has them, in Parquet; one has an empty prompt."""
    folder = tmp_path_factory.mktemp("dapo")
    header = "configs:\n"
    for language, empty in (("en", None), ("cn", 7)):
        rows = [{"prompt": f"{language} {i}?" if i != empty else "", "solution": str(i)} for i in range(40)]
        (folder / language).mkdir()
        datasets.Dataset.from_list(rows).to_parquet(str(folder / language / "train.parquet"))
        header += (
            f"- config_name: {language}\n  data_files:\n  - split: train\n    path: {language}/*.parquet\n"
        )
    (folder / "README.md").write_text(f"---\n{header}---\n")
    return folder


@pytest.fixture(autouse=True)
def _own_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets_cache"
    )


def hub(path: Path | str, **settings: Any) -> DatasetConfig:
    defaults = {"config_name": "en", "split": "train", "shuffle_seed": 3407, "num_prompts": 4}
    defaults |= {"prompt_field": "prompt", "answer_field": "solution", "verifier": "math"}
    return DatasetConfig(kind="hub", name="dapo_math", path=str(path), **{**defaults, **settings})


def test_hub_rows_come_in_the_order_of_the_librarys_shuffle(hub_folder):
    prompts = load(hub(hub_folder))
    shuffled = datasets.load_dataset(str(hub_folder), "en", split="train").shuffle(seed=3407).select(range(4))
    assert prompts.answers == shuffled["solution"][:]
    assert prompts.texts == [f"<s>[user]{prompt}[assistant]" for prompt in shuffled["prompt"]]
    assert load(hub(hub_folder, shuffle_seed=None, config_name="cn")).answers == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 41}, r"num_prompts=41 are asked for, and dataset .* \(split train\) has 40 rows"),
        ({"answer_field": "answer"}, "has no field 'answer'. Its fields: prompt, solution"),
        ({"split": "test"}, 'Unknown split "test"'),
        ({"config_name": "cn", "num_prompts": 40}, "row 7 of dataset .*: its prompt is empty"),  # shuffled
        ({"revision": "v2"}, r"is a folder here and has no revisions: remove revision=v2"),
    ],
)
def test_what_a_hub_dataset_lacks_is_named(hub_folder, settings, message):
    with pytest.raises(DatasetError, match=message):
        load(hub(hub_folder, **settings))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "there is no such folder"),
        ("./torn", "cannot be loaded"),
        ("org/none", r"the hub cannot be reached. Give a local folder in dataset\.path"),
    ],
)
def test_folders_and_hubs_without_a_dataset_are_explained(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if path == "./torn":
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn/train.json").write_text('{"prompt": "?"}\n{broken')
    with pytest.raises(DatasetError, match=message):
        load(hub(path, config_name=None))


# Synthetic


def synthetic(**settings: Any) -> DatasetConfig:
    return DatasetConfig(kind="synthetic", name="synthetic", **settings)


def test_ids_follow_the_seed_and_avoid_special_ids():
    config = synthetic(num_prompts=20, min_length=50, max_length=50)
    prompts, again, other = (load(config, seed).prompt_ids for seed in (0, 0, 1))
    assert prompts == again != other
    drawn = {token_id for ids in prompts for token_id in ids}
    assert drawn.isdisjoint(TOKENIZER.all_special_ids)
    assert max(drawn) >= 290
    config = synthetic(num_prompts=20, min_length=1, max_length=50)  # lengths have no seed of their own
    first, other = ([len(ids) for ids in load(config, seed).prompt_ids] for seed in (0, 1))
    assert first != other
    published = synthetic(num_prompts=32, min_length=100, max_length=300, lengths_seed=3407)
    assert sum(map(len, load(published).prompt_ids)) == 6168
    no_tokenizer = load_prompts(config, None, 4, 0, special_ids=[0, 3])
    assert {token_id for ids in no_tokenizer.prompt_ids for token_id in ids} == {1, 2}
    assert no_tokenizer.texts is None
    assert not needs_tokenizer(config)


def test_lengths_come_from_a_file(tmp_path):
    path = tmp_path / "lengths"
    config = synthetic(num_prompts=3, lengths_file=str(path))
    for text in ("[5, 1, 9, 4]", "5\n1\n9\n4\n"):
        path.write_text(text)
        assert [len(ids) for ids in load(config).prompt_ids] == [5, 1, 9]
    refused = {"5\n0\n": "'0' is none", "[1, 2.5]": "2.5 is none", "[1, ": "no list of lengths"}
    for text, message in (refused | {"5\n6\n": "num_prompts=3 are asked for, and .* has 2 lengths"}).items():
        path.write_text(text)
        with pytest.raises(DatasetError, match=message):
            load(config)
    path.unlink()
    with pytest.raises(DatasetError, match="cannot be read: "):
        load(config)


# Limits of new tokens

DRAWN = SamplingConfig(max_new_tokens=8192, median_new_tokens=600)


def experiment(sampling: SamplingConfig, seed: int = 0) -> ExperimentConfig:
    config = ExperimentConfig(
        model=ModelConfig(name="test", init="random", architecture=QWEN3, device="cpu"),
        dataset=synthetic(num_prompts=3, min_length=5, max_length=5),
        sampling=sampling,
        seed=seed,
    )
    config.cache.page_size = 16
    return config


def from_file(tmp_path, text: str) -> ExperimentConfig:
    path = tmp_path / "limits.json"
    path.write_text(text)
    return experiment(SamplingConfig(max_new_tokens_file=str(path)))


def test_limits_are_one_for_all_or_those_of_a_file(tmp_path):
    assert load_completion_limits(experiment(SamplingConfig(max_new_tokens=7))) == [7, 7, 7]
    assert load_completion_limits(experiment(SamplingConfig())) == [512] * 3
    config = from_file(tmp_path, "[4, 90, 1]")
    assert load_completion_limits(config) == [4, 90, 1]
    for text, message in (
        ("4 90 1", "is no JSON"),
        ("{}", "must be a JSON list of whole numbers"),
        ("[4, 90]", "has 2 limits, and dataset.num_prompts=3"),
    ):
        with pytest.raises(ConfigError, match=f"sampling.max_new_tokens_file=.*limits.json {message}"):
            load_completion_limits(from_file(tmp_path, text))
    (tmp_path / "limits.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_completion_limits(config)


def test_drawn_limits_are_fixed_by_their_seed_and_begin_alike():
    assert draw_limits(DRAWN, 5, seed=3407) == [297, 1318, 4594, 484, 388]  # log-normal
    assert (
        draw_limits(DRAWN, 8, seed=1) == draw_limits(DRAWN, 20, seed=1)[:8] != draw_limits(DRAWN, 8, seed=2)
    )
    own = SamplingConfig(max_new_tokens=8192, median_new_tokens=600, new_tokens_seed=5)
    assert load_completion_limits(experiment(own, seed=1)) == load_completion_limits(experiment(own, seed=2))
    assert load_completion_limits(experiment(DRAWN, seed=1)) == draw_limits(DRAWN, 3, seed=1)
    clipped = draw_limits(SamplingConfig(max_new_tokens=9, median_new_tokens=2, sigma_new_tokens=3), 99, 0)
    assert (min(clipped), max(clipped)) == (1, 9)


def test_plan_counts_every_request_at_its_own_length(tmp_path):
    config = from_file(tmp_path, "[4, 90, 1]")
    plan = build_plan(config)
    assert (plan.limits, plan.max_new_tokens) == ((4, 90, 1), 90)
    assert json.loads(json.dumps(plan.to_dict()))["mean_max_new_tokens"] == pytest.approx(95 / 3)
    size = cache_sizing.size_for_round(plan, [5, 5, 20], free_bytes=2**30)
    assert size.num_blocks == 1 + 6 + 2
    report = summarize_dry_run(config)
    assert report.cache_tokens_asked == (1 + 6 + 1) * 16
    assert report.longest_request_tokens == 6 * 16


def test_request_that_is_too_long_is_the_longest_with_its_own_limit(tmp_path):
    plan = build_plan(from_file(tmp_path, "[200, 90, 1]"))
    with pytest.raises(ConfigError, match="prompt 1 has 170 tokens, which with 90 new tokens exceed"):
        cache_sizing.check_prompt_lengths(plan, [5, 170, 250])
