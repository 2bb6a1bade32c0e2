"""The drawing of a graph: each node below what it depends on, many nodes that are alike as one."""

import time
from itertools import pairwise

from celery5.dashboard.graph import MAX_DRAWN, MAX_READ, NODE_WIDTH, Drawing, DrawnNode, draw_graph
from celery5.protocol.workflows.status import NodeState
from celery5.workflows.graph import GraphNode


def make(number: int, *feeds: int, name: str = "pay", state: str = "SUCCESS", kind: str = "job") -> GraphNode:
    return GraphNode(id=number, kind=kind, name=name, state=NodeState(state), feeds=feeds)


def by_label(drawing: Drawing) -> dict[str, DrawnNode]:
    return {node.label: node for node in drawing.nodes}


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw_graph([]).nodes == []
    assert draw_graph([]).left_out == 0


def test_a_chain_goes_down_even_when_all_its_nodes_have_one_name() -> None:
    drawing = draw_graph([make(number, number + 1) if number < 19 else make(19) for number in range(20)])
    assert [node.alike for node in drawing.nodes] == [1] * 20
    assert len({node.x for node in drawing.nodes}) == 1
    heights = [node.y for node in drawing.nodes]
    assert heights == sorted(set(heights))
    assert len(drawing.edges) == 19


def test_a_node_is_below_the_lowest_that_it_depends_on() -> None:
    drawing = draw_graph([make(0, 1, 2, name="a"), make(1, 2, name="b"), make(2, name="c")])
    nodes = by_label(drawing)
    assert nodes["a"].y < nodes["b"].y < nodes["c"].y


def test_nodes_of_a_layer_do_not_overlap_and_are_within_the_drawing() -> None:
    names = "abcdefgh"
    branches = [make(number, 9, name=names[number - 1]) for number in range(1, 9)]
    drawing = draw_graph([make(0, *range(1, 9)), *branches, make(9, name="total")])
    places = sorted(node.x for node in drawing.nodes if node.label in names)
    assert all(after - before >= NODE_WIDTH for before, after in pairwise(places))
    assert places[-1] + NODE_WIDTH <= drawing.width


def test_many_that_are_alike_are_one_whose_colour_is_that_of_the_worst() -> None:
    members = [make(number, 20, state="FAILED" if number == 7 else "SUCCESS") for number in range(20)]
    drawing = draw_graph([*members, make(20, name="total", state="PENDING")])
    assert [(node.label, node.alike, node.state.value, node.states) for node in drawing.nodes] == [
        ("pay ×20", 20, "FAILED", "1 FAILED, 19 SUCCESS"),  # noqa: RUF001
        ("total", 1, "PENDING", "PENDING"),
    ]
    assert len(drawing.edges) == 1
    assert drawing.left_out == 0


def test_many_branches_that_are_alike_are_one_branch() -> None:
    branches = [
        node
        for number in range(0, 40, 2)
        for node in (make(number, number + 1, name="fetch"), make(number + 1, 40, name="resize"))
    ]
    drawing = draw_graph([*branches, make(40, name="total")])
    assert [node.label for node in drawing.nodes] == ["fetch ×20", "resize ×20", "total"]  # noqa: RUF001
    assert len(drawing.edges) == 2


def test_what_leads_elsewhere_is_drawn_by_itself() -> None:
    members = [make(number, 20 if number < 10 else 21) for number in range(20)]
    drawing = draw_graph([*members, make(20, name="total"), make(21, name="mean")])
    assert sorted(node.label for node in drawing.nodes) == ["mean", "pay ×10", "pay ×10", "total"]  # noqa: RUF001
    assert len(drawing.edges) == 2


def test_a_map_is_one_node_with_its_members_counted() -> None:
    node = GraphNode(
        id=0, kind="map", name="pay", state=NodeState.ACTIVE, total=100_000, done=5_000, failed=12
    )
    (drawn,) = draw_graph([node]).nodes
    assert drawn.states == "ACTIVE 5,000 of 100,000, 12 failed"


def test_a_large_graph_is_drawn_in_part_and_soon() -> None:
    nodes = [make(number, name=f"task{number}") for number in range(20_000)]
    begun = time.perf_counter()
    drawing = draw_graph(nodes)
    assert time.perf_counter() - begun < 5
    assert len(drawing.nodes) == MAX_DRAWN
    assert drawing.left_out == 20_000 - MAX_DRAWN
    alike = draw_graph([make(number) for number in range(20_000)])
    assert [node.alike for node in alike.nodes] == [MAX_READ]
    assert alike.left_out == 20_000 - MAX_READ


def test_a_long_name_is_cut_in_front() -> None:
    (drawn,) = draw_graph([make(0, name="shop.thumbnails.resize_image_for_the_catalogue")]).nodes
    assert drawn.label.endswith("for_the_catalogue")
    assert len(drawn.label) == 30
