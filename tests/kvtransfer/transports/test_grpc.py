"""A stream of blocks counts only if every frame is the next one and intact; a slow reader costs its holder nothing."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from common.deadlines import Deadlines
from common.errors import (
    EpochMismatch,
    HandleTaken,
    HandoverError,
    KVExpired,
    PullStalled,
    TransportUnavailable,
)
from common.rpc.channel import GrpcServer, open_channel
from common.rpc.pb import kv_pb2, kv_pb2_grpc, types_pb2
from kvtransfer.lease import ROUTER
from kvtransfer.reader import KVReader
from kvtransfer.transport import Offer, Ticket
from kvtransfer.transports import grpc as transport
from kvtransfer.transports.grpc import (
    MAX_FRAME_BYTES,
    NAME,
    TRANSPORT,
    GrpcHolder,
    GrpcReader,
    Incoming,
    checksum,
    make_frame,
)
from kvtransfer.transports.shm import ShmHolder
from tests.support.kv_fakes import (
    EPOCH,
    FAST,
    FINGERPRINT,
    LAYOUT,
    BlockedCopy,
    CountingHolder,
    FakePool,
    held_back,
    running_holder,
    until,
)
from tests.support.kv_processes import PATIENCE_S, digest, holder_process

READER, OTHER = 5, 6
BLOCK = 1000  # bytes
FRAMES = 3  # that two blocks are cut into by the scripts below
TICKET = Ticket(bytes(16), EPOCH, READER)


@pytest.fixture
def source():
    pool = FakePool(16, BLOCK)
    yield pool
    pool.close()


@pytest.fixture
def target():
    pool = FakePool(16, BLOCK)
    yield pool
    pool.close()


def ignore(done: int) -> None:
    pass


def frame(offset: int, data: bytes, **changes) -> bytes:
    fields = {"offset": offset, "data": data, "checksum": checksum(offset, data)}
    return kv_pb2.Frame(**(fields | changes)).SerializeToString()


def right_frames(pool: FakePool, block_ids: Sequence[int] = (0, 1), num_frames: int = FRAMES) -> list[bytes]:
    total = len(block_ids) * BLOCK
    cuts = [total * i // num_frames for i in range(num_frames + 1)]
    return [
        make_frame(pool, block_ids, start, end - start).SerializeToString() for start, end in itertools.pairwise(cuts)
    ]


@asynccontextmanager
async def scripted(frames: Sequence[bytes]):
    """A reader of a holder of 16 blocks that answers every Pull with these messages."""

    async def pull(request, context):
        for message in frames:
            await context.write(message)

    server = GrpcServer("127.0.0.1", 0, FAST)
    handlers = {"Pull": grpc.unary_stream_rpc_method_handler(pull)}
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvrelay.v1.KV", handlers),))
    await server.start()
    channel = open_channel(server.address, FAST)
    try:
        with ThreadPoolExecutor(1) as executor:
            reader = GrpcReader(executor, channel)
            await reader.open(Offer("grpc", {"block_bytes": str(BLOCK), "num_blocks": "16", "nonce": "00"}))
            yield reader
    finally:
        await channel.close()
        await server.stop()


async def test_the_script_of_right_frames_is_taken(source, target):
    async with scripted(right_frames(source)) as reader:
        await reader.pull(TICKET, [(0, 7), (1, 3)], target, ignore)
    assert (target.block(7), target.block(3)) == (source.block(0), source.block(1))


@pytest.mark.parametrize("taken", [0, 1])
def test_no_flipped_bit_of_a_frame_goes_unnoticed(taken):
    source, target = FakePool(2, 24), FakePool(2, 24)
    first, second = (make_frame(source, (0, 1), offset, 24).SerializeToString() for offset in (0, 24))
    incoming = Incoming((1, 0), target, ignore)
    if taken:
        incoming.take(first)
    message, before = (first, second)[taken], target.blocks()
    for bit in range(len(message) * 8):
        corrupt = bytearray(message)
        corrupt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(HandoverError):
            incoming.take(bytes(corrupt))
        assert target.blocks() == before
    incoming.take(message)
    assert target.block((1, 0)[taken]) == source.block(taken)
    source.close()
    target.close()


def reorder(*order: int):
    return lambda frames: [frames[i] for i in order]


def swap_payloads(frames: list[bytes]) -> list[bytes]:
    """Frames of equal length whose data has changed places, and nothing else."""
    one, two = (kv_pb2.Frame.FromString(message) for message in right_frames_of(frames))
    one.data, two.data = two.data, one.data
    return [one.SerializeToString(), two.SerializeToString()]


def right_frames_of(frames: list[bytes]) -> list[bytes]:
    data = b"".join(kv_pb2.Frame.FromString(message).data for message in frames)
    return [frame(0, data[:BLOCK]), frame(BLOCK, data[BLOCK:])]


def swap_payloads_and_checksums(frames: list[bytes]) -> list[bytes]:
    one, two = (kv_pb2.Frame.FromString(message) for message in right_frames_of(frames))
    one.data, two.data, one.checksum, two.checksum = two.data, one.data, two.checksum, one.checksum
    return [one.SerializeToString(), two.SerializeToString()]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (reorder(), None),
        (reorder(0, 1), None),
        (reorder(1, 2), "frame.offset"),
        (reorder(0, 2), "frame.offset"),
        (reorder(1, 0, 2), "frame.offset"),
        (reorder(0, 0, 1, 2), "frame.offset"),
        (reorder(0, 1, 2, 2), "frame.offset"),
        (swap_payloads, "frame.checksum"),
        (swap_payloads_and_checksums, "frame.checksum"),
        (lambda frames: [*frames, frame(2 * BLOCK, b"x")], "frame.data"),
        (lambda frames: [*frames, frame(2 * BLOCK, b"")], "frame.data"),
        (lambda frames: [frame(0, b""), *frames], "frame.data"),
        (lambda frames: [*frames[:-1], frame(2 * BLOCK * 2 // 3, bytes(BLOCK))], "frame.data"),
        (lambda frames: [b"\xff" * 9, *frames], "frame"),
        (lambda frames: [*frames, b"\xff" * 9], "frame"),
        (lambda frames: [b"", *frames], "frame.data"),
        (lambda frames: [frame(0, b"", error=types_pb2.Error(code="kv_expired", field="x"))], "x"),
        (lambda frames: [*frames, frame(0, b"", error=types_pb2.Error(code="internal"))], None),
    ],
)
async def test_a_stream_that_is_not_the_right_one_is_never_accepted(source, target, change, field):
    untouched = target.blocks()[2:]
    async with scripted(change(right_frames(source))) as reader:
        with pytest.raises(HandoverError) as caught:
            await reader.pull(TICKET, [(0, 0), (1, 1)], target, ignore)
    assert caught.value.field == field
    assert target.blocks()[2:] == untouched


async def test_a_frame_above_the_limit_is_refused_though_it_is_intact():
    pool = FakePool(2, MAX_FRAME_BYTES)
    incoming = Incoming((0, 1), pool, ignore)
    data = bytes(MAX_FRAME_BYTES + 1)
    with pytest.raises(HandoverError) as caught:
        incoming.take(frame(0, data))
    assert caught.value.field == "frame.data"
    incoming.take(frame(0, data[:-1]))
    pool.close()


@asynccontextmanager
async def pulling(pool: FakePool, *, deadlines: Deadlines = FAST, transports=None):
    """A holder of the pool, and a reader's half connected to it."""
    offered = GrpcHolder(pool)
    async with running_holder(deadlines=deadlines, transports=transports or [offered]) as holder:
        channel = open_channel(holder.server.address, deadlines)
        with ThreadPoolExecutor(1) as executor:
            reader = GrpcReader(executor, channel)
            assert offered.verify(await reader.open(offered.offer()))
            yield holder, reader, channel
        await channel.close()


