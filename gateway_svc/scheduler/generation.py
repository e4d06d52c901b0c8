"""The prompts of one HTTP request, run together."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from cadenza.calls import convert
from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import grace_s
from cadenza.calls.session import size_error
from cadenza.errors import CadenzaError
from cadenza.outputs import RequestOutput
from cadenza.prompts import CallOptions, Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.scheduler.inbox import Inbox, Taken
from gateway_svc.scheduler.session import PromptRun


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What to run: prompts with the same parameters."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    adapter: str = ""
    options: CallOptions = field(default_factory=CallOptions)
    with_text_ends: bool = False
    """Whether outputs say where the text of each token ends."""


class Generation:
    """An async context: leaving it ends what still runs, as when the client has gone.

    Raises InvalidRequestError for a prompt that is too large for a message.
    """

    def __init__(self, caller: SchedulerCaller, job: GenerationJob, *, is_streamed: bool) -> None:
        self._caller = caller
        self._inbox = Inbox(len(job.prompts))
        self._runs = [
            PromptRun(
                request,
                OutputCollector(request.request_id, prompt),
                self._inbox,
                index,
                tenant=caller.tenant,
                is_streamed=is_streamed,
                run_alone=caller.run_alone,
            )
            for index, prompt in enumerate(job.prompts)
            for request in [
                convert.request_to_proto(
                    uuid.uuid4().hex,
                    prompt,
                    job.params,
                    final_only=not is_streamed,
                    options=job.options,
                    adapter=job.adapter,
                    resume_grace_s=grace_s(caller.timeout_s),
                    with_text_ends=job.with_text_ends,
                )
            ]
        ]
        for each in self._runs:
            if (error := size_error(each.request)) is not None:
                raise error

    async def __aenter__(self) -> Generation:
        for each in self._runs:
            self._caller.session.start(each)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._runs:
            self._caller.abort(each)
        self._inbox.error = None  # its traceback leads back here, and to the prompt

    @property
    def request_ids(self) -> list[str]:
        """The scheduler's ids of the prompts' requests."""
        return [each.request.request_id for each in self._runs]

    async def take(self) -> Taken | None:
        """New deltas of all prompts; None: all have ended. Raises the CadenzaError of a prompt that failed."""
        return await self._inbox.take()

    async def results(self) -> list[RequestOutput]:
        """The results in the order of the prompts, once all have ended; raises as `take`."""
        await self._inbox.wait()
        return self.totals()

    def end(self, error: CadenzaError) -> None:
        """End what runs: its last output still comes, or else `take` raises the error."""
        for each in self._runs:
            self._caller.end(each, error)

    def totals(self) -> list[RequestOutput]:
        """What there is so far of each prompt."""
        return [each.collector.result() for each in self._runs]

    def total(self, index: int) -> RequestOutput:
        """What there is so far of one prompt."""
        return self._runs[index].collector.result()

    def prompt_token_ids(self, index: int) -> list[int]:
        """Token ids of a prompt, known with its first output."""
        return self._runs[index].collector.prompt_token_ids or []
