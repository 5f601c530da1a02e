"""Numerics name what rounds: operations, torch, instruction set and kind of CPU."""

from pathlib import Path

import pytest
import torch

from common.compute.numerics import numerics

X86 = "processor : 0\nmodel name\t: AMD EPYC 7B13\ncpu family\t: 25\nmodel\t\t: 1\nprocessor : 1\nmodel name\t: other\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(("content", "cpu"), [(X86, "AMD EPYC 7B13 25 1"), (ARM, "0x41 0xd0c 0x3")])
def test_the_kind_of_cpu_is_the_kernels_word(content: str, cpu: str, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(content)
    assert numerics("native", tmp_path / "cpuinfo").endswith(f"/{cpu}")


def test_all_that_rounds_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nothing = tmp_path / "nothing"
    seen = {numerics("native", nothing), numerics("torch", nothing)}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    seen.add(numerics("torch", nothing))
    monkeypatch.setattr(torch, "__version__", "another")
    seen.add(numerics("torch", nothing))
    monkeypatch.setattr("platform.machine", lambda: "another")
    seen.add(numerics("torch", nothing))
    assert len(seen) == 5
