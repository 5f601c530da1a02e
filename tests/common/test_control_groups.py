"""A container's limits hold in both versions of control groups, wherever in its tree they stand; fake trees."""

import os
from pathlib import Path

import pytest

from common.control_groups import ControlGroups, usable_cores
from common.engine.memory import available_memory, memory_limit

MIB, GIB = 2**20, 2**30
UNLIMITED = 9223372036854771712  # version 1's word for it
V1 = "9:memory:/docker/one\n4:cpu,cpuacct:/docker/one\n3:cpuset:/\n1:name=systemd:/docker/one\n"


def tree(root: Path, groups: str, files: dict[str, object]) -> ControlGroups:
    """`files` by their path under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return ControlGroups(root)


STAT_1 = f"cache 1\ninactive_file 5\ntotal_inactive_file {200 * MIB}"
STAT_2 = f"anon 1\ninactive_file {200 * MIB}"


@pytest.mark.parametrize(
    ("groups", "files", "limit", "left"),
    [
        ("", {}, None, None),
        ("0::/\n", {}, None, None),
        ("0::/pods/one\n", {"pods/one/memory.max": "max"}, None, None),
        (
            "0::/pods/one\n",
            {
                "pods/one/memory.max": GIB,
                "pods/one/memory.current": 700 * MIB,
                "pods/one/memory.stat": STAT_2,
            },
            GIB,
            GIB - 500 * MIB,
        ),
        (  # the pod's limit is tighter than the container's
            "0::/pods/one\n",
            {"pods/one/memory.max": 3 * GIB, "pods/memory.max": GIB},
            GIB,
            GIB,
        ),
        (  # the path is the host's, the container sees its own group as the root
            "0::/kubepods/pod7/one\n",
            {"memory.max": GIB, "memory.current": 2 * GIB},
            GIB,
            0,
        ),
        ("0::/../../one\n", {"memory.max": GIB}, GIB, GIB),
        (
            V1,
            {
                "memory/docker/one/memory.limit_in_bytes": GIB,
                "memory/docker/one/memory.usage_in_bytes": 700 * MIB,
                "memory/docker/one/memory.stat": STAT_1,
            },
            GIB,
            GIB - 500 * MIB,
        ),
        (V1, {"memory/memory.limit_in_bytes": GIB}, GIB, GIB),
        (V1, {"memory/docker/one/memory.limit_in_bytes": UNLIMITED}, UNLIMITED, UNLIMITED),
        ("0::/one\n" + V1, {"unified/one/memory.max": GIB}, GIB, GIB),
    ],
    ids=[
        "none",
        "empty",
        "no limit",
        "v2",
        "v2 parent",
        "v2 without a namespace",
        "v2 outside",
        "v1",
        "v1 without a namespace",
        "v1 no limit",
        "both",
    ],
)
def test_the_tightest_memory_limit_counts(
    tmp_path: Path, groups: str, files: dict[str, object], limit: int | None, left: int | None
) -> None:
    found = tree(tmp_path, groups, files)
    assert (found.memory_limit(), found.memory_left()) == (limit, left)


def test_a_pool_is_planned_by_the_groups_memory_and_never_by_more_than_the_machines(tmp_path: Path) -> None:
    small = tree(tmp_path / "small", "0::/\n", {"memory.max": 64 * MIB, "memory.current": 60 * MIB})
    assert (memory_limit(small), available_memory(small)) == (64 * MIB, 4 * MIB)
    large = tree(tmp_path / "large", V1, {"memory/memory.limit_in_bytes": UNLIMITED})
    none = tree(tmp_path / "none", "", {})
    assert memory_limit(large) == memory_limit(none) < 2**50


@pytest.mark.parametrize(
    ("groups", "files", "cores", "threads"),
    [
        ("", {}, None, 8),
        ("0::/one\n", {"one/cpu.max": "max 100000"}, None, 8),
        ("0::/one\n", {"one/cpu.max": "250000 100000"}, 2.5, 2),
        ("0::/one\n", {"one/cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/one\n", {"one/cpu.max": "6400000 100000"}, 64.0, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3.0, 3),
        ("0::/host/path\n", {"cpu.max": "200000 100000"}, 2.0, 2),
        (V1, {"cpu/docker/one/cpu.cfs_quota_us": -1, "cpu/docker/one/cpu.cfs_period_us": 10000}, None, 8),
        (V1, {"cpu/docker/one/cpu.cfs_quota_us": 35000, "cpu/docker/one/cpu.cfs_period_us": 10000}, 3.5, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": 20000, "cpu,cpuacct/cpu.cfs_period_us": 10000}, 2.0, 2),
    ],
)
def test_threads_are_no_more_than_the_quota_pays_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, object],
    cores: float | None,
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = tree(tmp_path, groups, files)
    assert (found.cores(), usable_cores(found)) == (cores, threads)


def test_what_cant_be_read_is_no_limit(tmp_path: Path) -> None:
    groups = tree(tmp_path, "0::/one\n", {"one/memory.max": GIB})
    (tmp_path / "sys/fs/cgroup/one/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/one/memory.max").mkdir()
    assert groups.memory_limit() is None
