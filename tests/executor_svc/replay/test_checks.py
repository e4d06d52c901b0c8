"""What the executor's replay holds against the log: options like the recorded ones, and every part of a result."""

from __future__ import annotations

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from executor_svc.config import ExecutorConfig
from executor_svc.replay.checks import contradictions, first_difference, numerics_difference, recorded_arguments

RECORDED = pb.DescribeResponse(
    model=pb.ModelGeometry(name="org/name", vocab_size=99, max_model_len=64, dtype="bfloat16"),
    kv=pb.KvGeometry(block_size=8, num_device_blocks=100, num_host_blocks=20),
    limits=pb.ExecutorLimits(num_slots=10, max_num_seqs=5, max_num_batched_tokens=50),
    fingerprint=types_pb2.NumericsFingerprint(mode=types_pb2.NUMERICS_MODE_FAST, num_threads=3, digest=b"d"),
    device="cpu",
)
SIMULATED = pb.DescribeResponse()
SIMULATED.CopyFrom(RECORDED)
SIMULATED.device, SIMULATED.model.name, SIMULATED.model.dtype = "simulated", "simulated", "uint64"


def configured(recorded: pb.DescribeResponse, *given: str) -> ExecutorConfig:
    arguments = [*recorded_arguments(recorded, given), *given]
    return ExecutorConfig(
        **{name.removeprefix("--").replace("-", "_"): value for name, _, value in (a.partition("=") for a in arguments)}
    )


def test_options_are_as_recorded() -> None:
    config = configured(RECORDED)
    assert (config.model, config.block_size, config.num_gpu_blocks, config.num_cpu_blocks) == ("org/name", 8, 100, 20)
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (64, 5, 50)
    assert (config.dtype, config.numerics, config.num_threads, config.simulate) == ("bfloat16", "fast", 3, None)
    assert not list(contradictions(config, RECORDED))


def test_what_is_given_goes_before_what_was_recorded() -> None:
    config = configured(RECORDED, "--model=here", "--num-threads=1", "--block-size=16", "--dtype=float32")
    assert (config.model, config.num_threads, config.dtype) == ("here", 1, "float32")
    assert list(contradictions(config, RECORDED)) == ["--block-size: 16 is not what was recorded, 8"]


def test_blocks_are_what_states_leave() -> None:
    """So many blocks of three pages, and a state of four pages for each of five sequences; a pool of memory's size."""
    recorded = pb.DescribeResponse()
    recorded.CopyFrom(RECORDED)
    recorded.kv.groups.add(pages_per_block=3)
    recorded.kv.state.pages_per_state = 4
    for num_pages, num_blocks in ((3 * 7 + 20, 7), (3 * 7 + 21, 8), (24, 2), (11, 1)):
        recorded.kv.num_device_blocks = num_pages
        assert configured(recorded).num_gpu_blocks == num_blocks
        assert 3 * num_blocks + 20 >= num_pages


def test_options_of_a_simulated_executor_count_pages() -> None:
    recorded = pb.DescribeResponse()
    recorded.CopyFrom(SIMULATED)
    recorded.kv.groups.add(pages_per_block=3)
    recorded.kv.groups.add(window=24, pages_per_block=2)
    recorded.kv.state.pages_per_state = 4
    config = configured(recorded)
    assert (config.num_gpu_blocks, config.num_cpu_blocks) == (100, 20)
    assert (config.simulate_kv_groups, config.simulate_state_pages) == ("full:3,24:2", 4)


def test_a_simulated_executor_stays_one_unless_a_model_is_given() -> None:
    config = configured(SIMULATED)
    assert (config.simulate, config.model, config.simulate_vocab_size) == ("instant", "simulated", 99)
    assert configured(SIMULATED, "--simulate=costs.json").simulate == "costs.json"
    assert configured(SIMULATED, "--model=here").simulate is None
    config = configured(RECORDED, "--simulate=instant")
    assert (config.simulate, config.model, config.simulate_vocab_size) == ("instant", "org/name", 99)


def test_numerics_are_distinguished_by_their_digest() -> None:
    here = pb.DescribeResponse()
    here.CopyFrom(RECORDED)
    here.fingerprint.num_threads = 9
    assert numerics_difference(RECORDED, here) == ""
    here.fingerprint.digest = b"e"
    assert numerics_difference(RECORDED, here) == "num_threads"
    here.fingerprint.num_threads = 3
    assert numerics_difference(RECORDED, here) == "the model's configuration"


