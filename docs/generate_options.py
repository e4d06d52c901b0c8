"""Writes docs/options.md from the services' configurations: `python docs/generate_options.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cadenza.local_options import config_classes
from cadenza.settings.help import GROUPS, default_text, group_of, unit_of, values_of
from cadenza.settings.names import flag, variable

TARGET = Path(__file__).with_name("options.md")

HEAD = """# Options

<!-- Made by docs/generate_options.py from the services' configurations: change those, then `make docs`. -->

One name everywhere: `--block-size` of `cadenza up`, `cadenza generate --model`, `cadenza chat --model` and of a service
that is started alone is `block_size` in `LLM(model, block_size=32)`, `CADENZA_BLOCK_SIZE` in the environment, and
`block_size = 32` (or `block-size`) in a TOML file. A command that starts both services passes each option
to every service that has it.

The order of precedence is: command line (or argument of `LLM`), environment, file, default. An invalid value is an
error that names the option and, if it came from there, the variable or the file. An unknown option is an error on the
command line and in a file, and a warning in the environment; all three suggest the nearest known option.

## The file

```sh
cadenza up --config cadenza.toml
```

```toml
model = "models/cadenza-demo"   # with host and port, for `cadenza up`
port = 50051
dtype = "float32"
num_gpu_blocks = 2048

[scheduler]                     # for this service only; overrides the values above
max_num_seqs = 16
```

`cadenza up`, `generate` and `chat` accept it, so does `LLM(model, config="cadenza.toml")`, and both services when they
are started alone (`python -m executor_svc --config cadenza.toml`). A service that is started alone ignores the
top-level options of the other service and logs their names.

## `cadenza up` itself

| option | default | meaning | variable |
|---|---|---|---|
| `--model` | required | folder or Hugging Face hub id of the model | `CADENZA_MODEL` |
| `--host` | 127.0.0.1 | address to listen on | `CADENZA_HOST` |
| `--port` | 50051 | port to listen on; 0: any free one | `CADENZA_PORT` |
| `--config` | | the file | `CADENZA_CONFIG` |
"""


COLUMNS = ("option", "service", "default", "values", "unit", "meaning", "variable")


def content() -> str:
    """Return the contents of the file."""
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, owners in _owners().items():
        sections[group_of(next(iter(owners.values())))].append(_line(_cells(name, owners)))
    head = _line(COLUMNS) + "|" + "---|" * len(COLUMNS) + "\n"
    return HEAD + "".join(f"\n## {group}\n\n{head}{''.join(rows)}" for group, rows in sections.items())


def _owners() -> dict[str, dict[str, Any]]:
    """Return every option, with its field in each service that has it."""
    owners: dict[str, dict[str, Any]] = {}
    for service, config in config_classes().items():
        for name, field in config.model_fields.items():
            owners.setdefault(name, {})[service] = field
    return owners


def _cells(name: str, owners: dict[str, Any]) -> list[str]:
    def of_each(describe: Callable[[Any], str]) -> str:
        """Return the text of both services if they agree, otherwise the text of each after its name."""
        texts = {service: describe(field) for service, field in owners.items()}
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        return "<br>".join(f"{service}: {text}" for service, text in texts.items() if text)

    return [
        f"`{flag(name)}`",
        ", ".join(owners),
        of_each(default_text),
        of_each(values_of),
        of_each(unit_of),
        of_each(lambda field: str(field.description)),
        f"`{variable(name)}`",
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    """Write the file; with --check, fail if it is out of date."""
    if sys.argv[1:] == ["--check"]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != content():
            raise SystemExit(f"{TARGET} does not match the configurations: run make docs")
    else:
        TARGET.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
