"""A soak compares what it gets, tells what is off, and ends with one line of JSON."""

import json
from collections import Counter

import pytest

from bench.options import SoakOptions
from bench.processes import ProcessUsage
from bench.soak import soak
from bench.soak.soak import Soak
from bench.soak.tally import Tally
from common.settings import Bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.process_tools import linux


class FakeFaults:
    def __init__(self):
        self.counts, self.recovery_s = Counter({"kill": 2}), {"kill": [1.0, 3.0]}
        self.ended, self.bad_drains = 2, []


class FakeProcesses:
    def __init__(self, open_files=20, orphaned=0):
        self._usage, self._orphaned = {"router": ProcessUsage(80.0, 40.0, 12, open_files)}, orphaned

    def usage(self):
        return self._usage

    def orphaned_bytes(self):
        return self._orphaned


def result(*, ends=None, wrong=0, mb_per_1000=0.0, left=None, not_well=(), open_files=20, orphaned=0, lives=2):
    """What a soak says that has seen this."""
    tally = Tally({}, wrong=wrong)
    for number in range(1000):
        tally.ends["answered"] += 1
        usage = ProcessUsage(80.0, 40 + number * mb_per_1000 / 1e3, 12, 20)
        tally.memory["router", 1].append((number / 1e3, usage.anonymous_mb))
    tally.ends.update(ends or {})
    made = Soak(SoakOptions(rss_slope=2.0), None, None, FakeProcesses(open_files, orphaned))
    made._pids |= {"router": {1}, "decode-0": set(range(2, 2 + lives)), "decode-1": {20, 21}}
    return made._result(tally, FakeFaults(), FakeProcesses().usage(), left or {}, list(not_well))


def test_a_good_soak_has_nothing_off():
    row = result(ends={"aborted": 5, "refused": 2}, mb_per_1000=1.0)
    assert row["off"] == []
    assert (row["requests"], row["answered"], row["faults_total"]) == (1007, 1000, 2)
    assert row["recovery_s"] == {"kill": {"p50": 2.0, "max": 3.0}}
    assert row["router_mb_per_1000"] == pytest.approx(1.0)
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("seen", "off"),
    [
        ({"ends": {"hung": 1}}, "hung: 1"),
        ({"ends": {"failed": 3}}, "failed: 3"),
        ({"wrong": 1}, "wrong: 1"),
        ({"left": {"decode-0 kv_used_blocks": 2.0}}, "blocks: 2"),
        ({"left": {"router something_new": 1.0}}, "something_new: 1"),
        ({"orphaned": 4096}, "bytes: 4096"),
        ({"not_well": ["decode-1"]}, "not well again: decode-1"),
        ({"lives": 3}, "ended without being asked: 1 processes"),
        ({"open_files": 29}, "router has 1 open_files too many"),
        ({"mb_per_1000": 2.1}, "the router grows by 2.1 MB for 1,000 requests"),
    ],
)
def test_whatever_is_off_is_named(seen, off):
    assert result(**seen)["off"] == [off]


@linux
async def test_a_whole_soak_with_faults(tmp_path, capsys):
    model = make_random_checkpoint(tmp_path / "tiny")
    options = SoakOptions(
        model=str(model), prefill=1, decode=2, seconds=4.0, faults=True, fault_every=1.0, templates=10, concurrency=6,
        kv_cache_memory=Bytes(4 * 2**20), deadline_scale=0.4,
    )  # fmt: skip
    status = await soak.measure(options)
    table, line = capsys.readouterr().out.splitlines()[-2:]
    row = json.loads(line)
    assert (status, row["off"]) == (0, [])
    assert row["requests"] == sum(row[end] for end in ("answered", "refused", "aborted", "failed", "hung"))
    assert row["answered"] > 0
    assert row["faults_total"] > 0
    assert not any(row["leaked"].values())
    assert str(row["requests"]) in table.split()
