"""Check that the tables of docs/internals/scale.md are what the model prints, and that the model is right."""

import pytest

from benchmarks import scale
from tests.house.sources import HERE

PAGE = HERE / "docs" / "internals" / "scale.md"


@pytest.mark.parametrize("name", ["costs", "loads", "limits"])
def test_a_table_of_the_page_is_what_the_model_prints(name: str) -> None:
    _, found, rest = PAGE.read_text().partition(f"<!-- {name}:start -->\n")
    table, end, _ = rest.partition(f"<!-- {name}:end -->")
    assert found
    assert end
    lines = {"costs": scale.format_costs, "loads": scale.format_loads, "limits": scale.format_limits}[name]()
    assert table == "".join(f"{line}\n" for line in lines), "run python -m benchmarks.scale"


def test_one_queue_is_as_fast_on_any_number_of_primaries() -> None:
    most = {scale.find_most(scale.Shape("", primaries, workers=1_000, jobs=0)) for primaries in (3, 30, 100)}
    assert len(most) == 1


def test_shards_and_queues_divide_jobs_as_far_as_their_names_do() -> None:
    for queues, shards in ((1, 8), (1, 256), (1_000, 1)):
        parts, here = scale.count_largest(queues, shards, 10)
        assert queues * shards / 10 <= parts < queues * shards
        assert here <= queues
    assert scale.count_largest(1, 1, 10) == (1, 1)
    assert scale.count_largest(7, 3, 1) == (21, 7)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        (scale.Shape("", 1, 10, 1_000), ""),
        (scale.Shape("", 1, 10, 50_000), "the processor"),
        (scale.Shape("", 1, 5_000, 0, queues=5_000, is_idle=True), "connections"),
        (scale.Shape("", 100, 100, 800_000, queues=100_000, sharded_messages=False), "the bus"),
    ],
)
def test_the_model_names_what_breaks_first(shape: scale.Shape, first: str) -> None:
    assert scale.compute_load(shape).first == first
