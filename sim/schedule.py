"""What a seed asks for: deadlines, the cluster's shape, the requests, and what their clients should get."""

import random
from dataclasses import dataclass, field

from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.engine.limits import SchedulerConfig
from common.sampling import SamplingParams
from router.pipeline.generation import Delta, Generation, GenerationRequest
from sim.cluster import WorkerShape
from sim.toy import VOCAB, Expected, expected
from sim.virtual_time import Node

DEADLINES = Deadlines(
    heartbeat_s=1.0, suspect_s=1.6, dead_s=2.5, connect_s=1.5, rpc_s=1.0, router_queue_s=6.0, prefill_s=2.5,
    pull_progress_s=1.0, decode_token_s=2.5, request_s=15.0, lease_s=4.0,
)  # fmt: skip
MAX_MODEL_LEN = 6 * BLOCK_SIZE
LETTER = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Asked:
    """A request, its client, and what has come of it."""

    request: GenerationRequest
    expected: list[Expected]
    router: int
    at: float
    leaves_after: float | None = None
    generation: Generation = field(init=False)
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    finished: set[int] = field(default_factory=set)
    outcome: str = ""  # "finished", "left", "broken" (the router's crash) or an error's code
    router_node: Node | None = None
    must_mismatch: bool = False
    forged: bool = False

    def __post_init__(self) -> None:
        self.generation = Generation(self.request)
        self.tokens = [[] for _ in self.expected]
        self.texts = [""] * len(self.expected)


def draw_shapes(rng: random.Random) -> list[WorkerShape]:
    num_prefill = rng.choice([0, 1, 1, 1, 2])
    num_decode = rng.choice([1, 1, 2])
    shapes = []
    for role, count in (("prefill", num_prefill), ("decode", num_decode)):
        for index in range(count):
            places = rng.choice([3, 3, 4, 6])
            budget = rng.choice([8, 16, 24, 40])
            config = SchedulerConfig(max(budget, places), places, MAX_MODEL_LEN, eos_token_ids=(0,))
            shapes.append(
                WorkerShape(
                    role,
                    f"{role}-{index}",
                    f"{role}-{index}:7000",
                    rng.choice([7, 7, 8, 9, 12, 16, 30]),
                    config,
                    rng.choice([0.005, 0.005, 0.02, 0.02, 0.05, 0.05, 0.05, 0.12]),
                )
            )
    return shapes


class SimWorkload:
    """Draws requests of one world; some begin alike."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._streams = [[rng.randrange(VOCAB) for _ in range(MAX_MODEL_LEN)] for _ in range(2)]
        self._count = 0

    def draw(self, *, routers: int, plain: bool = False) -> Asked:
        rng = self._rng
        self._count += 1
        at_border = rng.choice([1, 2, 3, 4]) * BLOCK_SIZE + rng.choice([-1, 0, 1])
        length = rng.choice([1, 5, at_border, at_border, at_border, rng.randrange(1, 70)])
        shared = rng.choice([0, length, length, length - length % BLOCK_SIZE])
        stream = rng.choice(self._streams)
        prompt = (*stream[:shared], *(rng.randrange(VOCAB) for _ in range(length - shared)))
        max_tokens = rng.choice([1, 2, 6, 10, 14, 20])
        min_tokens = 0 if rng.random() < 0.7 else rng.randrange(max_tokens + 1)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            frequency_penalty=rng.choice([0.0, 1.0]),
            seed=rng.getrandbits(64),
            logprobs=0 if rng.random() < 0.2 else None,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 3)) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.3,
        )
        stop = tuple(rng.choice(LETTER) + rng.choice(["", rng.choice(LETTER)]) for _ in range(rng.choice([0, 0, 0, 2])))
        include = rng.random() < 0.3
        n = rng.choice([1, 1, 1, 2, 3])
        request = GenerationRequest(
            f"r{self._count}", prompt, params, n, stop, include, cache_salt=rng.choice(["", "", "", "salt"])
        )
        answers = [expected(prompt, params, fork, stop, include, MAX_MODEL_LEN) for fork in range(n)]
        leaves = None if plain or rng.random() < 0.8 else rng.random() * 0.6
        return Asked(request, answers, rng.randrange(routers), 0.0 if plain else rng.random() * 0.8, leaves)
