"""Compare measured figures with what celery5 is to reach. Nothing here is read or written: figures in, goals out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from contestants import (
    ARDIQ,
    ASYNCIO,
    BARE,
    BARE_SOCKET,
    BLITZQ,
    BOXED,
    CONTESTANTS,
    DEF,
    MAYU,
    NEITHER,
    NEW,
    NO_LOG,
    OLDER,
    TRIO,
)

Medians = Mapping[str, Mapping[str, float]]
LESS_IS_BETTER = frozenset(
    {
        "p50",
        "p99",
        "naps",
        "startup1",
        "recovery",
        "bytes",
        "pss",
        "rss",
        "commands",
        "idle_commands",
        "idle_cpu_ms",
    }
    | {f"{what}cpu_us{processes}" for what in ("", "worker_", "server_") for processes in (1, 2)}
    | {"enqueue_cpu_us", "bulk_cpu_us"}
)
COLOURS = {TRIO: "Trio", ASYNCIO: "asyncio", DEF: "`def`"}
GATED = (
    ("commands", "commands per job with a concurrency key", 20.0),
    ("script_ms", "slowest script with concurrency keys, ms", 2.0),
    ("pause_ms", "end of a job to the next start of its key, p50, ms", 3.0),
)


@dataclass(frozen=True)
class Goal:
    """What is to be reached, and what was measured."""

    label: str
    # ">=" or "<=".
    sign: str
    limit: float
    # None where something was not measured.
    value: float | None

    @property
    def verdict(self) -> str:
        """Say whether it is met."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.sign == ">=" else self.value <= self.limit
        return "met" if met else "**missed**"


