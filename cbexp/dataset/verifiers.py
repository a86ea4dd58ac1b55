"""Judges completions against reference answers. Garbage text is wrong, never an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from cbexp.dataset.arithmetic import verify_answer

Verifier = Callable[[str, str], bool]
"""Takes a completion's text and the reference answer."""

MATH_TIME_LIMIT_S = 3
# A minus counts as a sign unless it stands right after a word, as in "3-5".
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MARKED_ANSWER = re.compile(r"####|\\boxed\s*\{")


@dataclass(frozen=True)
class AnswerCheck:
    """How answers of one kind are judged.

    `normalize` turns a dataset's answer into the form that `verify` takes. `ValueError` means that it is unusable.
    """

    normalize: Callable[[str], str]
    verify: Verifier


def verify_arithmetic(text: str, answer: str) -> bool:
    """Whether the last line of `text` is `= ANSWER`."""
    return verify_answer(text, int(answer))


def verify_gsm8k(text: str, answer: str) -> bool:
    """Whether the number that `text` ends on, or that follows its last `####` or boxed mark, equals `answer`."""
    found = _final_number(text)
    return found is not None and found == Decimal(answer)


def verify_math(text: str, answer: str) -> bool:
    """Whether math-verify finds an expression in `text` that equals `answer`.

    Parsing and comparing take at most `MATH_TIME_LIMIT_S` each on the main thread. The library limits them by a signal,
    which other threads cannot receive, so there is no limit on those.
    """
    from math_verify import parse, verify

    limit_s: Any = _math_time_limit_s()
    found = parse(text, parsing_timeout=limit_s)
    return bool(verify(_parse_math_answer(answer), found, timeout_seconds=limit_s))


def _normalize_integer(answer: str) -> str:
    return str(int(answer))


def _normalize_gsm8k(answer: str) -> str:
    number = _final_number(answer)
    if number is None:
        raise ValueError("it holds no number")
    return str(number)


def _normalize_math(answer: str) -> str:
    if not _parse_math_answer(answer):
        raise ValueError("math-verify finds no expression in it")
    return answer


def _final_number(text: str) -> Decimal | None:
    marks = list(_MARKED_ANSWER.finditer(text))
    numbers = _NUMBER.findall(text[marks[-1].end() :] if marks else text)
    if not numbers:
        return None
    return Decimal((numbers[0] if marks else numbers[-1]).replace(",", ""))


def _parse_math_answer(answer: str) -> Any:
    from math_verify import parse

    is_marked = "$" in answer or "\\boxed" in answer
    limit_s: Any = _math_time_limit_s()
    return parse(answer if is_marked else f"${answer}$", parsing_timeout=limit_s)


def _math_time_limit_s() -> int | None:
    return MATH_TIME_LIMIT_S if threading.current_thread() is threading.main_thread() else None


ANSWER_CHECKS = {
    "arithmetic": AnswerCheck(_normalize_integer, verify_arithmetic),
    "gsm8k": AnswerCheck(_normalize_gsm8k, verify_gsm8k),
    "math": AnswerCheck(_normalize_math, verify_math),
}
