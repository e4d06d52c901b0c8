"""One instruction set gives one fingerprint and one set of tokens, whatever code libraries choose for a processor.

PyTorch, MKL, numpy and the C library are made to choose as they do on lesser processors: each run stands for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mpmath
import numpy as np
import pytest
import torch

from executor_svc.config import CpuIsa, ExecutorConfig
from executor_svc.cpu.kernels.codegen import isa
from executor_svc.cpu.kernels.codegen.isa import IsaName, host_isa
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device.interface import DeviceError
from executor_svc.portable_math import cos_and_sin, exp_each, log, log_each, power
from executor_svc.sampling.noise import uniform
from executor_svc.startup.executors import make_device
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import make_llama
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT

PROCESSORS: dict[str, dict[str, str]] = {
    "without AVX-512": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    },
    "without FMA": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL FMA3 AVX2 X86_V3",
    },
}
needs_avx2 = pytest.mark.skipif("avx2" not in ISAS, reason="this processor has no AVX2")


@needs_avx2
@pytest.mark.slow
@pytest.mark.parametrize("other", short_and_long(["without AVX-512", "without FMA"], ["without FMA"]))
@pytest.mark.long
def test_processors_of_one_isa_agree(tmp_path: Path, other: str) -> None:
    folder = make_llama(tmp_path / "model")
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.executor_svc.cpu.portable_bits", str(folder), "avx2"],
            env={**os.environ, **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, variables in (("this one", {}), (other, PROCESSORS[other]))
    }
    found: dict[str, Any] = {name: json.loads(process.communicate()[0]) for name, process in running.items()}
    first = found["this one"]
    assert first["own"]["isa"] == "avx2"
    assert found[other]["own"] == first["own"]
    assert found[other]["libraries"] != first["libraries"], "these runs differ in nothing"


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of this processor is its own name; what the processor lacks, and a GPU, are refused."""
    for name in ISAS.keys() - {"native"}:
        device = make_device(ExecutorConfig.model_validate({"model": "m", "device": "cpu", "cpu_isa": name}))
        assert device.isa == name
        assert name in device.isa_of_libraries
        assert len(device.isa_of_libraries) > len(name)
    assert make_device(ExecutorConfig(model="m", device="cpu")).isa in (host_isa().name, device.isa_of_libraries)
    with pytest.raises(DeviceError, match=r"^--cpu-isa avx2 is not possible on a GPU: it needs --device cpu$"):
        make_device(ExecutorConfig(model="m", device="cuda", cpu_isa="avx2"))
    monkeypatch.setattr(isa, "_host_features", lambda: frozenset({*_features("avx2"), "avx512f"}))
    with pytest.raises(DeviceError, match=r"^--cpu-isa avx512: this processor lacks avx512; it has avx2$"):
        make_device(ExecutorConfig(model="m", device="cpu", cpu_isa="avx512"))


def _features(name: IsaName) -> frozenset[str]:
    return isa.level(name).features


def test_the_options_values_are_the_levels() -> None:
    assert get_args(CpuIsa) == ("auto", *isa.ISA_NAMES)


def test_a_model_of_libraries_keeps_the_processor(tmp_path: Path) -> None:
    """A model whose operations are PyTorch's has the processor in its fingerprint, for PyTorch chooses by it."""
    model = Model(make_llama(tmp_path / "model"))
    cache = model.driver().cache
    own = fingerprint(model.loaded, model.device, cache)
    other = fingerprint(replace(model.loaded, recordable=False), model.device, cache)
    assert own.isa == host_isa().name or not ISAS.keys() - {"native"}
    assert other.isa == model.device.isa_of_libraries
    assert torch.backends.cpu.get_cpu_capability() in other.isa
    assert own.digest != other.digest or own.isa == other.isa


def test_functions_have_the_same_bits_at_every_level() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20_011, generator=generator) * 8
    keys = torch.randint(-(2**62), 2**62, (3, 1), generator=generator)
    ids, peak = torch.arange(20_011), x.amax(dim=1, keepdim=True)
    found = [CpuKernels(2, level).functions for level in ISAS.values()]
    for functions in found[1:]:
        assert torch.equal(functions.exp(x, peak), found[0].exp(x, peak))
        assert torch.equal(functions.gumbel(keys, ids), found[0].gumbel(keys, ids))
    noise = found[0].gumbel(keys, ids)
    exact = -torch.log(-torch.log1p(-uniform(keys, ids).double()))
    assert float((noise - exact).abs().max()) < 1e-6
    few = torch.randint(0, 20_011, (3, 37), generator=generator)
    assert torch.equal(found[0].gumbel(keys, few), noise.gather(1, few)), "a value depends on its key and id only"
    assert torch.equal(found[0].exp(x[1:2], peak[1:2]), found[0].exp(x, peak)[1:2])
    below = (x - peak).double().exp()
    assert float(((found[0].exp(x, peak) - below) / below.clamp(min=1e-37)).abs().max()) < 2e-7


def _worst_ulps(found: Any, exact: list[Any]) -> float:
    return max(
        abs(float((mpmath.mpf(float(value)) - wanted) / mpmath.mpf(float(np.spacing(abs(float(wanted)))))))
        for value, wanted in zip(found, exact, strict=True)
    )


def test_portable_functions_are_accurate() -> None:
    """The stated bounds, against 200 bits of mpmath."""
    rng = np.random.default_rng(0)
    with mpmath.workprec(200):
        x = np.concatenate([np.exp(rng.uniform(-700, 700, 400)), 1 + rng.uniform(-0.3, 0.4, 400), [1.0, 0.5, 2.0**0.5]])
        assert _worst_ulps(log_each(x), [mpmath.log(v) if v != 1 else mpmath.mpf(0) for v in x]) < 1
        assert [log(float(value)) for value in x] == log_each(x).tolist()
        x = np.concatenate([rng.uniform(-700, 700, 400), rng.uniform(-1e-3, 1e-3, 100), [0.0]])
        assert _worst_ulps(exp_each(x), [mpmath.exp(v) for v in x]) < 1
        base, exponent = rng.uniform(2, 1e7, 400), rng.uniform(0, 1.2, 400)
        wanted = [mpmath.power(b, e) for b, e in zip(base, exponent, strict=True)]
        for value, exact in zip(power(base, exponent), wanted, strict=True):
            assert abs(value / exact - 1) < 2.0**-51 * (1 + mpmath.log(exact))
        near = np.arange(1, 300) * (np.pi / 2)
        angles = np.concatenate([rng.uniform(0, 8, 300), rng.uniform(0, 2.0**24, 300), near, [0.0, 2.0**24]])
        angles = angles.astype(np.float32).astype(np.float64)
        for found, function in zip(cos_and_sin(angles), (mpmath.cos, mpmath.sin), strict=True):
            assert max(abs(mpmath.mpf(float(v)) - function(a)) for v, a in zip(found, angles, strict=True)) < 2.0**-52
    with pytest.raises(ValueError, match="more than 16777216 radians"):
        cos_and_sin(np.array([2.0**25]))
