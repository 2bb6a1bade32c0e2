"""Foreman, hosts that are away: who cannot be asked to end is not killed for not having ended."""

import pytest

from celery5.protocol.cluster.members import Action, Ended, Kill, Start, Stop, Stopping, Unknown
from tests.pure.cluster.test_foreman import Clock, names


@pytest.mark.parametrize("draining", [False, True])
def test_member_that_cannot_be_asked_is_killed_only_at_shutdown(*, draining: bool) -> None:
    clock, name = Clock().up(), "worker-default-1"
    others = [member for member in clock.crew.members if member != name]
    clock.crew.restart([name])
    clock.try_beside("worker-default-3")
    others.append("worker-default-3")
    if draining:
        clock.crew.drain()
    found: list[Action] = []
    for _ in range(60):
        clock.say(Unknown(name, "host web2 is away"))
        found += clock.wait(5, beats=others)
    assert (name in names(found, Stop)) or draining
    assert [
        action for action in found if isinstance(action, Kill) and action.name == name and not draining
    ] == []
    if not draining:
        assert "unknown: host web2 is away" in clock.crew.problem
        clock.say(Stopping(name), Ended(name, "exit code 0", 0))  # it is back, and was asked
        assert name in [action.member.name for action in clock.tick() if isinstance(action, Start)]
