"""Proves that a pick is the best available worker by a brute-force model, and that even requests load evenly."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.policy import HANDOVER_S, Candidate, goes_unsplit, pick_decode, pick_prefill

BLOCK = 16


def a_candidate(worker_id: str = "a", **changes: Any) -> Candidate:
    values: dict[str, Any] = {"fingerprint": "f", "free_blocks": 1000, "total_blocks": 1000}
    return Candidate(worker_id, **(values | changes))


candidate_lists = st.lists(
    st.builds(
        Candidate,
        worker_id=st.sampled_from([f"worker-{i}" for i in range(20)]),
        fingerprint=st.sampled_from(["f", "g"]),
        healthy=st.sampled_from([True, True, True, False]),
        draining=st.sampled_from([False, False, False, True]),
        charged_tokens=st.integers(0, 100),
        reported_tokens=st.integers(0, 100),
        in_flight=st.integers(0, 2),
        free_blocks=st.integers(0, 20),
        total_blocks=st.sampled_from([0, 6, 20]),
        prefix_blocks=st.integers(0, 8),
    ),
    max_size=6,
    unique_by=lambda worker: worker.worker_id,
)
accepted = st.sampled_from([None, (), ("f",), ("g",), ("f", "g")])


def blocks(tokens: int) -> int:
    return len(range(0, tokens, BLOCK))


def hit(worker: Candidate, tokens: int) -> int:
    """Blocks of `tokens` that are there; one token at least is computed."""
    count = 0
    while count < worker.prefix_blocks and (count + 1) * BLOCK < tokens:
        count += 1
    return count


def usable(worker: Candidate, tokens: int, fingerprints: Any) -> bool:
    if not worker.healthy or worker.draining:
        return False
    if fingerprints is not None and worker.fingerprint not in fingerprints:
        return False
    return worker.total_blocks == 0 or blocks(tokens) <= worker.total_blocks


def has_room(worker: Candidate, tokens: int) -> bool:
    taken = blocks(worker.charged_tokens) + blocks(tokens) - hit(worker, tokens)
    return worker.total_blocks == 0 or taken <= worker.free_blocks


def check(picked: Candidate | None, workers: list[Candidate], tokens: int, fingerprints: Any, cost: Any) -> None:
    """Nobody usable beats the one that was picked, looked at one by one."""
    able = [worker for worker in workers if usable(worker, tokens, fingerprints)]
    if not able:
        assert picked is None
        return
    assert picked in able
    for other in able:
        if has_room(picked, tokens) != has_room(other, tokens):
            assert has_room(picked, tokens)
        elif cost(picked) != cost(other):
            assert cost(picked) < cost(other)
        else:
            assert picked.in_flight <= other.in_flight


@settings(deadline=None)
@given(workers=candidate_lists, tokens=st.integers(1, 200), fingerprints=accepted, turn=st.integers(0, 9))
def test_prefill_pick_equals_the_model(workers: list[Candidate], tokens: int, fingerprints: Any, turn: int) -> None:
    def cost(worker: Candidate) -> int:
        return worker.charged_tokens + worker.reported_tokens + tokens - BLOCK * hit(worker, tokens)

    picked = pick_prefill(workers, tokens, fingerprints=fingerprints, turn=turn)
    check(picked, workers, tokens, fingerprints, cost)


@settings(deadline=None)
@given(
    workers=candidate_lists,
    context=st.integers(1, 200),
    output=st.integers(0, 100),
    fingerprint=st.sampled_from([None, "f", "g", "h"]),
    turn=st.integers(0, 9),
)
def test_decode_pick_equals_the_model(
    workers: list[Candidate], context: int, output: int, fingerprint: str | None, turn: int
) -> None:
    def cost(worker: Candidate) -> int:
        held = BLOCK * (worker.total_blocks - worker.free_blocks) + worker.charged_tokens + worker.reported_tokens
        return held + context - BLOCK * hit(worker, context)

    picked = pick_decode(workers, context, output_tokens=output, fingerprint=fingerprint, turn=turn)
    check(picked, workers, context + output, None if fingerprint is None else {fingerprint}, cost)


@settings(deadline=None)
@given(workers=candidate_lists, tokens=st.integers(1, 200), turn=st.integers(0, 9), data=st.data())
def test_pick_does_not_depend_on_the_order_of_workers(
    workers: list[Candidate], tokens: int, turn: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(workers))
    assert pick_prefill(workers, tokens, turn=turn) == pick_prefill(shuffled, tokens, turn=turn)
    assert pick_decode(workers, tokens, turn=turn) == pick_decode(shuffled, tokens, turn=turn)


@settings(deadline=None)
@given(workers=candidate_lists, tokens=st.integers(1, 200))
def test_affinity_never_costs_more_waiting_than_it_saves(workers: list[Candidate], tokens: int) -> None:
    picked = pick_prefill(workers, tokens)
    for other in workers:
        if picked and usable(other, tokens, None) and has_room(other, tokens):
            busier = picked.charged_tokens + picked.reported_tokens - other.charged_tokens - other.reported_tokens
            assert busier <= BLOCK * hit(picked, tokens)


@pytest.mark.parametrize(
    "changes",
    [{"healthy": False}, {"draining": True}, {"fingerprint": "g"}, {"total_blocks": 62}],
    ids=lambda changes: next(iter(changes)),
)
def test_availability_comes_before_affinity(changes: dict[str, Any]) -> None:
    unavailable = a_candidate("best", prefix_blocks=62, **changes)
    busy = a_candidate("busy", charged_tokens=10_000, in_flight=50)
    assert pick_prefill([unavailable, busy], 1000, fingerprints={"f"}) == busy
    assert pick_decode([unavailable, busy], 1000, fingerprint="f") == busy
    assert pick_prefill([unavailable], 1000, fingerprints={"f"}) is None
    assert pick_decode([unavailable], 1000, fingerprint="f") is None


@pytest.mark.parametrize(("queued", "picked"), [(999, "alike"), (1000, "mixed"), (1001, "mixed")])
def test_a_pair_that_rounds_alike_is_worth_the_context(queued: int, picked: str) -> None:
    """At 1000, equal scores: fewest in flight."""
    alike = a_candidate("alike", reported_tokens=queued, in_flight=1)
    mixed = a_candidate("mixed", mixed=True)
    for chosen in (pick_prefill([alike, mixed], 1000), pick_decode([alike, mixed], 1000)):
        assert chosen is not None
        assert chosen.worker_id == picked
    assert pick_decode([mixed], 1000) == mixed


def test_nobody_is_none() -> None:
    assert pick_prefill([], 10) is None
    assert pick_decode([], 10) is None


@pytest.mark.parametrize(("queued", "picked"), [(1599, "warm"), (1600, "cold"), (1601, "cold"), (10_000, "cold")])
def test_cached_prefix_is_worth_what_it_saves(queued: int, picked: str) -> None:
    """At 1600, equal scores: fewest in flight."""
    warm = a_candidate("warm", reported_tokens=queued, prefix_blocks=100, in_flight=1)
    cold = a_candidate("cold")
    chosen = pick_prefill([warm, cold], 1700)
    assert chosen is not None
    assert chosen.worker_id == picked


@pytest.mark.parametrize(("tokens", "saved"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 48)])
def test_hit_never_covers_the_last_token(tokens: int, saved: int) -> None:
    warm = a_candidate("warm", prefix_blocks=3, in_flight=1)
    for queued, expected in ((saved, "cold"), (saved - 1, "warm")):
        if queued >= 0:
            chosen = pick_prefill([replace(warm, charged_tokens=queued), a_candidate("cold")], tokens)
            assert chosen is not None
            assert chosen.worker_id == expected


@pytest.mark.parametrize(("free", "picked"), [(9, "roomy"), (10, "tight"), (11, "tight")])
@pytest.mark.parametrize("tokens", [145, 160])
def test_worker_without_room_comes_last(free: int, picked: str, tokens: int) -> None:
    tight = a_candidate("tight", total_blocks=100, free_blocks=free)
    roomy = a_candidate("roomy", total_blocks=5000, free_blocks=1000, reported_tokens=500)
    for chosen in (pick_prefill([tight, roomy], tokens), pick_decode([tight, roomy], tokens)):
        assert chosen is not None
        assert chosen.worker_id == picked
    assert pick_decode([tight], tokens) == tight  # it waits there rather than nowhere


def test_room_counts_what_is_promised_and_what_is_to_come() -> None:
    tight = a_candidate("tight", total_blocks=100, free_blocks=10)
    full = a_candidate("full", total_blocks=5000, free_blocks=1000)
    assert pick_decode([tight, full], 80, output_tokens=80) == tight
    assert pick_decode([tight, full], 80, output_tokens=81) == full
    assert pick_decode([replace(tight, charged_tokens=1), full], 80, output_tokens=80) == full
    warm = replace(tight, prefix_blocks=1)
    assert pick_decode([warm, full], 80, output_tokens=81) == warm


def test_worker_that_has_not_reported_its_pool_is_used() -> None:
    new = a_candidate("new", total_blocks=0, free_blocks=0)
    assert pick_prefill([new], 10**6) == new
    assert pick_decode([new], 10**6) == new


def test_equals_take_turns() -> None:
    workers = [a_candidate(name) for name in "abc"]
    picked = [pick_prefill(workers, 100, turn=turn) for turn in range(6)]
    assert [worker.worker_id for worker in picked if worker] == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("pick", [pick_prefill, pick_decode])
def test_even_requests_load_evenly(pick: Any, count: int) -> None:
    """Each is charged at dispatch; done ones come off in any order."""
    rng = random.Random(count)
    workers = {f"worker-{i}": a_candidate(f"worker-{i}") for i in range(count)}

    def change(worker_id: str, requests: int) -> None:
        worker = workers[worker_id]
        charged, in_flight = worker.charged_tokens + 100 * requests, worker.in_flight + requests
        workers[worker_id] = replace(worker, charged_tokens=charged, in_flight=in_flight)

    for turn in range(50 * count):
        picked = pick(workers.values(), 100, turn=turn)
        assert picked.in_flight == min(worker.in_flight for worker in workers.values())
        change(picked.worker_id, 1)
    assert {worker.in_flight for worker in workers.values()} == {50}
    for turn in range(200):
        change(rng.choice([name for name, worker in workers.items() if worker.in_flight]), -1)
        picked = pick(workers.values(), 100, turn=turn)
        assert picked.in_flight == min(worker.in_flight for worker in workers.values())
        change(picked.worker_id, 1)


@pytest.mark.parametrize("pick", [pick_prefill, pick_decode])
def test_who_failed_comes_last_but_comes(pick: Any) -> None:
    failed = a_candidate("failed", prefix_blocks=6, failed=True)
    busy = a_candidate("busy", charged_tokens=10_000, free_blocks=0, in_flight=50)
    assert pick([failed, busy], 100) == busy
    assert pick([failed, replace(busy, healthy=False)], 100) == failed


def test_popular_prefix_spreads_before_its_worker_is_overrun() -> None:
    """Requests of 1600 shared and 160 own tokens; whoever was picked has the prefix from then on."""
    workers = [a_candidate(f"worker-{i}", free_blocks=10**6, total_blocks=10**6) for i in range(4)]
    for turn in range(200):
        picked = pick_prefill(workers, 1760, turn=turn)
        assert picked is not None
        computed = 1760 - BLOCK * picked.prefix_blocks
        place = workers.index(picked)
        workers[place] = replace(picked, prefix_blocks=100, charged_tokens=picked.charged_tokens + computed)
    assert all(worker.prefix_blocks for worker in workers)
    queues = [worker.charged_tokens for worker in workers]
    assert max(queues) - min(queues) <= 160


TOKEN_S = {"token_s": 0.001, "step_s": 0.025}


@pytest.mark.parametrize(
    ("tokens", "prefill", "decode", "reason"),
    [
        (20, {}, {}, "quicker"),  # the same work, and no hand-over
        (32, {}, {}, "quicker"),
        (33, {}, {}, ""),  # beyond what a decode step may be stretched by
        (330, {}, {"prefix_blocks": 20}, "quicker"),  # most of it is there
        (330, {"prefix_blocks": 20}, {}, ""),  # it is on the other side
        (20, {}, {"running": 1}, "quicker"),  # one other waits for 20 ms; the hand-over takes longer
        (20, {}, {"running": 8}, ""),  # eight do
        (20, {"reported_tokens": 1000}, {"running": 8}, "quicker"),  # but a second of queue is worse
        (20, {}, {"reported_tokens": 1000}, ""),
        (20, {"charged_tokens": 100}, {"charged_tokens": 200}, ""),
        (20, {"token_s": 0.0}, {}, ""),  # nothing is known of it yet
        (20, {}, {"token_s": 0.0}, ""),
        (20, {"token_s": 0.0001}, {"running": 2}, ""),  # a much faster one
    ],
)
def test_the_hop_is_skipped_where_all_together_lose_less_time(
    tokens: int, prefill: dict[str, Any], decode: dict[str, Any], reason: str
) -> None:
    there = a_candidate("prefill", **{**TOKEN_S, **prefill})
    here = a_candidate("decode", **{**TOKEN_S, **decode})
    assert goes_unsplit(there, here, tokens, most_tokens=32) == reason


def test_without_a_prefill_worker_decode_serves_alone_whatever_it_takes() -> None:
    assert goes_unsplit(None, a_candidate("decode", running=60), 10**6, most_tokens=0) == "alone"


def test_the_time_of_the_hand_over_decides_between_equals() -> None:
    """One other sequence that waits for `tokens` more against the hand-over and the step that it waits for."""
    equal = int((HANDOVER_S + 0.025) / 0.001)
    one = a_candidate("decode", running=1, **TOKEN_S)
    reasons = [
        goes_unsplit(a_candidate("p", **TOKEN_S), one, tokens, most_tokens=99) for tokens in (equal - 1, equal + 1)
    ]
    assert reasons == ["quicker", ""]
