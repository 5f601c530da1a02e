"""From a checked request to what the pipeline takes: token ids, sampling parameters, room in the context."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from common.model.config import GenerationDefaults
from common.sampling import SamplingParams
from common.text.bad_words import bad_word_tokens
from common.text.text_model import TextModel
from router.config import RequestLimits
from router.openai.requests import ChatRequest, CompletionRequest, Request
from router.openai.strict_json import cut
from router.pipeline.generation import GenerationRequest

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
SMALLEST = 2.0**-126  # the wire's numbers are 32-bit: below this a positive number might become 0


class RequestBuilder:
    """Fills in defaults and checks lengths against one model; every error is an InvalidRequest."""

    def __init__(
        self,
        text: TextModel,
        max_model_len: int,
        model_names: Sequence[str],
        limits: RequestLimits | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._limits = limits or RequestLimits()
        self._vocab_size = text.config.vocab_size
        self._model_names = model_names
        self._new_id = new_id

    def chat(self, request: ChatRequest) -> list[GenerationRequest]:
        """One generation."""
        asked, field = request.max_tokens, "max_tokens"
        if request.max_completion_tokens is not None:
            asked, field = request.max_completion_tokens, "max_completion_tokens"
        params = self._params(request, asked, request.top_count, request.prompt_logprobs)
        messages = [message.for_template() for message in request.messages]
        prompt_ids = self._text.encode_chat(
            messages,
            limit=self._max_model_len,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.template_variables,
        )
        room = self._room(prompt_ids, "messages", asked, field)
        return [self._generation(request, prompt_ids, params, asked or room)]

    def completion(self, request: CompletionRequest) -> list[GenerationRequest]:
        """One generation a prompt."""
        prompts = request.prompts
        if len(prompts) * request.n > self._limits.max_answers:
            raise InvalidRequest(
                f"prompt must have at most {self._limits.max_answers} prompts times n, "
                f"got {len(prompts)} times {request.n}",
                field="prompt",
            )
        echo_only = request.max_tokens == 0
        asked = 1 if echo_only else request.max_tokens
        scores = [request.prompt_logprobs, request.top_count if request.echo else None]
        top_scores = max((count for count in scores if count is not None), default=None)
        params = self._params(request, asked, None if echo_only else request.top_count, top_scores)
        generations = []
        for number, prompt in enumerate(prompts):
            field = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
            prompt_ids = self._text.encode(prompt, self._max_model_len) if isinstance(prompt, str) else prompt
            room = self._room(prompt_ids, field, asked, "max_tokens")
            generation = self._generation(request, prompt_ids, params, asked or min(COMPLETION_MAX_TOKENS, room))
            if request.echo:
                echo = prompt if isinstance(prompt, str) else self._text.decode(prompt, whole=echo_only)
                generation = replace(generation, echo=echo, echo_only=echo_only)
            generations.append(generation)
        return generations

    def _params(
        self, request: Request, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Checked before anything is tokenized."""
        served_name(request.model, self._model_names)
        self._check_limits(request)
        params = replace(
            sampling_params(request, self._text.generation, max_tokens or self._max_model_len, logprobs),
            bad_words=bad_word_tokens(request.bad_words, self._text) if request.bad_words else (),
            prompt_logprobs=prompt_logprobs,
        )
        params.validate(self._vocab_size)
        return params

    def _check_limits(self, request: Request) -> None:
        limits = self._limits
        if request.n > limits.max_n:
            raise InvalidRequest(f"n must be at most {limits.max_n}, got {request.n}", field="n")
        for field, count, most in (
            ("stop", len(request.stops), limits.max_stop_strings),
            ("logit_bias", len(request.logit_bias), limits.max_logit_bias),
            ("bad_words", len(request.bad_words), limits.max_bad_words),
        ):
            if count > most:
                raise InvalidRequest(f"{field} must have at most {most} entries, got {count}", field=field)

    def _room(self, prompt_ids: Sequence[int], prompt_field: str, asked: int | None, field: str) -> int:
        """Tokens that the context has left for the answer."""
        if not prompt_ids:
            raise InvalidRequest(f"{prompt_field} must not be empty", field=prompt_field)
        if max(prompt_ids) >= self._vocab_size:
            unknown = next(token_id for token_id in prompt_ids if token_id >= self._vocab_size)
            raise InvalidRequest(
                f"{prompt_field} has token {unknown}, but the model only has {self._vocab_size}", field=prompt_field
            )
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"{self._context()}; {prompt_field} has {len(prompt_ids)}, and the answer needs at least one",
                field=prompt_field,
            )
        if asked is not None and asked > room:
            raise ContextLengthExceeded(
                f"{self._context()}; {field} is {asked}, but the prompt has {len(prompt_ids)}, which leaves {room}",
                field=field,
            )
        return room

    def _context(self) -> str:
        """Clients know an error of this kind by OpenAI's words for it."""
        return f"this model's maximum context length is {self._max_model_len} tokens"

    def _generation(
        self, request: Request, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int
    ) -> GenerationRequest:
        seed = secrets.randbits(64) if request.seed is None else params.seed
        params = replace(params, max_tokens=max_tokens, seed=seed)
        params.validate(self._vocab_size)  # again: min_tokens may not fit
        return GenerationRequest(
            request_id=self._new_id(),
            prompt_ids=tuple(prompt_ids),
            params=params,
            n=request.n,
            stop=request.stops,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            streamed=request.stream,
        )


def served_name(wanted: str | None, names: Sequence[str]) -> str:
    """The name of the served model that a client means; the first where it names none. Raises ModelNotFound."""
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise ModelNotFound(f"the model {cut(wanted)} does not exist; there is {', '.join(names)}", field="model")
    return wanted


def sampling_params(
    request: Request, defaults: GenerationDefaults, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The client's wish, else the model's recommendation, else no change of the distribution."""

    def first(wish: float | None, recommended: float | None, neutral: float) -> float:
        value = next((value for value in (wish, recommended) if value is not None), neutral)
        return SMALLEST if 0 < value < SMALLEST else value

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=first(request.temperature, defaults.temperature, 1.0),
        top_p=first(request.top_p, defaults.top_p, 1.0),
        top_k=max(int(first(request.top_k, defaults.top_k, 0)), 0),
        min_p=first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=(request.seed or 0) % 2**64,  # -1 is 2^64 - 1: OpenAI's seeds are signed
        logit_bias=tuple((int(token_id), bias) for token_id, bias in request.logit_bias.items()),
        logprobs=logprobs,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )
