"""/tokenize and /detokenize, as vLLM has them."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequest
from common.text.text_model import TextModel
from router.openai.fields import TokenId
from router.openai.request_builder import served_name
from router.openai.requests import Conversation, Message
from router.openai.strict_json import Wire

MAX_CHARS = 2**20  # of a text that is asked about; a tokenizer takes some hundred bytes for each
MAX_TOKENS = 2**18
MAX_MESSAGES = 2**14


class TokenizeRequest(Conversation):
    """Token ids of a prompt, or of messages as /v1/chat/completions would see them."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_CHARS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # default: of a prompt, not of messages, whose template has them
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "is required, or else messages, and not both", {"key": "prompt"})
        if self.messages is not None and self.add_special_tokens:
            raise PydanticCustomError(
                "template", "is not supported for messages: their template has them", {"key": "add_special_tokens"}
            )
        return self


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class Tokenizing:
    """Text to tokens and back, without any worker; may be called from any thread."""

    def __init__(self, text: TextModel, max_model_len: int, model_names: Sequence[str]) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._model_names = model_names

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Also of what is longer than the context: it is asked for in order to find out."""
        served_name(request.model, self._model_names)
        if request.messages is not None:
            messages = [message.for_template() for message in request.messages]
            if sum(len(message["content"]) for message in messages) > MAX_CHARS:
                raise InvalidRequest(f"messages must have at most {MAX_CHARS} characters", field="messages")
            ids = self._text.encode_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                variables=request.chat_template_kwargs,
            )
        else:
            special = request.add_special_tokens is not False
            ids = self._text.encode(request.prompt or "", add_special_tokens=special)
        strings = [self._text.token(token_id) or "" for token_id in ids] if request.return_token_strs else None
        return TokenizeReply(count=len(ids), max_model_len=self._max_model_len, tokens=ids, token_strs=strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Special tokens are written out."""
        served_name(request.model, self._model_names)
        size = self._text.config.vocab_size
        for number, token_id in enumerate(request.tokens):
            if token_id >= size:
                raise InvalidRequest(
                    f"tokens[{number}] is {token_id}, but the model only has {size}", field=f"tokens[{number}]"
                )
        return DetokenizeReply(prompt=self._text.decode(request.tokens))
