"""What does a GPU executor's host do for a step? On a stub of CUDA's driver, for a model of 32 narrow layers.

Triton launches what it has compiled for an H200 by its own launcher; nothing is computed, a graph's replay is left out,
and of a product PyTorch's call for one number is left. `edited` has all sampling features, `features` logprobs too.
Cases with a grammar let the model of a step take a simulated time, beside the same steps without a grammar.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.rows import ROOT, BenchmarkError, OtherLoad, Row, make_row

NAME = "gpu_host"


@dataclass(frozen=True)
class Case:
    """The steps of a case."""

    kind: str
    """greedy, edited or features."""
    sequences: int
    """That decode in each step."""
    prompt: int = 0
    """Tokens of a prompt beside them, a new one in each step."""
    graphs: bool = False
    """Whether there are graphs of steps with prompts, as of small models and few tokens."""


@dataclass(frozen=True)
class GrammarCase:
    """Decodes that all have one grammar, temperature 1."""

    schema: str
    """Of `grammars_child.SCHEMAS`."""
    device_us: int
    """Simulated: what a step's model takes on the device."""
    threads: int
    """That make masks."""
    sequences: int = 64


CASES: dict[str, Case | GrammarCase] = {
    "greedy-1": Case("greedy", 1),
    "greedy-64": Case("greedy", 64),
    "greedy-256": Case("greedy", 256),
    "edited-64": Case("edited", 64),
    "features-64": Case("features", 64),
    "mixed-64": Case("greedy", 64, 256),
    "mixed-64-graphs": Case("greedy", 64, 256, graphs=True),
    "mixed-64-features": Case("features", 64, 256),
    "prompt-512": Case("greedy", 0, 512),
    **{
        f"{schema}-{device_us}us-{threads}": GrammarCase(schema, device_us, threads)
        for schema in ("records", "strings")
        for device_us in (5500, 8900)
        for threads in (1, 2)
    },
}
_VOCAB_SIZE, _GRAMMAR_VOCAB_SIZE = 500, 128_256
_CACHE = Path.home() / ".cache" / "cadenza-gpu-host"


def _run(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="cadenza-host-") as place:
        stub = _stub(Path(place))
        for case in options.cases:
            steps = CASES[case]
            vocab_size = options.grammar_vocab if isinstance(steps, GrammarCase) else _VOCAB_SIZE
            model = _checkpoint(Path(place), vocab_size)
            with OtherLoad() as other:
                progress(f"{NAME}: {case}")
                repeats = [_child(stub, model, steps, options.steps, vocab_size) for _ in range(options.repeats)]
            params = {"case": case, **asdict(steps), "steps": options.steps, "layers": 32}
            params |= {"vocab_size": vocab_size} if isinstance(steps, GrammarCase) else {}
            yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=[other.cores])


def _stub(folder: Path) -> Path:
    """Build the driver's stub; raises BenchmarkError without a C compiler."""
    import triton

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchmarkError("needs a C compiler, as Triton's launcher does")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = ROOT / "tests" / "executor_svc" / "gpu" / "stub_cuda.c"
    library = "libcuda.so.1"
    built = ["-O2", "-shared", "-fPIC", "-o", str(folder / library), f"-Wl,-soname,{library}"]
    subprocess.run([compiler, "-I", str(headers), *built, str(source)], check=True)
    return folder


def _checkpoint(folder: Path, vocab_size: int) -> Path:
    import torch

    checkpoints = import_module("tests.checkpoints")  # by name: tests are not type checked
    return checkpoints.make_checkpoint(  # type: ignore[no-any-return]
        folder / f"model-{vocab_size}", "llama", vocab_size=vocab_size, dtype=torch.bfloat16, num_hidden_layers=32,
        hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=1,
        max_position_embeddings=2048,
    )  # fmt: skip


def _child(stub: Path, model: Path, case: Case | GrammarCase, steps: int, vocab_size: int) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | {
        "TRITON_LIBCUDA_PATH": str(stub), "TRITON_CACHE_DIR": str(_CACHE),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
    }  # fmt: skip
    if isinstance(case, Case):
        numbers: tuple[int, ...] = case.sequences, case.prompt, int(case.graphs), steps
        command = ["benchmarks.gpu.host_child", str(stub), str(model), case.kind, *map(str, numbers)]
    else:
        numbers = vocab_size, case.sequences, case.device_us, case.threads, steps
        command = ["benchmarks.gpu.grammars_child", str(stub), str(model), case.schema, *map(str, numbers)]
    command = [sys.executable, "-m", *command]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchmarkError(f"{case}: {ended.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _describe(row: Row) -> str:
    found = row.medians
    if "ratio" in found:
        return (
            f"{row.params['case']:17} {found['with_ms']:5.2f} ms a step, {found['without_ms']:5.2f} without a grammar: "
            f"{found['ratio']:.3f}; masks {found['masks_ms']:.2f} ms, {found['hidden_percent']:.0f}% hidden"
        )
    return (
        f"{row.params['case']:17} {found['host_us']:7.0f} us a step ({found['launch_us']:.0f} to launch, "
        f"{found['settle_us']:.0f} to settle), {found['launches']:.0f} launches of kernels"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=_cases, default=list(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument(
        "--grammar-vocab", type=positive, default=_GRAMMAR_VOCAB_SIZE, help=f"tokens (default {_GRAMMAR_VOCAB_SIZE})"
    )
    parser.add_argument("--steps", type=positive, default=300, help="timed steps of a repeat (default 300)")


def _cases(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [each for each in found if each not in CASES]:
        raise argparse.ArgumentTypeError(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return found


BENCHMARK = Benchmark(NAME, "what does a GPU executor's host do for a step?", _add_options, _run, _describe)
