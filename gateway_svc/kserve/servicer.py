"""inference.GRPCInferenceService: the model by the protocol of KServe and Triton Inference Server.

Names of tensors and parameters are those of Triton's vLLM backend (github.com/triton-inference-server/vllm_backend),
so that its clients need no change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from cadenza.errors import CadenzaError
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.dialects import inference_pb2_grpc as pb_grpc
from gateway_svc.http.errors import ApiError
from gateway_svc.kserve.model import VERSION, Statistics, model_config, model_metadata, server_metadata
from gateway_svc.kserve.stream import InferStream
from gateway_svc.rpc.calls import Context, abort_with, key_of
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.state import State

_Named = pb.ModelReadyRequest | pb.ModelMetadataRequest | pb.ModelConfigRequest | pb.ModelStatisticsRequest
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class InferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Serves KServe's clients."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._statistics = Statistics()

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """True: it answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Whether requests are served."""
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Whether this is a name of the model, and requests are served; a probe needs no key, and never waits."""
        if not self._is_ready:
            return pb.ModelReadyResponse(ready=False)
        key, link = key_of(context), self._state.link
        try:
            caller = link.own if key is None else await self._state.caller_with(key)
            await self._check_name(request, caller)
        except (ApiError, CadenzaError):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """The server."""
        return server_metadata()

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """The model's tensors."""
        try:
            return model_metadata(await self._name(request, context))
        except (ApiError, CadenzaError) as error:
            await abort_with(context, error, "ModelMetadata")

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The model's configuration."""
        try:
            return model_config(await self._name(request, context))
        except (ApiError, CadenzaError) as error:
            await abort_with(context, error, "ModelConfig")

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counts of requests."""
        try:
            return self._statistics.message(await self._name(request, context))
        except (ApiError, CadenzaError) as error:
            await abort_with(context, error, "ModelStatistics")

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """The names of the model."""
        try:
            caller = await self._state.caller_with(key_of(context))
            names = self._state.names.of_model(await caller.model())
        except (ApiError, CadenzaError) as error:
            await abort_with(context, error, "RepositoryIndex")
        state = "READY" if self._is_ready else "UNAVAILABLE"
        if request.ready and not self._is_ready:
            names = ()
        index = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(models=[index(name=each, version=VERSION, state=state) for each in names])

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Refused, as Triton refuses it for a decoupled model."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "ModelInfer is for models with one response; this one is decoupled: use ModelStreamInfer",
        )

    async def ModelStreamInfer(  # type: ignore[override]
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Many requests over one stream."""
        ended_by: list[Exception] = []
        try:
            await InferStream(self._state, self._statistics, context).run(requests)
        except* (ApiError, CadenzaError) as errors:
            ended_by += errors.exceptions
        if ended_by:
            await abort_with(context, ended_by[0], "ModelStreamInfer")

    @property
    def _is_ready(self) -> bool:
        return self._state.link.is_serving and not self._state.is_stopping

    async def _name(self, request: _Named, context: Context) -> str:
        """The model's name, as given or its first; raises as `_check_name`, and for a key that may not ask."""
        return await self._check_name(request, await self._state.caller_with(key_of(context)))

    async def _check_name(self, request: _Named, caller: SchedulerCaller) -> str:
        """The same for a caller; raises ApiError and CadenzaError for a name that the model does not have."""
        names = self._state.names.of_model(await caller.model())
        if (request.name and request.name not in names) or request.version not in ("", VERSION):
            raise ApiError(404, f"there is no model {request.name[:128]!a} with version {request.version[:16]!a}")
        return request.name or names[0]
