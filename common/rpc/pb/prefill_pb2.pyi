from common.rpc.pb import types_pb2 as _types_pb2
from common.rpc.pb import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillCommand(_message.Message):
    __slots__ = ("hello", "submit", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    submit: _types_pb2.Submission
    abort: _types_pb2.Abort
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., submit: _Optional[_Union[_types_pb2.Submission, _Mapping]] = ..., abort: _Optional[_Union[_types_pb2.Abort, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("key", "computed_tokens", "total_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.AttemptKey
    computed_tokens: int
    total_tokens: int
    def __init__(self, key: _Optional[_Union[_types_pb2.AttemptKey, _Mapping]] = ..., computed_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("key", "tokens", "handle", "cached_tokens", "queue_s", "prefill_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.AttemptKey
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.Token]
    handle: _kv_pb2.KVHandle
    cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, key: _Optional[_Union[_types_pb2.AttemptKey, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[_types_pb2.Token, _Mapping]]] = ..., handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("welcome", "accepted", "progress", "first_tokens", "failed", "prompt_logprobs", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: _types_pb2.Welcome
    accepted: _types_pb2.Accepted
    progress: Progress
    first_tokens: FirstTokens
    failed: _types_pb2.Failed
    prompt_logprobs: _types_pb2.PromptLogprobs
    load: _types_pb2.Load
    def __init__(self, welcome: _Optional[_Union[_types_pb2.Welcome, _Mapping]] = ..., accepted: _Optional[_Union[_types_pb2.Accepted, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., failed: _Optional[_Union[_types_pb2.Failed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...