def claimed(holder, block_ids: Sequence[int]) -> Ticket:
    handle = holder.hold(block_ids)
    holder.table.renew(handle.id, handle.epoch, READER, handle.block_ids)
    return Ticket(handle.id, handle.epoch, READER)


@pytest.mark.parametrize(
    ("changes", "blocks", "error", "field"),
    [
        ({"reader_id": OTHER}, (3, 4), HandleTaken, "reader_id"),
        ({"reader_id": ROUTER}, (3, 4), HandoverError, "reader_id"),
        ({"handle_id": bytes(16)}, (3, 4), KVExpired, None),
        ({"handle_id": b""}, (3, 4), KVExpired, None),
        ({"epoch": EPOCH + 1}, (3, 4), EpochMismatch, "epoch"),
        ({}, (3, 5), HandoverError, "block_ids"),
        ({}, (5,), HandoverError, "block_ids"),
    ],
)
async def test_only_the_claims_own_ticket_opens_its_blocks(source, target, changes, blocks, error, field):
    before = target.blocks()
    async with pulling(source) as (holder, reader, _):
        ticket = claimed(holder, (3, 4))
        with pytest.raises(error) as caught:
            await reader.pull(ticket._replace(**changes), [(block, block) for block in blocks], target, ignore)
        assert (type(caught.value), caught.value.field) == (error, field)
        assert target.blocks() == before
        await reader.pull(ticket, [(4, 0), (3, 1), (4, 2)], target, ignore)  # in any order, as often as wanted
    assert target.blocks()[:3] == [source.block(4), source.block(3), source.block(4)]


