"""Checks that a load test and a recording are of the same server run, by the facts that both hold."""

from __future__ import annotations

from collections import Counter

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.results import LoadTestFile
from cadenza_simulator.recordings import RecordedRun

_CLOCKS_S = 60.0
"""Allowed difference between the clocks of two machines."""


def check_compatible(recording: RecordedRun, file: LoadTestFile, path: str) -> None:
    """Raises LoadTestError if the first run of the result at `path` cannot be part of the recording.

    That is: its model or device differs, it began before the recording, or it has requests whose prompt lengths the
    recording lacks.

    A result that passes may still be of another recording: of the same server, later, with prompts of the same lengths.
    """
    mismatch = _mismatch(recording, file)
    if mismatch:
        raise LoadTestError(f"--loadtest {path}: does not match the recording: {mismatch}")


def _mismatch(recording: RecordedRun, file: LoadTestFile) -> str:
    server, run = file.server or {}, file.points[0].runs[0]
    model, devices = server.get("model"), [each.get("device") for each in server.get("executors", ())]
    if model is not None and model != recording.model:
        return f"its server had the model {model}, the recording has {recording.model}"
    if devices and recording.device not in devices:
        return f"its executors ran on {', '.join(map(str, devices))}, the recorded one on {recording.device}"
    if run.started_unix_s < recording.started_unix_s - _CLOCKS_S:
        return f"it began {recording.started_unix_s - run.started_unix_s:,.0f} s before the recording"
    sent = Counter(run.requests.num_prompt_tokens[run.requests.ok].tolist())
    missing = sent - Counter(recording.prompt_lens)
    if missing:
        return (
            f"{missing.total()} of its {sent.total()} completed requests are not in the recording, such as one with a "
            f"prompt of {next(iter(missing))} tokens"
        )
    return ""
