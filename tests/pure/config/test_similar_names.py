"""Similar names: what is suggested for a name that is not known."""

from celery5.similar_names import MAX_KNOWN, did_you_mean, find_similar, suggest_known


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
