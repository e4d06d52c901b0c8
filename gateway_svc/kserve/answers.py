"""Answers of one request: what has arrived, as tensors with one value for each sample."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cadenza.outputs import CompletionOutput, LogprobRow, RequestOutput
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.kserve.model import OUTPUT_KINDS, VERSION
from gateway_svc.kserve.requests import Asked
from gateway_svc.kserve.tensors import output

FINAL = "triton_final_response"
_RUNS = "None"
"""The backend's word for a sample that has not ended."""
_NO_LOGPROBS = b"null"


class KServeAnswers:
    """Makes the answers of one request, in order."""

    def __init__(self, request_id: str, asked: Asked) -> None:
        self._id = request_id
        self._asked = asked
        self._sums = [0.0] * asked.params.n
        self._reasons = [_RUNS] * asked.params.n

    def whole(self, result: RequestOutput, *, is_final: bool) -> pb.ModelStreamInferResponse:
        """The only answer with outputs of a request that is not streamed."""
        prefix = self._asked.prompt if self._asked.echoes else ""
        return self._answer([result], len(result.prompt_token_ids or ()), is_final=is_final, prefix=prefix)

    def part(
        self, deltas: Sequence[RequestOutput], num_prompt_tokens: int, *, is_final: bool
    ) -> pb.ModelStreamInferResponse:
        """What has arrived since the last one."""
        return self._answer(deltas, num_prompt_tokens, is_final=is_final)

    def empty_final(self) -> pb.ModelStreamInferResponse:
        """The answer without outputs that ends a request, if the client asked for it."""
        return pb.ModelStreamInferResponse(infer_response=_answer_of(self._id, self._asked.model, is_final=True))

    def _answer(
        self, deltas: Sequence[RequestOutput], num_prompt_tokens: int, *, is_final: bool, prefix: str = ""
    ) -> pb.ModelStreamInferResponse:
        news: list[list[CompletionOutput]] = [[] for _ in self._sums]
        for delta in deltas:
            for sample in delta.outputs:
                news[sample.index].append(sample)
        self._keep(news)
        values: dict[str, Sequence[bytes] | Sequence[float]] = {
            "text_output": [(prefix + "".join(part.text for part in parts)).encode() for parts in news],
            "finish_reason": [reason.encode() for reason in self._reasons],
            "cumulative_logprob": self._sums,
            "logprobs": [_logprobs(parts) if self._asked.has_logprobs else _NO_LOGPROBS for parts in news],
            "num_input_tokens": [num_prompt_tokens],
            "num_output_tokens": [sum(len(part.token_ids) for part in parts) for parts in news],
        }
        response = _answer_of(self._id, self._asked.model, is_final=is_final)
        for name in OUTPUT_KINDS:
            if name == "text_output" or name in self._asked.outputs:
                tensor, raw = output(name, values[name], OUTPUT_KINDS[name])
                response.outputs.append(tensor)
                response.raw_output_contents.append(raw)
        return pb.ModelStreamInferResponse(infer_response=response)

    def _keep(self, news: Sequence[Sequence[CompletionOutput]]) -> None:
        for index, parts in enumerate(news):
            for part in parts:
                self._reasons[index] = part.finish_reason or self._reasons[index]
                rows = zip(part.token_ids, part.logprobs or (), strict=False)
                self._sums[index] += sum(row[token_id].logprob for token_id, row in rows)


def failed(request_id: str, model: str, message: str) -> pb.ModelStreamInferResponse:
    """The answer of a request that failed; its stream goes on."""
    response = _answer_of(request_id, model, is_final=True)
    return pb.ModelStreamInferResponse(error_message=message, infer_response=response)


def _answer_of(request_id: str, model: str, *, is_final: bool) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)
    response.parameters[FINAL].bool_param = is_final
    return response


def _logprobs(parts: Sequence[CompletionOutput]) -> bytes:
    rows = [row for part in parts for row in part.logprobs or ()]
    return json.dumps([_row(row) for row in rows], separators=(",", ":")).encode()


def _row(row: LogprobRow) -> dict[str, dict[str, float | int | str | None]]:
    return {
        str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token_id, each in row.items()
    }
