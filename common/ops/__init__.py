"""Operations of the decoder: one table, chosen once at start-up."""

import logging

from common.ops import reference
from common.ops.table import Ops, StepInput

__all__ = ["Ops", "StepInput", "choose_ops"]

_log = logging.getLogger(__name__)


def choose_ops() -> Ops:
    """The best table for this machine; says in one log line which."""
    ops = reference.OPS
    _log.info("operations: %s", ops.name)
    return ops
