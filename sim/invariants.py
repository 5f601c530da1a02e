"""What has to hold at every moment of every schedule. Each check says what it found, or nothing."""

from collections import Counter
from typing import Any

from common.block_hash import BLOCK_SIZE
from common.engine.block_table import Reservation
from kvtransfer.transport import Ticket
from router.pipeline.generation import Delta
from sim.cluster import SimWorker
from sim.schedule import Asked
from sim.toy import ToyPool, entries


def block_accounts(worker: SimWorker) -> str | None:
    """Each block's references are those of sequences, reservations, leases, parked sequences and copies of a step."""
    held: Counter[int] = Counter()
    for sequence in worker.scheduler.running:
        held.update(sequence.block_ids)
    reserved = forks = 0
    for reservation in worker.engine.reservations.values():
        held.update(reservation.block_ids)
        reserved += len(reservation.block_ids)
        forks += len(reservation.forks)
    if worker.batch is not None:
        held.update(source for source, _ in worker.batch.copies)
    for output in worker.undelivered:
        for _, block_ids in output.parked:
            held.update(block_ids)
    if worker.shape.role == "prefill":
        for lease in worker.leases._held.values():
            held.update(lease.block_ids)
        for attempt in worker.service._attempts.values():
            held.update(attempt.block_ids)
    pool = worker.blocks
    for block, references in enumerate(pool._references):
        if references != held[block]:
            return f"block {block} has {references} references, {held[block]} are accounted for"
        if (references == 0) != (block in pool._free):
            return f"block {block} has {references} references and is {'' if block in pool._free else 'not '}free"
    if any(sequence.block_ids for sequence in worker.scheduler.waiting):
        return "a waiting sequence has blocks"
    if (reserved, forks) != (worker.scheduler.num_reserved_blocks, worker.scheduler.num_reserved_forks):
        return f"{reserved} blocks for {forks} forks are reserved, other numbers are counted"
    return None


def write_is_covered(workers: list[SimWorker], memory: ToyPool, block: int) -> str | None:
    """A copy writes to blocks only that are reserved for it."""
    for worker in workers:
        if worker.memory is memory:
            for reservation in worker.engine.reservations.values():
                if block in reservation.block_ids[reservation.num_cached_blocks :]:
                    return None
            return f"a copy writes to block {block} of {worker.shape.name}, which is not reserved"
    return "a copy writes to no worker's memory"


def admitted_kv(worker: SimWorker, reservation: Reservation) -> str | None:
    """What is admitted is the KV of its tokens."""
    token_ids = reservation.forks[0].token_ids[:-1]
    if worker.memory.read(reservation.block_ids, len(token_ids)) != entries(token_ids):
        return f"KV was admitted for {reservation.forks[0].key} that is not that of its tokens"
    return None


class Reads:
    """Every read of a holder's block, until the holder says whether it counts."""

    def __init__(self) -> None:
        self._reads: dict[Ticket, list[tuple[ToyPool, int, int]]] = {}

    def note(self, workers: list[SimWorker], ticket: Ticket, memory: ToyPool, block: int) -> None:
        for worker in workers:
            if worker.memory is memory:
                self._reads.setdefault(ticket, []).append((memory, block, worker.blocks.times_freed[block]))

    def released(self, worker: SimWorker, ticket: tuple[bytes, int, int], held: bool) -> str | None:
        """ "Held until now" covers no read of a block that has been free since."""
        if held:
            for memory, block, times in self._reads.pop(Ticket(*ticket), ()):
                if memory is worker.memory and worker.freed_before[block] != times:
                    return f"a release says held until now, but block {block} was free since it was read"
        return None


def delta_fits(asked: Asked, delta: Delta) -> str | None:
    """A client gets the reference's tokens and text in order, each once."""
    name = f"answer {delta.index} of {asked.request.request_id}"
    wanted = asked.expected[delta.index]
    if delta.index in asked.finished:
        return f"{name} goes on after its end"
    tokens = asked.tokens[delta.index]
    for token in delta.tokens:
        number = len(tokens)
        tokens.append(token.token_id)
        if tuple(tokens) != wanted.token_ids[: number + 1]:
            return f"{name} is {tokens}, not {wanted.token_ids}"
        got = token.logprobs[0].logprob if token.logprobs else None
        if got != wanted.logprobs[number]:
            return f"{name}: logprob {number} is {got}, not {wanted.logprobs[number]}"
    asked.texts[delta.index] += delta.text
    if not wanted.text.startswith(asked.texts[delta.index]):
        return f"{name} reads {asked.texts[delta.index]!r}, not {wanted.text!r}"
    if delta.finish_reason is not None:
        asked.finished.add(delta.index)
        got_end = (tuple(tokens), asked.texts[delta.index], delta.finish_reason, delta.stop_reason)
        want_end = (wanted.token_ids, wanted.text, wanted.finish_reason, wanted.stop_reason)
        if got_end != want_end:
            return f"{name} ended with {got_end}, not {want_end}"
    return None


def ended_well(asked: Asked) -> str | None:
    """All answers are there, and usage counts them."""
    name, report = asked.request.request_id, asked.generation.report
    if len(asked.finished) != len(asked.expected):
        return f"{name} ended with {len(asked.finished)} of {len(asked.expected)} answers"
    usage: tuple[Any, Any] = (report.prompt_tokens, report.completion_tokens)
    wanted = (len(asked.request.prompt_ids), sum(len(one.token_ids) for one in asked.expected))
    if usage != wanted:
        return f"{name} has usage {usage}, not {wanted}"
    if report.cached_tokens % BLOCK_SIZE or report.cached_tokens >= len(asked.request.prompt_ids):
        return f"{name} has {report.cached_tokens} cached tokens of {len(asked.request.prompt_ids)}"
    return None
