"""The fields of each API, in one table for each: OpenAI's, vLLM's beside them, and ours."""

from __future__ import annotations

from gateway_svc.fields.field import Field, accepted, by_name, honoured, refused

_NO_EFFECT = "for records of the caller; nothing is kept here"
_TRUSTED = "Jinja in place of the model's; the scheduler needs --trust-request-chat-template"
_NO_MEDIA = "the model reads and writes text alone"

_OF_CALLERS: tuple[Field, ...] = (
    honoured("model", "a string", "the served model or one of its names, or a LoRA adapter; default: the served model"),
    accepted("user", "a string", _NO_EFFECT),
    accepted("metadata", "an object", _NO_EFFECT),
    accepted("safety_identifier", "a string", _NO_EFFECT),
    accepted("prompt_cache_key", "a string", "a hint for routers; prefixes are found by their tokens"),
    accepted("prompt_cache_retention", "a string", "a hint; cached prefixes go when their place is needed"),
    accepted("store", "a boolean", "nothing is kept here; responses say store: false"),
    refused("service_tier", "there is one", "vLLM ignores it", ("auto", "default")),
)
"""What concerns the caller more than the model."""

_EXTENSIONS: tuple[Field, ...] = (
    accepted("session_id", "a string", "a hint for routers: the scheduler places requests by their prefixes"),
    refused("vllm_xargs", "there are no extensions", "for plugins", ({},)),
    refused("kv_transfer_params", "prefill and decode are not split", "for connectors", ({},)),
    refused("ec_transfer_params", "there are no encoders", "for connectors", ({},)),
    refused("watermarking", "there is none", "marks the output", (False,)),
    refused("mm_payload", _NO_MEDIA, "for its render paths", ("tensors", "none")),
    refused("return_mm_kwargs", _NO_MEDIA, "an old name of mm_payload", (True, False)),
)
"""vLLM's, on all paths that generate."""

_SAMPLING: tuple[Field, ...] = (
    honoured("temperature", "a number", "0 is greedy; default: the model's, else 1"),
    honoured("top_p", "a number", "default: the model's, else 1"),
    honoured("n", "an integer", "1 to 64, and 1 with greedy sampling; with use_beam_search, beams"),
    honoured("seed", "an integer", "64 bits, with a sign or without; absent or -1: drawn"),
    honoured("stop", "a string or a list of strings", "at most 128, each of 1 to 256 characters"),
    honoured("presence_penalty", "a number", "-2 to 2"),
    honoured("frequency_penalty", "a number", "-2 to 2"),
    honoured("logit_bias", "an object", "-100 to 100 by token id; at most 2,048"),
    honoured("stream", "a boolean", "server-sent events, `data: [DONE]` at the end"),
    honoured("stream_options", "an object", "include_usage and continuous_usage_stats"),
)

