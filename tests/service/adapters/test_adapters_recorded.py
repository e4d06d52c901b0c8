"""A run with adapters, recorded: the core makes the same plans and commands, an executor the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.serving.plan_log import PlanLogReader, record_bytes
from executor_svc.replay import __main__ as executor_replay
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.helpers.executor.simulated_adapters import make_adapter
from tests.helpers.services import cadenza_services

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    """Five adapters, of which an executor holds two, one of them broken; one is unloaded and loaded again."""
    folders = {name: make_adapter(tmp_path / name, name.encode(), rank=int(name != "e")) for name in "abcde"}
    scheduler = {
        "lora": [f"{name}={folder}" for name, folder in folders.items()],
        "lora_root": [str(tmp_path)],
        "max_loras": 1,
        "record": str(tmp_path / "log"),
    }
    async with (
        cadenza_services("simulated", simulate="instant", max_loras=2, max_cpu_loras=2, scheduler=scheduler) as running,
        AsyncClient(running.target) as client,
    ):
        names = [*"abcd", None] * 3
        await client.generate([[5, 6, 7] * 9] * len(names), PARAMS, adapter=names)
        with pytest.raises(Exception, match="adapter_config"):
            await client.generate([[5, 6, 7]], PARAMS, adapter="e")
        await client.unload_adapter("a")
        await client.load_adapter("a", str(folders["b"]))
        await client.generate([[5, 6, 7] * 9] * 2, PARAMS, adapter=["a", "b"])
    return tmp_path / "log"


async def test_both_replays_give_the_same(log: Path, capsys: pytest.CaptureFixture) -> None:
    with PlanLogReader(str(log)) as reader:
        records = list(reader)
    unloads = [index for record in records for index in record.adapter_commands.unloads]
    loads = [index for record in records for index in record.adapter_commands.loads]
    assert len(unloads) > 3
    assert {1, 2, 3, 4, 5, 6} <= set(loads)
    assert scheduler_replay.main([str(log)]) == 0
    assert capsys.readouterr().out.endswith(" tokens: all plans are the same\n")
    assert executor_replay.main([str(log)]) == 0
    assert capsys.readouterr().out.endswith(" tokens: all results are the same\n")


async def test_other_commands_and_other_files_are_found(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with PlanLogReader(str(log)) as reader:
        header, records = reader.header, list(reader)
    changed = next(record for record in records if record.adapter_commands.loads)
    changed.adapter_commands.loads[0] = 5
    other = tmp_path / "other"
    other.write_bytes(b"".join(map(record_bytes, [pb.PlanLogRecord(header=header), *records])))
    assert scheduler_replay.main([str(other)]) == 1
    assert "  loads: recorded [5" in capsys.readouterr().out
    make_adapter(tmp_path / "c", b"changed")
    assert executor_replay.main([str(log)]) == 1
