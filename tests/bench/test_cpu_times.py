"""CPU times are those that the kernel counts, and the engine's threads are told from the wire's."""

import os
import time

import pytest

from bench import cpu_times
from bench.cpu_times import TICK_S, Disturbance, ProcessTime, busy_s, process_time


def stat(name: str, user: int, system: int) -> str:
    fields = ["S", *["0"] * 10, str(user), str(system), *["0"] * 30]
    return f"1 ({name}) {' '.join(fields)}\n"


def fake_process(proc, pid, total, threads):
    """threads: tid → (name, user, system), ticks."""
    (proc / str(pid) / "task").mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(stat("some (odd) name", *total))
    (proc / str(pid) / "comm").write_text(f"{threads[pid][0]}\n")
    for tid, (name, user, system) in threads.items():
        task = proc / str(pid) / "task" / str(tid)
        task.mkdir()
        (task / "stat").write_text(stat(name, user, system))
        (task / "comm").write_text(f"{name}\n")


def test_the_engine_is_what_has_the_process_name_beside_the_first_thread(tmp_path):
    threads = {7: ("python", 10, 1), 8: ("python", 50, 2), 9: ("event_engine", 4, 4), 10: ("python", 3, 0)}
    fake_process(tmp_path, 7, (70, 9), threads)
    spent = process_time(7, tmp_path)
    assert spent.total_s == pytest.approx(79 * TICK_S)
    assert spent.engine_s == pytest.approx(55 * TICK_S)
    assert spent.wire_s == pytest.approx(24 * TICK_S)


def test_times_subtract_part_by_part():
    assert ProcessTime(5.0, 3.0) - ProcessTime(1.0, 0.5) == ProcessTime(4.0, 2.5)


def test_this_process_has_the_time_that_the_kernel_says():
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert process_time(os.getpid()).total_s == pytest.approx(time.process_time(), abs=0.05)


def test_a_process_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        process_time(1, tmp_path)


def test_a_cpu_is_busy_with_all_but_idling(tmp_path):
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0", "cpu0 1 2 3 1000 1000 4 5 6 0 0", "cpu1 10 0 0 1000 0 0 0 0 0 0", "intr 1"]
    (tmp_path / "stat").write_text("\n".join(lines))
    assert busy_s({0}, tmp_path) == pytest.approx(21 * TICK_S)
    assert busy_s({0, 1}, tmp_path) == pytest.approx(31 * TICK_S)
    assert busy_s({2}, tmp_path) == 0.0


@pytest.mark.parametrize(
    ("busy", "own", "cores"),
    [
        ((10.0, 14.0), (2.0, 3.0), 1.5),  # four seconds of CPU, one of them ours, in two
        ((10.0, 12.0), (2.0, 4.0), 0.0),
        ((10.0, 11.9), (2.0, 4.0), 0.0),  # the two clocks tick apart
    ],
)
def test_disturbance_is_what_others_took(monkeypatch, busy, own, cores):
    all_busy, all_own = iter(busy), iter(own)
    monkeypatch.setattr(cpu_times, "busy_s", lambda cpus: next(all_busy))
    monkeypatch.setattr(cpu_times, "process_time", lambda pid: ProcessTime(next(all_own), 0.0))
    assert Disturbance(100.0).cores(102.0) == cores
