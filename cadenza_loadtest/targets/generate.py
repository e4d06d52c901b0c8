"""Cadenza over Generate: one call for each request."""

from __future__ import annotations

import grpc

from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from cadenza_loadtest.driving.live import RequestInFlight
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.cadenza import INCOMPLETE, TOO_LARGE, CadenzaTarget, take_response


class GenerateTarget(CadenzaTarget):
    """One stream for each request; a connection carries any number of them."""

    api = "generate"

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        """See Target."""
        request = self._request(shape, prompt, live)
        if request.ByteSize() > MAX_REQUEST_BYTES:
            live.failed(TOO_LARGE)
            return
        stub = self._stubs[self._place(shape)]
        live.sent_s = self._clock()
        call = stub.Generate(request)
        is_last = False
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                is_last = take_response(live, response, self._clock())
            if not is_last:
                live.failed(INCOMPLETE)
        except grpc.aio.AioRpcError as error:
            live.failed(error.code().name, error.details() or "")
        finally:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()
