"""What the HTTP side asks of the pipeline, and what it gets: no JSON above, no wire messages below."""

from dataclasses import dataclass, field

from common.sampling import Logprob, SamplingParams
from common.text.detokenize import Reading


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, n answers. Token ids are checked, defaults are filled in, the seed is drawn."""

    request_id: str  # internal, unique; never a client's
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    echo: str | None = None  # the prompt's text, to come before each answer
    echo_only: bool = False  # max_tokens 0: nothing comes after it
    priority: int = 0  # lower goes first, as in vLLM
    streamed: bool = False  # its headers go out by keepalive_s, after which an error is no status any more


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of an answer; where log-probabilities are asked for, with what it adds to the text."""

    token_id: int
    logprobs: tuple[Logprob, ...] = ()  # the chosen token's, then the top k
    readings: tuple[Reading, ...] = ()  # of each; the chosen ones' joined are the text, until a stop string cuts it


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one answer; with finish_reason its last one. Joined texts are the whole answer."""

    index: int  # which of the n answers
    text: str
    tokens: tuple[TokenText, ...] = ()  # whose text may come in this delta or a later one
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: str | int | None = None  # the stop string or token id


@dataclass(slots=True)
class Report:
    """What a request took, complete when its last delta is out; seconds and bytes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that no worker had to compute for this request
    attempts: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    unsplit: str = ""  # why the decode worker computed the prompt, if it did
    router_queue_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    handover_bytes: int = 0
    transport: str = ""
    decode_queue_s: float = 0.0
    decode_cached_tokens: int = 0
    first_token_s: float = 0.0  # from the request's start
    last_token_s: float = 0.0


@dataclass(slots=True)
class Generation:
    """A request on its way; the pipeline yields Deltas and fills the rest, prompt_logprobs before the first."""

    request: GenerationRequest
    report: Report = field(default_factory=Report)
    prompt_logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)  # where asked for: of tokens 1, 2, ...
