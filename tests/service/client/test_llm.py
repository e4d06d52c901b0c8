"""LLM as a vLLM user calls it: positions, results, progress bar, and what it refuses."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from cadenza import LLM, InvalidRequestError, SamplingParams
from cadenza.async_client import AsyncClient
from tests.checkpoints import make_llama

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "ab"}]
FEW = SamplingParams(max_tokens=4, ignore_eos=True)
RATES = r"est\. speed input: [\d.]+ toks/s, output: [\d.]+ toks/s\]"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    with LLM(model, num_threads=1, num_gpu_blocks=64, max_model_len=64) as llm:
        yield llm


def test_drafts_change_no_token(llm, tmp_path_factory):
    """The option as LLM takes it; off for a call, on for another."""
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    expected = llm.generate([[5, 6, 7] * 4], params)[0].outputs[0].token_ids
    model = make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    with LLM(
        model, num_threads=1, num_gpu_blocks=64, max_model_len=64, speculative="suffix", num_speculative_tokens=3
    ) as drafting:
        for most in (None, None, 0, 1):
            (output,) = drafting.generate([[5, 6, 7] * 4], params, speculation=most)
            assert output.outputs[0].token_ids == expected
        # What the first request got is what the second one's drafts are.
        (executor,) = drafting.server_info().executors
        assert executor.num_accepted_drafts > 20


def last_picture(shown: str) -> str:
    """What a bar leaves on the screen: it draws over its line, and ends it."""
    assert shown.endswith("\n")
    return shown.rstrip("\n").rpartition("\r")[2].rstrip()


def test_positions_are_those_of_vllm(llm, capsys):
    """The calls stand in vLLM's documentation; chat takes use_tqdm and lora_request by position, generate by name."""
    assert len(llm.generate(["a", "b"], FEW, use_tqdm=False, lora_request=None)) == 2
    assert len(llm.generate(prompts="a", sampling_params=[FEW])) == 1
    capsys.readouterr()
    (output,) = llm.chat(CHAT, FEW, False, None)
    assert len(output.outputs[0].token_ids) == 4
    (output,) = llm.chat([CHAT], FEW, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt_token_ids == llm.tokenize(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert capsys.readouterr().err == ""


def test_the_tokenizer_as_vllm_gives_it(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    for text in ("ab", "Grüße <|user|>", ""):
        ids = llm.tokenize(text)
        assert tokenizer.encode(text) == llm.encode(text) == ids
        assert tokenizer.decode(ids) == llm.detokenize(ids, skip_special_tokens=False)
    with pytest.raises(TypeError, match="gives its token ids, not list: no embeddings"):
        llm.encode(["a", "b"])
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode(rendered, add_special_tokens=False) == llm.tokenize(CHAT)


@pytest.mark.parametrize("name", ["tokenize", "detokenize", "model_info", "server_info", "generate", "chat"])
def test_shared_parameters_have_the_names_and_defaults_of_the_clients(name):
    ours = dict(inspect.signature(getattr(LLM, name)).parameters)
    theirs = dict(inspect.signature(getattr(AsyncClient, name)).parameters)
    if name in ("generate", "chat"):
        assert (ours.pop("use_tqdm").default, ours.pop("lora_request").default) == (True, None)
        assert (
            ours.pop("sampling_params").default is theirs.pop("params").default is None
        )  # vLLM's name, and a short one
    assert {key: each.default for key, each in ours.items()} == {key: each.default for key, each in theirs.items()}


def test_a_bar_counts_prompts_and_shows_rates(llm, capsys):
    llm.generate(["a", [5, 6, 7], "c"], FEW)
    shown = last_picture(capsys.readouterr().err)
    assert re.fullmatch(rf"Processed prompts: 100%\|█+\| 3/3 \[.*it/s, {RATES}", shown), shown
    assert "output: 0.00" not in shown
    llm.chat([CHAT, CHAT], FEW)
    assert " 2/2 " in last_picture(capsys.readouterr().err)


def test_a_bar_of_the_callers_own(llm, capsys):
    llm.generate("a", FEW, use_tqdm=functools.partial(tqdm, desc="mine", disable=True))
    assert capsys.readouterr().err == ""
    bars = []

    def make(**options):
        bars.append(tqdm(**options))
        return bars[0]

    llm.chat([CHAT, CHAT], FEW, make)
    (bar,) = bars
    assert (bar.n, bar.total, bar.desc) == (2, 2, "Processed prompts")
    assert re.fullmatch(RATES, bar.postfix + "]")


def test_rates_count_every_sample(llm):
    """Of one prompt with three samples, the input is counted three times, as in vLLM."""
    bars = []

    def make(**options):
        bars.append(tqdm(**options))
        return bars[0]

    llm.generate([[5, 6, 7, 8]], SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1), use_tqdm=make)
    speed_in, speed_out = map(float, re.findall(r"[\d.]+(?= toks)", bars[0].postfix))
    assert speed_in == speed_out > 0


def test_a_failure_leaves_the_bar_and_is_raised(llm, capsys):
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.generate([[5], [299999], [6]], FEW)
    assert " 3/3 " in last_picture(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("a", FEW, lora_request=object()),
            r"^lora_request must be a name of 1 to 128 characters, or a LoRARequest, not <object ",
        ),
        (lambda llm: llm.chat(CHAT, FEW, True, object()), r"^lora_request must be a name "),
        (lambda llm: llm.generate([]), "at least one"),
        (lambda llm: llm.chat([{"role": "user"}]), "^message 0: content is missing"),
        (lambda llm: llm.generate("a", FEW, speculation=65), "^speculation must be 0 "),
        (lambda llm: llm.chat(CHAT, FEW, speculation=True), "^speculation must be 0 "),
        (lambda llm: llm.generate(["a"], [FEW, FEW]), "2 SamplingParams for 1 prompts"),
    ],
)
def test_wrong_arguments_show_no_bar(llm, capsys, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert capsys.readouterr().err == ""
