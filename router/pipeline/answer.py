"""One of a request's n answers: its tokens in order, its text, and how it ended."""

from common.errors import TokenMismatch
from common.rpc.convert import finish_reason_from_proto, logprob_from_proto
from common.rpc.pb import types_pb2
from common.text.detokenize import Reading
from common.text.stop_strings import StopChecker
from common.text.text_model import TextModel
from router.pipeline.generation import Delta, GenerationRequest, TokenText


class Answer:
    """Grows token by token. Tokens are numbered: one that comes again must be the same, none may be left out."""

    def __init__(self, index: int, request: GenerationRequest, text: TextModel) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.finished = False
        self._request = request
        self._detokenizer = text.detokenizer(request.skip_special_tokens, request.prompt_ids)
        self._stops = StopChecker(request.stop, request.include_stop_str_in_output)

    def accept(self, token: types_pb2.Token) -> Delta | None:
        """The token's delta; None for one that is known or comes after the end. Raises TokenMismatch."""
        known = len(self.output_ids)
        if token.index < known:
            if self.output_ids[token.index] != token.token_id:
                raise TokenMismatch(f"token {token.index} came twice, with different ids")
            return None
        if self.finished:
            return None
        if token.index > known:
            raise TokenMismatch(f"token {token.index} came where token {known} was due")
        self.output_ids.append(token.token_id)
        reason = finish_reason_from_proto(token)
        silent = reason == "stop" and not self._request.include_stop_str_in_output
        logprobs = tuple(map(logprob_from_proto, token.logprobs))
        readings = [self._detokenizer.read(one.token_id) for one in logprobs]
        piece = "" if silent else self._detokenizer.push([token.token_id])
        text, stop = self._check_stops(piece)
        data = b""
        if stop is None and reason is not None:
            rest, data = self._detokenizer.rest()
            piece += rest
            more, stop = self._check_stops(rest)
            text += more + (self._stops.finish() if stop is None else "")
        if readings:
            readings[0] = Reading(piece, (b"" if silent else readings[0].data) + data)
        self.finished = stop is not None or reason is not None
        return Delta(
            index=self.index,
            text=text,
            tokens=(TokenText(token.token_id, logprobs, tuple(readings)),),
            finish_reason="stop" if stop is not None else reason,
            stop_reason=stop or (token.stop_token_id if token.HasField("stop_token_id") else None),
        )

    def _check_stops(self, text: str) -> tuple[str, str | None]:
        """What can go out, and the stop string met; as in vLLM, none that ends in the first min_tokens tokens."""
        return self._stops.push(text, armed=len(self.output_ids) > self._request.params.min_tokens)
