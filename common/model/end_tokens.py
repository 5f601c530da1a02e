"""Which tokens end an answer, by all that a model's files say.

transformers heeds generation_config.json, else config.json. Fine-tunes often keep those of their base model, and say
it in tokenizer_config.json alone, or in their chat template alone: an answer that ignores that never ends.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from common.log import get_logger, log_event
from common.model.config import GenerationDefaults, parse_generation
from common.model.source import ModelSource, token_text

# How a turn of a chat ends.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
LOGGER = get_logger("model")


def read_generation(source: ModelSource) -> GenerationDefaults:
    """What a source's authors recommend, and every token that ends an answer. Raises ModelError."""
    config = source.config()
    told = parse_generation(config, source.generation())
    ends = [*told.eos_token_ids, *_ends_of_text(source)]
    return replace(told, eos_token_ids=_within(ends, config.positive("vocab_size")))


def _ends_of_text(source: ModelSource) -> Iterable[int]:
    """The tokenizer's own end of text and, where there is a chat template, its ends of a turn."""
    names = [token_text(source.tokenizer_config().get("eos_token"))]
    if source.chat_template() is not None:
        names += TURN_ENDS
    tokens = source.special_tokens()
    return [tokens[name] for name in names if name is not None and name in tokens]


def _within(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Without those that have no logit: nothing could ever choose them."""
    unique = list(dict.fromkeys(ids))
    beyond = [token_id for token_id in unique if token_id >= vocab_size]
    if beyond:
        log_event(LOGGER, logging.WARNING, "end tokens beyond the vocabulary are ignored", ids=beyond)
    return tuple(token_id for token_id in unique if token_id < vocab_size)
