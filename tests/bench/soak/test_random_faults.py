"""Faults strike who may be struck, one worker of a role stays well, and what was struck is waited for."""

import asyncio
import random
import signal
from types import SimpleNamespace

import pytest

from bench.soak.random_faults import ON_REDIS, Fault, RandomFaults
from common.deadlines import Deadlines

DEADLINES = Deadlines().scaled(0.01)
WORKER_FAULTS = [fault for fault in Fault if fault not in ON_REDIS]


class FakeChild:
    """Killed or asked to stop, it is replaced at once."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.exited = SimpleNamespace(result=lambda: cluster.exit_status)

    def obituary(self):
        return f"{self.name} died"

    def signal(self, number):
        self.cluster.log.append((self.name, number))
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.cluster.children[self.name] = FakeChild(self.cluster, self.name)


def make_cluster(*names, exit_status=0):
    cluster = SimpleNamespace(children={}, log=[], exit_status=exit_status)
    cluster.children.update({name: FakeChild(cluster, name) for name in names})
    return cluster


def make_faults(cluster, well=lambda name: True, every_s=0.001, seed=0):
    async def is_well(name):
        return well(name)

    return RandomFaults(cluster, is_well, DEADLINES, random.Random(seed), every_s)


FULL = ("redis", "prefill-0", "prefill-1", "decode-0", "decode-1", "router")


async def run_until(faults, kinds):
    """Until so many kinds of faults have come."""
    task = asyncio.create_task(faults.run())
    async with asyncio.timeout(30):
        while len(faults.counts) < kinds:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_router_is_never_struck():
    faults = make_faults(make_cluster(*FULL))
    assert {name for fault in Fault for name in faults.victims(fault)} == set(FULL) - {"router"}


@pytest.mark.parametrize("fault", WORKER_FAULTS)
async def test_one_worker_of_each_role_stays_well(fault):
    cluster = make_cluster(*FULL)
    faults = make_faults(cluster, well=lambda name: False)
    faults._struck["decode-0"] = asyncio.create_task(faults._strike(fault, "decode-0"))
    assert faults.victims(fault) == ["prefill-0", "prefill-1"]
    faults._struck["decode-0"].cancel()


def test_a_role_with_one_worker_may_lose_it():
    assert make_faults(make_cluster("prefill-0", "decode-0")).victims(Fault.KILL) == ["prefill-0", "decode-0"]


async def test_every_fault_comes_and_is_recovered_from():
    cluster = make_cluster(*FULL)
    faults = make_faults(cluster)
    await run_until(faults, len(Fault))
    assert await faults.settled(5.0) == []
    assert set(faults.counts) == set(Fault)
    assert {name: len(values) for name, values in faults.recovery_s.items()} == dict(faults.counts)
    assert faults.bad_drains == []
    ends = [number for _, number in cluster.log if number in (signal.SIGKILL, signal.SIGTERM)]
    assert faults.ended == len(ends)
    for name in FULL:
        sent = [number for who, number in cluster.log if who == name]
        assert sent.count(signal.SIGSTOP) == sent.count(signal.SIGCONT)


async def test_who_does_not_get_well_is_named():
    faults = make_faults(make_cluster(*FULL), well=lambda name: False)
    await run_until(faults, 1)
    late = await faults.settled(0.1)
    assert late
    assert set(late) <= set(FULL)
    for task in faults._struck.values():
        task.cancel()


async def test_a_freeze_that_is_interrupted_thaws():
    cluster = make_cluster(*FULL)
    task = asyncio.create_task(make_faults(cluster)._strike(Fault.FREEZE, "decode-0"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cluster.log == [("decode-0", signal.SIGSTOP), ("decode-0", signal.SIGCONT)]


@pytest.mark.parametrize(("status", "told"), [(0, []), (1, ["decode-0 died"]), (-9, ["decode-0 died"])])
async def test_a_drain_that_does_not_end_well_is_told(status, told):
    faults = make_faults(make_cluster(*FULL, exit_status=status))
    await faults._strike(Fault.DRAIN, "decode-0")
    await faults._strike(Fault.KILL, "decode-1")
    assert faults.bad_drains == told
