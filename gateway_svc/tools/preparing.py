"""What the tools, the format and the thought of a request come to: how its output is read, and what constrains it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cadenza.errors import FailedPreconditionError, InvalidRequestError
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from cadenza.structured_outputs import StructuredOutputsParams
from gateway_svc.fields.constraints import errors_of_constraint, field_of_grammar
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.output import Reading
from gateway_svc.parsing.parts import Role
from gateway_svc.parsing.reasoning import Opening, opening_of_ids, opening_of_text, opening_of_turn
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.tools.answers import behind_thought, schema_beside
from gateway_svc.tools.grammars import grammar_of, only_tool, tool_of_line
from gateway_svc.tools.xml_arguments import argument_kinds

_TAIL_TOKENS = 32
"""Of a prompt: they hold the marker that ends it."""
_LINE = re.compile(r"at (\d+)\(\d+\): (.*?)(?: \d+ \| .*)?")
"""A message of llguidance: the line of the grammar, what is wrong, and the lines around it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be sent."""

    reading: Reading
    params: SamplingParams
    constrained_by: str
    """The field that has the caller's constraint, or would have it."""
    grammar: str = ""
    """That of the tools; empty: the constraint is the caller's own, or there is none."""

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of the constraint are the caller's field's, or a tool's if it was made here; raises ApiError."""
        with errors_of_constraint(self.constrained_by):
            try:
                yield
            except (InvalidRequestError, FailedPreconditionError) as error:
                field = field_of_grammar(error)
                if not self.grammar or not field:
                    raise
                raise self._of_tool(error.message.rpartition(f"{field}: ")[2]) from None

    def _of_tool(self, message: str) -> ApiError:
        found = _LINE.fullmatch(message)
        index = only_tool(self.grammar) if found is None else tool_of_line(self.grammar, int(found[1]))
        if index is None:
            return bad_request(f"tools: {message}"[:500], "tools")
        return bad_request(f"tools[{index}]: {message if found is None else found[2]}"[:500], "tools")


async def prepare(caller: SchedulerCaller, request: GatewayRequest, formats: Formats) -> Prepared:
    """Prepare the request of a chat; raises ApiError and CadenzaError."""
    use, params, name = request.use, request.params, request.constrained_by
    if use.callable and formats.tools is None:
        message = (
            "the model's chat template shows no tools, no calls, or calls in no format that is known here; of a "
            "template that shows them --tool-call-parser can name the format, and --chat-template gives another one"
        )
        raise bad_request(f"tools cannot be called: {message}", "tools")
    given = params.structured_outputs
    is_constrained = given is not None or use.is_constrained
    opening = await _opening(caller, request.prompts[0], formats, is_needed=is_constrained)
    reading = Reading(
        formats,
        tuple(tool.name for tool in use.callable),
        skips_special=params.skip_special_tokens,
        opening=opening,
        has_calls_alone=bool(use.callable) and use.mode == "required",
        is_parallel=use.is_parallel,
        kinds=argument_kinds(use.callable),
    )
    if not is_constrained:
        return Prepared(reading, params, name)
    if use.callable:
        schema = None if given is None else schema_beside(use, given, name)
        grammar = grammar_of(use, formats, opening, schema)
        constraint = StructuredOutputsParams(grammar=grammar)
        return Prepared(reading, replace(params, structured_outputs=constraint), name, grammar)
    if given is not None and opening is not None:
        params = replace(params, structured_outputs=behind_thought(given, formats, opening, name))
    return Prepared(reading, params, name)


async def _opening(caller: SchedulerCaller, prompt: Prompt, formats: Formats, *, is_needed: bool) -> Opening | None:
    """How the prompt ends, if that must be known before the request runs; else None: its first output says."""
    if formats.reasoning is None:
        return None
    start, end = formats.marker(Role.THOUGHT), formats.marker(Role.THOUGHT_END)
    has_ids = start.token_id is not None and end.token_id is not None
    if prompt.chat is not None and prompt.chat.continue_final_message and prompt.messages:
        known = opening_of_turn(prompt.messages[-1].content or "", start.text, end.text)
        if known is not None:
            return known
    if has_ids and not is_needed:
        return None
    ids = await caller.tokenize(prompt)
    if start.token_id is not None and end.token_id is not None:
        return opening_of_ids(ids, start.token_id, end.token_id)
    tail = await caller.detokenize(ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return opening_of_text(tail, start.text, end.text)
