"""A toy model whose KV is real memory, and what it answers, worked out in a plain way.

The KV entry of a token is a hash of the entry before it, as read from the blocks, and the token. The next token
depends on all entries, so KV that is stale, a stranger's or copied in part changes the answer.
"""

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

from common.block_hash import BLOCK_SIZE
from common.engine.batch import Batch, Sample
from common.engine.sequence import Sequence
from common.sampling import Logprob, SamplingParams, fork_seed

VOCAB = 40
EOS = 0
BLOCK_BYTES = BLOCK_SIZE * 8
MASK = 2**64 - 1
LETTERS = [b"", *(bytes([97 + token % 26]) * (1 + token // 26) for token in range(1, VOCAB))]  # of each token


def entry(before: int, token_id: int) -> int:
    mixed = ((before ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK
    return mixed ^ (mixed >> 29)


def entries(token_ids: Sequenced[int]) -> list[int]:
    """The KV of these tokens."""
    found, before = [], 1
    for token_id in token_ids:
        before = entry(before, token_id)
        found.append(before)
    return found


def next_token(total: int, params: SamplingParams, fork: int, output_ids: Sequenced[int]) -> int:
    """`total` is the sum of all entries. Penalties make the output so far count, beside the KV."""
    state = entry(total & MASK, len(output_ids)) ^ (fork_seed(params.seed, fork) * 0x2545F4914F6CDD1D & MASK)
    if params.frequency_penalty:
        for token_id in output_ids:
            state = entry(state, token_id)
    token_id = entry(state, 7) % VOCAB
    if len(output_ids) < params.min_tokens:
        while token_id == EOS or token_id in params.stop_token_ids:
            token_id = (token_id + 1) % VOCAB
    return token_id


def logprob(token_id: int, total: int) -> float:
    return -((total ^ token_id) % 64) / 8  # exact in 32 bits


class ToyPool:
    """KV memory. Fresh memory holds what somebody else left there."""

    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int, salt: int) -> None:
        self.num_blocks = num_blocks
        self.memory = memoryview(bytearray((salt * 31 % 2**63 + 7).to_bytes(8, "little") * (num_blocks * BLOCK_SIZE)))
        self.entries = self.memory.cast("Q")

    def read(self, block_ids: Sequenced[int], count: int) -> list[int]:
        found: list[int] = []
        for block in block_ids:
            found += self.entries[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        return found[:count]


class ToyRunner:
    """Writes a batch's KV; "logits" are the sums of the sequences' entries."""

    def __init__(self, pool: ToyPool) -> None:
        self.pool = pool
        self._done: list[int] | None = None
        self._fails = False

    def compute(self, batch: Batch) -> None:
        """Before forward(), which then only hands over: a forward may read and write at any time of its step."""
        self._done = self._forward(batch)

    def fail(self) -> None:
        """The next forward() raises."""
        self._fails = True

    def forward(self, batch: Batch) -> list[int]:
        done, self._done = self._done, None
        if self._fails:
            self._fails = False
            raise RuntimeError("the kernel failed")
        return self._forward(batch) if done is None else done

    def _forward(self, batch: Batch) -> list[int]:
        kv, memory = self.pool.entries, self.pool.memory
        for source, target in batch.copies:
            memory[target * BLOCK_BYTES :][:BLOCK_BYTES] = memory[source * BLOCK_BYTES :][:BLOCK_BYTES]
        logits = []
        for chunk in batch.chunks:
            blocks, start = chunk.block_ids, chunk.start
            before = 1
            if start:
                at = start - 1
                before = kv[blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE]
            for position, token_id in enumerate(chunk.token_ids, start):
                before = entry(before, token_id)
                kv[blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = before
            if chunk.sampled:
                logits.append(sum(self.pool.read(blocks, start + len(chunk.token_ids))))
        return logits


def sample(logits: Sequenced[int], batch: Batch) -> list[list[Sample]]:
    sequences = [chunk.sequence for chunk in batch.chunks if chunk.sampled]
    return [_samples(total, sequence) for total, sequence in zip(logits, sequences, strict=True)]


def _samples(total: int, sequence: Sequence) -> list[Sample]:
    output = sequence.output_ids
    tokens = [next_token(total, sequence.params, fork, output) for fork in sequence.forks]
    if sequence.params.logprobs is None:
        return [Sample(token_id) for token_id in tokens]
    return [Sample(token_id, (Logprob(token_id, logprob(token_id, total), 1),)) for token_id in tokens]


@dataclass(frozen=True, slots=True)
class Expected:
    """One whole answer as the client should get it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None


def expected(
    prompt: Sequenced[int],
    params: SamplingParams,
    fork: int,
    stop: Sequenced[str],
    include_stop: bool,
    max_model_len: int,
) -> Expected:
    """Worked out token by token, with no engine, no router and no second worker."""
    kv = entries(prompt)
    output: list[int] = []
    logprobs: list[float | None] = []
    pieces: list[str] = []
    while True:
        total = sum(kv)
        token_id = next_token(total, params, fork, output)
        output.append(token_id)
        kv.append(entry(kv[-1], token_id))
        logprobs.append(None if params.logprobs is None else logprob(token_id, total))
        ended = _ended(output, params, len(prompt), max_model_len)
        silent = ended is not None and ended[0] == "stop" and not include_stop
        pieces.append("" if silent else LETTERS[token_id].decode())
        met = _stop_met(pieces, params.min_tokens, stop, include_stop)
        if met is not None:
            return Expected(tuple(output), tuple(logprobs), met[0], "stop", met[1])
        if ended is not None:
            return Expected(tuple(output), tuple(logprobs), "".join(pieces), *ended)


def _ended(
    output: Sequenced[int], params: SamplingParams, prompt_tokens: int, max_model_len: int
) -> tuple[str, int | None] | None:
    last = output[-1]
    if len(output) > params.min_tokens:
        if last == EOS and not params.ignore_eos:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    if len(output) == params.max_tokens or prompt_tokens + len(output) == max_model_len:
        return "length", None
    return None


def _stop_met(
    pieces: Sequenced[str], unchecked: int, stop: Sequenced[str], include_stop: bool
) -> tuple[str, str] | None:
    """The text up to the stop string that is complete first, and that string; one that ends unchecked is none."""
    text, head = "".join(pieces), len("".join(pieces[:unchecked]))
    places = [(text.find(one, max(0, head + 1 - len(one))), one) for one in stop]
    found = sorted((at + len(one), at, one) for at, one in places if at >= 0)
    if not found:
        return None
    end, start, met = found[0]
    return text[: end if include_stop else start], met
