"""The pages of streams: how far their groups are behind, and what they could not process."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.operations.operation import NotFound


async def load_streams(request: PageRequest) -> Mapping[str, Any]:
    """Return the streams and their groups."""
    return {"streams": await request.read("stream:list")}


async def load_stream(request: PageRequest) -> Mapping[str, Any]:
    """Return one stream."""
    return {"stream": await request.read("stream:show", stream=request.path["stream"])}


async def load_group(request: PageRequest) -> Mapping[str, Any]:
    """Return one group: its partitions, its parked keys and its dead records."""
    names = {"stream": request.path["stream"], "group": request.path["group"]}
    stream = await request.read("stream:show", stream=names["stream"])
    group = next((candidate for candidate in stream.groups if candidate.group == names["group"]), None)
    if group is None:
        raise NotFound(f"stream {names['stream']} has no group {names['group']!r}")
    parked, dead = list[Any](), list[Any]()
    if group.parked_keys:
        parked = await request.read_part("the parked keys", "stream:parked", parked, **names)
    if group.dead:
        dead = await request.read_part("the dead records", "dlq:read-records", dead, **names, limit=20)
    return {"stream": stream, "group": group, "parked": parked, "dead": dead}


STREAM_PAGES = (
    Page(
        path="streams",
        template="streams.html",
        title="Streams",
        load=load_streams,
        nav="Streams",
        refresh=3.0,
    ),
    Page(
        path="streams/{stream}",
        template="stream.html",
        title="Stream {stream}",
        load=load_stream,
        refresh=3.0,
    ),
    Page(
        path="streams/{stream}/{group}",
        template="stream_group.html",
        title="Group {group} of stream {stream}",
        load=load_group,
        refresh=3.0,
    ),
)
"""The pages of streams."""
