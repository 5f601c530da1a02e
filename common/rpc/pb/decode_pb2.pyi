from common.rpc.pb import types_pb2 as _types_pb2
from common.rpc.pb import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeSubmission(_message.Message):
    __slots__ = ("submission", "handle")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    submission: _types_pb2.Submission
    handle: _kv_pb2.KVHandle
    def __init__(self, submission: _Optional[_Union[_types_pb2.Submission, _Mapping]] = ..., handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("hello", "submit", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    submit: DecodeSubmission
    abort: _types_pb2.Abort
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., submit: _Optional[_Union[DecodeSubmission, _Mapping]] = ..., abort: _Optional[_Union[_types_pb2.Abort, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("key", "cached_tokens", "bytes", "handover_s", "queue_s", "transport")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.AttemptKey
    cached_tokens: int
    bytes: int
    handover_s: float
    queue_s: float
    transport: str
    def __init__(self, key: _Optional[_Union[_types_pb2.AttemptKey, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., handover_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("key", "tokens", "cached_tokens", "queue_s", "prefill_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.AttemptKey
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.Token]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, key: _Optional[_Union[_types_pb2.AttemptKey, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[_types_pb2.Token, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceTokens]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceTokens, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("welcome", "accepted", "admitted", "step", "failed", "prompt_logprobs", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: _types_pb2.Welcome
    accepted: _types_pb2.Accepted
    admitted: Admitted
    step: StepTokens
    failed: _types_pb2.Failed
    prompt_logprobs: _types_pb2.PromptLogprobs
    load: _types_pb2.Load
    def __init__(self, welcome: _Optional[_Union[_types_pb2.Welcome, _Mapping]] = ..., accepted: _Optional[_Union[_types_pb2.Accepted, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., step: _Optional[_Union[StepTokens, _Mapping]] = ..., failed: _Optional[_Union[_types_pb2.Failed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...
