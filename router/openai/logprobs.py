"""Log-probabilities as the API writes them."""

from collections.abc import Iterator, Sequence

from common.errors import KVRelayError
from common.sampling import Logprob
from common.text.detokenize import Reading
from common.text.text_model import TextModel
from router.openai.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from router.pipeline.generation import Generation, GenerationRequest, TokenText

MIN_LOGPROB = -9999.0  # JSON has no -Infinity
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def finite(logprob: float) -> float:
    """Also for not-a-number, which no comparison holds for."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class LogprobWriter:
    """Writes tokens of one model."""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def chat(self, tokens: Sequence[TokenText]) -> ChatLogprobs:
        content = []
        for token in tokens:
            (chosen, *top) = [
                TopLogprob(token=text, logprob=finite(one.logprob), bytes=list(data))
                for one, (text, data) in zip(token.logprobs, self._named(token.logprobs, token.readings), strict=True)
            ]
            content.append(TokenLogprob(**dict(chosen), top_logprobs=top))
        return ChatLogprobs(content=content)

    def append(
        self, to: CompletionLogprobs, logprobs: Sequence[Logprob], readings: Sequence[Reading], offset: int
    ) -> None:
        """One more token, whose reading comes first; no log-probabilities is what the first of a prompt has."""
        to.tokens.append(readings[0].text)
        to.text_offset.append(offset)
        if not logprobs:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            return
        to.token_logprobs.append(finite(logprobs[0].logprob))
        top: dict[str, float] = {}
        for one, (text, _) in zip(logprobs, self._named(logprobs, readings), strict=True):
            top[text] = max(finite(one.logprob), top.get(text, MIN_LOGPROB))  # of those that read alike the likeliest
        to.top_logprobs.append(top)

    def append_echo(self, to: CompletionLogprobs, generation: Generation, count: int) -> None:
        """The prompt's tokens, each with the `count` likeliest."""
        request = generation.request
        echo, offset = request.echo or "", 0
        scores = [logprobs[: 1 + count] for logprobs in ((), *_scores(generation))]
        for logprobs, readings in zip(scores, self._echo_readings(request, scores), strict=True):
            self.append(to, logprobs, readings, min(offset, len(echo)))
            offset += len(readings[0].text)

    def prompt(self, generation: Generation, count: int) -> PromptLogprobs:
        """vLLM's prompt_logprobs: for each token but the first its own and the `count` likeliest, by token id."""

        def entries(logprobs: Sequence[Logprob]) -> dict[str, PromptLogprob]:
            return {
                str(entry.token_id): PromptLogprob(
                    logprob=finite(entry.logprob), rank=entry.rank, decoded_token=self._token_text(entry.token_id)
                )
                for entry in logprobs
            }

        return [None, *(entries(logprobs[: 1 + count]) for logprobs in _scores(generation))]

    def _echo_readings(
        self, request: GenerationRequest, scores: Sequence[Sequence[Logprob]]
    ) -> Iterator[list[Reading]]:
        """Of each prompt token and its alternatives; joined they are the echo."""
        unwritten = self._text.num_added(request.prompt_ids, request.echo or "")
        detokenizer, last = self._text.detokenizer(skip_special_tokens=False), len(request.prompt_ids) - 1
        for place, (token_id, logprobs) in enumerate(zip(request.prompt_ids, scores, strict=True)):
            readings = [detokenizer.read(one) for one in (token_id, *(one.token_id for one in logprobs[1:]))]
            if place < unwritten:
                readings[0] = Reading("", b"")
            else:
                detokenizer.push([token_id])
            if place == last and request.echo_only:
                rest = detokenizer.rest()
                readings[0] = Reading(readings[0].text + rest.text, readings[0].data + rest.data)
            yield readings

    def _named(self, logprobs: Sequence[Logprob], readings: Sequence[Reading]) -> Iterator[Reading]:
        """A token reads as it stands in the text; alternatives that the text would not show go by their names."""
        chosen, chosen_id = readings[0], logprobs[0].token_id
        for one, reading in zip(logprobs, readings, strict=True):
            if one.token_id == chosen_id:
                yield chosen
            elif reading.data:
                yield reading
            else:
                name = self._text.token(one.token_id) or ""
                yield Reading(name, name.encode())

    def _token_text(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode("utf-8", "replace")


def _scores(generation: Generation) -> list[tuple[Logprob, ...]]:
    if len(generation.prompt_logprobs) != len(generation.request.prompt_ids) - 1:
        raise KVRelayError("the log-probabilities of the prompt are not complete")
    return generation.prompt_logprobs
