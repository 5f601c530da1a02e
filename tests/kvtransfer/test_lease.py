"""A lease frees its blocks exactly once, at release or expiry, and only an unbroken hold validates a copy."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from common.deadlines import Deadlines
from common.errors import Draining, EpochMismatch, HandleTaken, HandoverError, KVExpired
from kvtransfer.lease import HANDLE_ID_BYTES, ROUTER, LeaseTable

EPOCH, LEASE_S = 7, 30.0
READER, OTHER = 11, 12


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Holder:
    """A table with its clock and the blocks it gave back."""

    clock: Clock = field(default_factory=Clock)
    freed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = LeaseTable(self.clock, Deadlines(lease_s=LEASE_S), EPOCH, self.freed.extend)

    def hold(self, *block_ids: int):
        return self.table.hold("sequence", block_ids or (3, 1, 2), 16 * len(block_ids or (3, 1, 2)))


@pytest.fixture
def holder():
    holder = Holder()
    yield holder
    holder.table.close()
    assert (holder.table.num_held, holder.table.held_blocks, holder.table.next_expiry()) == (0, 0, None)
    assert holder.table.num_released + holder.table.num_expired <= holder.table.num_granted


def test_a_held_lease_has_random_bits_and_keeps_its_blocks(holder):
    first, second = holder.hold(3, 1), holder.hold(1, 2)
    assert len(first.id) == len(second.id) == HANDLE_ID_BYTES
    assert first.id != second.id
    assert (holder.table.num_held, holder.table.held_blocks) == (2, 3)
    assert (first.block_ids, first.num_tokens, first.key) == ((3, 1), 32, "sequence")
    assert holder.freed == []


def test_a_handle_id_is_not_in_the_repr(holder):
    lease = holder.hold()
    assert str(lease.id) not in repr(lease)
    assert lease.id.hex() not in repr(lease)


def test_release_frees_once_and_repeats_its_answer_for_one_lease(holder):
    lease = holder.hold(5, 6)
    for _ in range(3):
        assert holder.table.release(lease.id, EPOCH, READER) is True
    assert holder.freed == [5, 6]
    holder.clock.now += LEASE_S - 0.001
    assert holder.table.release(lease.id, EPOCH, READER) is True
    holder.clock.now += 0.001
    with pytest.raises(KVExpired):
        holder.table.release(lease.id, EPOCH, READER)
    assert holder.freed == [5, 6]


@pytest.mark.parametrize(("after_s", "held"), [(0.0, True), (LEASE_S - 0.001, True), (LEASE_S, False), (60.0, False)])
def test_a_release_counts_only_before_the_lease_ends_even_if_no_timer_ran(holder, after_s, held):
    lease = holder.hold(5, 6)
    holder.table.renew(lease.id, EPOCH, READER)
    holder.clock.now += after_s
    assert holder.table.release(lease.id, EPOCH, READER) is held
    assert holder.freed == [5, 6]


def test_renewal_starts_the_lease_anew(holder):
    lease = holder.hold()
    for _ in range(5):
        holder.clock.now += LEASE_S - 1
        assert holder.table.renew(lease.id, EPOCH, READER) == LEASE_S
    assert holder.table.next_expiry() == holder.clock.now + LEASE_S
    assert holder.table.release(lease.id, EPOCH, READER)


def test_an_expired_lease_cannot_be_renewed(holder):
    lease = holder.hold()
    holder.clock.now += LEASE_S
    with pytest.raises(KVExpired):
        holder.table.renew(lease.id, EPOCH, READER)
    assert holder.freed == [3, 1, 2]


def test_only_one_reader_gets_a_handle(holder):
    lease = holder.hold()
    holder.table.renew(lease.id, EPOCH, READER)
    for ask in (holder.table.renew, holder.table.release):
        with pytest.raises(HandleTaken):
            ask(lease.id, EPOCH, OTHER)
    assert holder.freed == []
    assert holder.table.release(lease.id, EPOCH, READER)
    with pytest.raises(HandleTaken):
        holder.table.release(lease.id, EPOCH, OTHER)


@pytest.mark.parametrize("block_ids", [(3, 1), (3, 1, 2, 4), (3, 2, 1), (4, 5, 6)])
def test_a_claim_on_other_blocks_than_the_leases_is_refused_and_claims_nothing(holder, block_ids):
    lease = holder.hold(3, 1, 2)
    with pytest.raises(HandoverError) as refused:
        holder.table.renew(lease.id, EPOCH, READER, block_ids)
    assert (type(refused.value), refused.value.field) == (HandoverError, "block_ids")
    assert holder.table.renew(lease.id, EPOCH, OTHER, [3, 1, 2]) == LEASE_S


def test_the_router_renews_before_and_after_the_claim_and_claims_nothing(holder):
    lease = holder.hold()
    holder.table.renew(lease.id, EPOCH, ROUTER)
    holder.table.renew(lease.id, EPOCH, READER)
    holder.table.renew(lease.id, EPOCH, ROUTER)
    with pytest.raises(HandleTaken):
        holder.table.renew(lease.id, EPOCH, OTHER)


def test_a_release_by_the_router_never_validates_a_readers_copy(holder):
    lease = holder.hold()
    holder.table.renew(lease.id, EPOCH, READER)
    assert holder.table.release(lease.id, EPOCH, ROUTER) is True
    assert holder.table.release(lease.id, EPOCH, READER) is False
    assert holder.table.release(lease.id, EPOCH, ROUTER) is True


def test_a_release_by_a_reader_is_not_repeated_to_the_router(holder):
    lease = holder.hold()
    assert holder.table.release(lease.id, EPOCH, READER) is True
    assert holder.table.release(lease.id, EPOCH, ROUTER) is False


def test_a_released_handle_cannot_be_claimed_again(holder):
    lease = holder.hold()
    holder.table.release(lease.id, EPOCH, READER)
    with pytest.raises(KVExpired):
        holder.table.renew(lease.id, EPOCH, READER)


@pytest.mark.parametrize("handle_id", [b"", b"x" * 15, b"x" * 16, b"x" * 17])
def test_an_unknown_handle_is_refused(holder, handle_id):
    for ask in (holder.table.renew, holder.table.release):
        with pytest.raises(KVExpired):
            ask(handle_id, EPOCH, READER)


def test_another_epoch_is_refused_and_changes_nothing(holder):
    lease = holder.hold()
    for ask in (holder.table.renew, holder.table.release):
        with pytest.raises(EpochMismatch):
            ask(lease.id, EPOCH + 1, READER)
    assert holder.freed == []
    assert holder.table.renew(lease.id, EPOCH, OTHER) == LEASE_S


def test_expire_frees_only_what_is_due_in_whatever_order_it_was_renewed(holder):
    first, second = holder.hold(1), holder.hold(2)
    holder.clock.now += 10
    holder.table.renew(first.id, EPOCH, ROUTER)
    third = holder.hold(3)
    holder.table.expire(holder.clock.now + LEASE_S - 10)
    assert holder.freed == [2]
    assert holder.table.release(first.id, EPOCH, READER)
    assert not holder.table.release(second.id, EPOCH, READER)
    assert holder.table.next_expiry() == third.ends_at


def test_close_frees_all_answers_later_releases_false_and_holds_nothing_more(holder):
    lease = holder.hold(4, 5)
    holder.table.close()
    assert holder.freed == [4, 5]
    assert holder.table.release(lease.id, EPOCH, READER) is False
    with pytest.raises(Draining):
        holder.hold()
    assert holder.freed == [4, 5]


class LeaseMachine(RuleBasedStateMachine):
    """Random calls against a brute-force model, with a pool that counts references."""

    handles = Bundle("handles")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.references: Counter[int] = Counter()
        self.table = LeaseTable(self.clock, Deadlines(lease_s=LEASE_S), EPOCH, self.give_back)
        self.next_block = 0
        self.leases: dict[bytes, dict] = {}  # held and ended: blocks, end, owner, freed_at, released_by

    def give_back(self, block_ids) -> None:
        for block in block_ids:
            assert self.references[block] > 0, "freed twice"
            self.references[block] -= 1

    def settle(self) -> None:
        """What any call does first: without calls (or a timer) nothing is freed, however late it is."""
        for lease in self.leases.values():
            if lease["freed_at"] is None and lease["end"] <= self.clock.now:
                lease["freed_at"] = lease["end"]

    @rule(target=handles, fresh=st.integers(0, 3), shared=st.booleans())
    def hold(self, fresh, shared):
        blocks = list(range(self.next_block, self.next_block + fresh)) + ([0] if shared and self.next_block else [])
        self.next_block += fresh
        self.settle()
        self.references.update(blocks)
        lease = self.table.hold("s", blocks, 16 * len(blocks))
        self.leases[lease.id] = {
            "blocks": blocks, "end": self.clock.now + LEASE_S, "owner": ROUTER, "freed_at": None, "released_by": None,
        }  # fmt: skip
        return lease.id

    @rule(seconds=st.sampled_from([0.0, 0.5, 10.0, LEASE_S - 0.5, LEASE_S, 100.0]), timer=st.booleans())
    def wait(self, seconds, timer):
        self.clock.now += seconds
        if timer:
            self.settle()
            self.table.expire(self.clock.now)

    @rule(handle=handles, reader=st.sampled_from([ROUTER, READER, OTHER]), epoch=st.sampled_from([EPOCH] * 4 + [8]))
    def renew(self, handle, reader, epoch):
        if epoch == EPOCH:
            self.settle()
        lease = self.leases[handle]
        try:
            self.table.renew(handle, epoch, reader)
        except EpochMismatch:
            assert epoch != EPOCH
        except KVExpired:
            assert lease["freed_at"] is not None
        except HandleTaken:
            assert lease["freed_at"] is None
            assert ROUTER != lease["owner"] != reader != ROUTER
        else:
            assert epoch == EPOCH
            assert lease["freed_at"] is None
            assert lease["owner"] in (ROUTER, reader) or reader == ROUTER
            lease["owner"] = lease["owner"] or reader
            lease["end"] = self.clock.now + LEASE_S

    @rule(handle=handles, reader=st.sampled_from([ROUTER, READER, OTHER]))
    def release(self, handle, reader):
        self.settle()
        lease = self.leases[handle]
        try:
            held = self.table.release(handle, EPOCH, reader)
        except HandleTaken:
            assert ROUTER != lease["owner"] != reader != ROUTER
        except KVExpired:
            assert lease["freed_at"] is not None
        else:
            if lease["freed_at"] is None:
                assert held
                lease["freed_at"], lease["released_by"] = self.clock.now, reader
                lease["owner"] = lease["owner"] or reader
            else:  # a copy that may have overlapped the free is never validated
                assert held == (lease["released_by"] == reader)

    @invariant()
    def references_are_accounted_for(self):
        if not hasattr(self, "table"):
            return
        expected: Counter[int] = Counter()
        held = [lease for lease in self.leases.values() if lease["freed_at"] is None]
        for lease in held:
            expected.update(lease["blocks"])
        assert +self.references == expected
        assert self.table.num_held == len(held)
        assert self.table.held_blocks == len(expected)
        assert self.table.next_expiry() == min((lease["end"] for lease in held), default=None)
        assert self.table.num_granted == len(self.leases)
        assert self.table.num_released == sum(lease["released_by"] is not None for lease in self.leases.values())

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()
            assert not +self.references


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLeasesAgainstAModel = LeaseMachine.TestCase


def test_only_the_reader_that_claimed_may_read_and_only_the_leases_blocks(holder):
    lease = holder.hold(5, 6, 7)
    with pytest.raises(HandoverError, match="not claimed"):
        holder.table.check_reader(lease.id, EPOCH, READER)
    holder.table.renew(lease.id, EPOCH, READER, (5, 6, 7))
    for block_ids in ((), (5, 6, 7), (7, 5), (6, 6)):
        holder.table.check_reader(lease.id, EPOCH, READER, block_ids)
    for reader_id, error in ((OTHER, HandleTaken), (ROUTER, HandoverError)):
        with pytest.raises(error) as caught:
            holder.table.check_reader(lease.id, EPOCH, reader_id, (5,))
        assert caught.value.field == "reader_id"
    for block_ids in ((8,), (5, 8)):
        with pytest.raises(HandoverError) as caught:
            holder.table.check_reader(lease.id, EPOCH, READER, block_ids)
        assert caught.value.field == "block_ids"
    with pytest.raises(EpochMismatch):
        holder.table.check_reader(lease.id, EPOCH + 1, READER, (5,))
    with pytest.raises(KVExpired):
        holder.table.check_reader(bytes(HANDLE_ID_BYTES), EPOCH, READER, (5,))


@pytest.mark.parametrize("after_s", [LEASE_S - 0.001, LEASE_S])
def test_reading_ends_with_the_lease_and_does_not_renew_it(holder, after_s):
    lease = holder.hold(5)
    holder.table.renew(lease.id, EPOCH, READER)
    holder.clock.now += after_s
    if after_s < LEASE_S:
        holder.table.check_reader(lease.id, EPOCH, READER, (5,))
        holder.clock.now += LEASE_S - after_s
    with pytest.raises(KVExpired):
        holder.table.check_reader(lease.id, EPOCH, READER, (5,))
    assert holder.freed == [5]


def test_reading_ends_with_the_release(holder):
    lease = holder.hold(5)
    holder.table.renew(lease.id, EPOCH, READER)
    holder.table.release(lease.id, EPOCH, READER)
    with pytest.raises(KVExpired):
        holder.table.check_reader(lease.id, EPOCH, READER)