_VLLM_SAMPLING: tuple[Field, ...] = (
    honoured("top_k", "an integer", "-1 or 0: all; default: the model's, else all"),
    honoured("min_p", "a number", "0 to 1; default: the model's, else 0"),
    honoured("top_n_sigma", "a number", "standard deviations below the highest logit; 0: off", "unknown there"),
    honoured("repetition_penalty", "a number", "over 0; default: the model's, else 1"),
    honoured("length_penalty", "a number", "with use_beam_search"),
    honoured("early_stopping", "any", "with use_beam_search: true, false or never", "not on completions and chat"),
    honoured("use_beam_search", "a boolean", "n beams; nothing is streamed before their end", "beams of its own front"),
    honoured("stop_token_ids", "a list of integers", "at most 1,024"),
    honoured("include_stop_str_in_output", "a boolean", "default false"),
    honoured("ignore_eos", "a boolean", "default false"),
    honoured("min_tokens", "an integer", "no end before so many"),
    honoured("skip_special_tokens", "a boolean", "default true"),
    honoured("truncate_prompt_tokens", "an integer", "last tokens of the prompt to keep; -1: what the model takes"),
    honoured("prompt_logprobs", "an integer", "in each choice as prompt_logprobs; not with stream"),
    honoured("allowed_token_ids", "a list of integers", "only these are chosen"),
    honoured("bad_words", "a list of strings", "at most 128"),
    honoured("return_token_ids", "a boolean", "prompt_token_ids and token_ids beside the text"),
    honoured("return_tokens_as_token_ids", "a boolean", "tokens of logprobs as token_id:7"),
    honoured("priority", "an integer", "smaller goes first under --order priority"),
    honoured("request_id", "a string", "in the id of the answer; at most 128 characters", "also the id in the engine"),
    honoured("cache_salt", "a string", "only requests with the same salt share cached prefixes"),
    refused("spaces_between_special_tokens", "texts have none but the tokenizer's own", "honoured", (True,)),
    honoured("structured_outputs", "an object", "json, regex, choice, grammar, json_object or structural_tag"),
    refused("logits_processors", "no code of callers runs here", "refused unless allowed at start"),
    refused("logprob_token_ids", "logprobs are those of the best tokens", "honoured", ([],)),
    refused("return_token_offsets", "texts have no offsets of tokens but those of logprobs", "honoured", (False,)),
    refused("truncation_side", "the last tokens are kept", "honoured", ("left",)),
    refused("stream_interval", "events are written as tokens come", "honoured", (1,)),
    refused("routed_experts_prompt_start", "the experts of a token are not reported", "honoured", (0,)),
    refused("repetition_detection", "there is none", "ends repeating outputs"),
    refused("thinking_token_budget", "thoughts have no limit of their own", "honoured with a reasoning parser"),
    refused("guided_json", "an old name of structured_outputs.json", "removed"),
    refused("guided_regex", "an old name of structured_outputs.regex", "removed"),
    refused("guided_choice", "an old name of structured_outputs.choice", "removed"),
    refused("guided_grammar", "an old name of structured_outputs.grammar", "removed"),
)

_FORMAT = honoured(
    "response_format",
    "an object",
    "text, json_object, json_schema (always strict; a schema may stand beside type, as in llama.cpp, or be value, as "
    "in TGI, whose regex is there too), structural_tag",
)

COMPLETIONS = by_name(
    _OF_CALLERS,
    (
        honoured("prompt", "a string or a list", "a text, a list of texts, token ids, or lists of token ids"),
        honoured("max_tokens", "an integer", "default 16; 0 with echo: the prompt alone"),
        honoured("best_of", "an integer", "samples drawn, of which the n most likely are returned; not with stream"),
        honoured("echo", "a boolean", "the prompt before the output, its logprobs with logprobs"),
        honoured(
            "logprobs",
            "an integer",
            "top logprobs of each token beside the chosen one's; text_offset is where its text begins, or that of the "
            "character that it is a part of",
            "at most 20",
        ),
        honoured("add_special_tokens", "a boolean", "default true"),
        refused("suffix", "the model does not fill gaps", "refused too", ("",)),
        refused("prompt_embeds", "prompts are texts and token ids", "with an option at start"),
        _FORMAT,
    ),
    _SAMPLING,
    _VLLM_SAMPLING,
    _EXTENSIONS,
)

