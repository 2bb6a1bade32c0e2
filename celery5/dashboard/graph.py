"""Lay the graph of a run out for a drawing: layer by layer, each node below all that it depends on. Pure.

Nodes that are alike are drawn as one, as in a group of many jobs of one task: those of one layer and name that depend
on nodes which are alike, and are followed by such. They are found as the states of a minimal automaton are, by
splitting classes until no class splits any more.

Source: the first two steps of Sugiyama's method; nodes of a layer are ordered by the middle of those they depend on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from celery5.protocol.workflows.status import NodeState
from celery5.workflows.graph import GraphNode

MAX_DRAWN = 300
"""Nodes that are drawn."""
MAX_READ = 5000
"""Nodes that are looked at."""
MAX_ALIKE = 5
"""Nodes that are alike and drawn side by side; more are drawn as one."""
MAX_ROUNDS = 20
"""How often classes are split; those that could be split further are drawn as one."""
NODE_WIDTH, NODE_HEIGHT = 224, 44
GAP_ACROSS, GAP_DOWN = 24, 40
MARGIN = 10
MAX_LABEL = 30
"""Characters of a name in the drawing."""


class DrawnNode(NamedTuple):
    """A node, or several that are alike, and where the upper left corner is, in pixels."""

    node: GraphNode
    x: int
    y: int
    label: str
    # How many nodes it stands for.
    alike: int
    # The state that matters most of theirs, and all of them in words.
    state: NodeState
    states: str


class DrawnEdge(NamedTuple):
    """A line from the middle of one node's lower side to the middle of another's upper side."""

    x1: int
    y1: int
    x2: int
    y2: int


class Drawing(NamedTuple):
    """A drawing, in pixels."""

    width: int
    height: int
    nodes: list[DrawnNode]
    edges: list[DrawnEdge]
    # Nodes that are not drawn.
    left_out: int


def draw_graph(nodes: Sequence[GraphNode]) -> Drawing:
    """Return the drawing of a graph without circles; of a large one the first nodes."""
    groups = _group_alike({node.id: node for node in nodes[:MAX_READ]})
    groups = dict(list(groups.items())[:MAX_DRAWN])
    leaders = {node.id: first for first, group in groups.items() for node in group}
    feeds = {
        first: sorted({leaders[after] for node in group for after in node.feeds if after in leaders})
        for first, group in groups.items()
    }
    layers = _order_layers(feeds, _find_layers(feeds))
    widest = max((len(layer) for layer in layers), default=0)
    width = widest * (NODE_WIDTH + GAP_ACROSS) - GAP_ACROSS + 2 * MARGIN
    places: dict[int, tuple[int, int]] = {}
    for depth, layer in enumerate(layers):
        own = len(layer) * (NODE_WIDTH + GAP_ACROSS) - GAP_ACROSS
        for place, number in enumerate(layer):
            x = (width - own) // 2 + place * (NODE_WIDTH + GAP_ACROSS)
            places[number] = (x, MARGIN + depth * (NODE_HEIGHT + GAP_DOWN))
    edges = [
        DrawnEdge(
            places[number][0] + NODE_WIDTH // 2,
            places[number][1] + NODE_HEIGHT,
            places[after][0] + NODE_WIDTH // 2,
            places[after][1],
        )
        for number, targets in feeds.items()
        for after in targets
    ]
    return Drawing(
        width=max(width, 2 * MARGIN),
        height=len(layers) * (NODE_HEIGHT + GAP_DOWN) - GAP_DOWN + 2 * MARGIN,
        nodes=[_make_drawn(groups[number], place) for number, place in places.items()],
        edges=edges,
        left_out=len(nodes) - len(leaders),
    )


def _make_drawn(group: Sequence[GraphNode], place: tuple[int, int]) -> DrawnNode:
    first, states = group[0], Counter(node.state for node in group)
    words = first.state.value
    if first.kind == "map":
        failed = f", {first.failed:,} failed" if first.failed else ""
        words = f"{words} {first.done:,} of {first.total:,}{failed}"
    elif len(group) > 1:
        words = ", ".join(f"{states[state]:,} {state.value}" for state in _BY_WEIGHT if states[state])
    state = next(state for state in _BY_WEIGHT if states[state])
    return DrawnNode(
        first, *place, _shorten(first.name, count=len(group)), alike=len(group), state=state, states=words
    )


_BY_WEIGHT = (
    NodeState.FAILED,
    NodeState.HELD,
    NodeState.WAITING,
    NodeState.ACTIVE,
    NodeState.PENDING,
    NodeState.SUCCESS,
    NodeState.SKIPPED,
)
"""States of nodes, those first that a reader needs to see of several nodes that are drawn as one."""


def _group_alike(nodes: Mapping[int, GraphNode]) -> dict[int, list[GraphNode]]:
    """Return the nodes that are drawn as one, by the first of each, in the order of their numbers."""
    feeds = {number: [after for after in node.feeds if after in nodes] for number, node in nodes.items()}
    before = _reverse(feeds)
    depths = _find_layers(feeds)
    keys: dict[int, object] = {
        number: number if node.kind == "map" or node.run else (node.name, node.kind, depths[number])
        for number, node in nodes.items()
    }
    classes = _number_classes(keys)
    for _ in range(MAX_ROUNDS):
        count = len(set(classes.values()))
        classes = _number_classes(
            {
                number: (
                    classes[number],
                    frozenset(classes[earlier] for earlier in before[number]),
                    frozenset(classes[later] for later in feeds[number]),
                )
                for number in nodes
            }
        )
        if len(set(classes.values())) == count:
            break
    sizes = Counter(classes.values())
    groups: dict[int, list[GraphNode]] = {}
    firsts: dict[int, int] = {}
    for number, node in nodes.items():
        alike = sizes[classes[number]] > MAX_ALIKE
        first = firsts.setdefault(classes[number], number) if alike else number
        groups.setdefault(first, []).append(node)
    return groups


def _number_classes(keys: Mapping[int, object]) -> dict[int, int]:
    """Return a number for each key, the same for equal ones."""
    numbers: dict[object, int] = {}
    return {node: numbers.setdefault(key, len(numbers)) for node, key in keys.items()}


def _reverse(feeds: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the nodes before each node."""
    before: dict[int, list[int]] = {number: [] for number in feeds}
    for number, targets in feeds.items():
        for after in targets:
            before[after].append(number)
    return before


