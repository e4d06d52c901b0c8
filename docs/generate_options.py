"""Writes docs/options.md and cadenza_launcher/llm_options.py from the services' configurations:
`python docs/generate_options.py [--check]`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cadenza_common.settings.help import GROUPS, default_text, described, group_of, unit_of, values_of
from cadenza_common.settings.names import flag, variable
from cadenza_launcher.services.options import option_classes, service_options

OPTIONS_PAGE = Path(__file__).with_name("options.md")
LLM_OPTIONS = Path(__file__).parents[1] / "cadenza_launcher" / "llm_options.py"

LLM_HEAD = '''"""Options of the two services as keyword arguments, for editors and type checkers.

Made by docs/generate_options.py from the services' configurations: change those, then `make docs`.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class LLMOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`; None counts as not given."""
'''

HEAD = """# Options

<!-- Made by docs/generate_options.py from the services' configurations: change those, then `make docs`. -->

One name everywhere: `--block-size` of `cadenza up`, `cadenza generate --model`, `cadenza chat --model` and of a service
that is started alone is `block_size` in `LLM(model, block_size=32)`, `CADENZA_BLOCK_SIZE` in the environment, and
`block_size = 32` (or `block-size`) in a TOML file. A command that starts both services passes each option
to every service that has it. The service `cadenza` in the tables is the program itself that starts the others.

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


def options_page() -> str:
    """Return the contents of docs/options.md."""
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, owners in _owners().items():
        sections[group_of(next(iter(owners.values())))].append(_line(_cells(name, owners)))
    head = _line(COLUMNS) + "|" + "---|" * len(COLUMNS) + "\n"
    return HEAD + "".join(f"\n## {group}\n\n{head}{''.join(rows)}" for group, rows in sections.items())


def _owners() -> dict[str, dict[str, Any]]:
    """Return every option, with its field in each service that has it."""
    owners: dict[str, dict[str, Any]] = {}
    for service, config in option_classes().items():
        for name, field in config.model_fields.items():
            owners.setdefault(name, {})[service] = field
    return owners


def _cells(name: str, owners: dict[str, Any]) -> list[str]:
    def of_each(describe: Callable[[Any], str]) -> str:
        return _of_each(owners, describe, "<br>")

    return [
        f"`{flag(name)}`",
        ", ".join(owners),
        of_each(default_text),
        of_each(values_of),
        of_each(unit_of),
        of_each(lambda field: str(field.description)),
        f"`{variable(name)}`",
    ]


def _of_each(owners: dict[str, Any], describe: Callable[[Any], str], separator: str) -> str:
    """Return the text of both services if they agree, otherwise the text of each after its name."""
    texts = {service: describe(field) for service, field in owners.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return separator.join(f"{service}: {text}" for service, text in texts.items() if text)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def llm_options() -> str:
    """Return the contents of cadenza_launcher/llm_options.py."""
    owners, known = _owners(), service_options()
    return LLM_HEAD + "".join(_typed(name, fields) for name, fields in owners.items() if name in known)


_MOST = 120
"""Characters of a line."""


def _typed(name: str, owners: dict[str, Any]) -> str:
    """One option as an entry of the TypedDict: its type, and its description as the docstring below."""
    types = dict.fromkeys(kind for field in owners.values() for kind in _type_texts(field.annotation))
    types.pop("None", None)
    text = f'"""{_of_each(owners, described, " ")}"""'
    docstring = textwrap.indent(textwrap.fill(text, 116, break_on_hyphens=False), "    ")
    line = f"    {name}: {' | '.join([*types, 'None'])}"
    if len(line) > _MOST:
        kinds = " | ".join(_wrapped(kind) for kind in [*types, "None"]).replace(" | ", f"\n{' ' * 8}| ")
        line = f"    {name}: (\n{' ' * 8}{kinds}\n    )"
    return f"\n{line}\n{docstring}\n"


def _wrapped(kind: str) -> str:
    """A type as `ruff format` writes it in a line of its own."""
    if len(kind) <= _MOST - 10:
        return kind
    values = kind.removeprefix("Literal[").removesuffix("]").split(", ")
    return "Literal[\n" + "".join(f"{' ' * 12}{value},\n" for value in values) + f"{' ' * 8}]"


def _type_texts(annotation: Any) -> list[str]:
    """The alternatives of a type, each as it is written in Python."""
    if get_origin(annotation) is Literal:
        return [f"Literal[{', '.join(map(json.dumps, get_args(annotation)))}]"]
    if get_origin(annotation) is list:
        return [f"list[{' | '.join(text for kind in get_args(annotation) for text in _type_texts(kind))}]"]
    return [text for kind in get_args(annotation) for text in _type_texts(kind)] or [
        "None" if annotation is type(None) else annotation.__name__
    ]


FILES = {OPTIONS_PAGE: options_page, LLM_OPTIONS: llm_options}


def main() -> None:
    """Write the files; with --check, fail if one is out of date."""
    for path, content in FILES.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(content(), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content():
            raise SystemExit(f"{path} does not match the configurations: run make docs")


if __name__ == "__main__":
    main()
