"""Operations of the decoder: one table, chosen once at start-up."""

import logging

from common.compute.native_build import NativeUnavailable
from common.compute.ops.cpu import native_attention as native
from common.compute.ops.reference import reference_ops as reference
from common.compute.ops.table import Ops, StepInput
from common.errors import ConfigError
from common.log import get_logger, log_event
from common.model.config import ModelConfig

__all__ = ["BACKENDS", "Ops", "StepInput", "choose_ops"]

BACKENDS = ("auto", "native", "torch")
log = get_logger("ops")


def choose_ops(config: ModelConfig, backend: str = "auto") -> Ops:
    """The best table for this machine and model; says in one log line which. Raises ConfigError if it can't be had."""
    ops, reason = reference.OPS, ""
    if backend != "torch":
        try:
            ops = native.load_ops(config)
        except NativeUnavailable as error:
            if backend == "native":
                raise ConfigError(f"no native attention: {error}", field="attention_backend") from error
            reason = str(error)
    log_event(log, logging.WARNING if reason else logging.INFO, "operations", backend=ops.name, reason=reason or None)
    return ops
