"""The committed demo model through plain transformers on the CPU: loads, fits, answers, ends, and was split fairly.

These tests pin down what other golden tests build on: if they fail, the checkpoint is wrong, not the server.
"""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.paths import ROOT

MODELS = ROOT / "models"
CHECKPOINT = MODELS / "cadenza-demo"
MAX_FOLDER_BYTES = 12_000_000
MIN_EXACT = 0.95
NUM_TRAINING_SAMPLES = 4000


class Demo(NamedTuple):
    """The checkpoint and the modules that define its world."""

    model: Any
    tokenizer: Any
    evaluation: ModuleType
    data: ModuleType
    split: ModuleType
    world: ModuleType


@pytest.fixture(scope="module")
def demo() -> Demo:
    """Load the checkpoint; models/ is a folder of scripts, so it is on the path for these tests only."""
    sys.path.insert(0, str(MODELS))
    try:
        names = ("eval_demo", "demo_data", "demo_split", "demo_world")
        evaluation, data, split, world = (importlib.import_module(name) for name in names)
    finally:
        sys.path.remove(str(MODELS))
    model, tokenizer = evaluation.load(CHECKPOINT, torch.float32)
    return Demo(model, tokenizer, evaluation, data, split, world)


def exact_share(demo: Demo, cases: list[Any], form: str) -> tuple[float, list[str]]:
    """Return the share of cases answered exactly and ended by EOS, with the failures."""
    scores, failures = demo.evaluation.evaluate(demo.model, demo.tokenizer, cases, form)
    total = sum(count for _, count in scores.values())
    return sum(exact for exact, _ in scores.values()) / total, failures


def test_folder_is_small_and_complete() -> None:
    """The folder lies in git, so it has to stay small."""
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_FOLDER_BYTES
    names = {path.name for path in files}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names


def test_checkpoint_is_a_small_bf16_llama(demo: Demo) -> None:
    """Stored in bfloat16, grouped-query attention, tied embeddings."""
    config = demo.model.config
    assert config.model_type == "llama"
    assert config.dtype == torch.float32  # as requested by load(); the file itself holds bfloat16
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in demo.model.parameters()) < 6_000_000


def test_tokenizer_adds_bos_once(demo: Demo) -> None:
    """Raw text and chats both start with exactly one BOS; digits stand alone and every string survives."""
    tokenizer = demo.tokenizer
    for form in demo.evaluation.FORMS:
        ids = demo.evaluation.render_prompt(tokenizer, "12+34=", form)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.tokenize("2026") == list("2026")
    for text in ("你好，今天的天气怎么样？", "龘 😀 naïve\n\ttabs  and spaces "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_chat_template_matches_training(demo: Demo) -> None:
    """The rendering that training used is the template's, with a system message and a history."""
    tasks = importlib.import_module("demo_tasks")
    turns = (tasks.Turn("question", "Hello!", "Hi."), tasks.Turn("question", "1+1=", "2"))
    conversation = demo.data.Conversation(turns, raw=False, system="Be kind and clear.")
    trained, weights = demo.data.Renderer(demo.tokenizer.backend_tokenizer).render(conversation)
    messages = [{"role": "system", "content": "Be kind and clear."}]
    for turn in turns:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False)
    assert demo.tokenizer(text, add_special_tokens=False)["input_ids"] == trained
    assert len(weights) == len(trained)
    opened = demo.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opened)


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_classic_questions(demo: Demo, form: str) -> None:
    """The three questions of the classic batching example, in one left-padded batch."""
    share, failures = exact_share(demo, demo.evaluation.classic_cases(), form)
    assert share == 1.0, failures


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["raw", "chat"])
def test_heldout_wordings(demo: Demo, form: str) -> None:
    """A seeded sample of wordings that training never showed, generated and hand-written."""
    cases = random.Random(5).sample(demo.evaluation.question_cases(4, seed=11), 40)
    share, failures = exact_share(demo, cases, form)
    assert share >= MIN_EXACT, failures


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_heldout_arithmetic(demo: Demo, form: str) -> None:
    """Sums and differences of operand pairs that training never showed in either order."""
    share, failures = exact_share(demo, demo.evaluation.arithmetic_cases(30, seed=12), form)
    assert share >= MIN_EXACT, failures


@pytest.mark.long
def test_long_story_ends_by_itself(demo: Demo) -> None:
    """Answers reach towards 200 tokens and still end by EOS, beside short ones in the same batch."""
    prompts = ["Tell me a long story about a fox.", "讲一个长故事，关于小猫的。", "12+34="]
    ids = [demo.evaluation.render_prompt(demo.tokenizer, prompt, "raw") for prompt in prompts]
    results = demo.evaluation.generate(demo.model, demo.tokenizer, ids)
    assert all(ended for _, _, ended in results)
    assert 60 <= results[0][1] <= 220
    assert results[2] == ("40+6=46", 7, True)


def test_chat_uses_history(demo: Demo) -> None:
    """A name given in an earlier turn is remembered."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Lucy."},
        {"role": "assistant", "content": "Nice to meet you, Lucy!"},
        {"role": "user", "content": "What is my name?"},
    ]
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = demo.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert demo.evaluation.generate(demo.model, demo.tokenizer, [ids])[0][0] == "Your name is Lucy."


def test_training_data_exclude_what_is_held_out(demo: Demo) -> None:
    """Sampled training conversations contain no held-out wording (by letters alone) and no held-out operand pair."""
    heldout = {demo.split.wording_key(item.turn.prompt) for item in demo.world.heldout_questions(20, seed=3)}
    pairs = set(demo.evaluation.heldout_pairs())
    assert len(heldout) > 700
    assert len(pairs) > 400
    assert all((right, left) in pairs for left, right in pairs)
    rng = random.Random(4)
    seen = 0
    for _ in range(NUM_TRAINING_SAMPLES):
        for turn in demo.data.training_conversation(rng).turns:
            if turn.kind == "question":
                assert demo.split.wording_key(turn.prompt) not in heldout, turn
            elif turn.kind in ("addition", "subtraction"):
                assert not pairs & _operand_pairs(turn.prompt), turn
            seen += 1
    assert seen >= NUM_TRAINING_SAMPLES


def _operand_pairs(prompt: str) -> set[tuple[int, int]]:
    digits = "".join(char if char.isdigit() else " " for char in prompt).split()
    left, right = map(int, digits)
    return {(left, right), (right, left)}


def test_every_topic_has_many_training_wordings(demo: Demo) -> None:
    """At least 150 distinct wordings a topic and language, counted without case and punctuation."""
    for language in demo.world.LANGUAGES:
        for topic in demo.world.TOPICS:
            rng = random.Random(6)
            keys = {demo.split.wording_key(demo.world.training_wording(topic, language, rng)) for _ in range(600)}
            assert len(keys) >= 150, (language, topic, len(keys))
