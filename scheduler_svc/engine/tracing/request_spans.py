"""The spans of a request that has ended, from its times, counts and trace.

`llm_request` has the children `queue`, `prefill` and `decode`; `prefill` has a child for each step that computed a part
of the prompt. Names are those of OpenTelemetry's conventions for generative AI and of vLLM; others begin with
`cadenza.`. No span has text or token ids.
"""

from __future__ import annotations

from cadenza_common.telemetry.spans import EXECUTOR, STEP_ID, Span, Value, decode_step_has_span, step_ids
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.request_trace import RequestTrace, Stay, TracedStep

_MAX_DECODE_LINKS = 64


def request_span(live: LiveRequest, trace: RequestTrace, *, model: str, to_wall_ns: int) -> Span:
    """The span of an ended request, with its children. to_wall_ns: the time since 1970 less that of the clock."""
    times = live.times
    end_ns = times.end_ns
    first_plan_ns, first_token_ns = times.first_plan_ns or end_ns, times.first_token_ns or end_ns
    root = Span("llm_request", times.arrival_ns, end_ns, _attributes(live, model), is_server=True)
    root.events = list(trace.events)
    if times.first_token_ns and trace.steps:
        last = [step for step in trace.steps if step.applied_ns <= times.first_token_ns] or trace.steps
        root.events.append(("first_token", times.first_token_ns, _of_step(last[-1])))
        root.events.sort(key=lambda event: event[1])
    if live.failed:
        details = [sample.finish.detail.name.lower() for sample in live.samples if sample.finish is not None]
        root.error = type(live.error).__name__ if live.error is not None else next(iter(details), "error")
    root.children.append(Span("queue", times.arrival_ns, first_plan_ns))
    phases = []
    if times.first_plan_ns:
        phases.append(Span("prefill", first_plan_ns, first_token_ns, _prefill_attributes(live, trace)))
    if times.first_token_ns:
        phases.append(_decode_span(trace, first_token_ns, end_ns))
    for step in trace.steps if phases else ():
        _phase_at(phases, step.planned_ns).children.append(_step_span(step, first_plan_ns))
    for each in trace.interruptions if phases else ():
        _phase_at(phases, each.start_ns).children.append(Span(each.name, each.start_ns, each.end_ns or end_ns))
    root.children += phases
    _shift(root, to_wall_ns)
    return root


def _attributes(live: LiveRequest, model: str) -> dict[str, Value]:
    spec, times, counts = live.request.spec, live.times, live.counts
    num_prompt, num_completion = len(spec.prompt_token_ids), live.num_completion_tokens
    attributes: dict[str, Value] = {
        "gen_ai.request.id": spec.request_id,
        "gen_ai.request.n": live.num_returned,
        "gen_ai.request.temperature": spec.sampling.temperature,
        "gen_ai.request.top_p": spec.sampling.top_p,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [
            sample.finish.detail.name.lower() for sample in live.samples if sample.finish is not None
        ],
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_completion,
        "gen_ai.usage.output_tokens": num_completion,
        "gen_ai.usage.num_sequences": len(live.samples),
        "gen_ai.latency.e2e": _seconds(times.arrival_ns, times.end_ns),
        "gen_ai.latency.time_in_queue": _seconds(times.arrival_ns, times.first_plan_ns or times.end_ns),
        "cadenza.usage.cached_tokens": counts.num_cached_tokens,
        "cadenza.num_preemptions": counts.num_preemptions,
    }
    if spec.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = spec.max_tokens
    if spec.tenant:
        attributes["cadenza.tenant"] = spec.tenant
    if times.first_plan_ns:
        attributes["gen_ai.latency.time_in_model_inference"] = _seconds(times.first_plan_ns, times.end_ns)
    if times.first_token_ns:
        attributes["gen_ai.latency.time_to_first_token"] = _seconds(times.arrival_ns, times.first_token_ns)
        attributes["gen_ai.latency.time_in_model_prefill"] = _seconds(times.first_plan_ns, times.first_token_ns)
        attributes["gen_ai.latency.time_in_model_decode"] = _seconds(times.first_token_ns, times.end_ns)
    return attributes


def _prefill_attributes(live: LiveRequest, trace: RequestTrace) -> dict[str, Value]:
    attributes: dict[str, Value] = {"cadenza.num_steps": trace.num_steps}
    attributes["cadenza.usage.cached_tokens"] = live.counts.num_cached_tokens
    if trace.stays:
        attributes[EXECUTOR] = trace.stays[0].executor.target
    return attributes


def _decode_span(trace: RequestTrace, start_ns: int, end_ns: int) -> Span:
    """The decode: where it ran, and links to the spans of its steps; not every step has a span."""
    span = Span("decode", start_ns, end_ns)
    if not trace.stays:
        return span
    span.attributes[EXECUTOR] = trace.stays[-1].executor.target
    span.attributes["cadenza.first_step_id"] = trace.stays[0].first_step_id
    if trace.stays[-1].last_step_id:
        span.attributes["cadenza.last_step_id"] = trace.stays[-1].last_step_id
    for stay in trace.stays:
        for step_id in _decode_steps(stay)[: _MAX_DECODE_LINKS - len(span.links)]:
            about: dict[str, Value] = {EXECUTOR: stay.executor.target, STEP_ID: step_id}
            span.links.append((step_ids(stay.executor.incarnation, step_id), about))
    return span


def _decode_steps(stay: Stay) -> list[int]:
    """The steps of a stay that have a span also if they computed no prompt."""
    steps = range(stay.first_step_id + 1, stay.last_step_id + 1)
    return [step_id for step_id in steps if decode_step_has_span(step_id)]


def _phase_at(phases: list[Span], time_ns: int) -> Span:
    return next((phase for phase in phases if time_ns < phase.end_ns), phases[-1])


def _step_span(step: TracedStep, first_plan_ns: int) -> Span:
    about = _of_step(step) | {"cadenza.step.num_tokens": step.num_tokens, "cadenza.step.device_s": step.device_ns / 1e9}
    link = (step_ids(step.executor.incarnation, step.step_id), _of_step(step))
    # The first plan counts from the moment when it was complete, and a step from the moment when planning began.
    return Span("step", max(step.planned_ns, first_plan_ns), step.applied_ns, about, links=[link])


def _of_step(step: TracedStep) -> dict[str, Value]:
    return {EXECUTOR: step.executor.target, STEP_ID: step.step_id}


def _seconds(begin_ns: int, end_ns: int) -> float:
    return (end_ns - begin_ns) / 1e9


def _shift(span: Span, by_ns: int) -> None:
    """Move a span and its children to the wall clock."""
    span.start_ns += by_ns
    span.end_ns = max(span.start_ns, span.end_ns + by_ns)
    span.events = [(name, time_ns + by_ns, attributes) for name, time_ns, attributes in span.events]
    for child in span.children:
        _shift(child, by_ns)
