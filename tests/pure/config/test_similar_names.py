"""Similar names: what is suggested for a name that is not known."""

import pytest

from celery5 import App, chain, group
from celery5.errors import UnknownQueue, UnknownTask
from celery5.similar_names import MAX_KNOWN, did_you_mean, find_similar, join_names, suggest_known

app = App("similar", broker="redis://127.0.0.1:1/0")


@app.task(name="d")
def double(a: int) -> int:
    return 2 * a


def test_the_most_similar_known_name_is_suggested() -> None:
    assert did_you_mean("crat", ["cart", "order"]) == "did you mean 'cart'?"


def test_without_a_similar_name_the_caller_decides_what_is_said() -> None:
    assert did_you_mean("xyz", ["cart", "order"]) == ""
    assert did_you_mean("xyz", ["cart", "order"], otherwise="known: cart, order") == "known: cart, order"


def test_how_similar_a_name_must_be_can_be_chosen() -> None:
    assert find_similar("cort", {"cart": 1}) == "cart"
    assert find_similar("cort", {"cart": 1}, cutoff=0.9) == ""


def test_an_error_lists_the_known_names_where_none_is_similar() -> None:
    assert suggest_known("crat", ["cart", "order"]) == "did you mean 'cart'?"
    assert suggest_known("xyz", ["cart", "order"]) == "known: cart, order"
    assert suggest_known("xyz", []) == "known: none"
    assert suggest_known("xyz", map(str, range(100))).count(",") == MAX_KNOWN - 1


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "n0"), (3, "n0, n1, n2"), (4, "n0, n1, n2 and 1 more")]
)
def test_list_that_is_cut_says_how_many_names_are_left_out(count: int, text: str) -> None:
    assert join_names((f"n{number}" for number in range(count)), 3) == text


def test_error_for_an_unknown_name_says_how_many_more_there_are() -> None:
    names = [f"task{number:02}" for number in range(24)]
    assert str(UnknownTask("nope.job", names)).endswith("task08, task09 and 14 more")
    assert str(UnknownQueue("nope.job", names)).endswith("task08, task09 and 14 more")
    assert suggest_known("nope.job", names).endswith("task18, task19 and 4 more")
    members = [double.s(number) for number in range(24)]
    assert repr(group(members)).endswith("(19) and 4 more)")
    assert repr(chain(members[0], *(double.s() for _ in range(24)))).endswith("() and 4 more")
