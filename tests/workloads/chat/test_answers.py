"""Numbers in answers: by hand, as a property, and beside the regular expression that GSM8K's own evaluation uses."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.workloads.chat.rewards import answer_in_completion, answer_in_dataset, last_boxed, parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = <<3+4=7>>7.\n#### 7", 7),
        ("#### 1,234", 1234),
        ("#### -12.50", Fraction(-25, 2)),
        ("#### $18", 18),
        ("#### 18 dollars", 18),
        ("#### 20%", 20),
        ("#### 7.", 7),
        ("#### 3\nno, wait\n#### 4", 4),
        (r"so \boxed{42}", 42),
        (r"\boxed{1} or rather \boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{-\dfrac{1}{2}}", Fraction(-1, 2)),
        (r"\boxed{1{,}000}", 1000),
        (r"\boxed{\$0.50}", Fraction(1, 2)),
        (r"\boxed{3/4}", Fraction(3, 4)),
        ("The answer is 42.", None),
        ("#### 5 6", None),
        ("#### 3 1/2", None),
        ("#### 5 apples and 6 pears", 5),
        ("#### 3 / 4", Fraction(3, 4)),
        (r"\boxed{5 6}", None),
        ("#### none", None),
        ("####", None),
        (r"\boxed{x + 1}", None),
        (r"\boxed{42", None),
        (r"\boxed{1/0}", None),
        ("", None),
    ],
)
def test_by_hand(text, number):
    assert answer_in_completion(text) == number


def test_what_is_marked_goes_before_what_is_boxed():
    assert answer_in_completion(r"\boxed{5} #### 6") == 6


def test_a_column_may_hold_the_number_alone():
    assert answer_in_dataset("1,000") == 1000
    assert answer_in_dataset("work\n#### 5") == 5
    assert answer_in_dataset("five") is None


def test_braces_are_balanced():
    assert last_boxed(r"\boxed{a{b}c} then \boxed{open") == "a{b}c"
    assert last_boxed("nothing") is None


@pytest.mark.parametrize("text", ["1,2", "12,34", "1.2.3", "--1", "1e5", "½", "1 2 apples"])
def test_what_is_not_plainly_a_number_is_none(text):
    assert parse_number(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9), st.text())
def test_every_decimal_is_found_however_it_is_dressed(number, before):
    for dressed in (f"{number}", f"{number:,}", f"${number}" if number >= 0 else f"{number}", f" {number} "):
        assert answer_in_completion(f"{before}\n#### {dressed}") == Fraction(number)
    assert answer_in_completion(f"{before.replace('####', '')} \\boxed{{{number:,}}}") == Fraction(number)


@given(st.integers(-(10**7), 10**7), st.text(alphabet="ab #.,0123456789\n", max_size=30))
def test_agrees_with_the_usual_expression_on_gsm8k_answers(number, before):
    text = f"{before}\n#### {number:,}"
    usual = re.findall(r"#### (\-?[0-9\.\,]+)", text)[-1].replace(",", "")
    assert answer_in_completion(text) == Fraction(usual)


def test_digits_without_end_are_no_number():
    """Python would refuse to read them, and every answer beside them would lose its reward."""
    assert answer_in_completion("#### " + "9" * 5000) is None
