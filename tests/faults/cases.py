"""Faults, stages of a request, and which of their combinations are tried on whom."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.faults.processes import DEADLINES
from tests.faults.proxy import BLACKHOLE, Traffic


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
DEADLY = set(Fault) - {Fault.BLINK, Fault.SLOW, Fault.DEAF}  # to what runs there; who hears nothing still speaks
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
PAIRS = [(prefill, decode) for prefill in ("prefill-0", "prefill-1") for decode in ("decode-0", "decode-1")]
PULL_RATE, PULL_BYTES = 4_000_000, 1_500_000  # bytes a second, and of the 7 MB of the long prompt's KV
STREAM_EVENTS = {Stage.STREAM: 40, Stage.FORKS: 60, Stage.LAST: 57}
FIND_EVENTS = 4  # by then the first answer is decoded, and its decode worker can be told by its metrics


@dataclass(frozen=True, slots=True)
class Case:
    target: str  # prefill, decode, router or redis
    fault: Fault
    stage: Stage

    def __str__(self) -> str:
        return f"{self.target}, {self.fault}, {self.stage}"


def _cases(target: str, fault: Fault, *stages: Stage) -> list[Case]:
    return [Case(target, fault, stage) for stage in stages]


S, F = Stage, Fault
STAGES = (S.IDLE, S.PROMPT, S.TOKEN_0, S.STREAM, S.FORKS, S.LAST)
TARGETS = ("prefill", "decode", "router", "redis")
PULLS = [Case(target, fault, S.PULL) for fault in Fault for target in TARGETS]  # where KV goes over the network
ALL = [Case(target, fault, stage) for stage in STAGES for fault in Fault for target in TARGETS]
# Each kind of fault once, each target and each stage at least once; more than the lease: test_specials.
QUICK = [
    *_cases("prefill", F.KILL, S.PROMPT),
    *_cases("prefill", F.FROZEN, S.TOKEN_0),
    *_cases("prefill", F.CUT, S.TOKEN_0),
    *_cases("prefill", F.MUTE, S.PROMPT),
    *_cases("decode", F.KILL, S.FORKS),
    *_cases("decode", F.BLINK, S.STREAM),
    *_cases("decode", F.DEAF, S.LAST),
    *_cases("decode", F.REFUSED, S.IDLE),
    *_cases("decode", F.BLACKHOLE, S.TOKEN_0),
    *_cases("router", F.KILL, S.STREAM),
    *_cases("router", F.FROZEN, S.STREAM),
    *_cases("router", F.SLOW, S.STREAM),
    *_cases("redis", F.CUT, S.PROMPT),
]
QUICK_PULLS = [
    *_cases("prefill", F.KILL, S.PULL),
    *_cases("decode", F.FROZEN, S.PULL),
]
