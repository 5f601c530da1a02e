"""Builders with visible defaults for tests of the engine, and a toy language model over paged KV."""

import hashlib
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequenced
from functools import cache

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import Batch, ScheduledChunk, StepOutput
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.limits import SchedulerConfig
from common.engine.sampler import Sampler
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.sampling import FinishReason, SamplingParams

VOCAB = 64  # of the toy model: a logit for each byte of a digest
EOS = 0  # of the toy model


def tokens(count: int, seed: int = 0) -> list[int]:
    """`count` prompt tokens of the toy model, the same for the same seed; a shorter list is a prefix of a longer."""
    return [1 + digest(b"prompt", seed, position)[0] % (VOCAB - 1) for position in range(count)]


def sequence(
    prompt: int | Sequenced[int] = 8,
    *,
    key: str = "s",
    output: Sequenced[int] = (),
    forks: tuple[int, ...] = (0,),
    prefill_only: bool = False,
    root: bytes = b"root",
    max_tokens: int = 4,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    **params: object,
) -> Sequence:
    """A sequence with nothing computed; a number for a prompt stands for that many tokens."""
    prompt = tokens(prompt) if isinstance(prompt, int) else list(prompt)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos, **params)
    return Sequence(key, [*prompt, *output], len(prompt), sampling, forks, prefill_only, root)


def scheduler(
    num_blocks: int = 16,
    *,
    block_size: int = 4,
    max_num_batched_tokens: int = 8,
    max_num_seqs: int = 4,
    max_model_len: int = 32,
    eos_token_ids: tuple[int, ...] = (EOS,),
    enable_caching: bool = True,
    max_scored_tokens: int = 128,
) -> Scheduler:
    """A scheduler over an empty pool of small blocks."""
    config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, eos_token_ids, max_scored_tokens)
    return Scheduler(config, BlockPool(num_blocks, enable_caching=enable_caching, block_size=block_size))


def engine(sched: Scheduler, runner: object = None, clock: Callable[[], float] = lambda: 0.0) -> Engine:
    """An engine over a scheduler; its runner is the toy model unless another is given."""
    return Engine(sched, runner or ToyRunner.of(sched), Sampler(sched.config.eos_token_ids), clock)


def waits(one: Engine) -> threading.Event:
    """Set once an idle step of the engine waits. It has the lock until it does: the next call finds it waiting."""
    waiting, wait = threading.Event(), one._changed.wait

    def told_wait(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    one._changed.wait = told_wait
    return waiting


def assert_all_free(sched: Scheduler) -> None:
    """Nothing is left: no sequence, no reservation, no reference on any block."""
    pool, load = sched.pool, sched.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.reserved_blocks) == (0, 0, 0, 0)
    assert (sched.running, list(sched.waiting), sched.num_reserved_forks) == ([], [], 0)
    assert [pool.references(block) for block in range(pool.num_blocks)] == [0] * pool.num_blocks
    assert pool.num_free == load.free_blocks == load.total_blocks == pool.num_blocks


# The toy model. The KV entry of a token is a hash of all entries before it and of the token; logits are
# a hash of all entries. So one wrong entry anywhere gives other tokens from there on.


def digest(*parts: object) -> bytes:
    """64 bytes that depend on all parts."""
    return hashlib.blake2b(repr(parts).encode()).digest()


def kv_entry(past: np.ndarray, token_id: int) -> int:
    return int.from_bytes(hashlib.blake2b(past.tobytes() + token_id.to_bytes(4, "little"), digest_size=8).digest())


@cache
def kv_of(token_ids: tuple[int, ...]) -> np.ndarray:
    """Entries [len(token_ids)] of a sequence computed alone and unpaged."""
    entries = np.zeros(len(token_ids), dtype=np.uint64)
    for position, token in enumerate(token_ids):
        entries[position] = kv_entry(entries[:position], token)
    return entries


def logits_of(entries: np.ndarray) -> Tensor:
    """Logits [VOCAB] after these entries."""
    data = hashlib.blake2b(entries.tobytes()).digest()
    return torch.tensor(list(data), dtype=torch.float32) / 64


