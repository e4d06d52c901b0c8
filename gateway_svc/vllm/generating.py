"""Generate: one request of the engine protocol, token ids for token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from cadenza.errors import CadenzaError
from cadenza.prompts import Prompt
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from gateway_svc.dialects import vllm_engine_pb2 as pb
from gateway_svc.http.bodies.apart import SHORT_BYTES
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.rpc.calls import Context, key_of, write
from gateway_svc.scheduler.generation import Generation, GenerationJob
from gateway_svc.state import State
from gateway_svc.vllm.answers import VllmAnswers
from gateway_svc.vllm.parameters import read_params, sampling_params

_REFUSED = {
    "kv_transfer_params": "prefill and decode are not split",
    "mm_inputs": "the model reads text alone",
    "extra_mm_inputs": "the model reads text alone",
    "media_refs": "the model reads text alone",
}


async def generate(state: State, running: RunningRequests, request: pb.GenerateRequest, context: Context) -> None:
    """Answer one request; raises ApiError and CadenzaError."""
    key = key_of(context)
    caller = await state.generating_with(key)
    _check_refused(request)
    if request.HasField("tokenized"):
        request.tokenized.ClearField("original_text")  # what the ids stand for is not sent on
    num_bytes = request.ByteSize()
    if num_bytes > MAX_REQUEST_BYTES:
        raise bad_request(f"the request has {num_bytes} bytes, and can have {MAX_REQUEST_BYTES} at most")
    if request.sampling_params.ByteSize() <= SHORT_BYTES:
        params = sampling_params(request.sampling_params)
    else:
        who = await state.payer(key, context.peer().rpartition(":")[0])
        params = await state.long_bodies.read(who, read_params, request.sampling_params.SerializeToString())
    job = GenerationJob([_prompt(request)], params)
    answers = VllmAnswers(params)
    async with Generation(caller, job, is_streamed=request.stream) as generation:
        with running.kept(key, request.request_id, generation):
            try:
                if request.stream:
                    await _stream(state, generation, answers, context)
                else:
                    (result,) = await generation.results()
                    await _write_all(state, context, answers.ends(result, generation.prompt_token_ids(0)))
            except AbortedError:
                ends = answers.aborted(generation.total(0), generation.prompt_token_ids(0), is_streamed=request.stream)
                await _write_all(state, context, ends)


async def _stream(state: State, generation: Generation, answers: VllmAnswers, context: Context) -> None:
    while (taken := await generation.take()) is not None:
        state.counts.num_deltas += len(taken)
        for _, delta in taken:
            parts = answers.parts(delta, generation.prompt_token_ids(0), generation.total(0))
            await _write_all(state, context, parts)


async def _write_all(state: State, context: Context, responses: Iterable[pb.GenerateResponse]) -> None:
    for response in responses:
        await write(state, context, response)


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("input")
    if kind == "text":
        return Prompt(text=request.text)
    if kind is None or not request.tokenized.input_ids:
        raise bad_request("the request has no prompt: give tokenized.input_ids or text")
    return Prompt(token_ids=list(request.tokenized.input_ids))


def _check_refused(request: pb.GenerateRequest) -> None:
    given = {field.name for field, _ in request.ListFields()}
    for name in sorted(given & _REFUSED.keys()):
        raise ApiError(501, f"{name} is not supported: {_REFUSED[name]}")
    if request.kv_transfer_params_json.strip() not in ("", "{}", "null"):
        raise ApiError(501, f"kv_transfer_params_json is not supported: {_REFUSED['kv_transfer_params']}")


class AbortedError(CadenzaError):
    """Another call has aborted the request."""


class RunningRequests:
    """Those of all callers. A caller sees its own alone."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str | None, str], Generation] = {}

    @contextlib.contextmanager
    def kept(self, key: str | None, request_id: str, generation: Generation) -> Iterator[None]:
        """Keep a request while the body runs; one without an id cannot be aborted. Raises ApiError for one of two."""
        if not request_id:
            yield
            return
        name = key, request_id
        if name in self._generations:
            raise ApiError(409, f"request {request_id[:128]!a} runs already")
        self._generations[name] = generation
        try:
            yield
        finally:
            del self._generations[name]

    def abort(self, key: str | None, request_ids: Iterable[str]) -> None:
        """Abort these requests, as far as they run: their streams end with the output so far."""
        for request_id in request_ids:
            generation = self._generations.get((key, request_id))
            if generation is not None:
                generation.end(AbortedError("the request was aborted"))
