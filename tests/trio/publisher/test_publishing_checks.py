"""Publishing Checks: who has failed is looked at soon, also when it fails while it is looked at."""

import trio
from trio.testing import MockClock

from celery5.broker.keys import Keys
from celery5.health.health_check import HealthCheck
from celery5.logs.log import NullLog
from celery5.sending.publishing_checks import PublishingChecks


async def test_what_fails_while_it_is_looked_at_is_looked_at_again_soon(autojump_clock: MockClock) -> None:
    looks: list[float] = []

    async def look() -> str:
        looks.append(trio.current_time())
        await trio.sleep(1)
        return "healthy"

    check = HealthCheck("slow", look, period=1000.0)
    checks = PublishingChecks(checks=[check], keys=Keys("shop"), log=NullLog())
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(checks.run)
        await trio.sleep(0.5)
        checks.report_failure("slow", "somebody met it")
        await trio.sleep(500)
        nursery.cancel_scope.cancel()
    assert [round(time - begun) for time in looks] == [0, 2]


async def test_a_check_that_hangs_neither_opens_nor_closes_the_breaker(autojump_clock: MockClock) -> None:
    says: list[str] = ["unhealthy"]

    async def look() -> str:
        if not says:
            await trio.sleep_forever()
        return says[0]

    check = HealthCheck("disk", look, period=10.0, timeout=1.0)
    checks = PublishingChecks(checks=[check], keys=Keys("shop"), log=NullLog())
    async with trio.open_nursery() as nursery:
        await nursery.start(checks.run)
        await trio.sleep(60)
        assert not checks.all_closed
        says.clear()
        await trio.sleep(3600)
        assert not checks.all_closed, "whether it is well again nobody knows"
        says.append("healthy")
        await checks.wait_until_closed()
        says.clear()
        await trio.sleep(3600)
        assert checks.all_closed
        nursery.cancel_scope.cancel()
