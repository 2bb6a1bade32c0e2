"""Gate leaks: what a queue's gates have in Redis that belongs to nobody: a slot of a job that no worker has, a count
that is wrong, a line with nobody in it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from celery5.broker.keys import GROUP, QueueKeys

WHAT = ("slots", "counts", "held")
"""The keys of a queue's gates, beside those of its waiting room."""


def gate_leaks(server: Any, keys: QueueKeys) -> list[str]:
    """What is wrong with the gates of a queue."""
    return [f"{keys.queue}: {fault}" for fault in (*_slots(server, keys), *_lines(server, keys))]


def parted(keys: Iterable[bytes], pattern: "re.Pattern[str]") -> tuple[set[tuple[str, str]], list[bytes]]:
    """The applications and queues that have keys of gates among these, and the other keys."""
    gated, others = set[tuple[str, str]](), list[bytes]()
    for key in keys:
        match = pattern.fullmatch(key.decode(errors="replace"))
        if match and match["queue"] and (match["what"] in WHAT or match["what"].startswith("room:")):
            gated.add((match["app"], match["queue"]))
        else:
            others.append(key)
    return gated, others


def pending(server: Any, keys: QueueKeys) -> set[str]:
    """The entries that workers have, each with its lane's letter."""
    found: set[str] = set()
    for lane in ("", "h", "l", "g"):
        stream = keys.on_lane(lane).stream
        if server.exists(stream) and server.xinfo_groups(stream):
            every = server.xpending_range(stream, GROUP, "-", "+", 100_000)
            found |= {entry["message_id"].decode() + lane for entry in every}
    return found


def _slots(server: Any, keys: QueueKeys) -> list[str]:
    slots = _texts(server.hgetall(keys.slots))
    counted: Counter[str] = Counter()
    for slot in slots.values():
        task, token, _worker = slot.split(" ", 2)
        counted[f"{task} {token}"] += 1
        counted[slot] += 1
    taken = {gate: int(count) for gate, count in _texts(server.hgetall(keys.slot_counts)).items()}
    found = [f"the slot {slot!r} is of {entry}, which no worker has" for entry, slot in slots.items()
             if entry not in pending(server, keys)]  # fmt: skip
    if taken != counted:
        found.append(f"slots are {dict(counted)}, but {taken} are counted")
    return found


def _lines(server: Any, keys: QueueKeys) -> list[str]:
    prefix, lines = keys.waiting_list_prefix, dict[str, set[str]]()
    for key in server.scan_iter(match=prefix.replace("{", "[{]") + "line *", count=1000):
        line = key.decode().removeprefix(f"{prefix}line ")
        lines[line] = {member.decode() for member in server.zrange(key, 0, -1)}
    places = _texts(server.hgetall(keys.jobs))
    gated = {job: place.partition(" ")[2] for job, place in places.items() if place[:1] == "G"}
    found = [f"{job} is in no line, but its place is {line!r}" for job, line in gated.items()
             if job not in lines.get(line, ())]  # fmt: skip
    found += [f"{job} is in the line {line!r}, but its place is {places.get(job)!r}"
              for line, jobs in lines.items() for job in jobs if gated.get(job) != line]  # fmt: skip
    held = _texts(server.hgetall(keys.limited_counts))
    late = {member.decode() for member in server.zrange(keys.due, 0, -1)} & gated.keys()
    counted = Counter(line.split(" ")[0] for line in gated.values()) + Counter({" expires": len(late)})
    if {task: int(count) for task, count in held.items()} != counted:
        found.append(f"{dict(counted)} wait, but {held} are counted")
    return found + _turns(server, prefix, set(lines), _texts(server.hgetall(keys.slot_counts)))


def _turns(server: Any, prefix: str, lines: set[str], taken: dict[str, str]) -> list[str]:
    """Check that each list is either open or parked, and that no list is parked without a reason."""
    opened, parked = _open(server, prefix), _parked(server, prefix)
    lists = {line for found in parked.values() for line in found}
    found = (
        [] if opened | lists == lines else [f"{opened} are open and {lists} parked, the lists are {lines}"]
    )
    found += [f"{opened & lists} are open and parked"] if opened & lists else []
    for task in _members(server, prefix, "full "):
        for token, limit in server.zrange(f"{prefix}full {task}", 0, -1, withscores=True):
            gate = f"{task} {token.decode()}"
            if gate not in parked:
                found.append(f"no list of {gate!r} is parked, but it counts as full")
                continue
            is_open = any(
                line.startswith(f"{task} ") and line.endswith(f" {token.decode()}") for line in opened
            )
            if int(taken.get(gate, 0)) < limit and not is_open:
                found.append(
                    f"{taken.get(gate, 0)} slots of {gate!r} are taken: its lists are parked at {limit}"
                )
    full = {f"{task} {token.decode()}" for task in _members(server, prefix, "full ")
            for token in server.zrange(f"{prefix}full {task}", 0, -1)}  # fmt: skip
    return found + [f"{gate!r} has parked lists, and does not count as full" for gate in parked.keys() - full]


def _open(server: Any, prefix: str) -> set[str]:
    """Return the lists that have a turn."""
    found: set[str] = set()
    for task in _members(server, prefix, "turns "):
        for fair in server.zrange(f"{prefix}turns {task}", 0, -1):
            tokens = server.zrange(f"{prefix}tokens {task} {fair.decode()}", 0, -1)
            found |= {f"{task} {fair.decode()} {token.decode()}" for token in tokens}
            found |= set() if tokens else {f"nobody: {task} {fair.decode()}"}
    return found


def _parked(server: Any, prefix: str) -> dict[str, set[str]]:
    """Return the lists that are parked, by their gate: task and token."""
    found: dict[str, set[str]] = {}
    for gate in _members(server, prefix, "parked "):
        task, _, token = gate.partition(" ")
        fairs = server.zrange(f"{prefix}parked {gate}", 0, -1)
        found[gate] = {f"{task} {fair.decode()} {token}" for fair in fairs}
    return found


def _members(server: Any, prefix: str, kind: str) -> list[str]:
    """Return what follows the prefix and `kind` in the names of keys."""
    pattern = prefix.replace("{", "[{]") + kind + "*"
    return [key.decode().removeprefix(prefix + kind) for key in server.scan_iter(match=pattern, count=1000)]


def _texts(raw: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in raw.items()}
