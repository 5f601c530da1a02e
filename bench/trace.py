"""Arrivals and lengths of real requests, scaled to a machine that could not take them as they are.

Two formats: Mooncake's .jsonl (https://github.com/kvcache-ai/Mooncake, FAST25 release), whose hash_ids name the
512-token blocks of a prompt, equal ids being equal prefixes; and Azure's .csv
(https://github.com/Azure/AzurePublicDataset, LLM inference traces), which has lengths alone.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError

BLOCK_TOKENS = 512.0  # that one of Mooncake's hash ids stands for


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; without hash_ids it shares no prefix with any other."""

    at_s: float  # from the first row
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: float = BLOCK_TOKENS  # of each hash id; no whole number when scaled

    def block_end(self, index: int) -> int:
        """Where in the prompt the block at this place ends, the same in every prompt."""
        return round((index + 1) * self.block_tokens)


def read(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first rows of a trace, in order of time. Raises ConfigError that names the file and the line."""
    parse = PARSERS.get(path.suffix)
    if parse is None:
        raise ConfigError(f"--trace: the name of {path} must end in {' or '.join(PARSERS)}", field="trace")
    rows: list[TraceRow] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                row = _parsed(parse, line, f"line {number} of {path}") if line.strip() else None
                if row is not None and row.prompt_tokens > 0 and row.output_tokens > 0:
                    rows.append(row)
                if len(rows) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: can't read {path}: {error}", field="trace") from error
    if not rows:
        raise ConfigError(f"--trace: {path} has no requests", field="trace")
    first_s = min(row.at_s for row in rows)
    return sorted((replace(row, at_s=row.at_s - first_s) for row in rows), key=lambda row: row.at_s)


def _parsed(parse: Callable[[str], TraceRow | None], line: str, where: str) -> TraceRow | None:
    try:
        return parse(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--trace: {where} is none of a trace: {error!r}", field="trace") from error


def _mooncake(line: str) -> TraceRow:
    data: dict[str, Any] = json.loads(line)
    hash_ids = tuple(int(block) for block in data.get("hash_ids", ()))
    return TraceRow(data["timestamp"] / 1e3, int(data["input_length"]), int(data["output_length"]), hash_ids)


def _azure(line: str) -> TraceRow | None:
    time, prompt_tokens, output_tokens = line.strip().split(",")
    if time == "TIMESTAMP":
        return None
    at = datetime.fromisoformat(time[:26]).replace(tzinfo=UTC)  # to microseconds
    return TraceRow(at.timestamp(), int(prompt_tokens), int(output_tokens))


PARSERS: dict[str, Callable[[str], TraceRow | None]] = {".jsonl": _mooncake, ".csv": _azure}


def scaled(rows: Sequence[TraceRow], lengths: float, times: float) -> list[TraceRow]:
    """Lengths and time axis times a factor each; every request keeps a token to ask and one to answer."""
    return [
        replace(
            row,
            at_s=row.at_s * times,
            prompt_tokens=max(1, round(row.prompt_tokens * lengths)),
            output_tokens=max(1, round(row.output_tokens * lengths)),
            block_tokens=row.block_tokens * lengths,
        )
        for row in rows
    ]


def prompt_ids(row: TraceRow, number: int, seed: int, first_id: int, vocab_size: int) -> tuple[int, ...]:
    """Random token ids, a block's drawn from its hash id: prompts with equal leading ids begin alike.

    What no hash id covers is the request's own, drawn from its number.
    """
    ids: list[int] = []
    for index, block in enumerate(row.hash_ids):
        count = row.block_end(index) - len(ids)
        ids += _draw(f"{seed}/block/{block}", min(count, row.prompt_tokens - len(ids)), first_id, vocab_size)
    ids += _draw(f"{seed}/request/{number}", row.prompt_tokens - len(ids), first_id, vocab_size)
    return tuple(ids)


def _draw(seed: str, count: int, first_id: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(first_id, vocab_size), k=max(0, count))


def rate(rows: Sequence[TraceRow]) -> float | None:
    """Requests a second; None where all come at once."""
    span_s = rows[-1].at_s - rows[0].at_s
    return (len(rows) - 1) / span_s if span_s > 0 else None
