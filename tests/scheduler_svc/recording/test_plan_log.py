"""The plan log: what is written is read again whole; files that are cut, damaged or something else; a full disk."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from cadenza.v1 import execution_pb2, types_pb2
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import Grammar
from cadenza_common.plan_wire.results import result_from_wire, result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from cadenza_common.serving.plan_log import PlanLogError, PlanLogReader, record_bytes
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, FinishDetail, RequestSpec, SessionEnd
from scheduler_svc.executors.convert import model_description
from scheduler_svc.recording import plan_log, records
from scheduler_svc.recording.plan_log import PlanLogWriter
from scheduler_svc.recording.recorded import executor_message, executor_spec, request_message, request_spec, session_end
from scheduler_svc.replay import __main__ as replay
from scheduler_svc.replay import core_replay
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.machine.full_disk import FullDisk

# Every field is another than its default, and fractions are those of float32.
SAMPLING = core_sampling(
    grammar=Grammar(types_pb2.GrammarSpec(regex="a+").SerializeToString(), b"engine"),
    temperature=0.5, top_p=0.75, top_k=7, min_p=0.125, seed=2**64 - 1, stop_token_ids=(9, 3), min_tokens=2,
    num_logprobs=0, num_prompt_logprobs=4, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25,
    bias_token_ids=(1, 2), biases=(-100.0, 0.5), allowed_token_ids=(5, 4), bad_words=((1,), (2, 3)), num_candidates=6,
    top_n_sigma=1.25,
)  # fmt: skip
REQUEST = RequestSpec(
    "r", (5, 6, 7), SAMPLING, max_tokens=11, eos_token_ids=frozenset({9, 3}), num_samples=3,
    beams=BeamSpec(4, 0.1, early_stopping=None), cache_salt=b"\xff\x00", uses_prefix_cache=False, priority=-3,
    tenant="blue", shared_prefixes="team", expected_output_tokens=0, max_drafts=3, adapter_index=2, adapter_hash=b"h",
    known_outputs=((5, 6), ()),
)  # fmt: skip
PLAIN = dataclasses.replace(REQUEST, beams=None, num_samples=1, known_outputs=(), adapter_index=0, adapter_hash=b"")
EXECUTOR = ExecutorSpec(
    8, 100, 10, 5, 50, 64, watermark=0.1, num_host_blocks=20, shares_prefixes=False, numerics=b"n",
    max_drafts=4, adaptive_drafts=True, max_loras=2, max_cpu_loras=3, grammar_engine=b"engine",
    lacks=frozenset({"beams", "samples"}), kv_groups=(KVGroup(0, None, 2), KVGroup(1, 128, 3)),
    pages_per_state=5,
)  # fmt: skip
DESCRIPTION = execution_pb2.DescribeResponse(
    protocol_version=1,
    incarnation=2**63 + 1,
    model=execution_pb2.ModelGeometry(
        name="toy",
        architecture="Toy",
        vocab_size=99,
        max_model_len=64,
        dtype="float32",
        num_parameters=11,
        model_type="toy_text",
    ),
    tokenizer="folder",
    eos_token_ids=[3, 9],
    bos_token_id=0,
    kv=execution_pb2.KvGeometry(
        block_size=8,
        num_device_blocks=100,
        num_host_blocks=20,
        bytes_per_block=2**40,
        num_groups=2,
        groups=[execution_pb2.KvGroup(pages_per_block=2), execution_pb2.KvGroup(window=128, pages_per_block=3)],
        state=execution_pb2.StateGeometry(pages_per_state=5),
    ),
    limits=execution_pb2.ExecutorLimits(
        num_slots=10,
        max_num_seqs=5,
        max_num_batched_tokens=50,
        max_logprobs=20,
        max_inflight_plans=4,
        max_drafts=3,
        adaptive_drafts=True,
    ),
    features=[1, 2, 3, 4, 5, 6, 7, 8, 13, 14],
    fingerprint=types_pb2.NumericsFingerprint(mode=types_pb2.NUMERICS_MODE_EXACT, digest=b"d" * 32),
    device="cpu",
)


def header(**changes: object) -> pb.PlanLogRecord:
    record = records.header(
        SchedulerConfig(max_num_seqs=5, tenants="t.toml", watermark=0.1).model_dump(),
        model_description(DESCRIPTION),
        cadenza_version="0.1.0",
        started_unix_ns=1,
    )
    for name, value in changes.items():
        setattr(record.header, name, value)
    return record


def calls() -> list[pb.PlanLogRecord]:
    return [
        records.add_executor(0, EXECUTOR),
        records.session_opened(0, 0, 77, 8),
        records.add_request(REQUEST, 1.5),
        records.abort(REQUEST.key, FinishDetail.DEADLINE),
    ]


def written(path: Path, *entries: pb.PlanLogRecord) -> Path:
    path.write_bytes(b"".join(map(record_bytes, entries)))
    return path


def of_defaults(value: object) -> set[str]:
    """Fields that have their default value; the sample index is that of a sequence."""
    fields = [field for field in dataclasses.fields(value) if field.name != "sample_index"]
    return {field.name for field in fields if getattr(value, field.name) == field.default}


def test_a_log_and_the_one_before_it_are_the_owners_alone(tmp_path: Path) -> None:
    """They have the tokens of prompts and outputs."""
    path = tmp_path / "plans"
    path.write_bytes(b"of a scheduler before this rule")
    path.chmod(0o644)
    PlanLogWriter(str(path)).close()
    assert [each.stat().st_mode & 0o777 for each in (path, tmp_path / "plans.old")] == [0o600, 0o600]


def test_requests_and_executors_are_recorded_whole() -> None:
    """With no field at its default, a field that the log does not know comes back changed."""
    assert not of_defaults(REQUEST) | of_defaults(SAMPLING) | of_defaults(REQUEST.beams) | of_defaults(EXECUTOR)
    assert request_spec(pb.RecordedRequest.FromString(request_message(REQUEST).SerializeToString())) == REQUEST
    assert executor_spec(pb.RecordedExecutor.FromString(executor_message(EXECUTOR).SerializeToString())) == EXECUTOR


@pytest.mark.parametrize("early_stopping", [True, False, None])
def test_what_a_request_leaves_open_stays_open(early_stopping: bool | None) -> None:
    sampling = dataclasses.replace(SAMPLING, num_logprobs=None, num_prompt_logprobs=None)
    beams = BeamSpec(2, 0.0, early_stopping)
    spec = RequestSpec("", (1,), sampling, max_tokens=None, beams=beams, expected_output_tokens=None)
    assert request_spec(request_message(spec)) == spec
    alone = dataclasses.replace(spec, beams=None)
    assert request_spec(request_message(alone)) == alone


def test_results_are_recorded_as_the_core_has_read_them() -> None:
    columns = types_pb2.LogprobColumns(
        chosen_logprobs=[-0.1, -0.3], chosen_ranks=[2, 1], num_top=2, top_token_ids=[4, 5, 6, 7],
        top_logprobs=[-0.01, -0.1, -0.3, -3.0],
    )  # fmt: skip
    message = execution_pb2.StepResult(
        step_id=4, epoch=9, incarnation=2**63 + 5, status=execution_pb2.STEP_STATUS_OK, slots=[1, 2, 3, 5],
        num_tokens=[2, 0, 1, 0], token_ids=[5, 7, 8], num_drafts=[3, 0, 1, 0], num_accepted=[1, 0, 0, 0],
        error_slots=[2], errors=[execution_pb2.SLOT_ERROR_NON_FINITE_LOGITS],
        logprobs=[execution_pb2.SlotLogprobs(slot=1, columns=columns)],
        prompt_logprobs=[execution_pb2.SlotLogprobs(slot=3, start=6, columns=columns)],
        candidates=[execution_pb2.SlotCandidates(slot=5, token_ids=[7, 1], logprobs=[-0.3, -0.7])],
        timings=execution_pb2.StepTimings(queue_ns=1, device_ns=2, sample_ns=3, total_ns=4, moves_ns=5),
        debug_digest=b"digest", saved_slots=[1, 1], saved_positions=[8, 16],
    )  # fmt: skip
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in message.DESCRIPTOR.fields
    } - {"error_message", "finished_transfers"}  # fmt: skip
    assert result_to_wire(result_from_wire(message), 9, 2**63 + 5) == message
    failed = execution_pb2.StepResult(
        step_id=4, status=execution_pb2.STEP_STATUS_OUT_OF_MEMORY, error_message="why", timings=message.timings
    )
    assert result_to_wire(result_from_wire(failed), 0, 0) == failed


def test_the_header_has_description_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PlanLogReader(str(written(tmp_path / "log", header()))) as log:
        assert log.header.executor == DESCRIPTION
        options = records.recorded_options(log.header)
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("CADENZA_MAX_QUEUED_REQUESTS", "7")
    monkeypatch.setenv("CADENZA_RECORD", "elsewhere")
    read = core_replay.RecordedConfig(**options).model_dump()
    monkeypatch.undo()
    assert read == SchedulerConfig(max_num_seqs=5, tenants="t.toml", watermark=0.1).model_dump()


def read(path: Path) -> tuple[list[pb.PlanLogRecord], int]:
    """The records after the header, and the bytes that were cut off."""
    with PlanLogReader(str(path)) as log:
        return list(log), log.num_cut_bytes


def test_each_record_is_in_the_file_before_the_next_comes(tmp_path: Path) -> None:
    path, kept = tmp_path / "log", calls()
    writer = PlanLogWriter(str(path))
    writer.write(header)
    for number, record in enumerate(kept, start=1):
        writer.write(lambda record=record: record)
        assert read(path) == (kept[:number], 0)
    writer.close()
    writer.close()
    writer.write(header)
    assert read(path) == (kept, 0)


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for content in ("first", "second"):
        path.write_text(content)
        PlanLogWriter(str(path)).close()
        assert (tmp_path / "log.old").read_text() == content
        assert path.read_bytes() == b""
    PlanLogWriter(str(path)).close()
    assert (tmp_path / "log.old").read_text() == "second", "an empty file is nothing to keep"


def test_a_file_cut_anywhere_has_what_was_whole(tmp_path: Path) -> None:
    entries = [header(), *calls()]
    sizes = [len(record_bytes(entry)) for entry in entries]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    content, path = written(tmp_path / "whole", *entries).read_bytes(), tmp_path / "log"
    for size in (*range(0, ends[0], 50), *range(ends[0] - 1, len(content))):
        path.write_bytes(content[:size])
        if size < ends[0]:
            with pytest.raises(PlanLogError, match="is not a plan log, or ends within its header"):
                PlanLogReader(str(path))
        else:
            whole = sum(end <= size for end in ends)
            assert read(path) == (entries[1:whole], size - ends[whole - 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a plan log"),
        (b"# Cadenza: a page of text, which is no plan log at all\n" * 9, "is not a plan log"),
        (b"\xff" * 40, "is not a plan log"),
        (record_bytes(calls()[0]), "is not a plan log"),
        (record_bytes(header(magic="other")), "is not a plan log"),
        (record_bytes(header(format_version=7, cadenza_version="9.9")), "format version 7, of Cadenza 9.9; this is 1"),
        (record_bytes(header()) + b"\x05\xff\xff\xff\xff\xff", f"record at byte {len(record_bytes(header()))} cannot"),
        (record_bytes(header()) + b"\xff" * 11, "cannot be read"),
        (record_bytes(header()) * 2, "is of an unknown kind"),
        (record_bytes(header()) + b"\x00", "is of an unknown kind"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert replay.main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {path}")
    assert message in err
    assert not out


@pytest.mark.parametrize(("name", "message"), [("none", "no such file or directory"), (".", "is a directory")])
def test_files_that_cannot_be_opened(tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / name
    assert replay.main([str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: {message}\n"
    if name == ".":
        with pytest.raises(OSError, match=f"^--record {path}: is a directory"):
            PlanLogWriter(str(path))


def test_options_of_another_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    entry = header()
    entry.header.options.add(name="warp_factor", value="9")
    assert replay.main([str(written(tmp_path / "log", entry))]) == 2
    assert "recorded by Cadenza 0.1.0, whose option warp_factor is not read here" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    writer = PlanLogWriter("/dev/full")
    for _ in range(3):
        writer.write(header)
    (logged,) = caplog.records
    assert logged.levelname == "ERROR"
    assert logged.getMessage() == (
        "recording to /dev/full has ended after 0 records, which can be read: No space left on device; "
        "requests are served on"
    )


@pytest.mark.parametrize("at", ["write", "close"])
@pytest.mark.parametrize("num_left", [0, 1, 20])
def test_a_record_that_no_longer_fits_is_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, num_left: int, at: str
) -> None:
    """What is on the disk ends with a whole record, though a part of the next one was written."""
    kept, path = calls(), tmp_path / "log"
    size = sum(len(record_bytes(record)) for record in (header(), *kept))
    monkeypatch.setattr(plan_log, "FileIO", partial(FullDisk, capacity=size + num_left, fails_at_close=at == "close"))
    writer = PlanLogWriter(str(path))
    for record in (header(), *kept, *calls(), *calls()):
        writer.write(lambda record=record: record)
    writer.close()
    assert path.stat().st_size == size
    assert read(path) == (kept, 0)
    (logged,) = caplog.records
    assert f"recording to {path} has ended after 5 records, which can be read: No space left" in logged.getMessage()


def test_a_record_that_cannot_be_made_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = PlanLogWriter(str(tmp_path / "log"))
    writer.write(header)
    writer.write(lambda: records.add_executor(-1, EXECUTOR))
    writer.write(lambda: records.drain(True))
    assert read(tmp_path / "log") == ([], 0)
    (logged,) = caplog.records
    assert logged.levelname == "ERROR"


@pytest.mark.parametrize("end", [None, SessionEnd(), SessionEnd(5, 4), SessionEnd(5, 0, executor_stopped=True)])
def test_a_recorded_session_end_is_read_back(end: SessionEnd | None) -> None:
    assert session_end(records.executor_lost(0, 1.5, end).executor_lost) == end


def test_differences_name_the_fields() -> None:
    def plan(**changes: object) -> execution_pb2.StepPlan:
        admitted = AdmittedSequence(3, (1, 2), 2, 0, (4,), SAMPLING, 0)
        return plan_to_wire(dataclasses.replace(StepPlan(5, 0, admitted=[admitted]), **changes), 1)

    assert not list(records.differences(plan(), plan()))
    other = AdmittedSequence(3, (1, 2), 2, 0, (9,), dataclasses.replace(SAMPLING, num_logprobs=None), 0)
    assert list(records.differences(plan(released_slots=[1]), plan(admitted=[other], decode_ready=True))) == [
        "released_slots: recorded [1], now []",
        "admitted[0].block_tables[0].block_ids: recorded [4], now [9]",
        "admitted[0].sampling.num_logprobs: recorded only",
        "decode_ready: recorded False, now True",
    ]
    scheduled = plan(scheduled_slots=[3] * 30, scheduled_num_tokens=[1] * 30, scheduled_samples=[True] * 30)
    assert list(records.differences(plan(), scheduled)) == ["scheduled: now only"]
    assert list(records.differences(plan(admitted=[]), plan())) == ["admitted: recorded [], now 1 entries"]


def test_the_replayed_core_must_refuse_what_was_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    core, spec = (
        Scheduler(),
        dataclasses.replace(PLAIN, prompt_token_ids=(1,) * 64, known_outputs=REQUEST.known_outputs),
    )
    core.add_executor(0, EXECUTOR)
    with pytest.raises(RequestRejectedError, match="64 prompt tokens") as refusal:
        core.add_request(spec, 0.0)
    error = records.error_text(refusal.value)
    refused = records.with_error(records.add_request(spec, 0.0), error)
    path = written(tmp_path / "log", header(), calls()[0], refused)
    assert replay.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 2 calls, 0 plans, 0 requests, 0 tokens: all plans are the same\n"
    refused.error = ""
    assert replay.main([str(written(path, header(), calls()[0], refused))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: record 2 (add_request) differs:",
        f"  error: recorded none, now {error}",
    ]


def test_plans_where_there_were_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And none where there was one."""
    spec = PLAIN
    nothing, something = records.plan_step(0, 2.0, None, 1), records.plan_step(0, 2.0, StepPlan(1, 0), 1)
    path = written(tmp_path / "log", header(), calls()[0], something)
    assert replay.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "step 1, record 2 (plan_step)" in out
    assert "recorded only" in out
    assert replay.main([str(written(path, header(), calls()[0], records.add_request(spec, 1.0), nothing))]) == 1
    assert "plan: now only" in capsys.readouterr().out
