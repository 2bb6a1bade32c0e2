"""Pages of single shards and of jobs on them: each link and each button works."""

import re
from html import unescape

from celery5 import App
from tests.redis.dashboard.site import browsing, press, read_text
from tests.redis.sharding.declaring import QUEUE, SHARDS
from tests.redis.sharding.test_every_operation import fill, make
from tests.redis.worker.workers import working

SHARD = SHARDS[1]


async def list_ids(app: App, state: str) -> list[str]:
    """The ids of jobs of one shard in a state."""
    return [job.id for job in (await app.jobs.asearch(queue=SHARD, state=state)).jobs]


async def test_every_link_to_a_shard_and_every_button_of_its_jobs_works(url: str, app_name: str) -> None:
    app = make(app_name, url, 4)
    async with working(app, name="one"):
        await fill(app)
        dead, waiting = await list_ids(app, "DEAD"), await list_ids(app, "SENT")
        async with browsing(app) as client:
            pages = ["", "queues/mails%231", "jobs", "dead/jobs", f"jobs/{dead[0]}", f"jobs/{waiting[0]}"]
            links: set[str] = set()
            for page in pages:
                html = (await client.get(f"/{app.name}/{page}".rstrip("/"))).text
                links |= {unescape(link) for link in re.findall(r'href="([^"]*)"', html)}
            of_shards = sorted(link for link in links if f"{QUEUE}%23" in link)
            assert {link.split("?")[0].rpartition("/")[2] for link in of_shards} >= {
                "replay",
                "purge",
                "revoke",
            }
            # Of jobs that differ by their ids alone, one has all kinds of links.
            for link in {re.sub(r"\w+-\d+(~\d)?", "", link): link for link in of_shards}.values():
                answer = await client.get(link)
                text = read_text(answer.text)
                assert answer.status_code == 200, (link, text)
                assert "a queue's name is" not in text, (link, text)
            shard = read_text((await client.get(f"/{app.name}/queues/mails%231")).text)
            assert f"A shard of {QUEUE} , which is paused and measured as one queue" in shard
            page = (await client.get(f"/{app.name}/jobs/{dead[0]}")).text
            (send,) = [unescape(link) for link in re.findall(r'href="([^"]*)"', page) if "task/send" in link]
            assert f"queue={QUEUE}" in send
            assert "%23" not in send.replace("%2523", "")
            single = next(job for job in dead if job.startswith("fail"))  # no step of a run
            done = await press(client, app, "dlq:replay", {"ids": [single], "queue": SHARD})
            assert "1 dead job sent again" in read_text(done.text)
        assert {job.id async for job in app.dlq.aread(queue=SHARD)} == {*dead} - {single}
        await app.limits.aresume("held")
    app.close()