CHAT = by_name(
    _OF_CALLERS,
    (
        honoured(
            "messages",
            "a list",
            "role, content (a text or text parts), name, tool_calls, tool_call_id, reasoning_content or reasoning; "
            "refusal, annotations, provider_specific_fields, thinking_blocks and cache_control have no effect",
        ),
        honoured("max_tokens", "an integer", "the old name of max_completion_tokens"),
        honoured("max_completion_tokens", "an integer", "default: as many as fit"),
        honoured("logprobs", "a boolean", "of each token, with top_logprobs"),
        honoured("top_logprobs", "an integer", "needs logprobs", "at most 20"),
        honoured("echo", "a boolean", "begin with the last message if it is the assistant's"),
        honoured("add_generation_prompt", "a boolean", "default true"),
        honoured("continue_final_message", "a boolean", "needs add_generation_prompt=false"),
        refused("add_special_tokens", "the template writes them", "honoured", (False,)),
        honoured("tools", "a list", "functions; strict holds their arguments to the schema", "strict has no effect"),
        honoured(
            "tool_choice",
            "a string or an object",
            "none (tools are not in the prompt), auto, required, a function, or allowed_tools",
            "no allowed_tools; with none, tools are in the prompt",
        ),
        honoured("parallel_tool_calls", "a boolean", "false: one call at most"),
        refused("functions", "an old name of tools", "refused too", ([],)),
        refused("function_call", "an old name of tool_choice", "refused too", ("none", "auto")),
        honoured("documents", "a list", "objects, for templates that know them"),
        honoured("chat_template", "a string", _TRUSTED, "honoured if trusted at start"),
        honoured("chat_template_kwargs", "an object", "arguments of the template, such as enable_thinking"),
        honoured(
            "reasoning_effort", "a string", "an argument of the template; none and low to max say whether it thinks too"
        ),
        honoured("include_reasoning", "a boolean", "false: the thought is left out of the answer"),
        refused("verbosity", "the model has no such setting", "ignored", ("medium",)),
        refused("modalities", _NO_MEDIA, "ignored", (["text"],)),
        refused("audio", _NO_MEDIA, "ignored"),
        refused("media_io_kwargs", _NO_MEDIA, "for media", ({},)),
        refused("mm_processor_kwargs", _NO_MEDIA, "for media", ({},)),
        refused("prediction", "drafts are the server's own", "ignored"),
        refused("web_search_options", "there is no search", "ignored"),
        refused(
            "return_prompt_text", "the prompt is given as token ids alone, by return_token_ids", "honoured", (False,)
        ),
        _FORMAT,
    ),
    _SAMPLING,
    _VLLM_SAMPLING,
    _EXTENSIONS,
)

RESPONSES = by_name(
    _OF_CALLERS,
    (
        honoured(
            "input",
            "a string or a list",
            "a text, or items: message with text parts, reasoning, function_call, custom_tool_call, and their outputs",
        ),
        honoured("instructions", "a string", "a system message before the input"),
        honoured("max_output_tokens", "an integer", "default: as many as fit"),
        honoured("temperature", "a number", "default 1"),
        honoured("top_p", "a number", "default 1"),
        honoured("stream", "a boolean", "events response.created to response.completed"),
        honoured("top_logprobs", "an integer", "with include message.output_text.logprobs"),
        honoured(
            "include",
            "a list of strings",
            "message.output_text.logprobs; reasoning.encrypted_content, which brings the thought back",
            "encrypted_content has no effect",
        ),
        honoured("stream_options", "an object", "include_obfuscation: false alone, as chunks are not padded"),
        honoured("metadata", "an object of strings", "repeated in the answer; nothing is kept here"),
        accepted("client_metadata", "an object of strings", _NO_EFFECT),
        honoured("user", "a string", "repeated in the answer"),
        honoured("safety_identifier", "a string", "repeated in the answer"),
        honoured("prompt_cache_key", "a string", "repeated in the answer; prefixes are found by their tokens"),
        refused("background", "nothing is kept here", "with store", (False,)),
        refused("previous_response_id", "nothing is kept here", "with store"),
        refused("conversation", "nothing is kept here", "refused too"),
        refused("prompt", "there are no stored prompts", "ignored"),
        honoured(
            "tools", "a list", "functions, flat, strict if they say so; custom; namespace", "also tools of its own"
        ),
        honoured("tool_choice", "a string or an object", "none, auto, required, a function, or allowed_tools"),
        honoured("parallel_tool_calls", "a boolean", "false: one call at most"),
        refused("max_tool_calls", "no tools are called here", "honoured"),
        honoured("text", "an object", "format: text, json_object, json_schema; no verbosity but medium"),
        honoured("reasoning", "an object", "effort, as reasoning_effort of chats; thoughts are items, without summary"),
        honoured("truncation", "a string", "auto: of a prompt that is too long the last tokens are kept; or disabled"),
        honoured("priority", "an integer", "smaller goes first under --order priority"),
        honoured("request_id", "a string", "in the id of the answer"),
        honoured("cache_salt", "a string", "only requests with the same salt share cached prefixes"),
        honoured("top_k", "an integer", "-1 or 0: all"),
        honoured("min_p", "a number", "0 to 1; default: the model's, else 0"),
        honoured("seed", "an integer", "64 bits, with a sign or without; absent or -1: drawn"),
        honoured("stop", "a string or a list of strings", "as on chat"),
        honoured("stop_token_ids", "a list of integers", "at most 1,024"),
        honoured("structured_outputs", "an object", "as on chat; not with text.format"),
        refused("media_io_kwargs", _NO_MEDIA, "for media", ({},)),
        refused("mm_processor_kwargs", _NO_MEDIA, "for media", ({},)),
        honoured("chat_template_kwargs", "an object", "arguments of the template, such as enable_thinking"),
        honoured("include_reasoning", "a boolean", "false: the thought is left out of the answer"),
        refused("enable_response_messages", "the prompt's text is not given", "honoured", (False,)),
        refused("previous_input_messages", "give them in input", "for one family of models"),
        honoured("repetition_penalty", "a number", "over 0; default: the model's, else 1"),
        honoured("presence_penalty", "a number", "-2 to 2"),
        honoured("frequency_penalty", "a number", "-2 to 2"),
        honoured("ignore_eos", "a boolean", "default false"),
        honoured("min_tokens", "an integer", "no end before so many"),
        honoured("logit_bias", "an object", "-100 to 100 by token id"),
        honoured("skip_special_tokens", "a boolean", "default true"),
        honoured("include_stop_str_in_output", "a boolean", "default false"),
    ),
    _EXTENSIONS,
)

