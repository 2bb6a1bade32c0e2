"""The table of types in the guide is what happens: each row is sent there and back."""

import pytest

from tests.house.types_table import END, NAMES, PAGE, START, evaluate, make_table, send_argument, send_result


def test_the_table_of_types_is_what_happens() -> None:
    table = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert table == make_table(), "write it again: python -m tests.house.types_table"


@pytest.mark.parametrize(
    ("annotation", "value"),
    [("float", "np.float64(0.5)"), ("int", "np.int64(5)"), ("np.ndarray", "np.ndarray(1)")],
)
def test_values_of_numpy_are_treated_as_the_stand_ins_of_the_table(
    annotation: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    stand_in = value.replace("ndarray(1)", "ndarray()")
    expected = send_argument(annotation, stand_in), send_result(annotation, stand_in)
    monkeypatch.setitem(NAMES, "np", numpy)
    assert type(evaluate(value)).__module__ == "numpy"
    assert (send_argument(annotation, value), send_result(annotation, value)) == expected
