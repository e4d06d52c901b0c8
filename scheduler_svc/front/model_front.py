"""What the front holds of the executor's model, and replaces when that changes: the tokenizer, the request builder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from cadenza_common.grammar.table import TableSource, table_source
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.adapters.lane_adapters import NO_ADAPTERS
from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.engine.served_model import PreparedModel, ServedModel
from scheduler_svc.front.front import Front
from scheduler_svc.plan_loop.model_change import ModelChange, ModelRefusedError
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.chats.option import read_template
from scheduler_svc.requests.chats.renderer import ChatSettings
from scheduler_svc.requests.field_rules import PATH
from scheduler_svc.requests.grammar_door import GrammarDoor
from scheduler_svc.requests.tokenizer import Tokenizer, TokenizerError, load_tokenizer, preload

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_FIELDS = {"bias_token_ids": "logit_bias"}
"""Where a value for executors has another name than the field that it comes from."""


class ModelFront:
    """Loads tokenizers in a thread and gives the front a request builder for the present model."""

    def __init__(self, front: Front, config: SchedulerConfig) -> None:
        """Raises ChatTemplateOptionError."""
        self._front = front
        self._config = config
        template = "" if config.chat_template is None else read_template(config.chat_template)
        self._chats = ChatSettings(template, config.trust_request_chat_template, config.chat_template_content_format)
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = 0
        """Maximum tokens of a new request; 0 before `open`."""
        self._grammars: GrammarDoor | None = None
        self._grammars_of: tuple[TableSource | None, bytes] = (None, b"")
        """What `_grammars` was made for: the table's source, and the executor's engine when it was read."""

    async def preload(self) -> None:
        """Do what needs no executor: load the tokenizer if an option names it, else import its library."""
        named = self._config.tokenizer
        if self._config.skip_tokenizer_init:
            return
        if named is None:
            await _in_thread(preload)
        else:
            self.tokenizer = await _in_thread(lambda: load_tokenizer(named, required=True, chats=self._chats))

    async def open(
        self,
        served: ServedModel,
        current: Callable[[], ModelDescription],
        *,
        restore: Callable[[RequestBuilder], Awaitable[None]] | None = None,
    ) -> None:
        """Load the tokenizer of the current model and accept calls; raises TokenizerError.

        From then on the front follows each change of the model. `restore` is called once, before calls are accepted.
        """
        loaded: ModelDescription | None = None
        while True:
            model, number = current(), served.number
            if loaded is None or (loaded.tokenizer, loaded.fingerprint) != (model.tokenizer, model.fingerprint):
                tokenizer, loaded = await self._load(model), model
            if tokenizer is not None:
                tokenizer.check_fits(model.vocab_size)
            if served.number == number and restore is not None:
                await restore(self._builder(model, tokenizer, number))
                restore = None
            if served.number == number:
                break
        served.front = self
        self._serve(model, tokenizer, number)

    async def prepare(self, change: ModelChange) -> PreparedModel:
        """Load the tokenizer of a changed model, if it may be another; raises ModelRefusedError."""
        old, tokenizer = self.tokenizer, self.tokenizer
        before, after = change.before, change.after
        try:
            if before.tokenizer != after.tokenizer or not change.same_numerics:
                tokenizer = await self._load(after)
            if tokenizer is not None and (tokenizer is not old or before.vocab_size != after.vocab_size):
                tokenizer.check_fits(after.vocab_size)
        except TokenizerError as exc:
            if not change.same_numerics:
                raise ModelRefusedError(str(exc)) from exc
            _LOG.warning("%s; the present tokenizer is kept, since the weights are the same", exc)
            tokenizer = old
        same_tokens = await _in_thread(partial(_have_same_tokens, old, tokenizer))
        return PreparedModel(same_tokens, check_features, partial(self._serve, after, tokenizer))

    def prepare_limits(self, model: ModelDescription) -> PreparedModel:
        """Keep the tokenizer: executors that serve one model differ in their limits only."""
        return PreparedModel(True, check_features, partial(self._serve, model, self.tokenizer))

    def close(self) -> None:
        """End the tokenizer's threads, and the process that compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _serve(self, model: ModelDescription, tokenizer: Tokenizer | None, number: int) -> None:
        """Check and tokenize new requests for this model; requests of the old one keep its tokenizer."""
        old, self.tokenizer = self.tokenizer, tokenizer
        if old is not None and old is not tokenizer:
            old.retire()
        builder = self._builder(model, tokenizer, number)
        self.max_model_len = builder.max_model_len
        self._front.open(builder)

    def _builder(self, model: ModelDescription, tokenizer: Tokenizer | None, number: int) -> RequestBuilder:
        limit = min(self._config.max_model_len or model.max_model_len, model.max_model_len)
        return RequestBuilder(
            model, tokenizer, max_model_len=limit, model_number=number, grammars=self._grammar_door(model, tokenizer)
        )

    def _grammar_door(self, model: ModelDescription, tokenizer: Tokenizer | None) -> GrammarDoor | None:
        """Return what compiles grammars for a model's tokens: the same as before while they are the same.

        A file may be replaced under its path: the executor's engine changes with it.
        """
        source = None
        if tokenizer is not None and model.grammar_engine:
            source = table_source(tokenizer.source, model.vocab_size, model.eos_token_ids)
        if (source, model.grammar_engine) == self._grammars_of:
            return self._grammars
        if self._grammars is not None:
            self._grammars.close()
        self._grammars_of = source, model.grammar_engine
        self._grammars = None
        if source is not None:
            self._grammars = GrammarDoor(source, max_waiting_requests=self._config.max_queued_requests)
        return self._grammars

    async def _load(self, model: ModelDescription) -> Tokenizer | None:
        """Load the tokenizer that the model names, unless an option says otherwise; raises TokenizerError."""
        if self._config.skip_tokenizer_init or self._config.tokenizer is not None:
            return self.tokenizer
        return await _in_thread(lambda: load_tokenizer(model.tokenizer, chats=self._chats))