MESSAGES = by_name(
    (
        honoured("model", "a string", "the served model or one of its names, or a LoRA adapter"),
        honoured(
            "messages",
            "a list",
            "role user, assistant or system; content is a text, or blocks: text, tool_use, tool_result, thinking; "
            "redacted_thinking is left out",
        ),
        honoured("system", "a string or a list", "a text or text blocks"),
        honoured("max_tokens", "an integer", "required"),
        honoured("stop_sequences", "a list of strings", "stop_reason stop_sequence"),
        honoured("stream", "a boolean", "events message_start to message_stop"),
        honoured("temperature", "a number", "0 is greedy; default 1"),
        honoured("top_p", "a number", "default 1"),
        honoured("top_k", "an integer", "default: all"),
        accepted("metadata", "an object", _NO_EFFECT),
        accepted("cache_control", "an object", "prefixes are cached by themselves"),
        refused("service_tier", "there is one", "ignored", ("auto", "standard_only")),
        honoured("tools", "a list", "name, description, input_schema, strict; of the caller's own", "no strict"),
        honoured("tool_choice", "an object", "auto, any, tool or none, and disable_parallel_tool_use"),
        honoured(
            "thinking",
            "an object",
            "enabled or adaptive: thinking blocks; for the template enable_thinking, thinking, reasoning, "
            "thinking_mode, and thinking_budget with budget_tokens, which is no limit of its own",
        ),
        refused("container", "there are none", "ignored"),
        refused("mcp_servers", "no tools are called here", "ignored", ([],)),
        honoured(
            "context_management", "an object", "edits that change nothing: of thoughts, with keep: all", "ignored"
        ),
        honoured("output_config", "an object", "format: json_schema; effort, an argument of the template"),
        honoured("output_format", "an object", "an old name of output_config.format"),
        refused("inference_geo", "the model runs where it runs", "ignored"),
        refused("speed", "there is one", "ignored", ("standard",)),
        honoured("cache_salt", "a string", "only requests with the same salt share cached prefixes"),
        honoured("chat_template_kwargs", "an object", "arguments of the template, such as enable_thinking"),
    ),
    _EXTENSIONS,
)

