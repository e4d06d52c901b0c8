"""Held-out exactness of the demo model with plain transformers: `python models/eval_demo.py [--json FILE]`.

An answer counts only when the greedy continuation equals the expected text and ends by EOS. Every question is
asked twice: as bare text and through the chat template.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import demo_tasks as tasks
import demo_world as world
import torch
from demo_split import CLASSIC_QUESTIONS, is_heldout_pair, is_heldout_range
from demo_tasks import Turn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = Path(__file__).resolve().parent / "cadenza-demo"
FORMS = ("raw", "chat")
_CLASSIC_TOPICS = ("weather", "time", "book")


@dataclass(frozen=True, slots=True)
class Case:
    """One held-out question and the category of the report that it belongs to."""

    category: str
    turn: Turn


def heldout_pairs() -> list[tuple[int, int]]:
    """Return all ordered operand pairs that training never shows."""
    operands = range(tasks.MAX_OPERAND + 1)
    return [(left, right) for left in operands for right in operands if is_heldout_pair(left, right)]


def question_cases(per_topic: int, seed: int) -> list[Case]:
    """Return held-out wordings, `per_topic` generated ones of each topic and language, and the hand-written ones."""
    return [
        Case(f"questions, {item.source}, {item.language}", item.turn)
        for item in world.heldout_questions(per_topic, seed)
    ]


def arithmetic_cases(num_pairs: int | None, seed: int) -> list[Case]:
    """Return sums and differences, bare and worded, of held-out ordered pairs (all of them when None)."""
    rng = random.Random(seed)
    pairs = heldout_pairs()
    if num_pairs is not None:
        pairs = rng.sample(pairs, num_pairs)
    cases = []
    for left, right in pairs:
        for operator in "+-":
            for bare in (True, False):
                turn = tasks.arithmetic(left, right, operator, rng, bare)
                cases.append(Case(f"{turn.kind}, {'bare' if bare else 'worded'}", turn))
    return cases


def other_cases(count: int, seed: int) -> list[Case]:
    """Return held-out counting ranges and fresh random phrases to repeat."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        first = rng.randint(0, tasks.MAX_OPERAND - 1)
        last = min(tasks.MAX_OPERAND, first + rng.randint(1, tasks.MAX_COUNT_SPAN))
        if is_heldout_range(first, last):
            cases.append(Case("counting", tasks.counting(first, last, rng.choice(world.LANGUAGES), rng)))
    cases += [Case("repeating", tasks.repeating(rng.choice(world.LANGUAGES), rng)) for _ in range(count)]
    return cases


def classic_cases() -> list[Case]:
    """Return the three questions of the classic batching example (they are part of training)."""
    return [
        Case("classic three", Turn("question", prompt, world.answer(topic, "zh")))
        for prompt, topic in zip(CLASSIC_QUESTIONS, _CLASSIC_TOPICS, strict=True)
    ]


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, form: str) -> list[int]:
    """Return the prompt's ids as bare text (BOS added by the tokenizer) or as a chat with one user message."""
    if form == "raw":
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], batch_size: int = 64
) -> list[tuple[str, int, bool]]:
    """Continue greedily in left-padded batches; return (text, tokens without EOS, ended by EOS) in prompt order."""
    results: list[tuple[str, int, bool]] = [("", 0, False)] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [prompts[index] for index in chosen]}, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**batch, max_new_tokens=256, do_sample=False)
        for index, row in zip(chosen, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in row
            ids = row[: row.index(tokenizer.eos_token_id)] if ended else row
            results[index] = (tokenizer.decode(ids), len(ids), ended)
    return results


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: list[Case], form: str
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return {category: (exact answers, questions)} and one line for every failure."""
    prompts = [render_prompt(tokenizer, case.turn.prompt, form) for case in cases]
    # Categories differ a lot in answer length, so that batches across them would mostly wait.
    answers: list[tuple[str, int, bool]] = [("", 0, False)] * len(cases)
    by_category: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by_category[case.category].append(index)
    scores: dict[str, tuple[int, int]] = {}
    failures: list[str] = []
    for category, indices in by_category.items():
        for index, result in zip(indices, generate(model, tokenizer, [prompts[i] for i in indices]), strict=True):
            answers[index] = result
        exact = 0
        for index in indices:
            text, _, ended = answers[index]
            if ended and text == cases[index].turn.answer:
                exact += 1
            else:
                failures.append(f"{category}: {cases[index].turn.prompt!r} -> {text!r}")
        scores[category] = (exact, len(indices))
    return scores, failures


def load(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, unmodified, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def main() -> None:
    """Print a table of exactness for both number formats and both prompt forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, default=None, help="write the scores to this file")
    parser.add_argument("--per-topic", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=None, help="ordered held-out pairs to evaluate (default: all)")
    parser.add_argument("--others", type=int, default=40, help="counts and phrases to evaluate")
    parser.add_argument("--show", type=int, default=20, help="failures to print per table")
    given = parser.parse_args()
    torch.set_num_threads(2)
    cases = classic_cases() + question_cases(given.per_topic, seed=7)
    cases += arithmetic_cases(given.pairs, seed=8) + other_cases(given.others, seed=9)
    report: dict[str, dict[str, list[int]]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model, tokenizer = load(given.model, dtype)
        for form in FORMS:
            scores, failures = evaluate(model, tokenizer, cases, form)
            report[f"{name} {form}"] = {category: list(score) for category, score in scores.items()}
            print(f"--- {name}, {form}")
            for category, (exact, asked) in scores.items():
                print(f"{category:32} {exact:5} / {asked:5}  {100 * exact / asked:6.2f} %")
            print(*failures[: given.show], sep="\n", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
