"""The formats of thoughts: a new one is a row here. What two could read is the first one's."""

from __future__ import annotations

from cadenza_common.call_formats.syntax import ThoughtSyntax

_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|constrain|>")
_KIMI_K3 = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

THOUGHTS: tuple[ThoughtSyntax, ...] = (
    ThoughtSyntax(
        "openai_gptoss",
        "gpt-oss (harmony)",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        repeats=True,
        wrappers=(
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>commentary to=assistant",
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
        ),
        then="<|start|>assistant",
        content=("<|channel|>final<|message|>", ""),
        parts=_HARMONY,
    ),
    ThoughtSyntax("mistral", "Magistral, Ministral", "[THINK]", "[/THINK]"),
    ThoughtSyntax("seed_oss", "Seed-OSS", "<seed:think>", "</seed:think>"),
    ThoughtSyntax("minimax_m3", "MiniMax M3", "<mm:think>", "</mm:think>"),
    ThoughtSyntax("hunyuan", "Hunyuan 3", "<think:opensource>", "</think:opensource>"),
    ThoughtSyntax(
        "cohere",
        "Command R7B, Command A, Cohere 2",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ThoughtSyntax(
        "gemma4",
        "Gemma 4",
        "<|channel>thought",
        "<channel|>",
        repeats=True,
        wrappers=("<|channel>", "<channel|>"),
        parts=("<|channel>", "<channel|>"),
    ),
    ThoughtSyntax(
        "kimi_k3",
        "Kimi K3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        wrappers=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
        content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        parts=_KIMI_K3,
    ),
    ThoughtSyntax(
        "solar",
        "Solar Open",
        "<|think|>",
        "<|end|>",
        wrappers=("<|begin|>assistant", "<|content|>", "<|end|>"),
        then="<|begin|>assistant",
        content=("<|content|>", "<|end|>"),
        parts=("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
    ),
    ThoughtSyntax(
        "muse",
        "Muse",
        " to=self<|message|>",
        "<|eom|>",
        wrappers=(" to=user<|message|>", "<|start|>assistant", "<|eom|>", "<|eot|>"),
        then="<|start|>assistant",
        content=(" to=user<|message|>", ""),
        parts=("<|message|>", "<|eom|>", "<|start|>", "<|eot|>"),
    ),
    ThoughtSyntax("apertus", "Apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ThoughtSyntax("apriel", "Apriel 1.6", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ThoughtSyntax(
        "granite",
        "Granite 3.3",
        "<think>",
        "</think>",
        answer=("<response>", "</response>"),
        hint="<response></response>",
    ),
    ThoughtSyntax(
        "hunyuan_a13b", "Hunyuan A13B", "<think>", "</think>", answer=("<answer>", "</answer>"), hint="<answer>"
    ),
    ThoughtSyntax(
        "qwen3",
        "Qwen 3, GLM, DeepSeek V3.1 to V4, Kimi K2, MiniMax M2, Nemotron, LFM2.5, Hermes and others with think tags",
        "<think>",
        "</think>",
    ),
    ThoughtSyntax("deepseek_r1", "DeepSeek R1: every answer begins with a thought", "<think>", "</think>", always=True),
)
THOUGHTS_BY_NAME = {each.name: each for each in THOUGHTS}
