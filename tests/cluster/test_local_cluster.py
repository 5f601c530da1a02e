"""A cluster starts in order, tells each end in one line, stops in order, and leaves no process behind."""

import asyncio
import io
import json
import signal
import subprocess
import sys

import pytest

from cluster.children import ChildSpec, Console
from cluster.local_cluster import Cluster
from common.errors import StartupError, Unavailable
from tests.support.process_tools import is_running, wait_until_ended

pytestmark = pytest.mark.slow

FAKE_ROLE = """
import json, os, signal, sys, time
name, options = sys.argv[1], json.loads(sys.argv[2])
def told(event):
    with open(options["journal"], "a") as journal:
        journal.write(f"{event} {name}\\n")
def on_term(*_):
    told("term")
    if not options.get("stubborn"):
        time.sleep(options.get("drain", 0))
        told("end")
        os._exit(options.get("status", 0))
signal.signal(signal.SIGTERM, on_term)
told("start")
print(options.get("noise", "") + "x" * options.get("long", 0), file=sys.stderr, flush=True)
if "error" in options:
    print("error: " + options["error"], file=sys.stderr, flush=True)
    sys.exit(2)
if not options.get("silent"):
    print("ready", name.split("-")[0], f"127.0.0.1:{os.getpid()}", json.dumps({"epoch": 7}), flush=True)
print(options.get("later", ""), flush=True)
if "exit" in options:
    sys.exit(options["exit"])
while True:
    time.sleep(60)
"""


class World:
    """A console that is kept, a journal of what the fake roles did, and clusters of them."""

    def __init__(self, folder):
        self.script = folder / "role.py"
        self.script.write_text(FAKE_ROLE)
        self.journal = folder / "journal"
        self.journal.touch()
        self.out, self.err = io.StringIO(), io.StringIO()

    def spec(self, name, essential=False, **options) -> ChildSpec:
        options = json.dumps({"journal": str(self.journal), **options})
        return ChildSpec(name, (sys.executable, "-S", str(self.script), name, options), essential=essential)

    def cluster(self, *stages, startup_s=20.0, grace_s=20.0, backoff=None) -> Cluster:
        console = Console(self.out, self.err)
        return Cluster(stages, console, startup_s=startup_s, grace_s=grace_s, restart_backoff_s=backoff)

    def events(self, kind: str) -> list[str]:
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [name for event, name in lines if event == kind]

    async def until(self, condition) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


async def test_stages_start_in_order_and_stop_in_reverse(world):
    stages = [[world.spec("redis")], [world.spec("prefill-0"), world.spec("decode-0")], [world.spec("router")]]
    async with world.cluster(*stages) as cluster:
        assert cluster.address("router") == f"127.0.0.1:{cluster.children['router'].pid}"
        pids = [child.pid for child in cluster.children.values()]
    started, ended = world.events("start"), world.events("end")
    assert (started[0], started[-1]) == ("redis", "router")
    assert (ended[0], ended[-1]) == ("router", "redis")
    assert sorted(ended) == sorted(started)
    assert not any(is_running(pid) for pid in pids)
    assert cluster.unclean == []


async def test_each_process_is_announced_in_one_line_with_pid_and_address(world):
    async with world.cluster([world.spec("prefill-0")]) as cluster:
        pid = cluster.children["prefill-0"].pid
    assert [line.split() for line in world.out.getvalue().splitlines()] == [
        ["prefill-0", "pid", str(pid), f"127.0.0.1:{pid}"]
    ]


async def test_all_output_of_a_process_is_shown_with_its_name(world):
    async with world.cluster([world.spec("prefill-0", noise="one\ntwo\r", long=200_000, later="three\n\xff")]):
        await world.until(lambda: "\xff" in world.err.getvalue())
    first, *lines = world.err.getvalue().splitlines()
    assert first == "starting prefill-0"
    assert all(line.startswith("prefill-0  | ") for line in lines)
    texts = [line.removeprefix("prefill-0  | ") for line in lines]
    assert {"one", "two", "three", "\xff"} <= set(texts)
    assert "".join(text for text in texts if text.startswith("x")) == "x" * 200_000


async def test_a_failed_start_is_one_line_and_stops_the_others(world):
    stages = [[world.spec("redis")], [world.spec("prefill-0", error="no model here"), world.spec("decode-0")]]
    with pytest.raises(StartupError) as caught:
        async with world.cluster(*stages):
            pytest.fail("must not start")
    assert caught.value.message == "prefill-0: no model here"
    assert "no model here" not in world.err.getvalue()
    assert "redis" in world.events("end")


async def test_what_only_looks_like_a_failure_is_shown_in_the_end(world):
    async with world.cluster([world.spec("prefill-0", noise="error: not so bad")]):
        pass
    assert "prefill-0  | not so bad\n" in world.err.getvalue()


async def test_an_end_without_a_reason_tells_status_and_last_line(world):
    with pytest.raises(StartupError, match=r"prefill-0 \(pid \d+\) died: exit status 3: ValueError: bad"):
        async with world.cluster([world.spec("prefill-0", silent=True, noise="Traceback\nValueError: bad", exit=3)]):
            pytest.fail("must not start")


async def test_a_program_that_cannot_be_run_is_a_startup_error(world):
    with pytest.raises(StartupError, match=r"router: can't run /nowhere/python: No such file"):
        async with world.cluster([world.spec("redis")], [ChildSpec("router", ("/nowhere/python",))]):
            pytest.fail("must not start")
    assert world.events("end") == ["redis"]