async def test_a_handle_that_nobody_has_claimed_opens_nothing(source, target):
    async with pulling(source) as (holder, reader, _):
        handle = holder.hold((3,))
        with pytest.raises(HandoverError, match="not claimed"):
            await reader.pull(Ticket(handle.id, handle.epoch, READER), [(3, 0)], target, ignore)


async def test_a_transport_whose_readers_copy_sends_nothing(source):
    async with pulling(source, transports=[ShmHolder(source)]) as (holder, _, channel):
        request = kv_pb2.PullRequest(**claimed(holder, (3,))._asdict(), block_ids=(3,), transport="shm")
        [frame] = [frame async for frame in kv_pb2_grpc.KVStub(channel).Pull(request)]
        assert (frame.data, frame.error.code) == (b"", TransportUnavailable.code)


async def test_a_holder_that_offers_other_ways_only_sends_nothing(source, target):
    async with pulling(source, transports=[ShmHolder(source)]) as (holder, reader, _):
        with pytest.raises(TransportUnavailable, match="has no transport 'grpc'"):
            await reader.pull(claimed(holder, (3,)), [(3, 0)], target, ignore)


async def test_a_lease_that_ends_between_two_frames_ends_the_stream(source, monkeypatch):
    monkeypatch.setattr(transport, "FRAME_BYTES", BLOCK)
    written, checks = [], []

    def check() -> None:
        checks.append(len(written))
        if len(written) == 2:
            raise KVExpired("ended")

    async def write(message: kv_pb2.Frame) -> None:
        written.append(message.offset)

    with pytest.raises(KVExpired):
        await GrpcHolder(source).send(range(16), check, write)
    assert (written, checks) == ([0, BLOCK], [0, 1, 2])


async def test_a_frame_is_made_only_when_the_one_before_has_left(source, monkeypatch):
    monkeypatch.setattr(transport, "FRAME_BYTES", BLOCK)
    made, most, written, turn = [], [], [], asyncio.Semaphore(0)

    def counting(*arguments):
        made.append(arguments[2])
        return make_frame(*arguments)

    async def write(message: kv_pb2.Frame) -> None:
        await turn.acquire()
        written.append(message.data)

    monkeypatch.setattr(transport, "make_frame", counting)
    sending = asyncio.create_task(GrpcHolder(source).send(range(16), lambda: None, write))
    for count in range(16):
        await until(lambda n=count: len(made) > n)
        await asyncio.sleep(0.002)
        most.append(len(made) - len(written))
        turn.release()
        await until(lambda n=count: len(written) > n)
    await sending
    assert most == [1] * 16
    assert written == source.blocks()


@asynccontextmanager
async def unread(pool: FakePool, timeout_s: float):
    """A call whose stream nobody reads, and what became of it at the holder."""
    async with pulling(pool) as (holder, _, channel):
        ticket = claimed(holder, range(pool.num_blocks))
        request = kv_pb2.PullRequest(**ticket._asdict(), block_ids=range(pool.num_blocks), transport=NAME)
        yield kv_pb2_grpc.KVStub(channel).Pull(request, timeout=timeout_s), holder


async def read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.fixture
def watched(monkeypatch):
    """Frames made, and what each Pull came to."""
    made, ended = [], []

    def counting(*arguments):
        made.append(arguments[2])
        return make_frame(*arguments)

    async def pull(self, request, context):
        try:
            await super(CountingHolder, self).Pull(request, context)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        ended.append("")

    monkeypatch.setattr(transport, "make_frame", counting)
    monkeypatch.setattr(CountingHolder, "Pull", pull, raising=False)
    return made, ended


async def test_a_stream_that_nobody_reads_stops_being_made_and_ends_with_an_error(watched):
    made, ended = watched
    pool = FakePool(48, MAX_FRAME_BYTES)
    async with unread(pool, timeout_s=PATIENCE_S) as (call, _):
        assert (await call.read()).offset == 0
        await asyncio.sleep(2 * FAST.pull_progress_s)
        count = len(made)
        assert count < 24  # what the windows of HTTP/2 take, and one
        with pytest.raises(grpc.aio.AioRpcError, match="took no frame"):
            await read_all(call)
        assert len(made) == count
        await until(lambda: ended == ["AbortError"])
    pool.close()