def result(**changes: object) -> pb.StepResult:
    columns = types_pb2.LogprobColumns(
        chosen_logprobs=[-0.5], chosen_ranks=[2], num_top=1, top_token_ids=[4], top_logprobs=[-0.25]
    )
    fields = {
        "status": pb.STEP_STATUS_OK, "slots": [1, 2, 3, 5], "num_tokens": [1, 0, 1, 0], "token_ids": [5, 8],
        "error_slots": [2], "errors": [pb.SLOT_ERROR_NON_FINITE_LOGITS],
        "logprobs": [pb.SlotLogprobs(slot=1, start=7, columns=columns)],
        "prompt_logprobs": [pb.SlotLogprobs(slot=3, start=6, columns=columns)],
        "candidates": [pb.SlotCandidates(slot=5, token_ids=[7, 1], logprobs=[-0.25, -0.5])],
        "debug_digest": b"\x01",
    }  # fmt: skip
    return pb.StepResult(**fields | changes)


def test_equal_results() -> None:
    """Times, epoch, and where sampled tokens stand (the log does not know) are no difference."""
    made = result(epoch=9, incarnation=8, timings=pb.StepTimings(total_ns=5))
    made.logprobs[0].start = 0
    assert first_difference(result(), made, exact=True) == ""
    assert first_difference(result(debug_digest=b""), made, exact=True) == ""
    one_each = result(slots=[1, 3], num_tokens=[], error_slots=[], errors=[], candidates=[])
    spelled_out = result(slots=[1, 3], num_tokens=[1, 1], error_slots=[], errors=[], candidates=[])
    assert first_difference(one_each, spelled_out, exact=True) == ""


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"token_ids": [5, 9]}, "slot 3: token ids: recorded [8], now [9]"),
        ({"num_tokens": [0, 0, 2, 0]}, "slot 1: token ids: recorded [5], now []"),
        ({"slots": [1, 2, 4, 5]}, "slot 3: token ids: recorded [8], now none"),
        (
            {"error_slots": [1], "errors": [pb.SLOT_ERROR_NON_FINITE_LOGITS]},
            "slot 1: error: recorded none, now SLOT_ERROR_NON_FINITE_LOGITS",
        ),
        (
            {"candidates": [pb.SlotCandidates(slot=5, token_ids=[1, 7], logprobs=[-0.25, -0.5])]},
            "slot 5: candidates: recorded [7, 1], now [1, 7]",
        ),
        ({"debug_digest": b"\x02"}, "digest of the slots: recorded 01, now 02"),
        (
            {"status": pb.STEP_STATUS_INVALID_PLAN, "error_message": "why"},
            "status: recorded OK, now INVALID_PLAN: why",
        ),
    ],
)
def test_differences(changes: dict[str, object], difference: str) -> None:
    for exact in (True, False):
        assert first_difference(result(), result(**changes), exact=exact) == difference


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"candidates": [pb.SlotCandidates(slot=5, token_ids=[7, 1], logprobs=[-0.25, -0.75])]},
            "slot 5: logprobs of candidates: recorded [-0.25, -0.5], now [-0.25, -0.75]",
        ),
        ({"logprobs": []}, "slot 1: logprobs: recorded [[-0.5], [2], [4], [-0.25]], now none"),
        ({"prompt_logprobs": []}, "slot 3: logprobs of the prompt: recorded [[-0.5], [2], [4], [-0.25]], now none"),
    ],
)
def test_differences_between_equal_numerics_only(changes: dict[str, object], difference: str) -> None:
    assert first_difference(result(), result(**changes), exact=True) == difference
    assert first_difference(result(), result(**changes), exact=False) == ""


def test_a_step_that_failed_must_fail_alike() -> None:
    failed = pb.StepResult(status=pb.STEP_STATUS_FAILED, error_message="it burns")
    assert first_difference(failed, pb.StepResult(status=pb.STEP_STATUS_FAILED), exact=True) == ""
    assert first_difference(failed, result(), exact=True) == "status: recorded FAILED, now OK"
