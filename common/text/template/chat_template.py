"""A model's chat template, rendered as Hugging Face's library renders it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from common.errors import InvalidRequest, ModelError
from common.text.template.budget import TooMuchWork, budget_for
from common.text.template.sandbox import TemplateEnvironment

MAX_TEMPLATE_CHARS = 2**18
MAX_REASON_CHARS = 300
# What a template raises when messages are not as it wants them: its own errors, and Python's on odd types.
REFUSALS = (*(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),)
TOO_MUCH = (TooMuchWork, RecursionError, MemoryError)


class ChatTemplate:
    """Renders messages to the text that the model was trained on."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
        name: str = "the chat template",
    ) -> None:
        """special_tokens: bos_token, eos_token and the like, as the template names them. Raises ModelError."""
        self._name = name
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} are allowed")
        environment = TemplateEnvironment(lambda pattern: now().strftime(pattern))
        try:
            self._template = environment.template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, *REFUSALS) as error:  # Python's, of what Jinja makes of it
            raise ModelError(f"the chat template can't be compiled: {_reason(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Raises InvalidRequest with the template's own words when it refuses the messages.

        Raises ModelError when it asks for more work than an honest template would.
        """
        given = [dict(message) for message in messages]
        try:
            with budget_for(given):
                return self._template.render(
                    messages=given,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
        except TOO_MUCH as error:
            raise ModelError(f"{self._name} was stopped: {_reason(error)}", field="messages") from None
        except REFUSALS as error:
            reason = f"the chat template refuses these messages: {_reason(error)}"
            raise InvalidRequest(reason, field="messages") from error


def _reason(error: BaseException) -> str:
    return str(error)[:MAX_REASON_CHARS] or type(error).__name__
