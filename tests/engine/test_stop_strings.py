"""Stop strings are found at the token that completes them, whatever the tokens' borders, as in the whole text."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cbexp.engine.stop_strings import FoundStop, find_stop_string

TEXT = "The answer is 42.\n\nÄpfel und Öl kosten 7 €. 日本語のテキスト 🙂🙂 </answer> stop STOP  \n" * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level: characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def find_in_bursts(tokenizer, ids, strings, sizes, num_searched=0):
    """As an engine does: after each burst, in what is new."""
    while num_searched < len(ids):
        end = min(len(ids), num_searched + sizes.randint(1, 9))
        found = find_stop_string(tokenizer, ids[:end], num_searched, strings)
        if found is not None:
            return found
        num_searched = end
    return None


def find_in_whole_text(tokenizer, ids, strings):
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        found = [s for s in strings if s in text]
        if found:
            return FoundStop(end, min(found, key=lambda s: (text.find(s), -len(s))))
    return None


@pytest.mark.parametrize(
    "strings",
    [
        (".",),
        ("\n",),
        (" ",),
        ("\n\n",),
        ("</answer>",),
        ("€",),
        ("🙂",),
        ("語の",),
        ("Öl kosten 7 €. 日",),
        ("swer>", "answer>", "wer"),
        ("not there",),
        ("stop", "STOP"),
        ("🙂 </answer> stop STOP  \nThe answer is 42.",),
    ],
)
def test_the_first_token_that_completes_a_stop_string_is_found(tokenizer, strings):
    sizes = random.Random(0)
    ids = tokenizer(TEXT)["input_ids"]
    for start in range(0, 60, 7):
        expected = find_in_whole_text(tokenizer, ids[start:], strings)
        assert find_in_bursts(tokenizer, ids[start:], strings, sizes) == expected


def test_what_was_complete_before_is_not_found_again(tokenizer):
    ids = tokenizer("one. two. three")["input_ids"]
    first = find_stop_string(tokenizer, ids, 0, (".",))
    second = find_stop_string(tokenizer, ids, first.num_tokens, (".",))
    assert tokenizer.decode(ids[: second.num_tokens]) == "one. two."
    assert find_stop_string(tokenizer, ids, second.num_tokens, (".",)) is None


def test_special_tokens_are_not_text(tokenizer):
    ids = [*tokenizer("a")["input_ids"], tokenizer.eos_token_id]
    assert find_stop_string(tokenizer, ids, 0, ("<eos>", "eos")) is None
