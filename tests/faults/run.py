"""One fault at one stage of a request, and what has to hold: the same answers, nothing left, and work again at once."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.cases import (
    BODIES,
    CHECK,
    COMPANIONS,
    DEADLY,
    FIND_EVENTS,
    FREEZES,
    IN_WORK,
    LASTS_S,
    PAIRS,
    PULL_BYTES,
    PULL_RATE,
    STREAM_EVENTS,
    TRAFFIC,
    Case,
    Fault,
    Stage,
)
from tests.faults.client import BROKEN, Answer, Asked
from tests.faults.cluster import FaultCluster
from tests.faults.proxy import Traffic
from tests.faults.tools import MEET_S, Disturbed, met, undisturbed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case; seconds."""

    case: Case
    result: str  # "same", or the errors that clients saw
    attempts: int  # of the first request
    stall_s: float  # its longest time without a token from the fault on
    ready_s: float  # from the fault until all is ready, the fault's own length included


async def run_case(cluster: FaultCluster, case: Case, turn: int = 0) -> Outcome:
    """Raises AssertionError where something is not as it has to be. `turn` picks a worker where any will do."""
    return await undisturbed(lambda: _run_case(cluster, case, turn))


async def _run_case(cluster: FaultCluster, case: Case, turn: int) -> Outcome:
    wanted = [await cluster.reference(body) for body in (BODIES[case.stage], *COMPANIONS)]
    clock = asyncio.get_running_loop().time
    asked: list[Asked] = []
    restart: asyncio.Task[None] | None = None
    try:
        if case.stage is Stage.PULL:
            for prefill, decode in PAIRS:
                cluster.proxies[prefill].shape(Traffic(bytes_per_s=PULL_RATE), owner=decode)
        victim = await _met(cluster, case, asked, turn)
        fault_at = clock()
        restart = await _strike(cluster, case.fault, victim)
        while len(asked) < len(wanted):
            asked.append(cluster.ask((BODIES[case.stage], *COMPANIONS)[len(asked)], direct=len(asked) > 0))
        await asyncio.sleep(LASTS_S.get(case.fault, 0.0))
        if case.fault in LASTS_S:
            await _relent(cluster, victim)
        answers = [await one.answer() for one in asked]
        if restart is not None:
            await restart
        await cluster.heal()
        ready_s = clock() - fault_at
        result = compare(case, wanted, answers)
        if result == "same":
            check_attempts(case, [one.report.get("attempts", 0) for one in asked])
        await cluster.quiet()
        check = await cluster.reference(CHECK)
        assert await cluster.ask(CHECK).answer() == check
    finally:
        for one in asked:
            one.cancel()
        if restart is not None:
            await asyncio.gather(restart, return_exceptions=True)
    return Outcome(case, result, asked[0].report.get("attempts", 0), _stall(asked[0].times, fault_at), ready_s)


async def _met(cluster: FaultCluster, case: Case, asked: list[Asked], turn: int) -> str:
    """_meet, or Disturbed where the request took another way."""
    try:
        async with asyncio.timeout(2 * MEET_S):
            return await _meet(cluster, case, asked, turn)
    except (TimeoutError, Disturbed) as error:
        for one in asked:
            one.cancel()
        await cluster.heal()
        await cluster.quiet()
        raise Disturbed(f"{case.stage} was not met") from error


async def _meet(cluster: FaultCluster, case: Case, asked: list[Asked], turn: int) -> str:
    """Asks, and waits for the stage; the process to be struck, which is one that has to do with the first request."""
    victim = case.target if case.target in ("router", "redis") else f"{case.target}-{turn % 2}"
    if case.stage is Stage.IDLE:
        return victim
    submitted = cluster.submitted()
    asked.append(cluster.ask(BODIES[case.stage]))
    prefill = await cluster.at_work("prefill", submitted)
    victim = prefill if case.target == "prefill" else victim
    if case.stage is Stage.PROMPT:
        asked += [cluster.ask(body, direct=True) for body in COMPANIONS]
        return victim
    if case.stage is Stage.TOKEN_0:
        await asked[0].reached(1)
        return await cluster.at_work("decode", submitted) if case.target == "decode" else victim
    if case.stage is Stage.PULL:
        pair = await _pulling(cluster)
        asked += [cluster.ask(body, direct=True) for body in COMPANIONS]
        return {"prefill": pair[0], "decode": pair[1]}.get(case.target, case.target)
    await asked[0].reached(FIND_EVENTS)
    if case.target == "decode":
        victim = await cluster.at_work("decode", submitted)
    asked += [cluster.ask(body, direct=True) for body in COMPANIONS]
    await asked[0].reached(STREAM_EVENTS[case.stage])
    return victim


async def _pulling(cluster: FaultCluster) -> tuple[str, str]:
    """The holder and the reader of a pull, when a part of its bytes has come."""
    before = {pair: cluster.proxies[pair[0]].moved[pair[1], "down"] for pair in PAIRS}

    async def one() -> tuple[str, str] | None:
        moved = (pair for pair in PAIRS if cluster.proxies[pair[0]].moved[pair[1], "down"] > before[pair] + PULL_BYTES)
        return next(moved, None)

    pair: tuple[str, str] = await met(one, "a pull is under way")
    return pair


async def _strike(cluster: FaultCluster, fault: Fault, victim: str) -> asyncio.Task[None] | None:
    """Returns the restart, if it takes one."""
    proxy = cluster.proxies[victim]
    if fault is Fault.KILL:
        await cluster.kill(victim)
        return asyncio.create_task(cluster.start(victim))
    if fault in FREEZES:
        cluster.freeze(victim)
    elif fault is Fault.CUT:
        proxy.cut()
    elif fault is Fault.REFUSED:
        proxy.refuse()
    else:
        proxy.shape(TRAFFIC[fault])
    return None


async def _relent(cluster: FaultCluster, victim: str) -> None:
    cluster.thaw(victim)
    await cluster.proxies[victim].heal()


def compare(case: Case, wanted: Sequence[Answer], answers: Sequence[Answer]) -> str:
    """The result, "same" where each answer is the one without the fault.

    Where a client's own way to the router is cut, what it has got until then is right, and it is told at once.
    """
    may_break = range(0)
    if case.target == "router" and case.fault in (Fault.KILL, Fault.CUT, Fault.REFUSED):
        may_break = range(len(answers) if case.fault is Fault.KILL else 1)  # the others don't go through the proxy
    for index, (answer, reference) in enumerate(zip(answers, wanted, strict=True)):
        if answer.error == BROKEN and index in may_break:
            pairs = zip(answer.choices, reference.choices, strict=True)
            assert all(whole.begins_with(part) for part, whole in pairs), f"request {index} got something else"
        else:
            assert answer.error is None, f"request {index}: {answer.error}"
            assert answer == reference, f"request {index} got another answer"
    return answers[0].error or "same"


def check_attempts(case: Case, attempts: Sequence[int]) -> None:
    """Redis is in no request's way; and where the first request was at work on the victim, it had to resume."""
    if case.target == "redis" and case.stage is not Stage.PULL and max(attempts) > 1:  # slow pulls may be given up
        raise Disturbed(f"attempts: {attempts}")
    if case.fault in DEADLY and (case.target, case.stage) in IN_WORK and attempts[0] == 1:
        raise Disturbed("the fault met nothing")


def _stall(times: Sequence[float], fault_at: float) -> float:
    later = [fault_at, *(time for time in times if time > fault_at)]
    return max((after - before for before, after in itertools.pairwise(later)), default=0.0)
