"""Writes docs/openai.md from the gateway's tables of fields: `python docs/generate_openai.py [--check]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from cadenza_common.call_formats.catalog import FORMATS
from cadenza_common.call_formats.thoughts import THOUGHTS
from cadenza_common.call_formats.writing import written_calls
from gateway_svc.fields.field import Field, Use
from gateway_svc.fields.tables import APIS

PAGE = Path(__file__).with_name("openai.md")

HEAD = """# HTTP: OpenAI's and Anthropic's APIs

<!-- Made by docs/generate_openai.py from the gateway's tables of fields: change those, then `make docs`. -->

The gateway is a process of its own, a client of the scheduler ([0046](decisions/0046-http-gateway.md)). It needs no
model on its machine, and several may serve one scheduler.

```sh
cadenza up models/cadenza-demo --http 8000                    # a third process beside scheduler and executor
cadenza gateway --target 127.0.0.1:50051 --http :8000         # or alone, for a scheduler that runs elsewhere

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(model="cadenza-demo", messages=[{"role": "user", "content": "Hello"}])
```

Its options are under [HTTP](options.md#http). `docker compose up` serves it at 127.0.0.1:8000, the model as `model`.

## Paths

| path | what |
|---|---|
| `POST /v1/completions` | texts or token ids, one or many; echo, logprobs, n, best_of, streams |
| `POST /v1/chat/completions` | chats, rendered by the scheduler with the model's own template; streams |
| `POST /v1/responses` | the same in the newer shape; nothing is stored |
| `POST /v1/responses/input_tokens` | the number of an input's tokens |
| `POST /v1/messages`, `/v1/messages/count_tokens` | Anthropic's API |
| `GET /v1/models`, `/v1/models/NAME` | [names](several-models.md), and the LoRA adapters that the key may see |
| `POST /tokenize`, `/detokenize` | as vLLM has them |
| `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter` | with the key of `--http-admin-key-file` alone |
| `GET /health` | 200 while requests are served, else 503; needs no key |
| `GET /version` | Cadenza's version; needs no key |
| `GET /openapi.json` | these paths and their fields, as OpenAPI 3.1; needs no key |
| `GET /metrics`, `HEAD` too | the gateway's metrics, then the scheduler's ([metrics](metrics.md)); [keys](#keys) |
| `POST /v1/embeddings` | refused with 400: the served model generates |

## Keys

A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`.

- **A scheduler with tenants** ([tenants](tenants.md)): the keys are the tenants' tokens. The gateway passes each on
  with that client's requests and decides nothing: limits, shares, adapters and refusals are the tenant's. It needs no
  token of its own: each key has a session to the scheduler. `--http-token-file` has one, of a tenant with admin for
  the scheduler's metrics and for adapters, or with may_name_tenants for
  [one session that carries the requests of all keys](tenants.md#gateways).
- **Without tenants** any key will do, and none. `--http-api-key-file` names a file of keys, one a line, of which a
  request needs one.

What needs no key names neither models nor tenants: `/health`, `/version`, `/openapi.json`, and with tenants the
gateway's own metrics, as in vLLM and SGLang (with `--http-api-key-file` they need a key too). The log says so once. A
proxy in front of the gateway may keep them inside. Whoever has a key sees the model's path: as the model's first name
where there is no `--served-model-name`, and as `root`.

Where the gateway listens on loopback and asks for no keys, any page in a browser of this machine could use the model
([page](page.md#who-sees-what)). So it answers requests for its own names alone: addresses, `localhost`, names in
`.localhost` and `.internal` (`host.docker.internal`), the host in `--http`, and the names in `--page-host`. A request
with an `Origin` of another site is answered only if `--http-cors-origin` has it. Others get 403. Some proxies ask for
another name: tunnels, and nginx with a named upstream. Put this name into `--page-host`.

Beyond loopback the gateway wants `--http-tls-cert` and `--http-tls-key`, or `--insecure`. Keys go to a scheduler on
another machine only with TLS ([security](security.md)), or with `--insecure`.

## Errors

Each API has its own shape: `{"error": {"message", "type", "param", "code"}}`, and Anthropic's
`{"type": "error", "error": {"type", "message"}}`.

| status | when |
|---|---|
| 400 | a field is wrong, unknown or refused: `param` names it; or the constraints leave no token to choose |
| 400, code `context_length_exceeded` | the prompt is too long |
| 401 | the key is missing or unknown |
| 403 | the tenant may not use this adapter |
| 404 | no such path, model or adapter |
| 408 | the body did not arrive: 10 s without a byte of it, or 60 s in all |
| 409 | the id is in use |
| 413 | the body is over `--http-max-body-mb`, a prompt over 1.5 MB, or the body takes too much time or memory to read |
| 415 | the body is compressed with something else than gzip or deflate |
| 429, with `Retry-After` | the queue is full, a limit of the tenant, `--http-max-requests`, too many long bodies |
| 500 | the request failed while it ran, as by logits that are not finite; nothing of it is an answer |
| 503, with `Retry-After` | the scheduler is away for over 10 s, has no executor, or the gateway stops |
| 504 | a deadline passed |

A stream that fails after its beginning has the error as its last event before `[DONE]`; Anthropic's as `event: error`,
and that of responses as `response.failed`.

## What happens when something goes

- A client that leaves ends its request at once.
- A client that does not read its answer, a stream or not, is disconnected after `--http-write-timeout-s`; others
  notice nothing.
- A scheduler that is restarted is a pause of up to `--http-reconnect-timeout-s`: with `--journal` streams go on with
  the next token. Without one, answers that nobody has seen a part of are begun anew, and streams that have begun end
  with an error. Calls that generate nothing, as `/tokenize`, wait as well.
- SIGTERM lets the gateway finish what runs, for `--drain-timeout-s`.

All that one step of the scheduler brings for a client is one write to its socket.

## Tools and reasoning

Tools go into the prompt by the model's own template; what the model writes is split into thought, content and calls,
streamed and not, on `/v1/chat/completions`, `/v1/responses` and `/v1/messages` alike. How the model writes them is
found at load: the template renders small chats with calls, and the format that reads these calls is the model's
([0066](decisions/0066-a-format-is-data.md)). It is logged once, and an option can name it; one that does not read what
the template shows is refused at start. Where no format reads it, requests with tools are refused, and so they are where
the template shows the model no tools or no calls, whatever the option says ([chats](chats.md#forms)).

CALL_ROWS

THOUGHT_ROWS

- **Markers** that are tokens of their own are known by their ids: the same text in other tokens is text, and
  `skip_special_tokens`, stop strings and logprobs are as without tools.
- **Markers within a string** of a call's arguments are its text, as tokens too, and so are all tags but the closing one
  of a bare value, as within a parameter of `qwen3_coder`.
- **What only looks like a call** is given back as content, whole and with its markers: also a call whose arguments are
  no object, and one that is cut before it is known to be one. Without a marker (`llama3_json`, `pythonic`,
  `qwen3_coder`'s function alone), the name of one of the tools is what makes a call. Whitespace next to a call is no
  content, nor are brackets too many behind it.
- **Arguments** are the model's own text, which is no JSON if the model makes a mistake within them: they are written as
  they come. A `tool_use` block that is no stream has such a text under the key `INVALID_JSON`.
- **A call cut by `max_tokens`** keeps what was parsed, and `finish_reason` is `length`; else it is `tool_calls`. What
  is cut before it is known to be a call is content, but for an answer that must be calls.
- **`tool_choice`** `required` or a named tool: the answer is calls alone, and their arguments fit the schema
  ([structured output](structured.md), JSON with `", "` and `": "`). With `auto`, calls of tools with `strict: true` fit
  theirs, and other text is free; with `allowed_tools` only those are called. A tool that no grammar can follow is
  refused with 400, and named.
- **Objects** of schemas, those of tools, of `response_format`, `text.format`, `output_config.format` and
  `structured_outputs.json`, have the properties that are named, unless the schema says something about others: so
  servers of the field read them, and a small model would add some until it is cut. `structured_outputs` with
  `disable_additional_properties: false` has any.
- **Keys of tools and of `tool_choice`** that are not known are refused by name. `cache_control` and
  `eager_input_streaming` are accepted without effect: prefixes are cached, and arguments streamed, by themselves.
  `defer_loading`, `allowed_callers` and `input_examples` are refused unless they ask for nothing, and so are tools of
  other types, as those that a server would call.
- **`response_format` beside tools** constrains the content; with `auto` the answer is then calls or that JSON, and
  where a call is demanded there is no content. Other constraints, and `structured_outputs` beside such a demand, are
  refused.
- **A constraint begins behind the thought.** A model that may think has the choice; but a GBNF grammar and a structural
  tag begin at once, unless the prompt has opened the thought or the model always thinks.
- **An answer that is continued** (`continue_final_message`, or a last message of the assistant on `/v1/messages`) is
  read from where that message ends: within its thought if it has `<think>` without `</think>`, else behind it.
- **`is_error`** of a `tool_result` stands before its text, as `Error: `: templates have no field for it.
- **History** is sent back as it was answered: a call alone, with content null, `""` or none, and arguments that are cut
  or no JSON. `instructions`, `system` and developer's messages become one system message ([chats](chats.md#forms)).
- **Whether to think**: `reasoning_effort` (none, low to max), `reasoning.effort`, `output_config.effort` and `thinking`
  set `enable_thinking`, `thinking`, `reasoning`, `thinking_mode` and `thinking_budget` of the template, whichever it
  reads; `chat_template_kwargs` count before them. The effort is its `reasoning_effort` and `thinking_effort`; where it
  refuses that word, the nearest that it knows, of two the lower (Qwen3.8: `high` is `medium`).
- **The thought** is `reasoning` and `reasoning_content` of a chat's message (`include_reasoning=false` leaves it out),
  a `reasoning` item, or a `thinking` block where `thinking` is enabled. Its tokens are counted in `usage`.

## Agents

What coding agents send beside the APIs' fields is read as they mean it.

- **Claude Code** (`ANTHROPIC_BASE_URL=http://127.0.0.1:8000`): a line of the system's that begins with
  `x-anthropic-billing-header:` is left out, as it changes with each request and no prefix could be cached behind it.
  Roles `ctx` and `msg` are the user's, and turns of the user that follow each other are one. `output_config.effort` is
  the template's `reasoning_effort`, and `context_management` is accepted where it changes nothing, as Claude Code's
  does. Thoughts have a signature, without which clients do not send them back.
- **Codex** (`wire_api = "responses"`): with `reasoning.encrypted_content` in `include` each thought has a string that
  brings it back in the next request, as nothing is kept here. The string holds the thought, and is not encrypted. A
  string of another server is refused. Its custom tools, as `apply_patch`, are functions with one text to the model, and
  those of a namespace, as an MCP server's, functions with both names (`mcp__idea__open`); calls are answered, and come
  back, as `custom_tool_call` and with `namespace`. The grammar of a custom tool stands in its description, and does not
  constrain the text; a namespace's description stands in that of its first tool. Tools that a server would call are
  to be switched off: `web_search = "disabled"` in its config.toml, without which it asks for a search.

## Fields

`null` is as if absent. A field that is in no table is refused with 400, and the nearest name, or the path that it is
for, is named. "same" in the last column: vLLM 0.33 does the same.
"""


def page() -> str:
    """Return the contents of docs/openai.md."""
    head = HEAD.replace("CALL_ROWS", _call_rows()).replace("THOUGHT_ROWS", _thought_rows())
    parts = [head]
    for path, table in APIS.items():
        head = "| field | here | what | vLLM |\n|---|---|---|---|\n"
        parts.append(f"\n### `{path}`\n\n{head}{''.join(map(_row, _sorted(table.values())))}")
    return "".join(parts)


def _call_rows() -> str:
    rows = ["| `--tool-call-parser` | models | a call |\n|---|---|---|\n"]
    for each in FORMATS:
        way = each.ways[each.written or 0]
        call = written_calls(way, [("f", {"a": 1, "b": "x"})])
        rows.append(f"| `{each.name}` | {each.models} | {_code(call)} |\n")
    return "".join(rows).rstrip()


def _thought_rows() -> str:
    rows = ["| `--reasoning-parser` | models | the thought stands between |\n|---|---|---|\n"]
    rows += [f"| `{each.name}` | {each.models} | {_code(each.open)}, {_code(each.close)} |\n" for each in THOUGHTS]
    return "".join(rows).rstrip()


def _code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    shown = text.strip().replace("\n", "⏎").replace("|", "\\|")
    return f"{ticks}{shown}{ticks}" if ticks == "`" else f"{ticks} {shown} {ticks}"


def _sorted(fields: Iterable[Field]) -> list[Field]:
    order = list(Use)
    return sorted(fields, key=lambda each: (order.index(each.use), each.name))


def _row(field: Field) -> str:
    use = field.use.value
    if field.neutral:
        use += f", but for {', '.join(f'`{json.dumps(each)}`' for each in field.neutral)}"
    cells = (f"`{field.name}`", use, field.ours, field.theirs or "same")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    """Write the page; with --check, fail if it is out of date."""
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit(f"{PAGE} does not match the tables of fields: run make docs")


if __name__ == "__main__":
    main()
