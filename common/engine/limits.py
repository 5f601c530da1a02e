"""Bounds of a step and of a sequence, and whether a sequence has met its own."""

from dataclasses import dataclass

from common.engine.sequence import Sequence
from common.errors import ConfigError
from common.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of one sequence."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    max_scored_tokens: int = 128  # prompt tokens a step gives log-probabilities: each is a row of logits in memory

    def __post_init__(self) -> None:
        # else running sequences of one token each could keep a prompt from ever being computed
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})",
                field="max_num_batched_tokens",
            )


def finish(sequence: Sequence, config: SchedulerConfig) -> tuple[FinishReason | None, int | None]:
    """Whether the last token ends its sequence, and the stop token id if one of those does; EOS is none."""
    params, token_id = sequence.params, sequence.token_ids[-1]
    if sequence.num_output_tokens > params.min_tokens:
        if token_id in config.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if sequence.num_output_tokens >= params.max_tokens or sequence.num_tokens >= config.max_model_len:
        return FinishReason.LENGTH, None
    return None, None
