from common.rpc.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVHandle(_message.Message):
    __slots__ = ("id", "address", "epoch", "fingerprint", "layout_id", "block_ids", "num_tokens", "lease_s", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    address: str
    epoch: int
    fingerprint: str
    layout_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    lease_s: float
    key: _types_pb2.AttemptKey
    def __init__(self, id: _Optional[bytes] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layout_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., lease_s: _Optional[float] = ..., key: _Optional[_Union[_types_pb2.AttemptKey, _Mapping]] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("epoch", "fingerprint", "layout_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    fingerprint: str
    layout_id: str
    def __init__(self, epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layout_id: _Optional[str] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "params")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., params: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("offers", "error")
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    offers: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    error: _types_pb2.Error
    def __init__(self, offers: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ("epoch", "transport", "proof")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    transport: str
    proof: bytes
    def __init__(self, epoch: _Optional[int] = ..., transport: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ProveReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _types_pb2.Error
    def __init__(self, error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("handle_id", "epoch", "reader_id", "block_ids")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    handle_id: bytes
    epoch: int
    reader_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., reader_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lease_s", "error")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    error: _types_pb2.Error
    def __init__(self, lease_s: _Optional[float] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("handle_id", "epoch", "reader_id")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    handle_id: bytes
    epoch: int
    reader_id: int
    def __init__(self, handle_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., reader_id: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("held_until_now", "error")
    HELD_UNTIL_NOW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    held_until_now: bool
    error: _types_pb2.Error
    def __init__(self, held_until_now: _Optional[bool] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("handle_id", "epoch", "reader_id", "block_ids", "transport")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    handle_id: bytes
    epoch: int
    reader_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    transport: str
    def __init__(self, handle_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., reader_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., transport: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("offset", "checksum", "data", "error")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    offset: int
    checksum: int
    data: bytes
    error: _types_pb2.Error
    def __init__(self, offset: _Optional[int] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...