async def test_a_stream_that_is_never_read_ends_at_its_calls_deadline(watched):
    _, ended = watched
    pool = FakePool(48, MAX_FRAME_BYTES)
    async with unread(pool, timeout_s=1.5 * FAST.pull_progress_s) as (call, _):
        await until(lambda: ended)
        assert call is not None  # it was not dropped before
    pool.close()


async def test_a_reader_that_leaves_ends_its_stream_at_once(watched):
    made, ended = watched
    pool = FakePool(48, MAX_FRAME_BYTES)
    async with unread(pool, timeout_s=PATIENCE_S) as (call, _):
        await call.read()
        call.cancel()
        await until(lambda: ended == ["CancelledError"])
        assert len(made) < pool.num_blocks
    pool.close()


class DeafCall:
    """A call that loses cancellations, as gRPC may when the connection fails in the same moment."""

    def __init__(self, frames: list[bytes]) -> None:
        self.frames, self.reading, self.cancelled = frames, asyncio.Event(), 0

    async def read(self):
        if len(self.frames) < FRAMES:
            self.reading.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return self.frames.pop(0)

    def cancel(self) -> None:
        self.cancelled += 1


async def test_a_cancellation_that_grpc_loses_ends_the_pull_all_the_same(source, target):
    before, call = target.blocks(), DeafCall(right_frames(source, (0, 1, 2)))
    async with scripted([]) as reader:
        reader._pull = lambda request: call
        pull = asyncio.create_task(reader.pull(TICKET, [(0, 0), (1, 1), (2, 2)], target, ignore))
        await asyncio.wait_for(call.reading.wait(), PATIENCE_S)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
    assert target.blocks() == [source.block(0), *before[1:]]
    assert (len(call.frames), call.cancelled) == (FRAMES - 2, 1)


async def test_a_channel_closed_under_a_pull_is_a_broken_stream_and_no_cancellation():
    pool, target, copy = FakePool(48, MAX_FRAME_BYTES), FakePool(48, MAX_FRAME_BYTES), BlockedCopy()
    async with pulling(pool) as (holder, reader, channel):
        ticket = claimed(holder, range(48))
        pull = asyncio.create_task(reader.pull(ticket, [(i, i) for i in range(48)], target, copy))
        await until(copy.reached.is_set)
        await channel.close()
        copy.go.set()
        with pytest.raises(HandoverError, match="broke"):
            await pull
        with pytest.raises(HandoverError, match="broke"):
            await reader.pull(ticket, [(0, 0)], target, ignore)
    pool.close()
    target.close()


async def test_a_frozen_holder_stalls_the_pull_and_writes_nothing_once_it_is_back():
    copy, pool = BlockedCopy(), FakePool(1024, LAYOUT.block_bytes)
    patience = replace(Deadlines(), pull_progress_s=0.3)  # the connection would be given up much later
    kinds = [held_back(TRANSPORT, copy)]
    reader = KVReader(pool, LAYOUT, FINGERPRINT, patience, time.monotonic, transports=kinds)
    async with holder_process(num_blocks=1024, scale=1.0, lease_s=30.0) as holder:
        async with reader.claimed(await holder.hold(*range(1024))) as claim:
            pull = asyncio.create_task(claim.pull([(i, i) for i in range(1024)]))
            await until(copy.reached.is_set, PATIENCE_S)
            holder.freeze()
            copy.go.set()
            with pytest.raises(PullStalled):
                await asyncio.wait_for(pull, PATIENCE_S)
            after = digest(pool.memory)
            holder.thaw()
        await reader.close()
        async with asyncio.timeout(PATIENCE_S):
            while await holder.ask("pulls") or (await holder.ask("state"))["held"]:
                await asyncio.sleep(0.01)
        assert digest(pool.memory) == after
    pool.close()


def test_only_the_nonce_of_this_offer_is_a_proof(source):
    holder, other = GrpcHolder(source), GrpcHolder(source)
    nonce = bytes.fromhex(holder.offer().params["nonce"])
    assert holder.verify(nonce)
    assert not any(holder.verify(wrong) for wrong in (b"", nonce[:-1], nonce + b"\0", bytes(len(nonce))))
    assert not other.verify(nonce)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_bytes": ""}, "offer.block_bytes"),
        ({"num_blocks": "-1"}, "offer.num_blocks"),
        ({"num_blocks": "9" * 30}, "offer.num_blocks"),
        ({"nonce": "x"}, "offer.nonce"),
    ],
)
async def test_an_offer_that_makes_no_sense_is_unavailable(source, changes, field):
    offer = GrpcHolder(source).offer()
    async with scripted([]) as reader:
        with pytest.raises(TransportUnavailable) as caught:
            await reader.open(Offer("grpc", {**offer.params, **changes}))
    assert caught.value.field == field