async def test_a_start_has_a_deadline_that_names_who_is_late(world):
    with pytest.raises(StartupError, match=r"not ready after 0.5 s: prefill-0$"):
        async with world.cluster([world.spec("prefill-0", silent=True)], startup_s=0.5):
            pytest.fail("must not start")


async def test_a_process_that_dies_while_others_start_fails_the_start(world):
    stages = [[world.spec("redis", exit=4)], [world.spec("prefill-0", silent=True)]]
    with pytest.raises(StartupError, match=r"redis .*exit status 4"):
        async with world.cluster(*stages):
            pytest.fail("must not start")


async def test_a_cancelled_start_leaves_nothing(world):
    cluster = world.cluster([world.spec("redis")], [world.spec("prefill-0", silent=True)])

    async def start():
        async with cluster:
            pytest.fail("must not start")

    task = asyncio.create_task(start())
    await world.until(lambda: "prefill-0" in world.events("start"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(is_running(child.pid) for child in cluster.children.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_dead_worker_is_reported_in_one_line_and_not_restarted(world, number):
    async with world.cluster([world.spec("prefill-0")], [world.spec("router", essential=True)]) as cluster:
        child = cluster.children["prefill-0"]
        child.signal(number)
        wanted = f"prefill-0 (pid {child.pid}) died: killed by {number.name}\n"
        await world.until(lambda: wanted in world.out.getvalue())
        assert cluster.children["prefill-0"] is child
    assert world.events("start") == ["prefill-0", "router"]


async def test_the_end_of_an_essential_process_ends_the_run(world):
    async with world.cluster([world.spec("prefill-0")], [world.spec("router", essential=True)]) as cluster:
        cluster.children["router"].signal(signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"router \(pid \d+\) died: killed by SIGKILL"):
            await asyncio.wait_for(cluster.run(), 20)
    assert world.events("end") == ["prefill-0"]


async def test_what_dies_is_restarted_with_growing_delays(world):
    stages = [[world.spec("prefill-0")], [world.spec("router", essential=True)]]
    async with world.cluster(*stages, backoff=(0.01, 0.04)) as cluster:
        running = asyncio.create_task(cluster.run())
        for name in ("prefill-0", "router", "prefill-0", "prefill-0", "prefill-0"):
            child = cluster.children[name]
            child.signal(signal.SIGKILL)
            await world.until(lambda n=name, c=child: (new := cluster.children[n]) is not c and new.ready.done())
        assert not running.done()
        running.cancel()
    delays = [
        line.rsplit("in ", 1)[1] for line in world.out.getvalue().splitlines() if line.startswith("prefill-0 (pid")
    ]
    assert delays == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert sorted(world.events("end")) == ["prefill-0", "router"]


async def test_a_restart_that_fails_is_tried_again(world):
    async with world.cluster([world.spec("prefill-0")], backoff=(0.01, 0.01)) as cluster:
        broken = world.script.read_text()
        world.script.write_text("import sys; print('error: disk full', file=sys.stderr); sys.exit(2)")
        cluster.children["prefill-0"].signal(signal.SIGKILL)
        await world.until(lambda: world.out.getvalue().count("exit status 2: disk full; starts again") >= 2)
        world.script.write_text(broken)
        await world.until(lambda: cluster.children["prefill-0"].ready.done())


async def test_what_does_not_stop_in_its_grace_is_killed(world):
    async with world.cluster([world.spec("redis")], [world.spec("prefill-0", stubborn=True)], grace_s=0.3) as cluster:
        pids = [child.pid for child in cluster.children.values()]
    assert cluster.unclean == [f"prefill-0 (pid {pids[1]}) died: killed by SIGKILL"]
    assert world.events("end") == ["redis"]
    assert not any(is_running(pid) for pid in pids)


async def test_what_stops_with_a_failure_is_told(world):
    async with world.cluster([world.spec("prefill-0", status=3, later="it burns")]) as cluster:
        await world.until(lambda: "it burns" in world.err.getvalue())
        pid = cluster.children["prefill-0"].pid
    assert cluster.unclean == [f"prefill-0 (pid {pid}) died: exit status 3: it burns"]


async def test_a_cancelled_stop_kills_at_once(world):
    cluster = world.cluster([world.spec("redis")], [world.spec("prefill-0", drain=60)])
    async with cluster:
        stopping = asyncio.create_task(cluster.stop())
        await world.until(lambda: "prefill-0" in world.events("term"))
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not any(is_running(child.pid) for child in cluster.children.values())
    assert world.events("end") == []


async def test_a_console_that_nobody_reads_ends_the_run(world):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console(Broken(), world.err)
    async with Cluster([[world.spec("router")]], console, startup_s=20, grace_s=20) as cluster:
        await asyncio.wait_for(cluster.run(), 20)
    assert world.events("end") == ["router"]


def test_no_process_outlives_a_supervisor_that_is_killed(world):
    program = f"""
import asyncio, sys
from cluster.children import ChildSpec, Console
from cluster.local_cluster import Cluster
specs = [ChildSpec(*args) for args in {[(s.name, s.command) for s in (world.spec("a"), world.spec("b"))]!r}]
async def main():
    async with Cluster([specs], Console(), startup_s=20, grace_s=20) as cluster:
        print(*[child.pid for child in cluster.children.values()], flush=True)
        await cluster.run()
asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(supervisor.stdout.readline().split()[2]) for _ in range(2)]
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()
    for pid in pids:
        wait_until_ended(pid)
    assert world.events("end") == []
