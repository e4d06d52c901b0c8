"""Writes docs/metrics.md from the definitions of both services: `python docs/generate_metrics.py [--check]`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from cadenza_common.metrics import listener_counts
from cadenza_common.metrics.common import LISTENER_DEFINITIONS, LOOP_DEFINITIONS
from cadenza_common.metrics.families import Definition
from executor_svc.service import metrics as executor
from gateway_svc import metrics as gateway
from scheduler_svc.engine import faults
from scheduler_svc.metrics import definitions as scheduler
from scheduler_svc.plan_loop.gauges import GAUGES

PAGE = Path(__file__).with_name("metrics.md")

HEAD = """# Metrics

<!-- Made by docs/generate_metrics.py from the services' definitions: change those, then `make docs`. -->

Both services serve Prometheus metrics. They do not by default: `--metrics-port` names the port.

```sh
cadenza up models/cadenza-demo --metrics-port 9464     # the scheduler's at 9464, its executors' at 9465, 9466 …
curl http://127.0.0.1:9464/metrics
docker-compose --profile watch up                      # with Prometheus at 127.0.0.1:9090, Grafana at 127.0.0.1:3000
```

`--metrics-port 0` takes free ports, which the services log and keep over restarts. `docs/watch/` has what an operator
needs: `prometheus.yml` scrapes both services, `alerts.yml` has the alert rules, `dashboard.json` is the Grafana
dashboard.

**Who may read them.** Metrics name models, executors' addresses and tenants; no request, prompt or id is among them.
The server listens on loopback. Beyond that (`--metrics-host`) it needs `--metrics-token-file FILE`, a bearer token
that a scraper sends (`authorization: {credentials_file: FILE}` in prometheus.yml) and that is read again for each
scrape, or `--metrics-insecure`. The link is not encrypted: on a network that others use, put a proxy with TLS before
it. At most 8 connections are served at once, and one that sends nothing for 5 s, or is open for 15 s, is closed.

**What they cost.** The services add to plain numbers, once for each step and each request, with or without a scraper.
A scrape copies them on the event loop (0.5 ms with 4 executors and 50 tenants). The text is written in a thread of
its own, which lets the event loop run after each 100 samples ([0027](decisions/0027-metrics.md)). If the event loop
does not run for 2 s, a scrape is answered with 503.

**Counts never go back** while the process lives: an executor that is lost, restarted or removed keeps its series, by
its address. What is true of an executor now (gauges) ends with its removal.

**Tenants.** Each tenant of the tenants file has a label, all others are `other`, so that no client can create time
series. Without a file there is one tenant, and its label is empty.

"""

VLLM = """## Scheduler: vLLM's names

Routers, autoscalers and dashboards that read vLLM's metrics read these: the old names (`gpu_cache_usage_perc`,
`gpu_prefix_cache_*`, `time_per_output_token_seconds`) beside those of 0.33. All executors of a scheduler are one
engine, `engine="0"`. Histograms have vLLM's buckets. Without adapters in use, `lora_requests_info` has empty lists. The
counts include executors that were removed.

"""

GATEWAY = """## Gateway

At `/metrics` of its HTTP port, beside the scheduler's if it may read those: with tenants it needs an admin's token
(`--http-token-file`).

"""

BOTH = (*LISTENER_DEFINITIONS, *LOOP_DEFINITIONS)
PARTS = (
    (VLLM, scheduler.VLLM_DEFINITIONS),
    ("## Scheduler: the service\n\n", scheduler.SERVICE_DEFINITIONS),
    ("## Scheduler: tenants\n\nLabel `tenant`.\n\n", scheduler.TENANT_DEFINITIONS),
    (
        "## Scheduler: executors\n\nA lane is the scheduler's side of one executor; label `executor`: its address.\n\n",
        scheduler.LANE_DEFINITIONS,
    ),
    ("## Executor\n\n", tuple(each for each in executor.DEFINITIONS if each not in BOTH)),
    (GATEWAY, gateway.DEFINITIONS),
    (
        "## Both services\n\nBeside these, `process_*`: CPU time, memory, file descriptors, time of the start.\n\n",
        BOTH,
    ),
)
REFUSALS = """
`cadenza_connections` is counted once a second. Connections over `--max-connections` and TLS handshakes that fail, as
with a wrong or expired certificate of a client, end within gRPC and are in no count: compare the first with the
limit, and the client names the reason. `cadenza_tls_certificate_expiry_seconds` follows the files that are in use,
which a scrape reads again if they have changed: a new certificate without its key changes nothing.