def _have_same_tokens(old: Tokenizer | None, new: Tokenizer | None) -> bool:
    """Whether token ids mean the same, as far as tokenizers show it; takes 0.6 s for 150,000 tokens."""
    return old is None or new is None or old is new or old.has_same_tokens(new)


def _in_thread(work: Callable[[], _T]) -> asyncio.Future[_T]:
    """Run blocking work in a daemon thread (the interpreter would wait for asyncio.to_thread's thread at exit)."""
    result: Future[_T] = Future()

    def run() -> None:
        result.set_running_or_notify_cancel()
        try:
            result.set_result(work())
        except BaseException as exc:
            result.set_exception(exc)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return asyncio.wrap_future(result)


def check_features(spec: RequestSpec, model: ModelDescription) -> None:
    """Raise PreconditionError for what this executor lacks: it would refuse every plan that holds the request."""
    sampling = spec.sampling
    for name, number in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if number is not None and number > model.max_logprobs:
            raise PreconditionError(PATH + name, f"the executor returns at most {model.max_logprobs}, not {number}")
    if sampling.num_prompt_logprobs is not None and not model.gives_prompt_logprobs:
        raise PreconditionError(PATH + "prompt_logprobs", "the executor gives no prompt logprobs")
    if spec.beams is not None and not (model.gives_candidates and model.can_copy):
        raise PreconditionError(PATH + "beam_width", "the executor can do no beam search")
    if spec.beams is None and spec.num_samples > 1 and not (model.can_fork and model.can_copy):
        raise PreconditionError(PATH + "n", "the executor cannot share a prompt's KV blocks among samples")
    if spec.adapter_index and not model.max_loras:
        raise PreconditionError("adapter", NO_ADAPTERS.message)
    if sampling.grammar is not None and sampling.grammar.engine != model.grammar_engine:
        raise PreconditionError(PATH + "grammar", "the executor follows no grammars, or not those of this one's tokens")
    if not model.has_logits_processors:
        for edit in sampling.edits():
            name = _FIELDS.get(edit, edit)
            raise PreconditionError(PATH + name, f"the executor has no {name}")
