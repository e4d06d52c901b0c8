"""What does structured output cost? Schemas honoured, masks alone, and batches with and without grammars in turns.

`schemas`: those that packages ship (check-jsonschema, kubernetes-validate, json-schema-test-suite of npm, where they
are installed, in other environments too: `--packages FOLDER`; and `--schemas FOLDER`). Each is compiled: the share
that is honoured, and why the others are refused. Then a tiny random model makes an output under each (or `--outputs N`
of them): what ends by itself must be valid, and what is cut the beginning of something valid. `masks`: one grammar,
its masks along random outputs.

`batch`: 16 requests through both services, all without a grammar, all with one, and half of them; the grammar
never ends before max_tokens, so that all outputs have the same length. Rows without a grammar must have the tokens
that they have alone. `vocabulary` is the same with 131,072 tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.burst_client import running_services
from benchmarks.common.checkpoints import vocab_size
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.stats import percentile
from benchmarks.grammars.batches import RECORDS, Batches
from benchmarks.grammars.outputs import Judge, outputs_of
from benchmarks.grammars.schemas import Source, evenly, found_sources, shares_of
from benchmarks.grammars.tokenizer import checkpoint_with_tokenizer
from benchmarks.serving.opening import names_type

NAME = "structured"
MEASURES = ("schemas", "masks", "batch", "vocabulary")
_SHAPES = {"schemas": "10m", "masks": "135m-131k", "batch": "135m", "vocabulary": "135m-131k"}
_BATCH, _PROMPT = 16, 16
_EOS = 1
_JUDGED = ("ended_valid", "ended_invalid", "cut_valid", "cut_invalid", "not_completed")


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        options.repeats, options.output = 1, min(options.output, 24)
    for measure in options.measure:
        model = checkpoint_with_tokenizer("10m" if options.quick else _SHAPES[measure])
        if measure == "schemas":
            yield from _run_schemas(model, options)
        elif measure == "masks":
            yield _run_masks(model, options)
        else:
            for temperature in (0.0, 1.0):
                yield _run_batch(measure, model, temperature, options)


# --- schemas ---------------------------------------------------------------------------------------------------------


def _run_schemas(model: Path, options: argparse.Namespace) -> Iterator[Row]:
    from cadenza_common.grammar.table import table_source
    from executor_svc.structured.compiler import Compiler

    source = table_source(str(model), vocab_size(model), [_EOS])
    assert source is not None
    judge = Judge(Compiler(source), [_EOS], options.seed)
    sizes = {"max_num_seqs": 64, "max_model_len": 1024, "num_gpu_blocks": 4096}
    with running_services(model, skip_tokenizer_init=False, **sizes) as target:
        for schemas in found_sources(options.packages, options.schemas):
            if schemas.schemas:
                yield _shares(schemas, source.table(), target, judge, options)


def _shares(source: Source, table: Any, target: str, judge: Judge, options: argparse.Namespace) -> Row:
    schemas = evenly(source.schemas, 20) if options.quick else source.schemas
    with OtherLoad() as other:
        shares = shares_of(schemas, table)
        tried = evenly(shares.honoured, min(options.outputs, 10 if options.quick else options.outputs))
        outputs = outputs_of(target, tried, max_tokens=options.output, seed=options.seed)
        judged = judge.judge(tried, outputs)
    found = {
        "files": float(source.num_files),
        "schemas": float(len(schemas)),
        "honoured": float(len(shares.honoured)),
        "honoured_percent": 100 * len(shares.honoured) / len(schemas),
        "outputs": float(len(tried)),
        **{name: float(getattr(judged, name)) for name in _JUDGED},
        "failed": float(judged.failed.total()),
    }
    if shares.compile_ms:
        found |= {"compile_p50_ms": percentile(shares.compile_ms, 50), "compile_max_ms": max(shares.compile_ms)}
    params = {
        "measure": "schemas", "source": source.name, "version": source.version, "model": "10m",
        "output_tokens": options.output, "refused": shares.reasons, "failed": dict(judged.failed),
        "invalid": judged.invalid[:20], "llguidance": importlib.metadata.version("llguidance"),
    }  # fmt: skip
    return make_row(NAME, seed=options.seed, params=params, repeats=[found], other_cores=[other.cores])


# --- masks -----------------------------------------------------------------------------------------------------------


def _run_masks(model: Path, options: argparse.Namespace) -> Row:
    from cadenza_common.grammar.spec import GrammarSpec
    from cadenza_common.grammar.table import table_source
    from executor_svc.structured.compiler import Compiler

    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    source = table_source(str(model), content["vocab_size"], [1])
    assert source is not None
    repeats, others = [], []
    for repeat in range(options.repeats):
        wait_quiet(options.quiet_wait_s)
        with OtherLoad() as other:
            began = time.perf_counter()
            compiler = Compiler(source)
            compiler.compiled(GrammarSpec("regex", "a"))
            found = {"table_ms": (time.perf_counter() - began) * 1e3}
            repeats.append(found | _walk(compiler, options.output, options.seed + repeat))
        others.append(other.cores)
        progress(f"{NAME}: {model.name} masks: {repeats[-1]}")
    params = {"measure": "masks", "model": model.name, "vocab_size": source.vocab_size, "tokens": options.output}
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _walk(compiler: Any, num_tokens: int, seed: int) -> dict[str, float]:
    """Masks along an output whose tokens are drawn from them."""
    import numpy as np

    from cadenza_common.grammar.spec import GrammarSpec
    from executor_svc.structured.matcher import GrammarState

    rng, output, taken = Random(seed), list[int](), list[float]()
    spec, source = GrammarSpec("json_schema", json.dumps(RECORDS)), compiler.source
    state = GrammarState(spec, compiler, 0)
    began = time.perf_counter()
    state.begin(())
    first_ms = (time.perf_counter() - began) * 1e3
    for _ in range(num_tokens):
        bits = np.unpackbits(state.bits[0].view(np.uint8), bitorder="little", count=source.vocab_size)
        token = rng.choice(np.flatnonzero(bits).tolist())
        output.append(token)
        began = time.perf_counter()
        state.take([token])
        taken.append((time.perf_counter() - began) * 1e6)
        if state.error:
            raise BenchmarkError(state.error)
    again = GrammarState(spec, compiler, 0)
    began = time.perf_counter()
    again.begin(output)
    rebuilt_ms = (time.perf_counter() - began) * 1e3
    if not (again.bits == state.bits).all():
        raise BenchmarkError("a state rebuilt from its tokens has another mask")
    return {
        "first_ms": first_ms,
        "mask_mean_us": sum(taken) / len(taken),
        "mask_p50_us": percentile(taken, 50),
        "mask_p99_us": percentile(taken, 99),
        "mask_max_us": max(taken),
        "rebuilt_ms": rebuilt_ms,
    }


# --- batches ---------------------------------------------------------------------------------------------------------


def _run_batch(measure: str, model: Path, temperature: float, options: argparse.Namespace) -> Row:
    rng = Random(options.seed)
    prompts = [rng.choices(range(300, 8000), k=_PROMPT) for _ in range(_BATCH)]
    kinds = {"none": [], "all": list(range(_BATCH)), "half": list(range(0, _BATCH, 2))}
    sizes = {"enable_prefix_caching": False, "max_num_seqs": _BATCH, "max_model_len": 1024}
    with running_services(model, skip_tokenizer_init=False, **sizes) as target:
        run = Batches(target, prompts, temperature, options.output)
        expected = {name: run.serve(structured)[0] for name, structured in kinds.items()}
        for index in range(_BATCH):
            mixed = expected["half"][index]
            if mixed != expected["all" if index % 2 == 0 else "none"][index]:
                raise BenchmarkError(f"request {index} has other tokens in the mixed batch")
        repeats, others = [], []
        for repeat in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                found = {
                    name: run.serve(kinds[name])[1] for name in (kinds if repeat % 2 == 0 else reversed(list(kinds)))
                }
            others.append(other.cores)
            plain = [tpot for index, tpot in enumerate(found["half"]) if index % 2]
            base = percentile(found["none"], 50)
            repeats.append(
                {
                    "none_tpot_ms": base,
                    "all_tpot_ms": percentile(found["all"], 50),
                    "all_ratio": percentile(found["all"], 50) / base,
                    "mixed_without_tpot_ms": percentile(plain, 50),
                    "mixed_without_ratio": percentile(plain, 50) / base,
                    "mixed_with_ratio": percentile(found["half"][::2], 50) / base,
                }
            )
            progress(f"{NAME}: {model.name} {measure}, temperature {temperature:g}: {repeats[-1]}")
    params = {
        "measure": measure, "model": model.name, "batch": _BATCH, "temperature": temperature,
        "prompt_tokens": _PROMPT, "output_tokens": options.output,
    }  # fmt: skip
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


# --- results ---------------------------------------------------------------------------------------------------------


def _describe_schemas(found: Mapping[str, float], params: Mapping[str, Any]) -> str:
    refused = "".join(f"\n    {count} refused: {reason}" for reason, count in params["refused"].items())
    failed = "".join(f"\n    {count} failed: {reason}" for reason, count in params["failed"].items())
    invalid = "".join(f"\n    invalid: {each}" for each in params["invalid"])
    return (
        f"{params['source']} {params['version']}: {found['files']:.0f} files, {found['honoured']:.0f} of "
        f"{found['schemas']:.0f} schemas honoured ({found['honoured_percent']:.1f}%); "
        f"of {found['outputs']:.0f} outputs {found['ended_valid']:.0f} ended and valid, "
        f"{found['ended_invalid']:.0f} ended and invalid, "
        f"{found['cut_valid']:.0f} cut and the beginning of a valid text, {found['cut_invalid']:.0f} not, "
        f"{found['not_completed']:.0f} not completed{refused}{failed}{invalid}"
    )


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    if params["measure"] == "schemas":
        return _describe_schemas(found, params)
    if params["measure"] == "masks":
        return (
            f"{params['model']}, {params['vocab_size']} tokens: table {found['table_ms']:.0f} ms, first mask "
            f"{found['first_ms']:.1f} ms, masks {found['mask_mean_us']:.0f} us (p50 {found['mask_p50_us']:.0f}, p99 "
            f"{found['mask_p99_us']:.0f}, max {found['mask_max_us']:.0f}), rebuilt from {params['tokens']} ids in "
            f"{found['rebuilt_ms']:.1f} ms"
        )
    return (
        f"{params['model']} {params['measure']}, {params['batch']} requests, temperature {params['temperature']:g}: "
        f"TPOT {found['none_tpot_ms']:.2f} ms without, {found['all_tpot_ms']:.2f} ms with ({found['all_ratio']:.3f}x); "
        "mixed: "
        f"{found['mixed_without_ratio']:.3f}x without, {found['mixed_with_ratio']:.3f}x with"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=names_type(MEASURES), default=list(MEASURES), metavar="NAMES",
        help=f"of {','.join(MEASURES)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--schemas", action="append", default=[], metavar="FOLDER", help="more schemas; repeatable")
    parser.add_argument(
        "--packages", action="append", default=[], metavar="FOLDER",
        help="site-packages or node_modules of another environment with schemas; repeatable",
    )  # fmt: skip
    parser.add_argument("--outputs", type=positive, default=400, help="outputs of each source of schemas (default 400)")
    parser.add_argument("--output", type=positive, default=256, help="tokens of each output (default 256)")
    parser.add_argument("--quick", action="store_true", help="a small model and short runs: whether it works at all")


BENCHMARK = Benchmark(
    NAME, "what does structured output cost, and which schemas are honoured?", _add_options, _run, _describe
)