COUNT_TOKENS = by_name(
    tuple(MESSAGES[name] for name in ("model", "messages", "system", "cache_control", "tools", "tool_choice")),
    (
        MESSAGES["thinking"],
        MESSAGES["mcp_servers"],
        MESSAGES["chat_template_kwargs"],
        MESSAGES["context_management"],
        honoured("output_config", "an object", "effort; format is no part of the prompt"),
        accepted("output_format", "an object", "it is no part of the prompt"),
    ),
)

INPUT_TOKENS = by_name(
    tuple(
        RESPONSES[name]
        for name in (
            "model input instructions tools tool_choice parallel_tool_calls reasoning chat_template_kwargs "
            "conversation previous_response_id"
        ).split()
    ),
    (
        accepted("text", "an object", "it is no part of the prompt"),
        accepted("truncation", "a string", "the whole prompt is counted"),
    ),
)

TOKENIZE = by_name(
    (
        honoured("model", "a string", "as on chat"),
        honoured("prompt", "a string", "a text; or messages"),
        honoured("messages", "a list", "a chat, with the model's template"),
        honoured("add_special_tokens", "a boolean", "of a text; default true"),
        honoured("add_generation_prompt", "a boolean", "of a chat; default true"),
        honoured("continue_final_message", "a boolean", "of a chat; needs add_generation_prompt=false"),
        honoured("return_token_strs", "a boolean", "the text of each token, as token_strs"),
        honoured("tools", "a list", "of a chat"),
        honoured("chat_template", "a string", _TRUSTED, "honoured if trusted at start"),
        honoured("chat_template_kwargs", "an object", "of a chat: arguments of the template"),
        refused("mm_processor_kwargs", _NO_MEDIA, "for media", ({},)),
        refused("media_io_kwargs", _NO_MEDIA, "for media", ({},)),
    ),
)

DETOKENIZE = by_name(
    (
        honoured("model", "a string", "as on chat"),
        honoured("tokens", "a list of integers", "token ids"),
    ),
)

LOAD_ADAPTER = by_name(
    (
        honoured("lora_name", "a string", "the name that requests give as model"),
        honoured("lora_path", "a string", "its folder, where the executors run"),
        refused("load_inplace", "unload it first: a name is one adapter", "honoured", (False,)),
        accepted("base_model_name", "a string", "there is one"),
    ),
)

UNLOAD_ADAPTER = by_name(
    (
        honoured("lora_name", "a string", "its name"),
        accepted("lora_int_id", "an integer", "adapters have names here"),
    ),
)

_OF_CHATS = {"prompt": "messages", "logprobs": "top_logprobs"}
RENAMED = {
    "/v1/completions": {"grammar": "structured_outputs"},
    "/v1/chat/completions": {**_OF_CHATS, "grammar": "structured_outputs"},
    "/v1/responses": {
        "prompt": "input",
        "messages": "input",
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "truncate_prompt_tokens": "truncation",
        "grammar": "text",
    },
    "/v1/responses/input_tokens": {"prompt": "input", "messages": "input"},
    "/v1/messages": {"prompt": "messages", "stop": "stop_sequences", "grammar": "output_config"},
    "/v1/messages/count_tokens": {"prompt": "messages"},
    "/detokenize": {"token_ids": "tokens"},
    "/v1/load_lora_adapter": {"name": "lora_name", "path": "lora_path"},
    "/v1/unload_lora_adapter": {"name": "lora_name"},
}
"""By path: the name there of what has another one on the wire, besides `adapter`, which is `model`."""

APIS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": INPUT_TOKENS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/load_lora_adapter": LOAD_ADAPTER,
    "/v1/unload_lora_adapter": UNLOAD_ADAPTER,
}
"""The table of each path."""

REQUIRED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/responses/input_tokens": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/detokenize": ("tokens",),
    "/v1/load_lora_adapter": ("lora_name", "lora_path"),
    "/v1/unload_lora_adapter": ("lora_name",),
}
"""By path: the fields without which there is no request."""
