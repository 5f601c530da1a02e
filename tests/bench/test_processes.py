"""What a process holds is read from /proc and its metrics, and memory of workers that are gone is found."""

import mmap
import os
import subprocess
import sys

import pytest

from bench.processes import gauges_of, orphaned_bytes, pools_of, slope, usage_of, worker_states
from common.metrics import metrics_response
from common.worker.metrics import WorkerMetrics
from router.metrics import RouterMetrics
from tests.support.process_tools import linux

MAPS = """\
7f0000000000-7f0000002000 rw-s 00000000 00:01 11 /memfd:kvrelay (deleted)
7f0000002000-7f0000003000 rw-s 00002000 00:01 11 /memfd:kvrelay (deleted)
7f0000004000-7f0000005000 r--s 00000000 00:01 12                       /memfd:kvrelay (deleted)
7f0000006000-7f0000009000 r-xp 00000000 08:01 13 /usr/lib/libc.so.6
7f000000a000-7f000000b000 rw-p 00000000 00:00 0
"""


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        ([(0, 1), (1, 3), (2, 5)], 2.0),
        ([(0, 1), (1, 1)], 0.0),
        ([(0, 0), (1, 2), (2, 1), (3, 3)], 0.8),
        ([(1, 5)], None),
        ([(2, 1), (2, 9)], None),
        ([], None),
    ],
)
def test_the_slope_is_by_least_squares(points, wanted):
    assert slope(points) == (None if wanted is None else pytest.approx(wanted))


def test_shared_pools_are_told_from_other_memory(tmp_path):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "maps").write_text(MAPS)
    assert pools_of(5, tmp_path) == {("00:01", "11"): 0x3000, ("00:01", "12"): 0x1000}


def test_a_pool_of_a_prefill_worker_that_is_gone_is_orphaned():
    mine, old = ("00:01", "1"), ("00:01", "2")
    pools = {"prefill-0": {mine: 100}, "decode-0": {mine: 100, old: 70}, "decode-1": {old: 70}, "router": {}}
    assert orphaned_bytes(pools) == 140
    assert orphaned_bytes({"prefill-0": {mine: 100}, "decode-0": {mine: 100}}) == 0


@linux
def test_usage_is_this_processs_own():
    before = usage_of(os.getpid())
    with open(os.devnull), open(os.devnull):
        held = mmap.mmap(-1, 2**25, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc has pages to spare
        held.write(os.urandom(2**25))
        after = usage_of(os.getpid())
    assert after.open_files == before.open_files + 2
    assert after.anonymous_mb > before.anonymous_mb + 25
    assert after.threads >= 1
    assert after.rss_mb > after.anonymous_mb > 0
    held.close()


@linux
def test_a_process_that_has_ended_has_no_usage():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    with pytest.raises(OSError):
        usage_of(process.pid)
    process.wait()
    with pytest.raises(OSError):
        usage_of(process.pid)


def page(metrics) -> str:
    return metrics_response(metrics.registry).body.decode()


def test_gauges_of_work_are_all_gauges_but_those_of_who_is_there():
    router = RouterMetrics("tiny")
    router.on_load(3, 2)
    router.on_workers({("decode", "ready"): 2, ("prefill", "draining"): 1})
    router.on_index(7)
    found = gauges_of(page(router))
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert not {"workers", "prefix_index_blocks"} & found.keys()
    assert not any(name.startswith("process") for name in found)
    worker = WorkerMetrics("tiny", "decode")
    worker.on_claims(4)
    assert gauges_of(page(worker))["kv_claims"] == 4
    assert {"kv_used_blocks", "kv_leases", "num_attempts"} <= gauges_of(page(worker)).keys()


def test_workers_are_counted_by_state():
    router = RouterMetrics("tiny")
    router.on_workers({("decode", "ready"): 2, ("prefill", "ready"): 1, ("prefill", "draining"): 1})
    assert worker_states(page(router)) == {"ready": 3, "draining": 1}
