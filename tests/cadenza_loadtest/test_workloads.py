"""Synthetic workloads: lazy, dependent on the seed alone, and with the requested mixture."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.workloads.mixes import Algorithm, parse_mix, parse_tenants
from cadenza_loadtest.workloads.workloads import KINDS, WorkloadSpec, make_workload
from tests.helpers.loadtest.specs import make_spec

COUNT = 10_000


def shapes(count: int | None = COUNT, seed: int = 1, **options: object) -> list[RequestShape]:
    return list(make_workload(make_spec(**options)).shapes(count, seed))


def within(share: float, count: int) -> float:
    """Four standard deviations of a share of `count`."""
    return 4 * math.sqrt(share * (1 - share) / count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**64), few=st.integers(1, 40))
def test_the_seed_decides_however_many_are_requested(kind: str, seed: int, few: int) -> None:
    options = {"workload": kind, "mix": "n=2:0.3", "tenants": "a,b", "adapters": "zipf:5"}
    many = shapes(200, seed, **options)
    short = shapes(few, seed, **options)
    assert short == many[: len(short)]
    endless = make_workload(make_spec(**options)).shapes(None, seed)
    assert list(itertools.islice(endless, len(many))) == many
    assert [each.index for each in many] == list(range(len(many)))
    assert shapes(200, seed + 1, **options) != many


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_made_as_they_are_requested(kind: str) -> None:
    requests = make_workload(make_spec(workload=kind)).shapes(10**12, 0)
    assert iter(requests) is requests
    assert len(list(itertools.islice(requests, 5000))) == 5000


def test_random_is_the_default_with_the_projects_usual_lengths() -> None:
    found = shapes()
    prompts, outputs = np.array([(s.num_prompt_tokens, s.num_output_tokens) for s in found]).T
    assert (prompts.min(), prompts.max()) == (16, 256)
    assert (outputs.min(), outputs.max()) == (8, 256)
    assert prompts.mean() == pytest.approx(136, abs=4 * prompts.std() / 100)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 4 / 100
    plain = RequestShape(7, int(prompts[7]), int(outputs[7]))
    assert found[7] == plain, "nothing else is set"


@pytest.mark.slow
def test_a_change_of_outputs_leaves_prompts_and_labels_alone() -> None:
    one = shapes(workload="long-short", tenants="a,b")
    two = shapes(workload="long-short", tenants="a,b", output_len="5")
    assert [(s.num_prompt_tokens, s.kind, s.tenant) for s in one] == [
        (s.num_prompt_tokens, s.kind, s.tenant) for s in two
    ]
    assert {s.num_output_tokens for s in two} == {5}


def test_sharegpt_has_the_published_means() -> None:
    found = shapes(workload="sharegpt")
    for values, mean in zip(
        np.array([(s.num_prompt_tokens, s.num_output_tokens) for s in found]).T, (161.31, 337.99), strict=True
    ):
        assert values.mean() == pytest.approx(mean, abs=4 * values.std() / math.sqrt(COUNT))
    assert max(s.num_prompt_tokens + s.num_output_tokens for s in found) <= 2048


def test_long_short() -> None:
    found = shapes(workload="long-short", input_len="10", long_len="uniform:500:600", long_share=0.25)
    long = [s for s in found if s.kind == "long"]
    assert len(long) / COUNT == pytest.approx(0.25, abs=within(0.25, COUNT))
    assert all(500 <= s.num_prompt_tokens <= 600 for s in long)
    assert {s.num_prompt_tokens for s in found if s.kind == "short"} == {10}


def test_shared_prefixes() -> None:
    found = shapes(
        workload="shared-prefix", num_prefixes=5, prefix_len="uniform:50:90", prefix_share=0.8, input_len="7"
    )
    with_prefix = [s for s in found if s.prefix >= 0]
    assert len(with_prefix) / COUNT == pytest.approx(0.8, abs=within(0.8, COUNT))
    lengths = defaultdict(set)
    for s in with_prefix:
        lengths[s.prefix].add(s.num_prefix_tokens)
        assert s.num_prompt_tokens == s.num_prefix_tokens + 7
    assert sorted(lengths) == [0, 1, 2, 3, 4]
    assert all(len(of_one) == 1 and 50 <= min(of_one) <= 90 for of_one in lengths.values())
    assert {(s.num_prompt_tokens, s.num_prefix_tokens) for s in found if s.prefix < 0} == {(7, 0)}
    assert stats.chisquare(list(Counter(s.prefix for s in with_prefix).values())).pvalue > 0.001


def test_skewed_prefixes_follow_zipf() -> None:
    found = shapes(workload="shared-prefix", num_prefixes=4, prefix_skew=1.0)
    counts = np.bincount([s.prefix for s in found])
    assert stats.chisquare(counts, COUNT * np.array([12, 6, 4, 3]) / 25).pvalue > 0.001


def test_sessions() -> None:
    found = shapes(2000, workload="multi-turn", num_turns="uniform:1:4", think_s=2.0, tenants="a,b", mix="n=2:0.5")
    sessions = [list(turns) for _, turns in itertools.groupby(found, lambda s: s.session)]
    assert [turns[0].session for turns in sessions] == list(range(2000)), "turns of one session follow each other"
    assert all([s.turn for s in turns] == list(range(len(turns))) for turns in sessions)
    assert stats.chisquare(list(Counter(map(len, sessions)).values())).pvalue > 0.001
    assert set(map(len, sessions)) == {1, 2, 3, 4}
    assert all(len({(s.tenant, s.n, s.kind) for s in turns}) == 1 for turns in sessions)
    assert all(turns[0].think_s == 0 for turns in sessions)
    pauses = [s.think_s for s in found if s.turn > 0]
    assert stats.kstest(pauses, "expon", args=(0, 2.0)).pvalue > 0.01


def test_sessions_without_pauses() -> None:
    assert {s.think_s for s in shapes(20, workload="multi-turn", think_s=0)} == {0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_over_the_total(kind: str) -> None:
    cut, whole = (shapes(500, workload=kind, max_total_len=limit) for limit in (100, None))
    totals: Counter[object] = Counter()
    for s in cut:
        totals[s.session if s.session >= 0 else -1 - s.index] += s.num_prompt_tokens + s.num_output_tokens
        assert s.num_output_tokens >= 1
        assert s.num_prefix_tokens <= s.num_prompt_tokens <= 99
    assert max(totals.values()) == 100 if kind != "multi-turn" else max(totals.values()) <= 100
    assert [s.index for s in cut] == list(range(len(cut)))
    if kind == "multi-turn":
        assert len(totals) == 500, "each session keeps its first turn"
        firsts = {s.session: s for s in whole if s.turn == 0}
        kept = {s.session: s for s in cut if s.turn == 0}
        assert all(kept[session].num_prompt_tokens == firsts[session].num_prompt_tokens for session in kept)
    else:
        small = [(a, b) for a, b in zip(whole, cut, strict=True) if a.num_prompt_tokens + a.num_output_tokens <= 100]
        assert all(a == b for a, b in small), "what fits is left alone"


def test_mix_and_tenants() -> None:
    found = shapes(mix="n=4:0.2,beam=3:0.1", tenants="a:3,b:1")
    kinds = Counter((s.kind, s.n, s.beam_width) for s in found)
    expected = {("n=4", 4, 0): 0.2, ("beam=3", 1, 3): 0.1, ("n=1", 1, 0): 0.7}
    assert kinds.keys() == expected.keys()
    assert (
        stats.chisquare([kinds[key] for key in expected], [COUNT * share for share in expected.values()]).pvalue > 0.001
    )
    tenants = Counter(s.tenant for s in found)
    assert tenants["a"] / COUNT == pytest.approx(0.75, abs=within(0.75, COUNT))
    assert tenants.keys() == {"a", "b"}
    table = [[sum(s.kind == kind and s.tenant == tenant for s in found) for kind in ("n=4", "n=1")] for tenant in "ab"]
    assert stats.chi2_contingency(table).pvalue > 0.001, "one does not depend on the other"


def test_a_mix_adds_to_the_kind() -> None:
    kinds = {s.kind for s in shapes(workload="long-short", mix="n=4:0.5")}
    assert kinds == {"long n=4", "long n=1", "short n=4", "short n=1"}


def test_parse_mix_and_tenants() -> None:
    assert parse_mix("") is None
    assert parse_tenants(" ") is None
    mix = parse_mix(" n=1:0.5 , beam=2:0.5")
    assert mix is not None
    assert (mix.values, mix.shares) == ((Algorithm(), Algorithm(beam_width=2)), (0.5, 0.5))
    tenants = parse_tenants("a, b,org:team:2")
    assert tenants is not None
    assert (tenants.values, tenants.shares) == (("a", "b", "org:team"), (0.25, 0.25, 0.5))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n=4", "'n=4' has no share; a mix looks like n=4:0.2,beam=4:0.1"),
        ("m=4:0.1", "'m=4' is neither n=NUMBER nor beam=WIDTH"),
        ("n=x:0.1", "'n=x' is neither"),
        ("n=0:0.1", "n=0: must be 1 or more"),
        ("beam=1:0.1", "beam=1: must be 2 or more"),
        ("n=4:x", "the share in 'n=4:x' must be a number, not 'x'"),
        ("n=4:0", "must be over 0"),
        ("n=4:nan", "must be over 0"),
        ("n=4:0.8,n=2:0.4", "the shares sum to 1.2, over 1"),
        ("n=4:0.2,n=4:0.1", "n=4 is given twice"),
        ("n=1:0.2,n=4:0.1", "with n=1 among them they must sum to 1"),
        ("n=4:0.2,", "'' has no share"),
    ],
)
def test_bad_mixes(text: str, problem: str) -> None:
    with pytest.raises(LoadTestError) as caught:
        parse_mix(text)
    assert str(caught.value).startswith(f"--mix {text}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [(":3", "has no name"), ("a,,b", "has no name"), ("a:1,a:2", "a is given twice"), ("a:0", "over 0"),
     ("a:x", "must be a number, not 'x'")],
)  # fmt: skip
def test_bad_tenants(text: str, problem: str) -> None:
    with pytest.raises(LoadTestError, match="--tenants") as caught:
        parse_tenants(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize("kind", [*KINDS, "requests.jsonl"])
def test_a_spec_goes_into_json_and_back(kind: str) -> None:
    spec = make_spec(kind=kind, output_len="9", mix="n=2:0.5", tenants="a", max_total_len=300)
    for each in (spec, spec.resolved()):
        assert WorkloadSpec.model_validate_json(each.model_dump_json()) == each
        assert WorkloadSpec.model_validate(json.loads(json.dumps(each.model_dump()))) == each
    assert spec.kind == spec.workload == kind
    assert spec.from_file == (kind == "requests.jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resolved_spec_says_all_and_makes_the_same(kind: str) -> None:
    spec = make_spec(workload=kind)
    said = spec.resolved()
    assert said.input_len
    assert said.output_len
    assert said.resolved() == said
    assert list(make_workload(said).shapes(50, 3)) == list(make_workload(spec).shapes(50, 3))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"input_len": "uniform:5"}, "--input-len: uniform:5: uniform takes LOW and HIGH"),
        ({"mix": "n=4"}, "--mix: 'n=4' has no share"),
        ({"tenants": "a:0"}, "--tenants: the weight in 'a:0' must be over 0, not 0"),
        (
            {"workload": "shared-prefix", "num_prefixes": 0},
            "--num-prefixes: Input should be greater than or equal to 1, not 0",
        ),
        ({"workload": "shared-prefix", "prefix_share": 1.5}, "--prefix-share: Input should be less than or equal to 1"),
        ({"workload": "multi-turn", "think_s": -1}, "--think-s: "),
        ({"workload": "multi-turn", "num_turns": "0"}, "--num-turns: 0: "),
        ({"max_total_len": 1}, "--max-total-len: "),
        ({"num_turns": "3"}, "--num-turns is for --workload multi-turn, not for random"),
        (
            {"workload": "sharegpt", "long_share": 0.5},
            "--long-share is for --workload long-short, not for sharegpt",
        ),
        ({"workload": "a.jsonl", "input_len": "5"}, "--input-len is for --workload random or sharegpt or"),
        ({"wrkload": "random"}, "--wrkload: Extra inputs are not permitted"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], problem: str) -> None:
    with pytest.raises(LoadTestError) as caught:
        make_spec(**options)
    assert problem in str(caught.value)


def test_a_workload_that_is_neither_kind_nor_file() -> None:
    with pytest.raises(LoadTestError, match=r"--workload randm: must be one of random, .*no such file"):
        make_workload(make_spec(workload="randm"))


@pytest.mark.parametrize("kind", ["random", "multi-turn"])
def test_counts_and_seeds_are_checked_before_the_first_request(kind: str) -> None:
    workload = make_workload(make_spec(workload=kind))
    with pytest.raises(LoadTestError, match="--num-requests 0: must be 1 or more"):
        workload.shapes(0, 1)
    with pytest.raises(LoadTestError, match="--seed -1"):
        workload.shapes(1, -1)
