"""Arithmetic questions, and verifiers: right answers, near misses, garbage, and references nothing could match."""

import random
import re
import string
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from cbexp.dataset import arithmetic
from cbexp.dataset.arithmetic import build_questions, verify_answer
from cbexp.dataset.verifiers import ANSWER_CHECKS, verify_gsm8k, verify_math
from cbexp.errors import DatasetError

# Verbs whose operands stand in the other order: "Add 5 to 12", "Take 5 away from 12", "Subtract 5 from 12".
SWAPPED_WORDING = re.compile(r"(Add \d+ to|Take \d+ away|Subtract \d+ from)")
MINUS_WORDS = {"minus", "away", "Subtract", "subtract", "less", "Decrease", "down"}


def read_terms(text: str) -> tuple[int, ...]:
    """Read the signed operands back out of a question's words, independently of how they were written."""
    words = re.findall(r"\w+", text)
    operands = [int(word) for word in words if word.isdigit()]
    if len(operands) == 2:
        first, second = reversed(operands) if SWAPPED_WORDING.match(text) else operands
        return first, -second if MINUS_WORDS & set(words) else second
    terms, sign = [operands[0]], 1
    for word in words[words.index(str(operands[0])) + 1 :]:
        if word.isdigit():
            terms.append(sign * int(word))
            sign = 1
        elif word in MINUS_WORDS:
            sign = -1
    return tuple(terms)


def test_questions_follow_their_arguments_on_every_machine():
    assert build_questions(50, 3, "heldout") != build_questions(50, 4, "heldout")
    assert build_questions(80, 3, "train")[:50] == build_questions(50, 3, "train")
    assert [question.text for question in build_questions(3, 0, "heldout")] == [
        "How much is 81 plus 68 minus 44?",
        "Increase 7 by 31.",
        "What is 62 minus 1?",
    ]


def test_solutions_are_those_of_the_words_and_show_true_steps():
    for question in [*build_questions(2000, 2, "train"), *build_questions(1000, 1, "heldout")]:
        assert question.answer == sum(read_terms(question.text)), question
        assert verify_answer(question.solution, question.answer), question
        assert not verify_answer(question.solution, question.answer + 1), question
        for step, result in re.findall(r"(?<!\S)(\d+(?:[+-]\d+)+)=(\d+)", question.solution):
            terms = [int(term) for term in re.findall(r"[+-]?\d+", step)]
            assert sum(terms) == int(result), question


def test_each_case_of_an_operation():
    lines = {
        (47, 1, 85): "47+85: 7+5=12 4+8+1=13",
        (90, -1, 12): "90-12: 10-2=8 9-1-1=7",
        (12, -1, 90): "12-90: -(90-12) 10-2=8 9-1-1=7",
        (-78, 1, 45): "-78+45: -(78-45) 8-5=3 7-4=3",
        (-78, -1, 45): "-78-45: -(78+45) 8+5=13 7+4+1=12",
    }
    assert {operation: arithmetic._solve_operation(*operation) for operation in lines} == lines


def test_questions_vary_and_there_is_an_end_of_them(monkeypatch):
    questions = build_questions(1000, 5, "heldout")
    assert len({question.solution for question in questions}) == 1000
    num_operands = Counter(len(read_terms(question.text)) for question in questions)
    assert set(num_operands) == {2, 3} and min(num_operands.values()) > 400
    varying = re.compile(r"\d+|\b(add|up|plus|subtract|take away|down|minus)\b")
    assert len({varying.sub("_", question.text) for question in questions}) == 14  # kinds of wording
    monkeypatch.setattr(arithmetic, "NUM_OPERAND_VALUES", 6)
    with pytest.raises(DatasetError, match="9999 arithmetic questions"):
        build_questions(9999, 0, "heldout")


def test_splits_share_no_problem_in_any_order_or_wording():
    trained = {tuple(sorted(read_terms(q.text))) for q in build_questions(5000, 0, "train")}
    held_out = {tuple(sorted(read_terms(q.text))) for q in build_questions(5000, 1, "heldout")}
    # A term of -0 reads as 0 here, so problems with a zero operand cannot be told apart by their terms.
    assert {terms for terms in trained & held_out if 0 not in terms} == set()


WRONG = ["", "   \n", "132", "= 131", "= 13", "= 1322", "= -132", "= 132 or so", "= 132\n= 7"]
WRONG += ["= 132\n132-7:", "47+85=132", "= 132.0"]


def test_answer_is_the_last_line():
    assert [text for text in WRONG if verify_answer(text, 132)] == []
    for text in ("47+85: 7+5=12 4+8+1=13\n= 132", "= 132\n", "steps\n= 132  "):
        assert verify_answer(text, 132)
    assert verify_answer("12-90: -(90-12) 10-2=8 9-1-1=7\n= -78", -78)


# Verifiers of other data sets


@pytest.mark.parametrize(
    ("verify", "text", "answer", "expected"),
    [
        (verify_gsm8k, "She has 5 + 2 = <<5+2=7>>7 eggs.\n#### 7", "7", True),
        (verify_gsm8k, "The total is 1,234 dollars.", "1234", True),
        (verify_gsm8k, "#### 18\nThis took 3 steps.", "18", True),
        (verify_gsm8k, "It costs $-5", "-5", True),
        (verify_gsm8k, "pages 3-5", "5", True),
        (verify_gsm8k, "no number at all", "18", False),
        (verify_math, r"The answer is \boxed{34}.", "34", True),
        (verify_math, r"Answer: $\frac{1}{2}$", "0.5", True),
        (verify_math, r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
        (verify_math, r"\boxed{35}", "34", False),
        (verify_math, r"\boxed{9^{9^{9^{9^{9}}}}}", "3", False),  # it gives up
    ],
)
def test_answers_in_words(verify, text, answer, expected):
    assert verify(text, answer) is expected


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k", "math"])
def test_garbage_is_false_and_never_raises(name):
    rng = random.Random(0)
    garbage = ["", "=", "####", "$$", "\\boxed{}", "{" * 500]
    garbage += ["".join(rng.choices(string.printable, k=60)) for _ in range(20)]
    for text in garbage:
        assert ANSWER_CHECKS[name].verify(text, "123456789") is False, text


def test_math_works_off_the_main_thread():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(verify_math, r"\boxed{34}", "34").result()


def test_references_are_brought_into_the_form_that_is_compared_or_refused():
    raw = [("gsm8k", "5 + 2 = <<5+2=7>>7\n#### 1,007"), ("arithmetic", " 12 "), ("math", r"\frac{1}{2}")]
    found = [ANSWER_CHECKS[name].normalize(answer) for name, answer in raw]
    assert found == ["1007", "12", r"\frac{1}{2}"]
    for name, answer in (("gsm8k", "none"), ("arithmetic", "twelve"), ("math", "")):
        with pytest.raises(ValueError, match=r"no number|invalid literal|no expression"):
            ANSWER_CHECKS[name].normalize(answer)
