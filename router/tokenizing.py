"""/tokenize and /detokenize, as vLLM has them."""

from pydantic import BaseModel

from common.errors import InvalidRequest
from router.openai import DetokenizeRequest, TokenizeRequest
from router.text import TextModel


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class Tokenizing:
    """Text to tokens and back, without any worker; may be called from any thread."""

    def __init__(self, text: TextModel, max_model_len: int) -> None:
        self._text = text
        self._max_model_len = max_model_len

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Also of what is longer than the context: it is asked for in order to find out."""
        if request.messages is not None:
            messages = [message.for_template() for message in request.messages]
            ids = self._text.encode_chat(messages, add_generation_prompt=request.add_generation_prompt)
        else:
            special = request.add_special_tokens is not False
            ids = self._text.encode(request.prompt or "", add_special_tokens=special)
        strings = [self._text.token(token_id) or "" for token_id in ids] if request.return_token_strs else None
        return TokenizeReply(count=len(ids), max_model_len=self._max_model_len, tokens=ids, token_strs=strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Special tokens are written out."""
        size = self._text.config.vocab_size
        for number, token_id in enumerate(request.tokens):
            if token_id >= size:
                raise InvalidRequest(
                    f"tokens[{number}] is {token_id}, but the model only has {size}", field=f"tokens[{number}]"
                )
        return DetokenizeReply(prompt=self._text.decode(request.tokens))
