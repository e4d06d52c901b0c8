"""A step's outputs to the live requests they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cadenza_common.plan.result import TokenLogprobs
from scheduler_svc.core.outputs import BeamOutput, StepOutputs
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import Finish, RequestKey
from scheduler_svc.engine.live_request import LiveRequest


def apply_outputs(
    outputs: StepOutputs, lives: Mapping[RequestKey, LiveRequest], stop_sample: Callable[[RequestKey, int], object]
) -> tuple[dict[LiveRequest, None], set[LiveRequest]]:
    """Extend the requests; returns the requests with new output, in order, and the requests with a finished sample.

    stop_sample: ends a sample at a stop string.
    """
    touched: dict[LiveRequest, None] = {}
    finished: set[LiveRequest] = set()

    def extend(
        sequence: Sequence | BeamOutput,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: Finish | None,
        cumulative_logprob: float | None = None,
    ) -> None:
        """Apply outputs to one sample, unless it has finished here already."""
        key, index = sequence.group.key, sequence.sample_index
        live = lives.get(key)
        # A beam search has more sequences than results.
        if live is None or index >= len(live.samples) or live.samples[index].finish is not None:
            return
        touched[live] = None
        if live.samples[index].extend(token_ids, logprobs, finish, cumulative_logprob) is not None:
            stop_sample(key, index)
        if live.samples[index].finish is not None:
            finished.add(live)

    for sequence, prompt_logprobs in outputs.prompt_logprobs:
        live = lives.get(sequence.group.key)
        if live is not None and live.prompt_logprobs is not None:
            touched[live] = None
            live.prompt_logprobs.extend(prompt_logprobs)
    extended = _append_tokens(outputs, lives, stop_sample, touched, finished)
    for sequence, token_ids in extended.items():
        extend(sequence, tuple(token_ids), outputs.logprobs.get(sequence, ()), outputs.finishes.get(sequence))
    for sequence, finish in outputs.finishes.items():
        extend(sequence, (), (), finish)
    for beam in outputs.hypotheses:
        extend(beam, beam.token_ids, (), beam.finish, beam.cumulative_logprob)
    return touched, finished


def _append_tokens(
    outputs: StepOutputs,
    lives: Mapping[RequestKey, LiveRequest],
    stop_sample: Callable[[RequestKey, int], object],
    touched: dict[LiveRequest, None],
    finished: set[LiveRequest],
) -> dict[Sequence, list[int]]:
    """Apply outputs of one plain token, as nearly all of a step are; returns the tokens of the others.

    Without a call for each, which takes longer than the rest.
    """
    with_more, live_of = outputs.logprobs.keys() | outputs.finishes.keys(), lives.get
    extended: dict[Sequence, list[int]] = {}
    for sequence, token_id in zip(outputs.sequences, outputs.token_ids, strict=True):
        if with_more and sequence in with_more:
            extended.setdefault(sequence, []).append(token_id)
            continue
        key, index = sequence.group.key, sequence.sample_index
        live = live_of(key)
        if live is None or index >= len(live.samples):
            continue
        sample = live.samples[index]
        if sample.finish is not None:
            continue
        touched[live] = None
        if sample.text is None:
            sample.token_ids.append(token_id)
        elif sample.append(token_id) is not None:
            finished.add(live)
            stop_sample(key, index)
    return extended