## Reasons of refused calls

Of `cadenza_refused_calls_total`. The log has one line a minute at most for each reason, with the client's address,
and never a token. A client gets the same message for every wrong token. Requests that are refused once their message
was read, those of a revoked token in an open Session included, are in `cadenza_requests_refused_total`.

| reason | meaning |
|---|---|
"""
FAULTS = """## Kinds of faults

Of `cadenza_faults_total`; `GetServerInfo` and `cadenza top` show the same counts.

| kind | meaning |
|---|---|
"""

GAUGES_HEAD = """
## GetServerInfo

The fields of `SchedulerLoad`. `ExecutorInfo` says the same of one executor, in fields of the same names. `cadenza top`
and the client's `server_info()` show them.

| field | unit | meaning |
|---|---|---|
"""

DRAFTS = """
## Speculative decoding

A draft is one drafted token. vLLM's `spec_decode_num_drafts_total` counts otherwise: the sequences that had drafts,
once for each step. All are 0 without [speculative decoding](speculation.md); a position has a series once a plan
allowed drafts there.

```promql
# Share of drafts accepted; by position with `sum by (position)`.
sum(rate(cadenza_lane_accepted_drafts_total[5m])) / sum(rate(cadenza_lane_drafts_total[5m]))
# Tokens a step and sequence; 1 without drafts.
sum(rate(cadenza_lane_decoded_tokens_total[5m])) / sum(rate(cadenza_lane_decodes_total[5m]))
# Goodput gained.
sum(rate(cadenza_lane_without_drafts_seconds_total[5m])) / sum(rate(cadenza_lane_drafting_seconds_total[5m])) - 1
```

**Goodput gained** is how many more tokens a second the steps with drafts gave than steps without would have given: 0.5
is half as many again, less than 0 is a loss. Only measured times are in it, those of the executor without block moves.
A step with drafts is compared with the steps without that decoded as many sequences, of which the latest 20 or so
count (a mean with a decay of 0.95), once there were four. Steps in which prompt tokens were computed are left out.
Steps in which drafts were allowed and the source had none count as steps without. Where all steps have drafts, as they
may with a draft model and a fixed number of drafts, nothing can be compared: both counters stay 0. The figure says
nothing about first tokens, queues or the time between steps.
"""


def page() -> str:
    """Return the contents of docs/metrics.md."""
    tables = "\n".join(f"{head}{''.join(_table(definitions))}" for head, definitions in PARTS)
    gauges = GAUGES_HEAD + "".join(f"| `{each.name}` | {each.unit} | {each.meaning} |\n" for each in GAUGES)
    refusals, kinds = _rows(listener_counts.RefusalReason), _rows(faults.FaultKind)
    return f"{HEAD}{tables}{REFUSALS}{refusals}\n{FAULTS}{kinds}{gauges}{DRAFTS}"


def _table(definitions: Iterable[Definition]) -> Iterator[str]:
    yield "| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
    for each in definitions:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        yield f"| `{each.name}` | {each.kind} | {each.unit} | {labels} | {each.meaning} |\n"


def _rows(enumeration: type[StrEnum]) -> str:
    """A row with the value and the docstring of each member."""
    return "".join(f"| `{value}` | {meaning} |\n" for value, meaning in _members(enumeration))


def _members(enumeration: type[StrEnum]) -> Iterator[tuple[str, str]]:
    (kinds,) = ast.parse(inspect.getsource(enumeration)).body
    assert isinstance(kinds, ast.ClassDef)
    for value, text in zip(kinds.body[1::2], kinds.body[2::2], strict=True):
        assert isinstance(value, ast.Assign)
        assert isinstance(text, ast.Expr)
        yield ast.literal_eval(value.value), ast.literal_eval(text.value)


def main() -> None:
    """Write the page; with --check, fail if it is out of date."""
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit(f"{PAGE} does not match the definitions: run make docs")


if __name__ == "__main__":
    main()
