"""Log-probabilities as the API writes them."""

from collections.abc import Sequence
from itertools import accumulate

from common.errors import KVRelayError
from common.sampling import Logprob
from common.text.text_model import TextModel
from router.openai.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from router.pipeline.generation import Generation, TokenText

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
            (chosen, *top) = [self._entry(entry) for entry in token.logprobs]
            content.append(TokenLogprob(**dict(chosen), top_logprobs=top))
        return ChatLogprobs(content=content)

    def append(self, to: CompletionLogprobs, token_id: int, logprobs: Sequence[Logprob], offset: int) -> None:
        """One more token; no log-probabilities is what the first of a prompt has."""
        to.tokens.append(self._token_text(token_id))
        to.text_offset.append(offset)
        if not logprobs:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            return
        to.token_logprobs.append(finite(logprobs[0].logprob))
        top: dict[str, float] = {}
        for entry in logprobs:  # ids that read alike share a key: the likeliest stays
            text = self._token_text(entry.token_id)
            top[text] = max(finite(entry.logprob), top.get(text, MIN_LOGPROB))
        to.top_logprobs.append(top)

    def append_echo(self, to: CompletionLogprobs, generation: Generation, count: int) -> None:
        """The prompt's tokens, each with the `count` likeliest."""
        ids = generation.request.prompt_ids
        offsets = self._echo_offsets(ids, generation.request.echo or "")
        for token_id, logprobs, offset in zip(ids, [(), *_scores(generation)], offsets, strict=True):
            self.append(to, token_id, logprobs[: 1 + count], offset)

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

    def _echo_offsets(self, ids: Sequence[int], echo: str) -> list[int]:
        """Where each token's text begins in the echo, which lacks what the tokenizer has put before it (a BOS)."""
        detokenizer = self._text.detokenizer(skip_special_tokens=False)
        lengths = [len(detokenizer.push([token_id])) for token_id in ids]
        added = sum(lengths) + len(detokenizer.finish()) - len(echo)
        return [min(max(0, end - added), len(echo)) for end in accumulate(lengths[:-1], initial=0)]

    def _entry(self, entry: Logprob) -> TopLogprob:
        data = list(self._text.token_bytes(entry.token_id))
        return TopLogprob(token=self._token_text(entry.token_id), logprob=finite(entry.logprob), bytes=data)

    def _token_text(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode("utf-8", "replace")


def _scores(generation: Generation) -> list[tuple[Logprob, ...]]:
    if len(generation.prompt_logprobs) != len(generation.request.prompt_ids) - 1:
        raise KVRelayError("the log-probabilities of the prompt are not complete")
    return generation.prompt_logprobs
