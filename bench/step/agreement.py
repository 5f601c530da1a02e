"""How far two ways of computing an answer agree, and by how little they differ where they part.

    python -m bench.step.agreement --model DIR [--prompts N] [--tokens N]

For each dtype it decodes greedily in kvrelay's engine (all prompts in one running batch, in chunks), then asks the
references for the same: kvrelay's own full recompute of each sequence alone, and transformers. One JSON line a
pair: answers that are equal, and for the others the place where they part and the margin there, the difference
between the two highest logits. A small margin means a near tie that rounding decides; a large one a defect.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.block_hash import BLOCK_SIZE
from common.engine.batch import Batch, ScheduledChunk
from common.engine.build import BuiltEngine, build_engine
from common.engine.config import EngineConfig
from common.engine.sequence import Sequence as EngineSequence
from common.sampling import SamplingParams
from common.settings import Bytes

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which",
)
Ids = list[int]
Logits = Callable[[Ids], torch.Tensor]  # of the token after these, [vocab]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer leaves its reference."""

    token: int
    margin: float


def engine_for(model: str, dtype: str) -> BuiltEngine:
    settings = EngineConfig(model=model, dtype=dtype, max_model_len=1024, threads=1, kv_cache_memory=Bytes(2**29))
    return build_engine(settings, max_num_batched_tokens=64, shared_pool=False, clock=time.monotonic)


def served(built: BuiltEngine, prompts: Sequence[Ids], count: int) -> list[Ids]:
    """Greedy answers of the engine, all prompts at once."""
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    sequences = [EngineSequence(str(i), list(ids), len(ids), params) for i, ids in enumerate(prompts)]
    for sequence in sequences:
        built.engine.add(sequence)
    while built.engine.load().running + built.engine.load().waiting:
        output = built.engine.step()
        if output is not None and output.failed:
            raise output.failed[0][1]
    return [sequence.output_ids for sequence in sequences]


def recomputed(built: BuiltEngine) -> Logits:
    """Every token from one pass over the whole sequence, alone. The engine must be idle: its blocks are used."""

    def logits(ids: Ids) -> torch.Tensor:
        sequence = EngineSequence("whole", ids, len(ids), SamplingParams())
        blocks = tuple(range(-(-len(ids) // BLOCK_SIZE)))
        chunk = ScheduledChunk(sequence, 0, tuple(ids), blocks, range(len(ids) - 1, len(ids)))
        return built.engine._runner.forward(Batch((chunk,)))[0]

    return logits


def transformers_logits(model: str, dtype: str) -> Logits:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def logits(ids: Ids) -> torch.Tensor:
        result: torch.Tensor = reference(torch.tensor([ids])).logits[0, -1].float()
        return result

    return logits


def parting(prompt: Ids, answer: Ids, reference: Logits) -> Parting | None:
    """The first token that the reference would not have written after the same tokens."""
    for place, token in enumerate(answer):
        logits = reference(prompt + answer[:place])
        if int(logits.argmax()) != token:
            top = logits.topk(2).values
            return Parting(place, round(float(top[0] - top[1]), 4))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--prompts", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    arguments = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{arguments.model}/tokenizer.json")
    prompts = [tokenizer.encode(text).ids for text in PROMPTS[: arguments.prompts]]
    for dtype in ("float32", "bfloat16"):
        built = engine_for(arguments.model, dtype)
        answers = served(built, prompts, arguments.tokens)
        references = {
            "kvrelay, full recompute": recomputed(built),
            f"transformers, {dtype}": transformers_logits(arguments.model, dtype),
        }
        for name, reference in references.items():
            partings = [parting(*pair, reference) for pair in zip(prompts, answers, strict=True)]
            row = {
                "dtype": dtype,
                "reference": name,
                "answers": len(answers),
                "tokens": arguments.tokens,
                "equal": partings.count(None),
                "partings": [{"token": p.token, "margin": p.margin} for p in partings if p],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