def best(figures: Medians, figure: str, groups: Iterable[str] = (NEW,)) -> tuple[float, str] | None:
    """Return the best value of a figure among the peers of these groups, and whose it is."""
    names = [contestant.name for contestant in CONTESTANTS if contestant.group in groups]
    values = [(figures[name][figure], name) for name in names if figure in figures.get(name, {})]
    if not values:
        return None
    return min(values) if figure in LESS_IS_BETTER else max(values)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return how many times theirs ours is, or None where one of them is not known."""
    return ours / theirs if ours is not None and theirs else None


@dataclass(frozen=True)
class _Shares:
    """Figures of contestants, and one compared with another; None where one of them was not measured."""

    figures: Medians

    def of(self, name: str, figure: str) -> float | None:
        return self.figures.get(name, {}).get(figure)

    def times(self, name: str, peer: str, figure: str) -> float | None:
        return ratio(self.of(name, figure), self.of(peer, figure))

    def times_best(self, figure: str, *groups: str) -> float | None:
        peer = best(self.figures, figure, groups or (NEW, OLDER))
        return ratio(self.of(TRIO, figure), peer[0] if peer else None)

    def largest(self, figure: str) -> float | None:
        """Return the largest of our three kinds of task, when all were measured."""
        values = [self.of(name, figure) for name in COLOURS]
        known = [value for value in values if value is not None]
        return max(known) if len(known) == len(values) else None


def goals(figures: Medians) -> list[Goal]:
    """Return the goals beside the new generation of peers."""
    return [*_drain_goals(_Shares(figures)), *_other_goals(_Shares(figures))]


def _drain_goals(shares: _Shares) -> list[Goal]:
    of, times = shares.of, shares.times
    return [
        Goal("`def`: drain, 1 process, times mayu", ">=", 1.5, times(DEF, MAYU, "drain1")),
        Goal("asyncio: drain, 1 process, times BlitzQ", ">=", 1.3, times(ASYNCIO, BLITZQ, "drain1")),
        Goal("Trio: drain, 1 process, times BlitzQ", ">=", 2.0, times(TRIO, BLITZQ, "drain1")),
        Goal("Trio: drain, 2 processes, times BlitzQ", ">=", 2.0, times(TRIO, BLITZQ, "drain2")),
        *(
            Goal(
                f"{colour}: 2 processes, times 1 process",
                ">=",
                1.7,
                ratio(of(name, "drain2"), of(name, "drain1")),
            )
            for name, colour in COLOURS.items()
        ),
        *(
            Goal(f"{colour}: worker + Redis CPU, µs a job", "<=", limit, of(name, "cpu_us1"))
            for (name, colour), limit in zip(COLOURS.items(), (25.0, 35.0, 40.0), strict=True)
        ),
    ]


def _other_goals(shares: _Shares) -> list[Goal]:
    of, times = shares.of, shares.times
    boxed, logged = of(BOXED, "drain1"), ratio(of(TRIO, "cpu_us1"), of(NEITHER, "cpu_us1"))
    log_cost = (logged - 1) * 100 if logged is not None else None
    return [
        Goal("send one by one, times the best peer", ">=", 1.0, shares.times_best("enqueue")),
        Goal("send one by one, share of a bare socket", ">=", 0.9, times(TRIO, BARE_SOCKET, "enqueue")),
        Goal("send in bulk, times the best peer", ">=", 1.0, shares.times_best("bulk")),
        Goal("send in bulk, times ArdiQ", ">=", 1.2, times(TRIO, ARDIQ, "bulk")),
        Goal("send in bulk, CPU of the producer, µs a job", "<=", 8.0, of(TRIO, "bulk_cpu_us")),
        Goal("round trip p50, share of the best peer's", "<=", 0.6, shares.times_best("p50")),
        Goal("5,000 x 50 ms at 100, s, slowest of the three", "<=", 2.7, shares.largest("naps")),
        Goal("start to first job, s, slowest of the three", "<=", 0.25, shares.largest("startup1")),
        Goal("bytes of Redis a queued job", "<=", 150.0, of(TRIO, "bytes")),
        Goal("idle worker, PSS, MiB, largest of the three", "<=", 45.0, shares.largest("pss")),
        Goal("last job done after SIGKILL, s", "<=", 1.0, of(TRIO, "recovery")),
        Goal("boxed no-op jobs one after another, µs a job", "<=", 100.0, 1e6 / boxed if boxed else None),
        Goal("log and history, % of the CPU of a job", "<=", 5.0, log_cost),
    ]


def budgets(figures: Medians) -> list[Goal]:
    """Return the goals that do not depend on the new generation."""
    ours, shares = figures.get(TRIO, {}), _Shares(figures)
    return [
        Goal("drain, 1 process, times the best older peer", ">=", 10.0, shares.times_best("drain1", OLDER)),
        Goal("drain, 2 processes, times the best older peer", ">=", 8.0, shares.times_best("drain2", OLDER)),
        Goal("requests per job on the worker's side", "<=", 0.2, ours.get("commands")),
        Goal(
            "enqueue one by one, share of redis-py's XADD", ">=", 0.8,
            shares.times(TRIO, BARE, "enqueue"),
        ),
        Goal("bytes left when all results expired", "<=", 0.0, ours.get("left")),
        Goal("keys left when all results expired", "<=", 0.0, ours.get("left_keys")),
        Goal("idle worker, RSS MiB", "<=", 60.0, ours.get("rss")),
        Goal("idle worker, requests/s", "<=", 1.0, ours.get("idle_commands")),
        *(
            Goal(f"{label}, {keys} keys", "<=", limit, ours.get(f"gated_{figure}_{keys}"))
            for figure, label, limit in GATED
            for keys in (("1", "12") if figure == "pause_ms" else ("1", "12", "1000"))
        ),
        Goal("moving a due job, a million waiting, times a thousand waiting", "<=", 2.0, ours.get("due_flat")),
        Goal(
            "drain with the log on, share of off", ">=", 0.85,
            shares.times(TRIO, NO_LOG, "drain1"),
        ),
    ]  # fmt: skip
