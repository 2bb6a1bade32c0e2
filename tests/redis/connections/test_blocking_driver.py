"""The blocking driver alone: threads, forks, the end of a process, and what a call costs."""

import gc
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import redis

from celery5.broker.connection.socket_link import SocketLink
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerUnavailable
from tests.redis.connections.colours import raw
from tests.redis.process.onlookers import blocked, clients, meanwhile, until


@pytest.fixture
def driver(url: str) -> Iterator[BlockingRedis]:
    """A driver with four connections."""
    one = BlockingRedis(Endpoint.from_url(url), max_connections=4)
    yield one
    one.close()


def test_one_thread_uses_one_connection(own_server: EmbeddedServer) -> None:
    driver = BlockingRedis(Endpoint.from_url(own_server.url))
    ids = {driver.perform(raw("CLIENT", "ID")) for _ in range(20)}
    assert len(ids) == 1
    driver.close()


def test_threads_share_a_bounded_number_of_connections_and_never_mix_replies(
    own_server: EmbeddedServer,
) -> None:
    driver = BlockingRedis(Endpoint.from_url(own_server.url), max_connections=4)

    def talk(number: int) -> bool:
        return all(
            driver.perform(raw("ECHO", f"{number}:{at}")) == b"%d:%d" % (number, at) for at in range(50)
        )

    with ThreadPoolExecutor(20) as threads:
        assert all(threads.map(talk, range(20)))
    with redis.Redis.from_url(own_server.url) as client:
        assert 1 <= len(clients(client, name="celery5-producer")) <= 4
        driver.close()
        until(lambda: not clients(client, name="celery5-producer"))
    assert driver.perform(raw("PING")) == b"PONG", "a closed driver opens again when it is used"
    driver.close()


def test_tcp_connections_do_not_delay_small_writes_and_notice_a_dead_server(
    own_server: EmbeddedServer,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("port", port)
    driver = BlockingRedis(Endpoint.from_url(f"redis://127.0.0.1:{port}/0"))
    assert driver.perform(raw("PING")) == b"PONG"
    (connected,) = open_connections(port)
    with connected:
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        silence, interval, probes = (connected.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert (silence, interval, probes) == (30, 5, 3), "a server that has vanished is noticed after 45 seconds"
    driver.close()


def test_a_link_that_the_collector_finds_in_a_cycle_is_closed_without_a_warning() -> None:
    ours, theirs = socket.socketpair()
    cycle: list[object] = [SocketLink(ours)]
    cycle.append(cycle)
    del ours, cycle
    with theirs, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gc.collect()
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
    assert not warned


def open_connections(port: int) -> list[socket.socket]:
    """Return copies of this process's TCP connections to that port."""
    found = list[socket.socket]()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), ExitStack() as stack:  # closed by now, no socket, or not connected
            descriptor = os.dup(int(entry))
            stack.callback(os.close, descriptor)
            copy = stack.enter_context(socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM))
            if copy.getpeername()[1:] == (port,):
                found.append(copy.dup())
    return found


def test_waiting_for_a_connection_has_an_end(url: str, app_name: str, redis_client: "redis.Redis") -> None:
    driver = BlockingRedis(Endpoint.from_url(url), timing=Timing(reply=0.2), max_connections=1)
    with meanwhile(lambda: driver.perform(raw("BLPOP", app_name, 5, blocks=5))):
        until(lambda: driver._pool.in_use)
        with pytest.raises(BrokerUnavailable, match="busy") as busy:
            driver.perform(raw("PING"))
        assert not busy.value.maybe_done
        redis_client.lpush(app_name, "go")
    assert driver.perform(raw("PING")) == b"PONG"
    driver.close()


