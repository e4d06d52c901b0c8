"""Options of the two services as keyword arguments, for editors and type checkers.

Made by docs/generate_options.py from the services' configurations: change those, then `make docs`.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class LLMOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`; None counts as not given."""

    http: str | None
    """cadenza: PORT or HOST:PORT: serve OpenAI's and Anthropic's HTTP APIs there too, by a third process, the gateway;
    0: any free port; default: none, and 8000 with --page. A port alone is of the same address as --port;
    docs/openai.md. gateway: HOST:PORT to listen on for HTTP, or the port alone; port 0 takes any free one; default:
    127.0.0.1:8000, and none with --kserve, --vllm-grpc or --kv-events-endpoint without --page."""

    kserve: str | None
    """cadenza: PORT or HOST:PORT, as --http: the gateway also serves gRPC clients of KServe v2 and of Triton Inference
    Server there; docs/integrations.md. gateway: HOST:PORT to listen on for gRPC clients of KServe v2 and Triton
    Inference Server, or the port alone; docs/integrations.md."""

    vllm_grpc: str | None
    """cadenza: PORT or HOST:PORT, as --http: the gateway also serves routers that speak vLLM's engine protocol there,
    such as SMG; docs/integrations.md. gateway: HOST:PORT to listen on for routers that speak vLLM's engine protocol,
    such as SMG, or the port alone; docs/integrations.md."""

    page_demo: bool | None
    """With --page: its button may kill an executor, to show that the streams go on; docs/page.md. [default: off]"""

    executors: int | None
    """Executors of the one scheduler, each a process with the model. Each has a GPU of its own, or the cores and the
    memory divided by their number; each has --num-gpu-blocks blocks. [default: 1]"""

    max_executors: int | None
    """With --distributed-executor-backend ray: the most executors. There are more than --executors while requests are
    more than three quarters of what the executors can run at once, or wait; docs/ray.md."""

    scale_up_after_s: float | None
    """With --max-executors: how long there must be more requests than fit before an executor is added. [default:
    5.0]"""

    scale_down_after_s: float | None
    """With --max-executors: how long fewer executors must do before one is drained and taken away. [default: 120.0]"""

    models_dir: str | None
    """Folder whose models are served behind one door: its folders with a config.json, its GGUF files and those of its
    folders, each by its name; `cadenza up` alone; docs/several-models.md."""

    models_memory: float | None
    """Of several models: memory for those that are loaded at once; default: what is free at start. On a GPU
    --models-max counts."""

    models_max: int | None
    """Of several models: the most that are loaded at once; default: on a GPU 1, else as many as the memory holds."""

    unload_after: float | None
    """Of several models: one without a request for so long is unloaded; default: never, but when another one needs its
    memory."""

    load_timeout_s: float | None
    """Of several models: how long a request waits for its model, before it ends with 503. [default: 600.0]"""

    log_format: Literal["text", "json"] | None
    """Lines of text, or one JSON object a line with the ids that the line is about; docs/tracing.md. [default: text]"""

    otlp_traces_endpoint: str | None
    """OTLP/gRPC URL of an OpenTelemetry collector, such as http://127.0.0.1:4317, that gets a trace of each request;
    default: none. Needs the extra otel; docs/tracing.md."""

    metrics_port: int | None
    """Serve Prometheus metrics at http://METRICS_HOST:PORT/metrics; 0: any free port, which is logged. `cadenza up`:
    that of the scheduler; executors have the next ones. docs/metrics.md."""

    metrics_token_file: str | None
    """File with a bearer token that a scraper must send; it is read again for each scrape."""

    metrics_insecure: bool | None
    """Let other machines read the metrics without a token, as on a network of containers alone. [default: off]"""

    metrics_host: str | None
    """Address to serve metrics on; beyond loopback it needs --metrics-token-file or --metrics-insecure. [default:
    127.0.0.1]"""

    insecure: bool | None
    """executor: Let other machines reach the service without credentials; without it, an address beyond loopback needs
    TLS and proof of who the clients are; docs/security.md. [default: off] scheduler: Let other machines reach the
    service without credentials; without it, an address beyond loopback needs TLS and proof of who the clients are;
    docs/security.md. [default: off] gateway: Let other machines reach the gateway without TLS, and send API keys to the
    scheduler of another machine without TLS; docs/security.md. [default: off]"""

    tls_cert: str | None
    """PEM file of the certificate chain that the service shows; read again when it changes."""

    tls_key: str | None
    """PEM file of the key of --tls-cert; read again when it changes."""

    tls_client_ca: str | None
    """PEM file of CA certificates: clients must show a certificate that one of them has signed; read again when it
    changes."""

    max_connections: int | None
    """Connections of all peers together; further ones are closed at once. [default: 2000]"""

    max_connections_per_peer: int | None
    """executor: Connections of one address; further ones are closed within a second, on Linux. Give more behind a
    proxy. [default: 500] scheduler: Connections of one address; further ones are closed within a second, on Linux. Give
    more behind a proxy. [default: 500] gateway: Connections of one address to each listener; further ones are closed at
    once, those of gRPC within a second, on Linux. Give more behind a proxy. [default: 500]"""

    simulate: str | None
    """Simulate the model: steps take no time (instant), or the time that a JSON file of step costs gives;
    docs/simulated.md. Values: instant, COSTS.json."""

    simulate_vocab_size: int | None
    """Number of token ids of the simulated model; a config.json in the folder of --model overrides it. [default:
    32768]"""

    simulate_eos_token_id: int | None
    """Token id that ends outputs of the simulated model; a config.json in the folder of --model overrides it."""

    simulate_kv_groups: str | None
    """KV groups of the simulated model, joined by commas: the positions that a row reads, or full, and the pages of a
    block; --num-gpu-blocks then counts pages. Values: full:1,1024:5."""

    simulate_state_pages: int | None
    """Pages of the recurrent state of each sequence of the simulated model; 0: it has none. --num-gpu-blocks then
    counts pages. [default: 0]"""

    inject: str | None
    """Only for tests, with --simulate or a model on the CPU: faults of this process, joined by commas, each in its step
    of this number; die only with --simulate; docs/simulated.md. Values: hang@STEP[:SECONDS], oom@STEP,
    device-error@STEP, non-finite@STEP[:SLOT], die@TOKEN:POSITION."""

    few_bits_products: Literal["by-rows", "measured"] | None
    """How a GPU multiplies weights in few bits with 17 to 256 rows in fast mode; by-rows: as was best on an H100;
    measured: the start times every way for each shape on the GPU at hand, some seconds, and takes the fastest that is
    right (docs/quantization.md). [default: by-rows]"""

    attention_backend: Literal["auto", "triton", "gluon"] | None
    """Kernel of prompts' attention on a GPU; gluon: one for compute capability 9.0 alone that copies, multiplies and
    computes weights at once, and that no GPU has run; auto: triton (docs/gpu.md). [default: auto]"""

    kernel_cache: str | None
    """Folder that keeps a GPU's compiled kernels and what the start found out about them, so that the next start on
    such a GPU compiles and compares nothing; default: kernels in ~/.cache/cadenza, or below XDG_CACHE_HOME
    (docs/gpu.md)."""

    kernel_checks: Literal["on", "report", "off"] | None
    """Whether the first start on a GPU compares the model's kernels with a reference; on: what is wrong is computed in
    another way, and without one the start ends with an error; report: what is wrong is logged and computed all the
    same, what does not run is computed in another way; off: nothing is compared (docs/gpu.md). [default: on]"""

    skinny_gemms: Literal["off", "auto", "on"] | None
    """On a GPU, decodes of 1 to 16 rows of plain models in 16 bits by Cadenza's own products, with norms, rotations,
    activations and sums fused into them; auto: in those sizes in which the start finds them right, and faster; on: in
    all. Not in exact mode, and not with adapters, ranks or a cache in fp8 (docs/gpu.md). [default: off]"""

    pdl: Literal["off", "auto"] | None
    """On a GPU of compute capability 9.0 or later, let kernels of --skinny-gemms begin before the ones before them end,
    and fetch weights meanwhile (programmatic dependent launch); auto: if the start finds the same bits so, and less
    time (docs/gpu.md). [default: off]"""

    device: Literal["auto", "cpu", "cuda"] | None
    """Device that runs the model; auto: a GPU if PyTorch finds one, else the CPU. [default: auto]"""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    """Data type of weights, activations and KV; auto: the checkpoint's data type, but on the CPU float32 for
    activations between products with weights in few bits (docs/quantization.md). half and float are float16 and
    float32, as in vLLM. [default: auto]"""

    numerics: Literal["auto", "exact", "fast"] | None
    """exact: results of a request do not depend on the other requests of its batch, bit by bit; fast: no such
    guarantee; auto: exact on the CPU where the model supports it, fast on a GPU (docs/exactness.md). [default: auto]"""

    quantization: Literal["none", "int8", "int4", "fp8", "fp8_w8a8"] | None
    """Quantizes the weights of a dense checkpoint while it is loaded: int8 and int4 on the CPU, int8 and fp8 on a GPU;
    fp8_w8a8, on a GPU, also activations; docs/quantization.md. [default: none]"""

    quantized_activations: Literal["auto", "off", "int8"] | None
    """For weights in few bits on the CPU: off multiplies activations as they are; int8 quantizes them to 8 bits, by
    groups of 32 columns of a row; auto: int8 for every format but fp8. [default: auto]"""

    expert_weights: Literal["memory", "mapped"] | None
    """Where the weights of a mixture's experts are on the CPU: in memory, prepared for the kernels; or mapped from
    their files, of which the system keeps in memory what there is room for and reads the rest as experts are chosen.
    Slower, for models larger than the memory (docs/models.md). [default: memory]"""

    save_quantized: str | None
    """With --quantization int8 or int4 on the CPU: a new folder, to which the quantized model is saved as a checkpoint
    of compressed-tensors."""

    load_format: Literal["auto", "safetensors", "dummy"] | None
    """Source of the weights; auto: safetensors files; dummy: random weights, only config.json is read. [default:
    auto]"""

    generation_config: Literal["auto", "none"] | None
    """auto: requests over HTTP, chats and `cadenza generate` that do not say otherwise sample with the temperature,
    top_p, top_k, min_p, repetition_penalty and max_new_tokens of the model's generation_config.json, or of
    general.sampling in a GGUF file; none: with the defaults of each API. [default: auto]"""

    seed: int | None
    """Seed of dummy weights. [default: 0]"""

    num_threads: int | None
    """Compute threads; default: one for each available core."""

    cpu_isa: Literal["auto", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx"] | None
    """Instruction set of the CPU's kernels; auto: the highest that the processor has. Processors with one instruction
    set, and as many threads, give the same tokens (docs/exactness.md). [default: auto]"""

    block_size: int | None
    """Tokens per KV block: 8, 16, 32 or 64. Values: 8, 16, 32, 64. [default: 16]"""

    num_gpu_blocks: int | None
    """KV blocks in device memory (on the CPU: in main memory), each of all layers; layers with a window share this
    memory as they need it. Default: as many as gpu_memory_utilization allows."""

    num_cpu_blocks: int | None
    """KV blocks in host memory, for swapping. [default: 0]"""

    disable_hybrid_kv_cache_manager: bool | None
    """Layers with a window keep the KV of all positions, in the same blocks as the others, and not in a KV group of
    their own that keeps those of the window alone. Tokens are the same. [default: off]"""

    kv_cache_dtype: Literal["auto", "model", "fp8"] | None
    """Data type of KV blocks; model: the model's data type; fp8: e4m3, on a GPU of compute capability 9.0 or later,
    with the checkpoint's scales if it has any; auto: fp8 on such a GPU if the checkpoint specifies it, else the model's
    data type. [default: auto]"""

    gpu_memory_utilization: float | None
    """Share of the device's memory for weights, steps and KV; default: 0.9 of a GPU's memory, 0.5 of the free memory on
    the CPU."""

    max_model_len: int | None
    """executor: Maximum tokens of a sequence, prompt and output together; default: the model's own limit. scheduler:
    Maximum tokens of a sequence, prompt and output together; default: the executor's limit."""

    max_num_seqs: int | None
    """executor: Maximum sequences of a step; default on a GPU: 256. [default: 64] scheduler: Maximum sequences in one
    step; default: the executor's limit."""

    max_num_batched_tokens: int | None
    """executor: Maximum tokens of a step, at least max_num_seqs; default on a GPU: 2,048; a default is never less than
    max_num_seqs. [default: 512] scheduler: Token budget of one step; default: the executor's limit."""

    speculative: Literal["off", "ngram", "suffix", "draft", "eagle3", "mtp", "auto"] | None
    """Speculative decoding: where drafts of the next tokens come from; ngram: earlier places of the same text; suffix:
    these and other requests' texts, by frequency; draft: a smaller model; eagle3: a head that reads the model's hidden
    states; mtp: such a head in the model's own checkpoint; auto: suffix, else the smaller model or head if there is
    one, on a GPU that alone, with as many drafts as pay. Off by default on a GPU, with --simulate, and for models with
    recurrent layers. Tokens are the same with each of them (docs/speculation.md). [default: auto]"""

    speculative_model: str | None
    """With --speculative draft, eagle3 or auto: folder, GGUF file or hub id of a smaller model with the same
    vocabulary, or of an EAGLE-3 head that was trained for the model."""

    num_speculative_tokens: int | None
    """With --speculative: the most drafts of a sequence in one step. [default: 5]"""

    tensor_parallel_size: int | None
    """Number of ranks that the model is divided among: processes that each hold a part of every layer; docs/ranks.md.
    [default: 1]"""

    distributed_executor_backend: Literal["mp", "external", "ray"] | None
    """How the ranks start. mp: this process, rank 0, starts the others on this machine. external: something else starts
    each, on one machine or several, with the same options and the variables of torchrun (RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or of a LeaderWorkerSet. ray: Ray starts them, and whole executors too,
    on the machines of its cluster (docs/ray.md). [default: mp]"""

    rank_port: int | None
    """With external: the port of MASTER_ADDR at which rank 0 listens for the others; default: MASTER_PORT + 1, as
    torchrun itself may listen at MASTER_PORT; 50053 without MASTER_PORT."""

    rank_secret_file: str | None
    """With external: a file with the same 16 bytes or more at all ranks, by which they know each other. Beyond loopback
    ranks need it, or --tls-cert, --tls-key and --tls-client-ca, which also encrypt."""

    rank_connect_timeout_s: float | None
    """With external: how long the ranks wait for each other at the start. [default: 600.0]"""

    ray_address: str | None
    """HOST:PORT of the Ray cluster, of which this machine is a node; default: what RAY_ADDRESS names, else the cluster
    that was started here, else one of its own on this machine alone."""

    ray_placement: Literal["auto", "pack", "spread", "strict-pack", "strict-spread"] | None
    """Where Ray places executors. auto: each with all of its ranks on one machine, several on different machines where
    it can; else, on the CPU, each rank by itself, and those of an executor like this. [default: auto]"""

    max_loras: int | None
    """executor: Maximum LoRA adapters in one batch; 0: no adapters. On a GPU there are none unless this is given, as
    the adapters of a batch take memory there. [default: 8] scheduler: Maximum LoRA adapters in one batch; default: the
    executor's limit; 0: no adapters."""

    max_cpu_loras: int | None
    """executor: Maximum LoRA adapters that are loaded, at least max_loras. The default is lowered where so many would
    take over a tenth of the free memory. [default: 64] scheduler: Maximum LoRA adapters that an executor has loaded;
    default: the executor's limit."""

    max_lora_rank: int | None
    """Maximum rank of a LoRA adapter; memory is set aside for so large ones. Tokens do not depend on it. [default:
    64]"""

    lora_root: list[str] | None
    """executor: Folder below which LoRA adapters may be read; several times, or with commas, for several ones; default:
    any that the scheduler names. scheduler: Folder below which LoRA adapters may be loaded while serving; several
    times, or with commas, for several ones; default: none."""

    enforce_eager: bool | None
    """Captures no CUDA graphs on a GPU and launches every kernel of every step: steps are slower, the start is faster,
    and profiles are easier to read. [default: off]"""

    max_inflight_plans: int | None
    """executor: Maximum plans in flight. [default: 4] scheduler: Plans sent ahead of their results. [default: 2]"""

    step_timeout_s: float | None
    """A step that runs for longer ends the process with exit code 4, so that it is started again; 0: never. Give more
    where a step of max_num_batched_tokens may take minutes. [default: 300.0]"""

    drain_timeout_s: float | None
    """executor: How long a service that got SIGTERM goes on: the scheduler with its requests, while it takes no new
    ones; the executor with its running step. 0, SIGINT (Ctrl-C) or a second signal: not at all. [default: 25.0]
    scheduler: How long a service that got SIGTERM goes on: the scheduler with its requests, while it takes no new ones;
    the executor with its running step. 0, SIGINT (Ctrl-C) or a second signal: not at all. [default: 25.0] gateway: How
    long the gateway goes on with its requests after SIGTERM, while it takes no new ones. [default: 25.0]"""

    log_level: Literal["debug", "info", "warning", "error"] | None
    """What is logged to stderr. [default: info]"""

    tokenizer: str | None
    """Folder, GGUF file or hub id of the tokenizer; default: that of the executor's model."""

    skip_tokenizer_init: bool | None
    """Load no tokenizer: prompts and outputs are token ids only. [default: off]"""

    chat_template: str | None
    """Jinja template of chats in place of the tokenizer's: a file, or the template itself."""

    chat_template_content_format: Literal["auto", "string", "parts"] | None
    """How messages give their content to chat templates: as a string, or as a list of parts; auto: for each role as the
    template shows it, found as it is loaded. [default: auto]"""

    trust_request_chat_template: bool | None
    """Let requests bring chat templates of their own: they are rendered in a sandbox, by a process with bounds on
    memory and time; docs/security.md. [default: off]"""

    enable_prefix_caching: bool | None
    """Keep computed KV blocks for later prompts with the same prefix; a request can opt out. [default: on]"""

    watermark: float | None
    """Share of KV blocks kept free when new sequences are admitted. [default: 0.01]"""

    batching: Literal["continuous", "static", "dynamic"] | None
    """When sequences join a batch; continuous: at every step; static: a full batch starts together and runs until all
    have finished; dynamic: as static, but a batch also starts when its window ends. [default: continuous]"""

    batch_size: int | None
    """Requests of a static or dynamic batch. [default: 8]"""

    batch_window_ms: float | None
    """How long a dynamic batch waits for more requests after its first. [default: 50.0]"""

    waiting_served_ratio: float | None
    """Continuous batching holds new requests back until the ratio of waiting to running ones reaches this, for 20 steps
    at most; 0: never. [default: 0.0]"""

    long_prefill_token_threshold: int | None
    """Maximum tokens of one prompt in a step, so that a long prompt leaves budget for others; 0: the whole budget.
    [default: 0]"""

    tenants: str | None
    """TOML file of the tenants: tokens, weights and limits, read again when it changes; every call needs a token then;
    docs/tenants.md. Without it there is one tenant, and no call needs a token."""

    max_queued_requests: int | None
    """Maximum waiting requests; further ones are rejected with RESOURCE_EXHAUSTED. With --tenants each tenant may have
    as many as there are free places: one alone half of these. [default: 1024]"""

    max_resume_grace_s: float | None
    """Longest time for which a request runs on and its results are kept after its stream was lost; a larger
    resume_grace_s of a request counts as this; 0: a lost stream aborts its request. [default: 600.0]"""

    max_kept_results_mb: float | None
    """Memory for results of finished requests that are kept for clients which come back; beyond it the oldest are
    dropped before their resume_grace_s is over. [default: 64.0]"""

    order: Literal["fcfs", "priority", "fair", "sjf"] | None
    """Which request goes first; fcfs: the oldest; priority: the smallest priority, which also preempts larger ones;
    fair: one of the least-served tenant, and the default with --tenants; sjf: the shortest expected output. [default:
    fcfs]"""

    max_wait_s: float | None
    """A request that arrived longer ago goes first in every order; without it, orders other than fcfs may let a request
    wait forever."""

    preemption: Literal["recompute", "swap", "auto"] | None
    """What happens to the KV of a preempted request; recompute: it is computed again; swap: it moves to the host pool,
    if that has free blocks (--num-cpu-blocks); auto: the cheaper one by measured rates. [default: recompute]"""

    placement: Literal["expected-time", "round-robin"] | None
    """Where a request runs, if there are several executors; expected-time: where its first token is expected first, by
    cached prefix, queue, free memory and measured rates; round-robin: each executor in turn. [default:
    expected-time]"""

    allow_fingerprint_change: bool | None
    """Let unfinished requests go on when an executor comes back with another numerics fingerprint, as after a change of
    threads or weights, though their later tokens may differ; otherwise they end with FAILED_PRECONDITION. [default:
    off]"""

    journal: str | None
    """Directory of the journal, created if need be: unfinished requests survive the death of the scheduler and go on
    when it is started again with the same directory; docs/journal.md. One process at a time may use it."""

    journal_damage: Literal["refuse", "set-aside"] | None
    """What is done when the journal is damaged; refuse: the scheduler ends with an error that says how it shows;
    set-aside: its files move to a folder damaged-N of the directory, an error is logged, and the journal begins empty.
    [default: refuse]"""

    restart_grace_s: float | None
    """How long requests restored from the journal wait for their streams to come back before they are aborted.
    [default: 30.0]"""

    lora: list[str] | None
    """NAME=PATH of a LoRA adapter's folder, where the executors run; several times, or with commas, for several ones;
    docs/lora.md."""

    lora_dir: str | None
    """Folder of LoRA adapters, where the executors run: the first request that names NAME loads the adapter in its
    folder NAME."""

    lora_load_timeout_s: float | None
    """How long a request waits for its LoRA adapter's load; then it ends with FAILED_PRECONDITION. [default: 60.0]"""

    record: str | None
    """File to write a plan log to: every call into the scheduler's core, every plan and result, for replay;
    docs/replay.md."""

    log_requests: bool | None
    """Log one line for each request when it ends: its sizes, times and how it ended, never its text. [default: off]"""

    log_stats_interval_s: float | None
    """Time between two log lines of figures while requests run: queues, KV use, tokens/s; 0: none. [default: 10.0]"""

    http_tls_cert: str | None
    """PEM file of the certificate chain that the gateway shows: with it, it serves HTTPS, and gRPC with TLS."""

    http_tls_key: str | None
    """PEM file of the key of --http-tls-cert."""

    kv_events_endpoint: str | None
    """ZeroMQ endpoint to publish KV events at, for routers that send requests to where their prefix is cached:
    tcp://*:5557 listens, tcp://HOST:5557 connects, as vLLM's kv_events_config has it; default: none;
    docs/integrations.md."""

    kv_events_replay_endpoint: str | None
    """ZeroMQ endpoint, such as tcp://*:5558, at which subscribers of --kv-events-endpoint ask for what they have
    missed."""

    kv_events_topic: str | None
    """Topic of published KV events; llm-d expects kv@POD@MODEL."""

    tool_call_parser: (
        Literal["auto", "none"]
        | Literal[
            "hermes",
            "llama3_json",
            "pythonic",
            "mistral",
            "qwen3_coder",
            "apertus",
            "apriel",
            "cohere",
            "command_r",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "firefunction",
            "functiongemma",
            "functionary_v31",
            "functionary_v32",
            "gemma4",
            "gigachat3",
            "glm45",
            "granite",
            "hunyuan",
            "internlm",
            "kimi_k2",
            "kimi_k3",
            "lfm2",
            "longcat",
            "minicpm5",
            "minimax",
            "minimax_m2",
            "minimax_m3",
            "muse",
            "nemotron",
            "olmo3",
            "openai",
            "phi4_mini_json",
            "seed_oss",
            "solar",
        ]
        | None
    )
    """How the model writes tool calls; auto: as its chat template shows; none: tools are refused. [default: auto]"""

    reasoning_parser: (
        Literal["auto", "none"]
        | Literal[
            "deepseek_r1",
            "qwen3",
            "mistral",
            "apertus",
            "apriel",
            "cohere",
            "gemma4",
            "granite",
            "hunyuan",
            "hunyuan_a13b",
            "kimi_k3",
            "minimax_m3",
            "muse",
            "openai_gptoss",
            "seed_oss",
            "solar",
        ]
        | None
    )
    """How the model writes its reasoning, which answers have apart from their content; auto: as its chat template or
    its tokens show; none: it stays in the content. deepseek_r1: every answer begins with it. [default: auto]"""

    served_model_name: list[str] | None
    """Name of the model in the APIs; several times, or with commas, for several ones, of which answers have the first;
    default: the model as the executor names it, and the last part of that."""

    http_api_key_file: str | None
    """File with API keys, one a line: a request needs one of them. It is read again when it changes. With --tenants,
    keys are the tenants' tokens, and this is not needed."""

    http_admin_key_file: str | None
    """File with the key of admins, in one line: for /v1/load_lora_adapter and /v1/unload_lora_adapter, which there are
    with it alone, and with --http-api-key-file for KV events and FlushCache of --vllm-grpc. It is read again when it
    changes."""

    http_token_file: str | None
    """File with the gateway's own token for a scheduler with --tenants. Of a tenant with admin: for the scheduler's
    metrics in /metrics, for adapters and for --kv-events-endpoint. With may_name_tenants: one session to the scheduler
    carries the requests of all keys; else each key has a session of its own."""

    http_cors_origin: list[str] | None
    """Origin whose pages may call the gateway from a browser, such as https://chat.example.org; * is any; several
    times, or with commas, for several ones. Without it, none."""

    http_max_body_mb: float | None
    """Largest body of a request; a larger one is refused with 413. [default: 8.0]"""

    http_max_requests: int | None
    """Requests that are served at a time; further ones get 429. [default: 4096]"""

    http_write_timeout_s: float | None
    """A client that takes nothing of its answer for so long is disconnected, and its request aborted. [default:
    30.0]"""

    http_reconnect_timeout_s: float | None
    """How long requests wait for a scheduler that was lost, before they end with 503. [default: 30.0]"""

    page: bool | None
    """Serve the live page at / too: queues, executors, blocks, the schedule as it runs, and a chat. Its address is
    logged at start; docs/page.md. [default: off]"""

    page_token_file: str | None
    """File with the token of the page, which shows the requests of all clients and kills executors; default: drawn at
    start, and logged with the address."""

    page_host: list[str] | None
    """Name by which browsers may ask for the page, and on loopback without API keys for all paths, as behind a proxy,
    besides addresses, localhost and that of --http; several times, or with commas, for several ones."""
