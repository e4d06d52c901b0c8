"""Whether a load test is of what was recorded, by what both know."""

from __future__ import annotations

from collections import Counter

from cadenza.loadtest.requests import LoadTestError
from cadenza.loadtest.results import LoadTestFile
from cadenza.simulate.recordings import Recording

_CLOCKS_S = 60.0
"""So far the clocks of two machines may be apart."""


def check_compatible(recording: Recording, file: LoadTestFile, path: str) -> None:
    """Raises LoadTestError if the first run of the result at `path` cannot be of the recording.

    That is with another model or device, begun before the recording, or with requests that the recording does not have,
    by the lengths of their prompts.

    What passes may still be of another recording: of the same server, later, with prompts of the same lengths.
    """
    mismatch = _mismatch(recording, file)
    if mismatch:
        raise LoadTestError(f"--loadtest {path}: it is not of this recording: {mismatch}")


def _mismatch(recording: Recording, file: LoadTestFile) -> str:
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
            f"{missing.total()} of its {sent.total()} requests that ended well are not in it, as one with a prompt of "
            f"{next(iter(missing))} tokens"
        )
    return ""