@cache
def answer(
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    fork: int = 0,
    max_model_len: int = 32,
    eos_token_ids: tuple[int, ...] = (EOS,),
) -> tuple[tuple[int, ...], FinishReason]:
    """What a fork must answer: recomputed alone, without blocks, chunks, cache or company."""
    sampler, output = Sampler(eos_token_ids), []
    while True:
        one = Sequence("alone", [*prompt_ids, *output], len(prompt_ids), params, (fork,))
        chunk = ScheduledChunk(one, 0, tuple(one.token_ids), (), range(len(one.token_ids) - 1, len(one.token_ids)))
        logits = logits_of(kv_of(chunk.token_ids))
        token = sampler(logits[None], Batch((chunk,)))[0][0].token_id
        output.append(token)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if token in stops and len(output) > params.min_tokens:
            return tuple(output), FinishReason.STOP
        if len(output) == params.max_tokens or len(prompt_ids) + len(output) == max_model_len:
            return tuple(output), FinishReason.LENGTH


def alone(one: Sequence, fork: int = 0, max_model_len: int = 32) -> list[int]:
    """The answer of a sequence's prompt and parameters."""
    return list(answer(tuple(one.prompt_ids), one.params, fork, max_model_len)[0])


class ToyRunner:
    """The toy model over paged KV: reads every entry back through the block table it is given."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self._garbage = 0
        self.poison(range(num_blocks))

    @classmethod
    def of(cls, sched: Scheduler) -> "ToyRunner":
        return cls(sched.pool.num_blocks, sched.pool.block_size)

    def poison(self, block_ids: Iterable[int]) -> None:
        """Overwrites blocks with garbage, other at each call."""
        for block in block_ids:
            self._garbage += 1
            self.kv[block] = self._garbage

    def read(self, block_ids: Sequenced[int], count: int) -> np.ndarray:
        """The first `count` entries of these blocks."""
        return self.kv[list(block_ids)].reshape(-1)[:count]

    def write(self, block_ids: Sequenced[int], start: int, entries: Sequenced[int]) -> None:
        size = self.kv.shape[1]
        for position, entry in enumerate(entries, start):
            self.kv[block_ids[position // size], position % size] = entry

    def forward(self, batch: Batch) -> Tensor:
        read = [self.kv[source].copy() for source, _ in batch.copies]
        for (_, destination), block in zip(batch.copies, read, strict=True):
            self.kv[destination] = block
        rows = [row for chunk in batch.chunks for row in self._compute(chunk)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _compute(self, chunk: ScheduledChunk) -> list[Tensor]:
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self.write(chunk.block_ids, position, [kv_entry(self.read(chunk.block_ids, position), token)])
        rows = [*chunk.scored, *chunk.sampled]
        return [logits_of(self.read(chunk.block_ids, chunk.start + row + 1)) for row in rows]


class Stepper:
    """A scheduler with the toy runner and the sampler, stepped by hand."""

    def __init__(self, sched: Scheduler) -> None:
        self.scheduler = sched
        self.runner = ToyRunner.of(sched)
        self.sampler = Sampler(sched.config.eos_token_ids)

    def finish(self, batch: Batch) -> StepOutput:
        """Computes a batch and takes it in."""
        return self.scheduler.update(batch, self.sampler(self.runner.forward(batch), batch))

    def step(self) -> tuple[Batch, StepOutput]:
        """A whole step."""
        batch = self.scheduler.schedule()
        return batch, self.finish(batch)

    def run(self, most: int = 200) -> list[StepOutput]:
        """Steps until all sequences have left."""
        outputs = []
        while self.scheduler.running or self.scheduler.waiting:
            assert len(outputs) < most, "starved"
            outputs.append(self.step()[1])
        return outputs


def answers(outputs: list[StepOutput]) -> dict[tuple[str, int], list[int]]:
    """Tokens of each key and fork, in order."""
    result: dict[tuple[str, int], list[int]] = {}
    for token in (token for output in outputs for token in output.tokens):
        written = result.setdefault((token.sequence.key, token.fork), [])
        assert token.index == len(written)
        written.append(token.sample.token_id)
    return result
