"""Verifiers: right answers, near misses, garbage, and references that nothing could match."""

from __future__ import annotations

import random
import string
import threading

import pytest

from cbexp.dataset.verifiers import ANSWER_CHECKS, verify_arithmetic, verify_gsm8k, verify_math


def test_arithmetic():
    """The rules are those of `cbexp.dataset.arithmetic`."""
    assert verify_arithmetic("47+85: 7+5=12 4+8+1=13\n= 132", "132") is True
    assert verify_arithmetic("= 132", "131") is False


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("She has 5 + 2 = <<5+2=7>>7 eggs.\n#### 7", "7", True),
        ("The total is 1,234 dollars.", "1234", True),
        ("So 18.00", "18", True),
        ("That is 18.", "18", True),
        ("\\boxed{18} eggs, out of 20", "18", True),
        ("#### 18\nThis took 3 steps.", "18", True),
        ("It costs $-5", "-5", True),
        ("pages 3-5", "5", True),
        ("The answer is 17 of 18... no, 17", "18", False),
        ("#### ", "18", False),
        ("no number at all", "18", False),
    ],
)
def test_gsm8k(text, answer, expected):
    assert verify_gsm8k(text, answer) is expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"The answer is \boxed{34}.", "34", True),
        (r"Answer: $\frac{1}{2}$", "0.5", True),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
        ("so it is 34.", "34", True),
        (r"\boxed{35}", "34", False),
        (r"\boxed{", "34", False),
        ("", "34", False),
    ],
)
def test_math(text, answer, expected):
    assert verify_math(text, answer) is expected


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k", "math"])
def test_garbage_is_false_and_never_raises(name):
    rng = random.Random(0)
    alphabet = string.printable + "\\{}$^_#=-0\x00é数"
    garbage = ["", "=", "= ", "####", "$$", "\\boxed{}", "{" * 500, "= 99999999999999999999999999x"]
    garbage += ["".join(rng.choices(alphabet, k=60)) for _ in range(20)]
    for text in garbage:
        assert ANSWER_CHECKS[name].verify(text, "123456789") is False, text


def test_math_gives_up_on_endless_expressions():
    assert verify_math(r"\boxed{9^{9^{9^{9^{9}}}}}", "3") is False


def test_math_works_off_the_main_thread():
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(verify_math(r"\boxed{34}", "34")))
    thread.start()
    thread.join()
    assert verdicts == [True]


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("gsm8k", "5 + 2 = <<5+2=7>>7\n#### 1,007", "1007"),
        ("gsm8k", "42", "42"),
        ("arithmetic", " 12 ", "12"),
        ("math", r"\frac{1}{2}", r"\frac{1}{2}"),
        ("math", "(1,2)", "(1,2)"),
    ],
)
def test_references_are_brought_into_the_form_that_is_compared(name, raw, expected):
    assert ANSWER_CHECKS[name].normalize(raw) == expected


@pytest.mark.parametrize(("name", "raw"), [("gsm8k", "none"), ("arithmetic", "twelve"), ("math", "")])
def test_references_that_nothing_could_match_are_refused(name, raw):
    with pytest.raises(ValueError, match=r"no number|invalid literal|no expression"):
        ANSWER_CHECKS[name].normalize(raw)
