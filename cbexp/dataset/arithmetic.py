"""Arithmetic questions in words, generated from a seed and split by hash, with solutions and a verifier."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cbexp.errors import DatasetError

Split = Literal["train", "heldout"]

NUM_OPERAND_VALUES = 100
_HELD_OUT_HASH_BYTES_BELOW = 38  # of 256: about 15 % of the problems are held out
_ANSWER_LINE = re.compile(r"= (-?[0-9]{1,9})")

_SUM_WORDINGS = (
    "What is {0} plus {1}?",
    "What is the sum of {0} and {1}?",
    "Add {1} to {0}.",
    "How much do {0} and {1} make together?",
    "Increase {0} by {1}.",
)
_DIFFERENCE_WORDINGS = (
    "What is {0} minus {1}?",
    "Take {1} away from {0}.",
    "Subtract {1} from {0}.",
    "How much is {0} less {1}?",
    "Decrease {0} by {1}.",
)
_CHAIN_WORDINGS = (
    ("What is {0} {1} {2} {3} {4}?", "plus", "minus"),
    ("How much is {0} {1} {2} {3} {4}?", "plus", "minus"),
    ("Start with {0}, {1} {2}, then {3} {4}.", "add", "subtract"),
    ("Take {0}, {1} {2} and {3} {4}.", "add", "take away"),
    ("Begin at {0}, go {1} by {2}, then {3} by {4}.", "up", "down"),
)


@dataclass(frozen=True)
class Question:
    """A question in words, its answer, and a solution: the text a model should complete it with."""

    text: str
    answer: int
    solution: str


@dataclass(frozen=True)
class _Problem:
    """What a question asks for, without its wording: the sum of `signs[i] * operands[i]`. `signs[0]` is 1."""

    operands: tuple[int, ...]
    signs: tuple[int, ...]


def build_questions(num_questions: int, seed: int, split: Split) -> list[Question]:
    """Return `num_questions` distinct questions of `split`; the same arguments give the same questions.

    Questions of two and of three operands are equally likely, until those of two are used up.

    Raises:
        DatasetError: more questions are asked for than `split` holds.
    """
    rng = random.Random(seed)
    questions: list[Question] = []
    for problem in _shuffle_problems(rng):
        if len(questions) == num_questions:
            break
        if _is_held_out(problem) == (split == "heldout"):
            questions.append(_build_question(problem, rng))
    if len(questions) < num_questions:
        raise DatasetError(
            f"{num_questions} arithmetic questions were asked for, "
            f"but the {split} split holds {len(questions)}."
        )
    return questions


def verify_answer(completion_text: str, answer: int) -> bool:
    """Whether the last line of `completion_text` is `= N` with the right N; malformed text is False."""
    last_line = completion_text.rstrip().rpartition("\n")[2]
    match = _ANSWER_LINE.fullmatch(last_line)
    return match is not None and int(match[1]) == answer


def _shuffle_problems(rng: random.Random) -> Iterator[_Problem]:
    """Yield every problem once, in random order."""
    walks = {num_operands: _shuffle_problems_of_size(num_operands, rng) for num_operands in (2, 3)}
    while walks:
        num_operands = rng.choice(list(walks))
        try:
            yield next(walks[num_operands])
        except StopIteration:
            del walks[num_operands]


def _shuffle_problems_of_size(num_operands: int, rng: random.Random) -> Iterator[_Problem]:
    num_operand_choices = NUM_OPERAND_VALUES**num_operands
    for index in _shuffle_range(num_operand_choices * 2 ** (num_operands - 1), rng):
        sign_bits, operand_index = divmod(index, num_operand_choices)
        yield _Problem(
            operands=tuple(
                operand_index // NUM_OPERAND_VALUES**i % NUM_OPERAND_VALUES for i in range(num_operands)
            ),
            signs=(1, *(-1 if sign_bits >> i & 1 else 1 for i in range(num_operands - 1))),
        )


def _shuffle_range(size: int, rng: random.Random) -> Iterator[int]:
    """Yield `range(size)` in random order, by a Fisher-Yates shuffle that stores only what has moved."""
    moved: dict[int, int] = {}
    for last in range(size - 1, -1, -1):
        chosen = rng.randint(0, last)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(last, last)


def _is_held_out(problem: _Problem) -> bool:
    """Decide by a hash that ignores the order of terms: `12 + 5` and `5 + 12` are in the same split."""
    digest = hashlib.sha256(_canonical_form(problem).encode()).digest()
    return digest[0] < _HELD_OUT_HASH_BYTES_BELOW


def _canonical_form(problem: _Problem) -> str:
    terms = zip(problem.signs, problem.operands, strict=True)
    return " ".join(sorted(f"{'+' if sign > 0 else '-'}{operand}" for sign, operand in terms))


def _build_question(problem: _Problem, rng: random.Random) -> Question:
    answer = sum(sign * operand for sign, operand in zip(problem.signs, problem.operands, strict=True))
    return Question(_word_problem(problem, rng), answer, _solve_problem(problem))


def _word_problem(problem: _Problem, rng: random.Random) -> str:
    if len(problem.operands) == 2:
        wordings = _SUM_WORDINGS if problem.signs[1] > 0 else _DIFFERENCE_WORDINGS
        return rng.choice(wordings).format(*problem.operands)
    wording, plus, minus = rng.choice(_CHAIN_WORDINGS)
    first, second, third = problem.operands
    words = [plus if sign > 0 else minus for sign in problem.signs[1:]]
    return wording.format(first, words[0], second, words[1], third)


def _solve_problem(problem: _Problem) -> str:
    """Write a line for each operation, as in `47+85: 7+5=12 4+8+1=13`, and a last line `= 132`."""
    value, *operands = problem.operands
    lines = []
    for sign, operand in zip(problem.signs[1:], operands, strict=True):
        lines.append(_solve_operation(value, sign, operand))
        value += sign * operand
    return "\n".join([*lines, f"= {value}"])


def _solve_operation(value: int, sign: int, operand: int) -> str:
    """Solve `value + sign * operand` in columns.

    It is first rewritten as a sum or difference that is not negative, as in `12-90: -(90-12) 10-2=8 9-1-1=7`.
    """
    is_sum = (value >= 0) == (sign > 0)
    larger, smaller = abs(value), operand
    if not is_sum and operand > abs(value):
        larger, smaller = smaller, larger
    columns = _add_columns(larger, smaller) if is_sum else _subtract_columns(larger, smaller)
    asked = f"{value}{'+' if sign > 0 else '-'}{operand}"
    magnitude = f"{larger}{'+' if is_sum else '-'}{smaller}"
    rewritten = f"-({magnitude})" if value + sign * operand < 0 else magnitude
    steps = columns if rewritten == asked else [rewritten, *columns]
    return f"{asked}: {' '.join(steps)}"


def _add_columns(first: int, second: int) -> list[str]:
    """Add digit by digit from the units; a carry of 1 is a third term of the next column."""
    columns, carry = [], 0
    for first_digit, second_digit in _digit_columns(first, second):
        total = first_digit + second_digit + carry
        columns.append(f"{first_digit}+{second_digit}{'+1' * carry}={total}")
        carry = total // 10
    return columns


def _subtract_columns(larger: int, smaller: int) -> list[str]:
    """Subtract digit by digit from the units.

    A column that borrows shows its upper digit plus 10, and the next column a further `-1`.
    """
    columns, borrow = [], 0
    for upper, lower in _digit_columns(larger, smaller):
        borrowed = upper - lower - borrow < 0
        raised = upper + 10 * borrowed
        columns.append(f"{raised}-{lower}{'-1' * borrow}={raised - lower - borrow}")
        borrow = int(borrowed)
    return columns


def _digit_columns(first: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of digits from the units up, one for each digit of the longer number."""
    num_columns = len(str(max(first, second)))
    for column in range(num_columns):
        yield first // 10**column % 10, second // 10**column % 10
