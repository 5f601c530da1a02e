"""One fault at one stage of a request, and what has to hold: the same answers, nothing left, and work again at once."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from faults.client import BROKEN, Answer, Asked
from faults.cluster import DEADLINES, FaultCluster
from faults.proxy import BLACKHOLE, Traffic


class Stage(StrEnum):
    IDLE = "idle"
    PROMPT = "prompt is computed"
    TOKEN_0 = "first token out"
    PULL = "mid-pull"
    STREAM = "mid-stream"
    FORKS = "n > 1"
    LAST = "nearly done"


class Fault(StrEnum):
    KILL = "SIGKILL"
    BLINK = "frozen, less than suspect"
    FROZEN = "frozen, more than dead"
    FROZEN_LEASE = "frozen, more than the lease"
    CUT = "connections cut"
    REFUSED = "cut and refused"
    BLACKHOLE = "no bytes either way"
    DEAF = "no bytes to it"
    MUTE = "no bytes from it"
    SLOW = "slow"


LASTS_S = {
    Fault.BLINK: 0.5 * DEADLINES.suspect_s,
    Fault.FROZEN: 1.5 * DEADLINES.dead_s,
    Fault.FROZEN_LEASE: DEADLINES.lease_s + DEADLINES.dead_s,
    Fault.REFUSED: 1.5 * DEADLINES.dead_s,
    Fault.BLACKHOLE: 1.5 * DEADLINES.dead_s,
    Fault.DEAF: 1.5 * DEADLINES.dead_s,
    Fault.MUTE: 1.5 * DEADLINES.dead_s,
}
SLOW = Traffic(delay_s=0.01, bytes_per_s=200_000)
TRAFFIC = {
    Fault.BLACKHOLE: BLACKHOLE,
    Fault.DEAF: Traffic(up=False),
    Fault.MUTE: Traffic(down=False),
    Fault.SLOW: SLOW,
}
DEADLY = set(Fault) - {Fault.BLINK, Fault.SLOW}  # to what runs there
IN_WORK = {("prefill", Stage.PROMPT), ("decode", Stage.STREAM), ("decode", Stage.FORKS)}
FREEZES = (Fault.BLINK, Fault.FROZEN, Fault.FROZEN_LEASE)

LONG_PROMPT = "A prompt of many blocks, which take many steps. " * 24
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "frequency_penalty": 0.3, "ignore_eos": True}
BODIES: dict[Stage, dict[str, Any]] = {
    Stage.IDLE: {"prompt": LONG_PROMPT, "max_tokens": 40, "logprobs": 2, **SEEDED},
    Stage.PROMPT: {"prompt": LONG_PROMPT, "max_tokens": 40, "logprobs": 2, **SEEDED},
    Stage.TOKEN_0: {"prompt": LONG_PROMPT, "max_tokens": 60, "logprobs": 2, **GREEDY},
    Stage.PULL: {"prompt": LONG_PROMPT, "max_tokens": 40, "logprobs": 2, **SEEDED},
    Stage.STREAM: {"prompt": LONG_PROMPT, "max_tokens": 160, "logprobs": 1, **SEEDED},
    Stage.FORKS: {"prompt": LONG_PROMPT, "max_tokens": 80, "logprobs": 1, "n": 3, **SEEDED},
    Stage.LAST: {"prompt": LONG_PROMPT, "max_tokens": 60, "logprobs": 1, **GREEDY},
}
COMPANIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "One beside it, greedy and short.", "max_tokens": 30, "logprobs": 1, **GREEDY},
    {"prompt": "Another, of some length. " * 12, "max_tokens": 50, "logprobs": 0, **SEEDED, "seed": 11},
    {"prompt": "A third, which may stop by itself.", "max_tokens": 50, "logprobs": 0, "temperature": 1.0, "seed": 3},
)
CHECK: dict[str, Any] = {"prompt": "Is all well again?", "max_tokens": 12, "logprobs": 1, **GREEDY}
STREAM_EVENTS = {Stage.STREAM: 40, Stage.FORKS: 60, Stage.LAST: 57}
FIND_EVENTS = 4  # by then the first answer is decoded, and its decode worker can be told by its metrics


@dataclass(frozen=True, slots=True)
class Case:
    target: str  # prefill, decode, router or redis
    fault: Fault
    stage: Stage

    def __str__(self) -> str:
        return f"{self.target}, {self.fault}, {self.stage}"


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
    wanted = [await cluster.reference(body) for body in (BODIES[case.stage], *COMPANIONS)]
    clock = asyncio.get_running_loop().time
    asked: list[Asked] = []
    restart: asyncio.Task[None] | None = None
    try:
        if case.stage is not Stage.IDLE:
            asked.append(cluster.ask(BODIES[case.stage]))
        victim = await _meet(cluster, case, asked, turn)
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
            check_attempts(case, [one.report["attempts"] for one in asked])
        await cluster.quiet()
        check = await cluster.reference(CHECK)
        assert await cluster.ask(CHECK).answer() == check
    finally:
        for one in asked:
            one.cancel()
        if restart is not None:
            await asyncio.gather(restart, return_exceptions=True)
    return Outcome(case, result, asked[0].report.get("attempts", 0), _stall(asked[0].times, fault_at), ready_s)


async def _meet(cluster: FaultCluster, case: Case, asked: list[Asked], turn: int) -> str:
    """Waits for the stage; the process to be struck, which is one that has to do with the first request."""
    victim = case.target if case.target in ("router", "redis") else f"{case.target}-{turn % 2}"
    if case.stage is Stage.IDLE:
        return victim
    prefill = await cluster.busy("prefill")
    victim = prefill if case.target == "prefill" else victim
    if case.stage is Stage.PROMPT:
        asked += [cluster.ask(body, direct=True) for body in COMPANIONS]
        return victim
    if case.stage is Stage.TOKEN_0:
        await asked[0].reached(1)
        return await cluster.busy("decode") if case.target == "decode" else victim
    await asked[0].reached(FIND_EVENTS)
    if case.target == "decode":
        victim = await cluster.busy("decode")
    asked += [cluster.ask(body, direct=True) for body in COMPANIONS]
    await asked[0].reached(STREAM_EVENTS[case.stage])
    return victim


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
    if case.target == "redis":
        assert max(attempts) == 1, f"attempts: {attempts}"
    if case.fault in DEADLY and (case.target, case.stage) in IN_WORK:
        assert attempts[0] > 1, "the fault met nothing"


def _stall(times: Sequence[float], fault_at: float) -> float:
    later = [fault_at, *(time for time in times if time > fault_at)]
    return max((after - before for before, after in itertools.pairwise(later)), default=0.0)


def _cases(target: str, fault: Fault, *stages: Stage) -> list[Case]:
    return [Case(target, fault, stage) for stage in stages]


S, F = Stage, Fault
STAGES = (S.IDLE, S.PROMPT, S.TOKEN_0, S.STREAM, S.FORKS, S.LAST)
TARGETS = ("prefill", "decode", "router", "redis")
ALL = [Case(target, fault, stage) for stage in STAGES for fault in Fault for target in TARGETS]
"""Every combination, and those of `make test`: each fault of each target, and each stage of each target."""
QUICK = [
    *_cases("prefill", F.KILL, S.IDLE, S.PROMPT, S.TOKEN_0),
    *_cases("prefill", F.FROZEN, S.PROMPT, S.TOKEN_0),
    *_cases("prefill", F.BLINK, S.PROMPT),
    *_cases("prefill", F.CUT, S.PROMPT, S.TOKEN_0, S.STREAM),
    *_cases("prefill", F.BLACKHOLE, S.PROMPT, S.TOKEN_0),
    *_cases("prefill", F.SLOW, S.TOKEN_0),
    *_cases("decode", F.KILL, S.TOKEN_0, S.STREAM, S.FORKS),
    *_cases("decode", F.FROZEN, S.STREAM, S.FORKS),
    *_cases("decode", F.FROZEN_LEASE, S.TOKEN_0),
    *_cases("decode", F.BLINK, S.STREAM),
    *_cases("decode", F.CUT, S.PROMPT, S.STREAM, S.FORKS, S.LAST),
    *_cases("decode", F.BLACKHOLE, S.TOKEN_0),
    *_cases("decode", F.DEAF, S.STREAM),
    *_cases("decode", F.MUTE, S.LAST),
    *_cases("decode", F.SLOW, S.FORKS),
    *_cases("router", F.KILL, S.STREAM),
    *_cases("router", F.FROZEN, S.TOKEN_0, S.STREAM),
    *_cases("router", F.BLINK, S.PROMPT),
    *_cases("router", F.CUT, S.PROMPT, S.STREAM),
    *_cases("router", F.BLACKHOLE, S.FORKS),
    *_cases("router", F.SLOW, S.STREAM),
    *_cases("redis", F.KILL, S.STREAM),
    *_cases("redis", F.FROZEN, S.IDLE),
    *_cases("redis", F.CUT, S.PROMPT),
    *_cases("redis", F.BLACKHOLE, S.TOKEN_0),
]
