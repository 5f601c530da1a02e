"""The decoder's seam for tensor parallelism is where it has to be: two members with half the weights each equal one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from common.compute.decoder import Decoder
from common.compute.linear_weight import DenseWeight
from common.compute.mlp import GatedMlp
from common.compute.ops.reference.reference_ops import OPS
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import LayerWeights, ModelWeights, load_weights
from common.engine.batch import Batch
from common.engine.kv_pool import HostKVPool
from common.engine.runner import ModelRunner
from common.model.config import ModelConfig
from tests.support.checkpoints import make_random_checkpoint
from tests.support.model_files import load_config
from tests.support.model_tools import chunk, random_ids

SIZE = 2
LENGTH = 37


class Meeting:
    """A value of each member, met by all of them."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=60)
        self.values: dict[int, torch.Tensor] = {}
        self.calls: list[str] = []


class Member:
    """A ParallelGroup of threads."""

    size = SIZE

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def _meet(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        meeting.values[self._rank] = x
        if self._rank == 0:
            meeting.calls.append(name)
        meeting.barrier.wait()
        values = [meeting.values[rank] for rank in range(SIZE)]
        meeting.barrier.wait()
        return values

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet("reduce", x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet("gather", x), -1)


def part(tensor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    return tensor.chunk(SIZE, dim)[rank].contiguous()


def part_of_layer(layer: LayerWeights, config: ModelConfig, rank: int) -> LayerWeights:
    rows = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    qkv = torch.cat([part(piece, rank, 0) for piece in layer.qkv.tensors[0].split(rows)])
    gate_up = torch.cat([part(piece, rank, 0) for piece in layer.mlp.gate_up.tensors[0].chunk(2)])
    down = part(layer.mlp.down.tensors[0], rank, 1)
    return replace(
        layer,
        qkv=DenseWeight(qkv),
        out=DenseWeight(part(layer.out.tensors[0], rank, 1)),
        mlp=GatedMlp(DenseWeight(gate_up), DenseWeight(down)),
    )


def part_of_model(weights: ModelWeights, config: ModelConfig, rank: int) -> ModelWeights:
    table = torch.zeros_like(weights.embedding.tensors[0])
    half = len(table) // SIZE
    table[rank * half : (rank + 1) * half] = weights.embedding.tensors[0][rank * half : (rank + 1) * half]
    layers = tuple(part_of_layer(layer, config, rank) for layer in weights.layers)
    head = DenseWeight(part(weights.head.tensors[0], rank, 0))
    return ModelWeights(DenseWeight(table), layers, weights.norm, head)


def logits(decoder: Decoder, config: ModelConfig, batch: Batch) -> torch.Tensor:
    pool = HostKVPool(config.kv_layout("float32"), 8, shared=False)
    return ModelRunner(decoder, pool).forward(batch)


def test_two_members_with_half_the_weights_answer_as_one(tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", num_heads=8, num_kv_heads=2, tie_word_embeddings=False)
    config = load_config(directory)
    weights = load_weights(SafetensorsReader(directory), config, "float32")
    batch = Batch((chunk(random_ids(LENGTH), 0, LENGTH),))
    alone = logits(Decoder(config, weights, OPS), config, batch)
    meeting = Meeting()
    halved = replace(config, num_heads=config.num_heads // SIZE, num_kv_heads=config.num_kv_heads // SIZE)

    def member(rank: int) -> torch.Tensor:
        decoder = Decoder(halved, part_of_model(weights, config, rank), OPS, Member(meeting, rank))
        return logits(decoder, halved, batch)

    with ThreadPoolExecutor(SIZE) as threads:
        answers = list(threads.map(member, range(SIZE)))
    for answer in answers:
        torch.testing.assert_close(answer, alone, atol=1e-4, rtol=0)
    assert meeting.calls == ["reduce", *["reduce"] * 2 * config.num_layers, "gather"]
