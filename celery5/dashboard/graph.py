"""Lay the graph of a run out for a drawing: layer by layer, each node below all that it depends on. Pure.

Source: the first two steps of Sugiyama's method; nodes of a layer are ordered by the middle of those they depend on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from celery5.workflows.graph import GraphNode

MAX_DRAWN = 300
"""Nodes that are drawn."""
NODE_WIDTH, NODE_HEIGHT = 180, 44
GAP_ACROSS, GAP_DOWN = 24, 40
MARGIN = 10
MAX_LABEL = 24
"""Characters of a name in the drawing."""


class DrawnNode(NamedTuple):
    """A node and where its upper left corner is, in pixels."""

    node: GraphNode
    x: int
    y: int
    label: str


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
    shown = {node.id: node for node in nodes[:MAX_DRAWN]}
    feeds = {number: [after for after in node.feeds if after in shown] for number, node in shown.items()}
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
        nodes=[DrawnNode(shown[number], *places[number], _shorten(shown[number].name)) for number in places],
        edges=edges,
        left_out=max(len(nodes) - MAX_DRAWN, 0),
    )


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
    before: dict[int, list[int]] = {number: [] for number in feeds}
    for number, targets in feeds.items():
        for after in targets:
            before[after].append(number)
    places: dict[int, float] = {}
    for layer in layers:
        middles = {
            number: sum(places[one] for one in before[number]) / len(before[number])
            if before[number]
            else place
            for place, number in enumerate(layer)
        }
        layer.sort(key=lambda number: middles[number])
        places |= {number: float(place) for place, number in enumerate(layer)}
    return layers


def _shorten(name: str) -> str:
    """Return the end of a long name: what tasks of one module differ by."""
    return name if len(name) <= MAX_LABEL else f"...{name[3 - MAX_LABEL :]}"