def test_one_who_queues_gets_the_connection_that_is_given_back(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    driver = BlockingRedis(Endpoint.from_url(url), max_connections=1)
    answers: list[object] = []
    with meanwhile(lambda: driver.perform(raw("BLPOP", app_name, 5, blocks=5))):
        until(lambda: driver._pool.in_use)
        waiter = threading.Thread(target=lambda: answers.append(driver.perform(raw("PING"))))
        waiter.start()
        until(lambda: driver._pool.waiting_threads)
        redis_client.lpush(app_name, "go")
        waiter.join(30)
    assert answers == [b"PONG"]
    driver.close()


def test_broken_connections_leave_their_places_to_others(own_server: EmbeddedServer) -> None:
    driver = BlockingRedis(Endpoint.from_url(own_server.url), timing=Timing(reply=1.0), max_connections=2)
    with redis.Redis.from_url(own_server.url) as client:
        for _ in range(6):
            with meanwhile(lambda: kill_the_blocked(client)), pytest.raises(BrokerUnavailable):
                driver.perform(raw("BLPOP", "list", 5, blocks=5))
    assert driver.perform(raw("PING")) == b"PONG"
    driver.close()


def test_kept_errors_of_an_outage_hold_no_connection(
    own_server: EmbeddedServer,
) -> None:
    timing = Timing(reply=1.0, breaker_reset=0.1)
    driver = BlockingRedis(Endpoint.from_url(own_server.url), max_connections=4, timing=timing)
    own_server.kill()
    kept: list[BrokerUnavailable] = []
    for _ in range(10):
        try:
            driver.perform(raw("PING"))
        except BrokerUnavailable as error:
            kept.append(error)
    own_server.revive()
    time.sleep(0.1)  # the breaker's
    assert driver.perform(raw("PING")) == b"PONG"
    assert len(kept) == 10
    driver.close()


def kill_the_blocked(client: "redis.Redis") -> None:
    """Cut whoever is in a blocking command."""
    until(lambda: blocked(client))
    client.client_kill_filter(_id=blocked(client)[0]["id"])


SCRIPT_HEAD = """
import os, sys
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.call import Call
from celery5.broker.endpoint import Endpoint
from celery5.broker.waiting.blocking import BlockingResultWaiter
endpoint = Endpoint.from_url(sys.argv[1])
redis = BlockingRedis(endpoint)
results = BlockingResultWaiter(redis, endpoint)
def do(*words):
    return redis.perform(Call(words, lambda reply: reply))
"""


def run(script: str, *arguments: str) -> str:
    """Run a script in a Python of its own, in which every warning is an error, and give its output."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT_HEAD + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_forked_child_never_uses_its_parents_connections(url: str, app_name: str) -> None:
    output = run(
        """
key = sys.argv[2]
do("SET", key, "document")
assert results.wait([key], timeout=30)
mine, listening = do("CLIENT", "ID"), results._link.greeting.client_id
child = os.fork()
if not child:
    code = 1
    try:
        assert results.wait([key], timeout=30) == {key: b"document"}
        code = 0 if do("CLIENT", "ID") != mine and results._link.greeting.client_id != listening else 2
    finally:
        os._exit(code)
for _ in range(200):
    assert do("CLIENT", "ID") == mine
_, status = os.waitpid(child, 0)
assert results.wait([key], timeout=30) and results._link.greeting.client_id == listening
print(os.waitstatus_to_exitcode(status), do("CLIENT", "ID") == mine)
""",
        url,
        app_name,
    )
    assert output.split() == ["0", "True"]


def test_a_child_forked_while_another_thread_holds_the_locks_is_not_stuck(url: str, app_name: str) -> None:
    output = run(
        """
import threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on Python warns of a fork beside threads
key = sys.argv[2]
threads = [threading.Thread(target=do, args=("BLPOP", key, 1), daemon=True) for _ in range(10)]
for _ in range(5):
    threads.append(threading.Thread(target=results.wait, args=([key],), kwargs={"timeout": 1}, daemon=True))
for thread in threads:
    thread.start()
with redis._pool._lock, results._lock:
    child = os.fork()
if not child:
    code = 1
    try:
        code = 0 if do("PING") == b"PONG" and results.wait(["none"], timeout=0.05) == {} else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
for thread in threads:
    thread.join()
print(os.waitstatus_to_exitcode(status))
""",
        url,
        app_name,
    )
    assert output.split() == ["0"]


def test_a_process_that_just_ends_leaves_no_warning(url: str) -> None:
    assert run('print(do("PING").decode(), results.wait(["none"], timeout=0.05))', url) == "PONG {}\n"


INTERRUPTED_HEAD = """
import random, signal, threading, time
sys.unraisablehook = id  # an interruption may well hit a finaliser, and a hook in Python, too
main, over, chance = threading.main_thread().ident, threading.Event(), random.Random(1)
def interrupt():
    while not over.wait(chance.random() * 0.01):
        signal.pthread_kill(main, signal.SIGINT)
interrupter = threading.Thread(target=interrupt, daemon=True)
exposed = False
def interrupted_now(*_):  # never outside of the `try` that expects it
    global exposed
    if exposed:
        exposed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupted_now)
end = time.monotonic() + 1.5
def goes_on(*counts):  # for long enough, and until all has happened often enough
    now = time.monotonic()
    return now < end or (min(counts) <= 20 and now < end + 60)
"""


def test_interruptions_at_any_moment_never_shift_replies(url: str) -> None:
    output = run(
        INTERRUPTED_HEAD
        + """
number = answered = interrupted = 0
do("PING")
interrupter.start()
while goes_on(answered - 80, interrupted):
    try:
        while goes_on(answered - 80, interrupted):
            exposed = True
            number += 1
            assert do("ECHO", number) == b"%d" % number
            answered += 1
        exposed = False
    except KeyboardInterrupt:
        interrupted += 1
over.set()
interrupter.join()
for number in range(100):
    assert do("ECHO", number) == b"%d" % number
print(answered > 100 and interrupted > 20)
""",
        url,
    )
    assert output == "True\n"


def test_interruptions_at_any_moment_leave_waiting_in_order(url: str, app_name: str) -> None:
    output = run(
        INTERRUPTED_HEAD
        + """
key = sys.argv[2]
found = interrupted = 0
do("SET", key, "document")
results.wait([key], timeout=30)
interrupter.start()
while goes_on(found, interrupted):
    try:
        while goes_on(found, interrupted):
            exposed = True
            assert results.wait([key], timeout=30) == {key: b"document"}
            found += 1
        exposed = False
    except KeyboardInterrupt:
        interrupted += 1
over.set()
interrupter.join()
assert results.wait([key], timeout=30) == {key: b"document"}
assert results.wait(["none"], timeout=0.05) == {}
assert do("PUBSUB", "NUMSUB", key) == [key.encode(), 0]
print(found > 20 and interrupted > 20)
""",
        url,
        app_name,
    )
    assert output == "True\n"


def test_a_call_costs_at_most_five_sixths_of_redis_py(url: str, app_name: str, driver: BlockingRedis) -> None:
    """Counted in processor time, which is what a busy machine shares out fairly."""
    body = b"x" * 200
    call = raw("XADD", app_name, "MAXLEN", 1000, "*", "m", body)
    ours: list[float] = []
    theirs: list[float] = []

    def redis_py() -> None:
        client.xadd(app_name, {"m": body}, maxlen=1000, approximate=False)

    with redis.Redis.from_url(url) as client:
        for costs, step in (
            (ours, lambda: driver.perform(call)),
            (theirs, redis_py),
        ) * 4:
            began = time.process_time()
            for _ in range(300):
                step()
            costs.append(time.process_time() - began)
        client.delete(app_name)
    assert statistics.median(ours) * 1.2 <= statistics.median(theirs)
