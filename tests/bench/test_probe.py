"""The probe is built and measures something; without a compiler torch stands in and says so."""

import shutil

import pytest
import torch

from bench import probe
from common.compute.native_build import COMPILERS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    torch.set_num_threads(1)


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler here")
def test_the_program_gives_positive_figures():
    figures = probe.native_figures(1)
    assert figures is not None
    assert {"stream_gb_s", "fp32_gflop_s"} <= figures.keys()
    assert min(figures["stream_gb_s"], figures["fp32_gflop_s"]) > 0


def test_a_source_that_does_not_compile_gives_none(tmp_path, monkeypatch):
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(probe, "SOURCE", source)
    assert probe.native_figures(1) is None


def test_a_program_that_fails_gives_none(monkeypatch):
    monkeypatch.setattr(probe, "build", lambda source, library: "/no/such/program")
    assert probe.native_figures(1) is None


def test_without_the_program_torch_stands_in_and_says_so(monkeypatch):
    monkeypatch.setattr(probe, "native_figures", lambda threads: None)
    monkeypatch.setattr(probe, "torch_stream_gb_s", lambda: 10.0)
    monkeypatch.setattr(probe, "torch_matmul_gflop_s", lambda dtype: 100.0)
    measured = probe.measure("float32")
    assert (measured.stream_gb_s, measured.stream_by) == (10.0, "torch sum")
    assert (measured.matmul_gflop_s, measured.matmul_by) == (100.0, "torch linear")


@pytest.mark.parametrize(
    ("dtype", "torch_peak", "peak", "by"),
    [
        ("float32", 50.0, 60.0, "probe fp32"),
        ("float32", 70.0, 70.0, "torch linear"),
        ("bfloat16", 50.0, 300.0, "probe amx_bf16"),
        ("bfloat16", 400.0, 400.0, "torch linear"),
    ],
)
def test_the_peak_is_the_best_of_probe_and_torch_for_the_dtype(monkeypatch, dtype, torch_peak, peak, by):
    native = {"stream_gb_s": 9.0, "fp32_gflop_s": 60.0, "avx512_bf16_gflop_s": 200.0, "amx_bf16_gflop_s": 300.0}
    monkeypatch.setattr(probe, "native_figures", lambda threads: native)
    monkeypatch.setattr(probe, "torch_matmul_gflop_s", lambda dtype: torch_peak)
    measured = probe.measure(dtype)
    assert (measured.matmul_gflop_s, measured.matmul_by) == (peak, by)
    assert (measured.stream_gb_s, measured.stream_by) == (9.0, "probe")


def test_torchs_own_rates_are_positive(monkeypatch):
    monkeypatch.setattr(probe, "SHAPES", ((16, 16, 16),))
    assert probe.torch_matmul_gflop_s(torch.float32) > 0
    assert probe.torch_stream_gb_s() > 0
