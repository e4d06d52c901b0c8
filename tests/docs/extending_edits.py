"""The edits of docs/extending.md's walks for a dummy sampling field, option and metric.

By heading and file: pairs of a text that stands in the file exactly once, and the text that replaces it.
"""

from __future__ import annotations

from pathlib import Path

Edits = dict[str, list[tuple[str, str]]]

_SAMPLING_TEST = "service/test_sampling_rules.py::test_tokens_are_drawn_with_the_exact_probabilities"
_ERROR_ROW = (
    '| Generate | `sampling_params={{"max_gap": {0}}}` | INVALID_ARGUMENT | `sampling_params.max_gap` '
    "| must be a finite number, not {0} |"
)


def _before(line: str, *added: str) -> tuple[str, str]:
    return line, "".join(f"{each}\n" for each in added) + line


def _after(line: str, *added: str) -> tuple[str, str]:
    return line, line + "".join(f"\n{each}" for each in added)


SAMPLING_FIELD: Edits = {
    "protos/cadenza/v1/types.proto": [
        _after(
            "  optional double top_n_sigma = 30;",
            "  // Keeps tokens whose logit, divided by temperature, is within this of the highest one; 0 is off.",
            "  optional double max_gap = 31;",
        ),
        _after(
            "  float top_n_sigma = 19;",
            "  // Distance below the highest logit that is kept, after temperature; absent or 0: off.",
            "  float max_gap = 20;",
        ),
    ],
    "client/cadenza/sampling_params.py": [
        _before("    repetition_penalty: float = 1.0", "    max_gap: float = 0.0  # below the highest logit; 0: off"),
        _before('        self._float("repetition_penalty", low=0.0', '        self._float("max_gap", low=0.0)'),
    ],
    "scheduler_svc/requests/sampling_fields.py": [
        _before(
            "    repetition_penalty: float = _row(",
            "    max_gap: float = _row(",
            "        0.0, check=between(0, _FLOAT32_MAX), form=at_least_if_on(_SMALLEST), needs_draw=True",
            "    )",
        ),
    ],
    "cadenza_common/plan/sampling.py": [
        _before(
            "    repetition_penalty: float = _row(",
            "    max_gap: float = _row(",
            '        0.0, "f4", Need.FLOOR, "0 or more and finite", _finite(), off=0, in_warm_up=9.0',
            "    )",
        ),
    ],
    "executor_svc/sampling/floors.py": [
        (
            "not len(by_deviation) and not (by_min_p > -np.inf).any()",
            'not len(by_deviation) and not (by_min_p > -np.inf).any() and not numbers["max_gap"].any()',
        ),
        _before(
            "    for few in chunks(by_deviation",
            '    gaps = _on(logits, numbers["max_gap"])[:, None]',
            '    floors = torch.maximum(floors, torch.where(gaps > 0, -gaps, float("-inf")))',
        ),
    ],
    "executor_svc/gpu/kernels/sampling/floors.py": [
        _after('_TOP_N_SIGMA = tl.constexpr(field("top_n_sigma"))', '_MAX_GAP = tl.constexpr(field("max_gap"))'),
        _before(
            "            num_deviations = as_float(record + _TOP_N_SIGMA)",
            "            gap = as_float(record + _MAX_GAP)",
            '            floor = tl.maximum(floor, tl.where(gap > 0, -gap, float("-inf")))',
        ),
    ],
    "executor_svc/sampling/reference.py": [
        _before("    min_p: float = 0.0,", "    max_gap: float = 0.0,"),
        _before(
            "    p = _softmax(x / temperature)",
            "    if max_gap > 0:",
            "        x[x < x.max() - max_gap * temperature] = -np.inf",
        ),
    ],
    "gateway_svc/fields/tables.py": [
        _before(
            '    honoured("top_n_sigma"',
            '    honoured("max_gap", "a number", "below the highest logit; 0: off", "unknown there"),',
        ),
    ],
    "docs/sampling.md": [
        _before(
            "| `repetition_penalty` | `1.0`",
            f"| `max_gap` | `0.0` | 0 or more | keeps tokens within this of the highest logit | | `{_SAMPLING_TEST}` |",
        ),
    ],
    "docs/errors.md": [
        _before(
            '| Generate | `sampling_params={"repetition_penalty": nan}` | INVALID_ARGUMENT',
            *map(_ERROR_ROW.format, ("nan", "inf")),
        ),
    ],
}

OPTION: Edits = {
    "scheduler_svc/config.py": [
        _before(
            "    tokenizer: str | None = Field(",
            "    greeting: str = Field(",
            '        "hello", description="What the scheduler says when it starts.", json_schema_extra=about("Basics")',
            "    )",
        ),
    ],
    "scheduler_svc/app.py": [
        _after(
            "        model, tokenizer, config = self._engine.model, self._model.tokenizer, self._config",
            '        _LOG.info("it says: %s", config.greeting)',
        ),
    ],
}

METRIC: Edits = {
    "protos/cadenza/v1/generation.proto": [
        _after(
            "  uint64 num_accepted_drafts = 24;",
            "  // Device KV blocks that no sequence holds.",
            "  uint32 num_free_device_blocks = 25;",
        ),
    ],
    "scheduler_svc/plan_loop/gauges.py": [
        _before(
            "    num_host_blocks: int = _gauge(",
            "    num_free_device_blocks: int = _gauge(",
            '        "blocks", "Are free.", lambda _, lane: lane.blocks.num_free,',
            '        families={"cadenza_free_device_blocks": "Device KV blocks that nobody holds."},',
            "    )",
        ),
    ],
    "client/cadenza/info.py": [
        _before("    num_cached_host_blocks: int", "    num_free_device_blocks: int"),
    ],
    "cadenza_cli/top/details.py": [
        _after(
            '            f"{load.num_cached_device_blocks:,} cached",',
            '            f"{load.num_free_device_blocks:,} free",',
        ),
    ],
}

WALKS = {"A sampling field": SAMPLING_FIELD, "An option": OPTION, "A metric": METRIC}


def edit(root: Path, edits: Edits) -> None:
    """Make the edits in the copy below `root`; each place must be there exactly once."""
    for name, pairs in edits.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, f"{name}: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
