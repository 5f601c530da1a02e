"""Who has the key is admitted, once a proof; who hasn't is not, whatever was overheard, and costs bounded memory."""

import secrets

import pytest

from common.cluster_key import ClusterKey
from common.rpc.handshake import (
    HEADER_BYTES,
    MAX_SESSIONS,
    NONCE_BYTES,
    SESSION_S,
    WINDOW,
    CallSigner,
    CallVerifier,
)
from tests.support.kv_fakes import ManualClock

KEY, OTHER = ClusterKey("the key of this cluster"), ClusterKey("the key of another one")
PATIENCE_S = 5.0
METHOD = "/kvrelay.v1.KV/Renew"
OVER, WRONG, AGAIN = (
    "the session is over, or was never begun",
    "the proof is wrong: that is another cluster's key",
    ("the proof was used before"),
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(running=False)


@pytest.fixture
def verifier(clock: ManualClock) -> CallVerifier:
    return CallVerifier(KEY, clock, PATIENCE_S)


def met(verifier: CallVerifier, key: ClusterKey = KEY) -> CallSigner | None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return CallSigner.meet(key, nonce, *verifier.greet(nonce), 0.0)


def signer(verifier: CallVerifier) -> CallSigner:
    found = met(verifier)
    assert found is not None
    return found


def test_both_sides_prove_the_key(verifier: CallVerifier) -> None:
    one = signer(verifier)
    assert [verifier.admit(METHOD, one.header(METHOD)) for _ in range(3)] == ["", "", ""]


def test_a_dialer_sends_nothing_to_a_listener_with_another_key_or_none(verifier: CallVerifier) -> None:
    assert met(verifier, OTHER) is None
    mine, theirs = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    for nonce, proof in [(theirs, b""), (theirs, secrets.token_bytes(32)), (b"", b""), (mine, mine)]:
        assert CallSigner.meet(KEY, mine, nonce, proof, 0.0) is None


def test_a_listener_can_not_be_impersonated_with_what_it_told_another_dialer(verifier: CallVerifier) -> None:
    theirs, proof = verifier.greet(secrets.token_bytes(NONCE_BYTES))
    assert CallSigner.meet(KEY, secrets.token_bytes(NONCE_BYTES), theirs, proof, 0.0) is None


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(NONCE_BYTES - 1), bytes(NONCE_BYTES + 1)])
def test_a_nonce_of_another_length_is_refused_and_not_kept(verifier: CallVerifier, nonce: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        verifier.greet(nonce)
    assert verifier.num_sessions == 0


def test_a_proof_counts_once_and_for_its_method_alone(verifier: CallVerifier) -> None:
    one = signer(verifier)
    header = one.header(METHOD)
    assert verifier.admit("/kvrelay.v1.KV/Release", header) == WRONG
    assert [verifier.admit(METHOD, header) for _ in range(2)] == ["", AGAIN]


def test_any_changed_bit_is_refused(verifier: CallVerifier) -> None:
    header = signer(verifier).header(METHOD)
    for at in range(HEADER_BYTES):
        changed = header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]
        assert verifier.admit(METHOD, changed) == (OVER if at < NONCE_BYTES else WRONG)
    assert verifier.admit(METHOD, header) == ""


@pytest.mark.parametrize("header", [b"", b"x", bytes(HEADER_BYTES), bytes(HEADER_BYTES + 1)])
def test_who_has_no_proof_is_told_what_is_missing(verifier: CallVerifier, header: bytes) -> None:
    assert verifier.admit(METHOD, header)


def test_calls_may_overtake_each_other_within_the_window(verifier: CallVerifier) -> None:
    one = signer(verifier)
    headers = [one.header(METHOD) for _ in range(WINDOW + 1)]
    assert verifier.admit(METHOD, headers[-1]) == ""
    assert verifier.admit(METHOD, headers[0]) == AGAIN  # too far behind to be told from a replay
    assert [verifier.admit(METHOD, header) for header in headers[1:-1]] == [""] * (WINDOW - 1)
    assert {verifier.admit(METHOD, header) for header in headers} == {AGAIN}


def test_a_jump_of_the_count_forgets_nothing(verifier: CallVerifier) -> None:
    one = signer(verifier)
    first = one.header(METHOD)
    assert verifier.admit(METHOD, first) == ""
    one._calls += 2**40
    assert verifier.admit(METHOD, one.header(METHOD)) == ""
    assert verifier.admit(METHOD, first) == AGAIN


@pytest.mark.parametrize(("late_s", "answer"), [(PATIENCE_S, ""), (PATIENCE_S + 0.1, OVER)])
def test_the_first_call_may_take_only_so_long(
    verifier: CallVerifier, clock: ManualClock, late_s: float, answer: str
) -> None:
    one = signer(verifier)
    clock.offset += late_s
    assert verifier.admit(METHOD, one.header(METHOD)) == answer


@pytest.mark.parametrize(("age_s", "answer"), [(2 * SESSION_S, ""), (2 * SESSION_S + 0.1, OVER)])
def test_a_session_ends_some_time_after_its_dialer_begins_another(
    verifier: CallVerifier, clock: ManualClock, age_s: float, answer: str
) -> None:
    one = signer(verifier)
    assert verifier.admit(METHOD, one.header(METHOD)) == ""
    clock.offset += age_s
    assert verifier.admit(METHOD, one.header(METHOD)) == answer


def test_a_session_that_is_over_can_not_be_begun_again_with_its_first_proof(
    verifier: CallVerifier, clock: ManualClock
) -> None:
    one = signer(verifier)
    header = one.header(METHOD)
    assert verifier.admit(METHOD, header) == ""
    clock.offset += 2 * SESSION_S + 1
    signer(verifier)
    assert verifier.admit(METHOD, header) == OVER


def test_a_flood_of_strangers_is_bounded_and_puts_nobody_out_who_is_in(
    verifier: CallVerifier, clock: ManualClock
) -> None:
    one = signer(verifier)
    assert verifier.admit(METHOD, one.header(METHOD)) == ""
    for _ in range(MAX_SESSIONS + 100):
        verifier.greet(bytes(NONCE_BYTES))
    assert verifier.num_sessions == MAX_SESSIONS + 1
    assert verifier.admit(METHOD, one.header(METHOD)) == ""
    clock.offset += PATIENCE_S + 1
    newcomer = signer(verifier)
    assert verifier.num_sessions == 2
    assert verifier.admit(METHOD, newcomer.header(METHOD)) == ""
