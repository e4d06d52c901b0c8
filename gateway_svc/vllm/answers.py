"""Output of a request as messages of the engine protocol: chunks with what is new, and the end of each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cadenza.outputs import CompletionOutput, LogprobRow, RequestOutput
from cadenza.sampling_params import SamplingParams
from gateway_svc.dialects import vllm_engine_pb2 as pb


class VllmAnswers:
    """Makes the messages of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def parts(
        self, delta: RequestOutput, prompt_ids: Sequence[int], total: RequestOutput
    ) -> Iterator[pb.GenerateResponse]:
        """The messages of a delta: a chunk of each sample, and the ends of ended samples."""
        for sample in delta.outputs:
            first = sample.index not in self._begun
            self._begun.add(sample.index)
            yield pb.GenerateResponse(
                chunk=pb.GenerateStreamChunk(
                    token_ids=sample.token_ids,
                    prompt_tokens=len(prompt_ids),
                    completion_tokens=len(sample.token_ids),
                    cached_tokens=delta.num_cached_tokens or 0,
                    output_logprobs=self._output_logprobs(sample),
                    input_logprobs=self._input_logprobs(total, prompt_ids) if first else None,
                    index=sample.index,
                )
            )
            if sample.finish_reason is not None:
                yield self._end(sample, delta, prompt_ids)

    def ends(self, result: RequestOutput, prompt_ids: Sequence[int]) -> Iterator[pb.GenerateResponse]:
        """The end of each sample of a request that is not streamed, with all its output."""
        for sample in result.outputs:
            yield self._end(sample, result, prompt_ids)

    def aborted(
        self, total: RequestOutput, prompt_ids: Sequence[int], *, is_streamed: bool
    ) -> Iterator[pb.GenerateResponse]:
        """The end of each sample that runs when its request is aborted; with its output unless that was streamed."""
        known = {sample.index: sample for sample in total.outputs}
        for index in range(self._params.n):
            if index not in self._ended:
                sample = CompletionOutput(index) if is_streamed else known.get(index, CompletionOutput(index))
                sample.finish_reason = "abort"
                yield self._end(sample, total, prompt_ids)

    def _end(self, sample: CompletionOutput, output: RequestOutput, prompt_ids: Sequence[int]) -> pb.GenerateResponse:
        self._ended.add(sample.index)
        complete = pb.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=sample.finish_reason or "error",
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(sample.token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            output_logprobs=self._output_logprobs(sample),
            input_logprobs=self._input_logprobs(output, prompt_ids),
            index=sample.index,
        )
        if isinstance(sample.stop_reason, int):
            complete.matched_token_id = sample.stop_reason
        elif sample.stop_reason is not None:
            complete.matched_stop_str = sample.stop_reason
        return pb.GenerateResponse(complete=complete)

    def _output_logprobs(self, sample: CompletionOutput) -> pb.OutputLogProbs | None:
        if not sample.logprobs:
            return None
        chosen = [row[token_id].logprob for token_id, row in zip(sample.token_ids, sample.logprobs, strict=True)]
        top = _top(sample.logprobs, self._params.logprobs)
        return pb.OutputLogProbs(token_logprobs=chosen, token_ids=sample.token_ids, top_logprobs=top)

    def _input_logprobs(self, output: RequestOutput, prompt_ids: Sequence[int]) -> pb.InputLogProbs | None:
        rows = output.prompt_logprobs
        if not rows:
            return None
        values = [
            pb.InputTokenLogProb(value=None if row is None else row[token_id].logprob)
            for token_id, row in zip(prompt_ids, rows, strict=False)
        ]
        top = _top([row or {} for row in rows], self._params.prompt_logprobs)
        return pb.InputLogProbs(token_logprobs=values, token_ids=prompt_ids[: len(rows)], top_logprobs=top)


def _top(rows: Sequence[LogprobRow], number: int | None) -> list[pb.TopLogProbs] | None:
    """The top logprobs of each row, best first; -1: all. The chosen token is in a row though it may not be of these."""
    if not number:
        return None
    tops = []
    for row in rows:
        best = sorted(row.items(), key=lambda entry: -entry[1].logprob)[: number if number > 0 else None]
        tops.append(pb.TopLogProbs(values=[each.logprob for _, each in best], token_ids=[each for each, _ in best]))
    return tops