def _find_layers(feeds: dict[int, list[int]]) -> dict[int, int]:
    """Return the layer of each node: one more than that of the lowest that it depends on."""
    needs = dict.fromkeys(feeds, 0)
    for targets in feeds.values():
        for after in targets:
            needs[after] += 1
    depths = dict.fromkeys(feeds, 0)
    ready = [number for number, count in needs.items() if not count]
    while ready:
        number = ready.pop()
        for after in feeds[number]:
            depths[after] = max(depths[after], depths[number] + 1)
            needs[after] -= 1
            if not needs[after]:
                ready.append(after)
    return depths


def _order_layers(feeds: dict[int, list[int]], depths: dict[int, int]) -> list[list[int]]:
    """Return the nodes of each layer, ordered so that lines cross seldom."""
    layers: list[list[int]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for number in sorted(depths):
        layers[depths[number]].append(number)
    before = _reverse(feeds)
    places: dict[int, float] = {}
    for layer in layers:
        middles = {
            number: sum(places[earlier] for earlier in before[number]) / len(before[number])
            if before[number]
            else place
            for place, number in enumerate(layer)
        }
        layer.sort(key=lambda number: middles[number])
        places |= {number: float(place) for place, number in enumerate(layer)}
    return layers


def _shorten(name: str, *, count: int) -> str:
    """Return the end of a long name, by which tasks of one module differ, and how many nodes have it."""
    number = f" ×{count:,}" if count > 1 else ""  # noqa: RUF001  a sign of multiplication
    room = MAX_LABEL - len(number)
    return f"{name if len(name) <= room else f'...{name[3 - room :]}'}{number}"
