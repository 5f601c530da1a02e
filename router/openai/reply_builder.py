"""Builds replies out of deltas, whole or in chunks. Chunks joined are the whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Generic

from common.text.text_model import TextModel
from router.openai.logprobs import LogprobWriter
from router.openai.replies import (
    Body,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChoiceType,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from router.openai.requests import Request
from router.pipeline.generation import Delta, Generation, TokenText

NO_CHOICES = '"choices":[]'  # which no text in JSON can hold: its quotes have backslashes


class Choice:
    """One answer as far as it has come."""

    def __init__(self, index: int, generation: Generation) -> None:
        self.index = index
        self.generation = generation
        self.echo = generation.request.echo or ""
        self.started = False
        self.texts: list[str] = []
        self.tokens: list[TokenText] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._offset = len(self.echo)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def next_offset(self, token: TokenText) -> int:
        """Where the text of the next token begins; to be asked once a token, in order."""
        offset = self._offset
        self._offset += len(token.readings[0].text)
        return offset


class Reply(ABC, Generic[ChoiceType]):
    """The answers to one HTTP request, in one of the API's two shapes. Answer k of prompt p has index p * n + k."""

    BODY: ClassVar[type[Body[Any]]]
    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(
        self, request: Request, generations: Sequence[Generation], text: TextModel, model_name: str, created: int
    ) -> None:
        self._generations = generations
        self._reports = [generation.report for generation in generations]
        self._n = request.n
        self._top_count, self._prompt_top_count = request.top_count, request.prompt_logprobs
        self._text = text
        options = request.stream_options
        self._usage_in_chunks = options is not None and options.include_usage and options.continuous_usage_stats
        self._sent_tokens = 0
        name = self.PREFIX + generations[0].request.request_id
        self._head: dict[str, Any] = {"id": name, "created": created, "model": model_name}
        self._choices = [
            Choice(number * request.n + k, generation)
            for number, generation in enumerate(generations)
            for k in range(request.n)
        ]

    @cached_property
    def _writer(self) -> LogprobWriter:
        return LogprobWriter(self._text)

    def add(self, prompt: int, delta: Delta) -> None:
        """Takes in a delta of the whole reply."""
        self._choices[prompt * self._n + delta.index].add(delta)

    def whole(self, with_report: bool) -> str:
        """The reply as JSON, when all deltas are in."""
        more = {**self._prompt_part(), **self._report(with_report)}
        head, tail = self._json(self.OBJECT, [], usage=Usage.of(self._reports), **more).split(NO_CHOICES, 1)
        # one by one: whoever writes JSON holds the interpreter until all of it is written
        choices = (self._whole_choice(choice).model_dump_json(exclude_unset=True) for choice in self._choices)
        return f"{head}{NO_CHOICES[:-1]}{','.join(choices)}]{tail}"

    def chunks(self, prompt: int, delta: Delta) -> list[str]:
        """A delta as JSON chunks."""
        self._sent_tokens += len(delta.tokens)
        # the report may be ahead of what is sent
        usage = {"usage": Usage.of(self._reports, self._sent_tokens)} if self._usage_in_chunks else {}
        parts = self._parts(self._choices[prompt * self._n + delta.index], delta)
        return [self._json(self.CHUNK_OBJECT, [part], **usage) for part in parts]

    def last_chunk(self, with_report: bool) -> str:
        """The chunk without choices that brings the usage."""
        return self._json(self.CHUNK_OBJECT, [], usage=Usage.of(self._reports), **self._report(with_report))

    def _prompt_part(self) -> dict[str, Any]:
        """What a whole reply says of its prompt."""
        return {}

    def _report(self, wanted: bool) -> dict[str, Any]:
        reports = [asdict(report) for report in self._reports]
        return {"kvrelay": reports[0] if len(reports) == 1 else reports} if wanted else {}

    def _json(self, kind: str, choices: list[ChoiceType], **more: Any) -> str:
        body = self.BODY(object=kind, choices=choices, **self._head, **more)
        return body.model_dump_json(exclude_unset=True)

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> ChoiceType: ...

    @abstractmethod
    def _parts(self, choice: Choice, delta: Delta) -> list[ChoiceType]: ...


class ChatReply(Reply[ChatChoice]):
    BODY = Body[ChatChoice]
    PREFIX = "chatcmpl-"
    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content="".join(choice.texts)),
            logprobs=self._logprobs(choice.tokens),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _parts(self, choice: Choice, delta: Delta) -> list[ChatChoice]:
        """The role first, then text, then how it ended."""
        parts: list[ChatChoice] = []

        def part(message: ChatMessage, logprobs: ChatLogprobs | None = None, **more: Any) -> None:
            ending = {"finish_reason": None, **more}
            parts.append(ChatChoice(index=choice.index, delta=message, logprobs=logprobs, **ending))

        if not choice.started:
            choice.started = True
            part(ChatMessage(role="assistant", content=""))
        logprobs = self._logprobs(delta.tokens)
        if delta.text or (logprobs and logprobs.content):
            part(ChatMessage(content=delta.text), logprobs)
        if delta.finish_reason is not None:
            part(ChatMessage(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return parts

    def _prompt_part(self) -> dict[str, Any]:
        if self._prompt_top_count is None:
            return {}
        return {"prompt_logprobs": self._writer.prompt(self._generations[0], self._prompt_top_count)}

    def _logprobs(self, tokens: Sequence[TokenText]) -> ChatLogprobs | None:
        return None if self._top_count is None else self._writer.chat(tokens)


class CompletionReply(Reply[CompletionChoice]):
    BODY = Body[CompletionChoice]
    PREFIX = "cmpl-"
    OBJECT = CHUNK_OBJECT = "text_completion"

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        more: dict[str, Any] = {}
        if self._prompt_top_count is not None:
            more = {"prompt_logprobs": self._writer.prompt(choice.generation, self._prompt_top_count)}
        return CompletionChoice(
            index=choice.index,
            text=choice.echo + "".join(choice.texts),
            logprobs=self._logprobs(choice, choice.tokens),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **more,
        )

    def _parts(self, choice: Choice, delta: Delta) -> list[CompletionChoice]:
        text = delta.text if choice.started else choice.echo + delta.text
        logprobs = self._logprobs(choice, delta.tokens)
        if not (text or delta.finish_reason or (logprobs and logprobs.tokens)):
            return []
        ending: dict[str, Any] = {"stop_reason": delta.stop_reason} if delta.finish_reason is not None else {}
        part = CompletionChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=delta.finish_reason, **ending
        )
        return [part]

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenText]) -> CompletionLogprobs | None:
        begins, choice.started = not choice.started, True
        if self._top_count is None:
            return None
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if begins and choice.generation.request.echo is not None:
            self._writer.append_echo(logprobs, choice.generation, self._top_count)
        for token in tokens:
            self._writer.append(logprobs, token.logprobs, token.readings, choice.next_offset(token))
        return logprobs
