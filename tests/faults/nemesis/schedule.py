"""Schedule: which faults strike whom, when and for how long. A pure function of the seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

WORKERS = ("W0", "W1", "W2")
ROUTERS = ("R0", "R1")
SCHEDULERS = ("S0", "S1")
PRODUCERS = ("P0", "P1", "P2")
REDIS = ("redis",)
SLOTS = ("queue", "events", "stream")
"""Primaries of a cluster, by their contents: the queue, the events of the application, or the stream."""
SERVERS = REDIS + SLOTS
ATTENDANTS = ROUTERS + SCHEDULERS
MEMBERS = WORKERS + ATTENDANTS
EVERYBODY = MEMBERS + PRODUCERS


@dataclass(frozen=True, slots=True)
class Kind:
    """Whom a kind of fault may strike, and the bounds of how long it lasts, in leases."""

    targets: tuple[str, ...]
    shortest: float = 0.0
    longest: float = 0.0
    alone: bool = False
    """Whether nothing else strikes for a lease before it, nor while it lasts."""
    recovery: float = 0.0
    """Leases until the servers are whole again, so that another fault may strike them."""


KINDS: Mapping[str, Kind] = {
    "kill": Kind(WORKERS),
    "kill with sidecar": Kind(WORKERS),
    "kill sidecar": Kind(WORKERS),
    "kill attendant": Kind(ATTENDANTS),
    "stop shortly": Kind(WORKERS, 0.1, 0.5),
    "stop": Kind(WORKERS, 1.4, 2.5),
    "stop with sidecar": Kind(WORKERS, 1.4, 2.5),
    "stop sidecar": Kind(WORKERS, 0.5, 2.0),
    "stop attendant": Kind(ATTENDANTS, 0.5, 2.5),
    "partition shortly": Kind(EVERYBODY, 0.1, 0.4),
    "partition": Kind(WORKERS, 2.0, 3.5),
    "partition attendant": Kind(ATTENDANTS, 1.0, 2.5),
    "refuse connections": Kind(EVERYBODY, 0.2, 1.5),
    "cut connections": Kind(EVERYBODY),
    "lose a reply": Kind(PRODUCERS, 0.3, 0.6),
    "lose a reply of a member": Kind(MEMBERS, 0.1, 0.3),
    "slow network": Kind(EVERYBODY, 0.5, 1.5),
    "kill redis": Kind(REDIS, 0.1, 0.5),
    "freeze redis": Kind(REDIS, 0.3, 1.8),
    "flap redis": Kind(REDIS, 6.3, 6.3, alone=True),
    "fill memory": Kind(REDIS, 0.5, 1.5),
    "pause redis": Kind(REDIS, 0.3, 1.2),
    "stop while memory is full": Kind(MEMBERS, 2.4, 2.8),
}
"""Every kind of fault. Composite ones stand beside the simple ones where two must meet to find something."""

ON_MEMBERS = {
    name: KINDS[name] for name in ("kill", "kill attendant", "stop shortly", "stop", "stop attendant")
}
"""Faults that need no proxy between processes and Redis: clients of a cluster go to the addresses of its nodes. They
are few, so that most of what happens is of the servers: jobs whose workers die often run one at a time.
"""
FAILOVERS: Mapping[str, Kind] = {
    "kill primary": Kind(SLOTS, 0.1, 1.0, recovery=4.0),
    "freeze primary": Kind(SLOTS, 2.5, 3.5, recovery=2.0),
    "cut off primary": Kind(SLOTS, 2.5, 3.0, recovery=1.0),
}
"""What makes a replica a primary. Redis replicates after it has answered, so the last writes may be lost. A primary
that is cut off from other servers, and not from clients, loses all that it accepts: in a cluster for its node timeout,
else until it is joined again.
"""
ON_CLUSTER: Mapping[str, Kind] = {
    **ON_MEMBERS,
    **FAILOVERS,
    "migrate slot": Kind(SLOTS, 0.1, 1.0, recovery=1.0),
    "migrate slot at once": Kind(SLOTS, 0.1, 1.0, recovery=1.0),
}
ON_SENTINEL: Mapping[str, Kind] = {
    **ON_MEMBERS,
    **{name: replace(kind, targets=REDIS) for name, kind in FAILOVERS.items()},
    "change primary": Kind(REDIS, recovery=2.0),
    "kill sentinel": Kind(REDIS, 0.5, 2.0, recovery=1.0),
}
KINDS_ON: Mapping[str, Mapping[str, Kind]] = {
    "server": KINDS,
    "cluster": ON_CLUSTER,
    "sentinel": ON_SENTINEL,
}
"""The kinds of faults, by the servers of the processes."""

FLAP_DOWN, FLAP_UP, FLAPS = 4 / 3, 2.6 / 3, 3
"""A flap in leases: Redis is frozen for so long, then up for so long, so many times."""
QUIET = 1.0
"""Seconds at the beginning without a fault."""
LEAST_GAP, MOST_GAP = 0.3, 1.6
"""Seconds from the beginning of one fault to that of the next."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: when it begins (seconds from the start), its kind, whom it strikes, how many seconds it lasts."""

    at: float
    kind: str
    target: str
    seconds: float

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:6.2f}  {self.kind} {self.target}{lasts}"


def schedule(
    seed: int, seconds: float, *, lease: float, kinds: Mapping[str, Kind] = KINDS
) -> tuple[Fault, ...]:
    """Return the faults of a run, in order. All have ended before `seconds` are over.

    Kinds are dealt like cards: each comes once before one comes a second time. What would last too long is left out.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    at, servers_are_whole = QUIET, QUIET
    while at < seconds:
        if not deck:
            deck = sorted(kinds)
            chance.shuffle(deck)
        name = deck.pop()
        kind = kinds[name]
        lasts = round(lease * chance.uniform(kind.shortest, kind.longest), 2)
        target = chance.choice(kind.targets)
        begins = max([at, *(fault.at + fault.seconds for fault in faults)]) + lease if kind.alone else at
        if kind.recovery:
            begins = max(at, servers_are_whole)
        ends = begins + lasts + kind.recovery * lease
        if ends <= seconds:
            faults.append(Fault(round(begins, 2), name, target, lasts))
            if kind.recovery:
                servers_are_whole = ends
            else:
                at = begins + kind.alone * lasts
            at += chance.uniform(LEAST_GAP, MOST_GAP)
        elif at + 1 > seconds:
            break
        else:
            at += 0.05  # a card that fits may come yet
    return tuple(sorted(faults, key=lambda fault: fault.at))
