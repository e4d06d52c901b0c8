"""Offline use: both services as child processes, with the interface of vLLM's `LLM`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from cadenza.adapters import Adapters, lora_requests
from cadenza.calls.reconnect import checked_timeout
from cadenza.calls.short_interrupts import shorten_interrupts
from cadenza.chats import JsonObjects, chat_options
from cadenza.client import Client
from cadenza.info import ModelInfo, ServerInfo
from cadenza.outputs import RequestOutput
from cadenza.prompts import (
    CallOptions,
    Messages,
    Params,
    Prompt,
    Prompts,
    match_params,
    parse_chats,
    parse_prompts,
)
from cadenza.sampling_params import SamplingParams
from cadenza_launcher.llm_options import LLMOptions
from cadenza_launcher.local import LocalServices, log_line
from cadenza_launcher.progress.bar import UseTqdm, prompts_bar
from cadenza_launcher.progress.loading import LoadProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
RECONNECT_TIMEOUT_S = 600.0
"""Longer than a client's: the services are known to come back, and the scheduler waits for the executor's model."""


class LLM:
    """A model that is loaded and served on this machine while this object exists.

    `options` are `executors`, the number of executors, and those of the two services: dtype, device, block_size,
    num_gpu_blocks, max_model_len, max_num_seqs, skip_tokenizer_init … (`cadenza up --help` lists them); `config` names
    a TOML file of them. The scheduler listens on `host` and `port` (0: any free one), for other clients too.
    `use_tqdm_on_load`, named as in vLLM, shows on stderr that the services start; their logs go to the loggers
    `cadenza.executor` and `cadenza.scheduler`.

    Raises OptionError for an unknown or invalid option before anything starts, and LocalServiceError with the service's
    own message when one does not start, or not within `start_timeout_s`. A service that dies later is started again.
    After five deaths of the scheduler, or of each executor, without progress in between, the calls in progress and all
    later ones raise LocalServiceError: a script does not hang. Until then a call waits for a scheduler that is started
    again, for up to `reconnect_timeout_s` seconds without an answer, and its prompts go on or start anew. Use it with
    `with`, or call `close`; otherwise the services end when the object is collected or the program ends. Stopped
    services have `stop_grace_s` seconds to end before they are killed. `token` is this program's own, if the option
    `tenants` names a file.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        use_tqdm_on_load: bool = True,
        config: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        start_timeout_s: float = 1800.0,
        stop_grace_s: float = 10.0,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        token: str | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        shorten_interrupts()
        checked_timeout(reconnect_timeout_s)
        with LoadProgress(str(model), shown=use_tqdm_on_load) as progress:

            def on_log(service: str, line: str) -> None:
                progress.log(service, line)
                log_line(service, line)

            self._services = LocalServices(
                model,
                config=config,
                host=host,
                port=port,
                start_timeout_s=start_timeout_s,
                stop_grace_s=stop_grace_s,
                on_log=on_log,
                on_start=progress.start,
                **options,
            )
        self._client = Client(
            self._services.target,
            token=token,
            reconnect_timeout_s=reconnect_timeout_s,
            tls=self._services.tls or False,
        )
        self._tokenizer: PreTrainedTokenizerBase | None = None
        services = self._services  # not self, which must be collected as soon as nobody refers to it
        self._client._expect_server(lambda: services.failure is not None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running calls and stop both services; a second call does nothing."""
        self._client.close()
        self._services.close()

    @property
    def target(self) -> str:
        """`HOST:PORT` of the scheduler, for other clients on this machine."""
        return self._services.target

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, without a chat template; returns a list in the order of prompts.

        Prompts are a str, {"prompt": str}, a list of token ids, {"prompt_token_ids": [...]}, or a list of these; one
        SamplingParams for all or a list with one for each. `use_tqdm` shows a progress bar on stderr; it may also be a
        callable that makes one from the arguments of `tqdm`. `lora_request`: one of vLLM's LoRARequests for all
        prompts, or a list with one, or None, for each; the adapter of a new name is loaded from its `lora_path`, if
        that is below the option `lora_root`. The rest is as in `AsyncClient.generate`.
        """
        options = CallOptions(enable_prefix_caching, speculation, self._adapter(adapter, lora_request))
        return self._run(parse_prompts(prompts), sampling_params, use_tqdm, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: JsonObjects = None,
        documents: JsonObjects = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many with the model's chat template; always returns a list.

        `use_tqdm` and `lora_request` are those of `generate`, and positional as in vLLM; the rest is as in
        `AsyncClient.chat`.
        """
        rendering = chat_options(
            add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs, chat_template
        )
        chats = parse_chats(messages, rendering)
        options = CallOptions(enable_prefix_caching, speculation, self._adapter(adapter, lora_request))
        return self._run(chats, sampling_params, use_tqdm, options)

    def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: JsonObjects = None,
        documents: JsonObjects = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a text, with the model's special tokens if requested, or of a chat with its template applied."""
        return self._guarded(
            lambda: self._client.tokenize(
                prompt,
                add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
            )
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `get_tokenizer().encode`, without loading that. vLLM's `encode` gives embeddings.

        Raises TypeError for prompts in vLLM's other forms: a model that generates has no embeddings to give.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode takes a str and gives its token ids, not {type(text).__name__}: no embeddings")
        return self.tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self._guarded(lambda: self._client.detokenize(token_ids, skip_special_tokens))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer as transformers has it, loaded from what the scheduler uses; the same at each call.

        It encodes and decodes in this program. Raises FailedPreconditionError if the model has none.
        """
        if self._tokenizer is None:
            # Imported here: it takes seconds, and most programs send texts.
            from transformers import AutoTokenizer

            with tempfile.TemporaryDirectory(prefix="cadenza-tokenizer-") as folder:
                for name, content in self._guarded(self._client._tokenizer_files).items():
                    Path(folder, Path(name).name).write_bytes(content)
                self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return self._tokenizer

    def model_info(self) -> ModelInfo:
        """Describe the model."""
        return self._guarded(self._client.model_info)

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of calls without any: what the model's files suggest, for the rest the defaults."""
        return SamplingParams(**self.model_info().default_sampling)  # type: ignore[arg-type]

    def server_info(self) -> ServerInfo:
        """Describe the scheduler: its options, load and executor."""
        return self._guarded(self._client.server_info)

    def _run(
        self, prompts: list[Prompt], sampling_params: Params, use_tqdm: UseTqdm, options: CallOptions
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = match_params(sampling_params, len(prompts))  # a wrong argument shows no bar
        with prompts_bar(len(prompts), use_tqdm, self._count_output_tokens) as on_output:
            return self._guarded(lambda: self._client._run(prompts, params, options, on_output))

    def _adapter(self, adapter: Adapters, lora_request: Adapters) -> Adapters:
        """The adapters of a call; a LoRARequest with a new name is loaded. Raises ValueError if both are given."""
        if lora_request is None:
            return adapter
        if adapter is not None:
            raise ValueError("give an adapter or a lora_request, not both")
        names, wanted = lora_requests(lora_request)
        known = {each.name for each in self._guarded(self._client.adapters)} if wanted else set()
        for name, path in wanted.items():
            if name not in known:
                self._guarded(partial(self._client.load_adapter, name, os.path.abspath(path)))
        return names

    def _count_output_tokens(self) -> int:
        return self._client.server_info().load.num_output_tokens

    def _guarded(self, call: Callable[[], T]) -> T:
        """Run a call; if a service was given up, raise its error in place of the lost connection's."""
        with self._services.naming_failure():
            return call()
