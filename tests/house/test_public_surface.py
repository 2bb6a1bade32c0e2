"""The compatibility promise: nothing that the last release offered is missing."""

import json
from functools import cache

from tests.house.public_surface import FILE, Names, find_removed, make_surface

surface = cache(make_surface)


def test_nothing_that_the_last_release_offered_is_removed() -> None:
    released: dict[str, Names] = json.loads(FILE.read_text())
    removed = find_removed(released, surface())
    assert not removed, f"docs/reference/compatibility.md promises what is missing: {'; '.join(removed)}"


def test_removal_of_a_name_or_of_a_part_of_it_is_found_for_each_kind() -> None:
    for kind, names in surface().items():
        name = max(names, key=lambda name: len(names[name]))
        others = {other: names[other] for other in names if other != name}
        assert find_removed(surface(), surface() | {kind: others}) == [f"{kind}: {name}"]
        fewer = surface() | {kind: names | {name: names[name][1:]}}
        assert find_removed(surface(), fewer) == [f"{kind}: {part} of {name}" for part in names[name][:1]]
        assert find_removed(surface(), surface() | {kind: names | {"new": ["one"]}}) == []
