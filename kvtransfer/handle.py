"""The handle that names blocks under a lease; it travels from prefill through the router to decode."""

import math
from dataclasses import dataclass, field

from common.address import is_address
from common.block_hash import BLOCK_SIZE
from common.errors import HandoverError
from common.rpc.pb import kv_pb2, types_pb2
from kvtransfer.lease import HANDLE_ID_BYTES

MAX_NAME = 512  # characters of a fingerprint, a layout id or a request id


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Where the KV of `num_tokens` tokens is, and until when. A wrong field raises HandoverError.

    Whoever has the id may read the blocks, so it is left out of repr() and never logged.
    """

    id: bytes = field(repr=False)
    address: str  # the holder's gRPC address
    epoch: int  # the holder's
    fingerprint: str
    layout_id: str
    block_ids: tuple[int, ...]  # in the holder's pool, in the order of the prompt
    num_tokens: int
    lease_s: float  # from the message that brought it
    request_id: str
    attempt: int

    def __post_init__(self) -> None:
        _check(len(self.id) == HANDLE_ID_BYTES, "id", f"must have {HANDLE_ID_BYTES} bytes, got {len(self.id)}")
        _check(is_address(self.address), "address", f"{self.address!r} is not host:port")
        _check(0 < self.epoch < 2**64, "epoch", f"must be in [1, 2^64), got {self.epoch}")
        for name in ("fingerprint", "layout_id", "request_id"):
            length = len(getattr(self, name))
            _check(0 < length <= MAX_NAME, name, f"must have 1 to {MAX_NAME} characters, got {length}")
        _check(0 < self.num_tokens < 2**32, "num_tokens", f"must be in [1, 2^32), got {self.num_tokens}")
        num_blocks = -(-self.num_tokens // BLOCK_SIZE)
        _check(
            len(self.block_ids) == num_blocks,
            "block_ids",
            f"{self.num_tokens} tokens take {num_blocks} blocks, got {len(self.block_ids)}",
        )
        _check(all(0 <= block < 2**32 for block in self.block_ids), "block_ids", "an id is not in [0, 2^32)")
        _check(len(set(self.block_ids)) == num_blocks, "block_ids", "a block comes twice")
        _check(math.isfinite(self.lease_s) and self.lease_s > 0, "lease_s", f"must be above 0, got {self.lease_s}")
        _check(0 <= self.attempt < 2**32, "attempt", f"must be in [0, 2^32), got {self.attempt}")

    def to_proto(self) -> kv_pb2.KVHandle:
        return kv_pb2.KVHandle(
            id=self.id,
            address=self.address,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            layout_id=self.layout_id,
            block_ids=self.block_ids,
            num_tokens=self.num_tokens,
            lease_s=self.lease_s,
            key=types_pb2.AttemptKey(request_id=self.request_id, attempt=self.attempt),
        )

    @classmethod
    def from_proto(cls, message: kv_pb2.KVHandle) -> "KVHandle":
        """Raises HandoverError that names the first field which can't be right."""
        return cls(
            id=message.id,
            address=message.address,
            epoch=message.epoch,
            fingerprint=message.fingerprint,
            layout_id=message.layout_id,
            block_ids=tuple(message.block_ids),
            num_tokens=message.num_tokens,
            lease_s=message.lease_s,
            request_id=message.key.request_id,
            attempt=message.key.attempt,
        )


def _check(ok: bool, name: str, problem: str) -> None:
    if not ok:
        raise HandoverError(f"KV handle: {name} {problem}", field=f"handle.{name}")
