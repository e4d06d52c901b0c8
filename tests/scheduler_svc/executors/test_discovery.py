"""The list of executors: addresses, names that a resolver answers for, and files that are read again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from scheduler_svc.engine.fleet.executor_member import ExecutorExistsError, UnknownExecutorError
from scheduler_svc.executors.addresses import executor_address, executor_entries, is_same_listener
from scheduler_svc.executors.discovery import LOOK_S, RESOLVE_S, Discovery, resolve_name


class FakeExecutors:
    """A set of executors that retires them as soon as `may_retire` is set."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.calls: list[str] = []
        self.may_retire = asyncio.Event()
        self.may_retire.set()

    def has(self, target: str) -> bool:
        return target in self.targets

    def add(self, target: str) -> None:
        if target in self.targets:
            raise ExecutorExistsError(target)
        self.targets.append(target)
        self.calls.append(f"add {target}")

    def resume(self, target: str) -> None:
        self.calls.append(f"resume {target}")

    async def retire(self, target: str) -> None:
        await self.may_retire.wait()
        if target not in self.targets:
            raise UnknownExecutorError(target)
        self.targets.remove(target)
        self.calls.append(f"retire {target}")


class Name:
    """What a resolver answers, and the time between two resolutions."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = []
        self.resolved: list[tuple[str, int]] = []
        self._go = asyncio.Event()

    async def resolve(self, name: str, port: int) -> list[str]:
        self.resolved.append((name, port))
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer

    async def sleep(self, seconds: float) -> None:
        assert seconds in (RESOLVE_S, LOOK_S)
        if seconds == LOOK_S:
            await asyncio.Event().wait()
        await self._go.wait()
        self._go.clear()

    async def resolved_again(self, answer: list[str] | OSError) -> None:
        self.answer = answer
        self._go.set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def started(executors: FakeExecutors, *entries: str, name: Name | None = None) -> Discovery:
    name = name or Name()
    discovery = Discovery(executors, executor_entries(entries), resolve=name.resolve, sleep=name.sleep)
    discovery.start()
    await settle()
    return discovery


async def test_addresses_are_added_in_their_order() -> None:
    executors = FakeExecutors()
    discovery = await started(executors, "b:2", "a", "b:2")
    assert executors.targets == ["b:2", "a:50052"]
    await discovery.stop()


async def test_each_address_of_a_name_is_an_executor() -> None:
    """One that vanishes is drained and removed, and an answer without addresses changes nothing."""
    executors, name = FakeExecutors(), Name()
    name.answer = ["10.0.0.1:7", "10.0.0.2:7"]
    discovery = await started(executors, "dns:///pool:7", name=name)
    assert executors.targets == ["10.0.0.1:7", "10.0.0.2:7"]
    await name.resolved_again(["10.0.0.2:7", "10.0.0.3:7"])
    assert executors.targets == ["10.0.0.2:7", "10.0.0.3:7"]
    for nothing in ([], OSError(-2, "Name or service not known")):
        await name.resolved_again(nothing)
        assert executors.targets == ["10.0.0.2:7", "10.0.0.3:7"]
    assert set(name.resolved) == {("pool", 7)}
    await discovery.stop()


async def test_a_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    executors, name = FakeExecutors(), Name()
    discovery = await started(executors, "dns:///pool:7", name=name)
    for _ in range(3):
        await name.resolved_again(OSError(-2, "Name or service not known"))
    assert [record.message for record in caplog.records] == [
        "executors of pool:7: it has no address; the executors stay as they are",
        "executors of pool:7: it cannot be resolved: Name or service not known; the executors stay as they are",
    ]
    await discovery.stop()


async def test_an_address_that_comes_back_while_it_is_drained_serves_on() -> None:
    executors, name = FakeExecutors(), Name()
    executors.may_retire.clear()
    name.answer = ["10.0.0.1:7", "10.0.0.2:7"]
    discovery = await started(executors, "dns:///pool:7", name=name)
    await name.resolved_again(["10.0.0.2:7"])
    await name.resolved_again(["10.0.0.1:7", "10.0.0.2:7"])
    executors.may_retire.set()
    await settle()
    assert executors.calls[2:] == ["resume 10.0.0.1:7"]
    assert executors.targets == ["10.0.0.1:7", "10.0.0.2:7"]
    await discovery.stop()


async def test_what_an_operator_has_added_or_removed_stays_so_until_the_list_changes() -> None:
    executors, name = FakeExecutors(), Name()
    name.answer = ["10.0.0.1:7", "10.0.0.2:7"]
    discovery = await started(executors, "dns:///pool:7", name=name)
    executors.targets.remove("10.0.0.1:7")
    executors.add("other:1")
    await name.resolved_again(["10.0.0.1:7", "10.0.0.2:7"])
    await name.resolved_again(["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"])
    assert executors.targets == ["10.0.0.2:7", "other:1", "10.0.0.3:7"]
    await name.resolved_again(["10.0.0.2:7", "10.0.0.3:7"])
    await name.resolved_again(["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"])
    assert executors.targets == ["10.0.0.2:7", "other:1", "10.0.0.3:7", "10.0.0.1:7"]
    await discovery.stop()


async def test_a_file_has_an_address_on_each_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "executors"
    path.write_text("# two\na:1\n\n  b:2  # the second\n")
    executors = FakeExecutors()
    entries = executor_entries([f"file:{path}"])
    discovery = await started(executors, f"file:{path}")
    assert executors.targets == ["a:1", "b:2"]
    path.write_text("b:2\nc:3\n")
    discovery.reload(entries)
    await settle()
    assert executors.targets == ["b:2", "c:3"]
    for wrong in ("b:2\nc:x\n", None):
        path.write_text(wrong) if wrong else path.unlink()
        discovery.reload(entries)
        await settle()
        assert executors.targets == ["b:2", "c:3"]
    assert "line 2: 'c:x' is not HOST:PORT" in caplog.text
    assert "No such file or directory" in caplog.text
    discovery.reload(executor_entries(["c:3", "d:4"]))
    await settle()
    assert executors.targets == ["c:3", "d:4"]
    await discovery.stop()


async def test_a_file_that_changes_is_read_again_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "executors"
    path.write_text("a:1\n")
    executors = FakeExecutors()
    go, waits = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.set()
        await go.wait()
        go.clear()

    async def look() -> None:
        await waits.wait()
        waits.clear()
        go.set()
        await waits.wait()

    discovery = Discovery(executors, executor_entries([f"file:{path}"]), sleep=sleep)
    discovery.start()
    assert executors.targets == ["a:1"]
    await look()
    for text in ("a:1\nb", "a:1\nb:2\n"):
        path.write_text(text)
        await look()
        assert executors.targets == ["a:1"], "it may be half of what is written"
    await look()
    assert executors.targets == ["a:1", "b:2"]
    path.unlink()
    await look()
    await look()
    assert executors.targets == ["a:1", "b:2"]
    await discovery.stop()


async def test_a_list_that_changes_nothing_is_not_reported_as_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "executors"
    path.write_text("a:1\n")
    executors = FakeExecutors()
    discovery = await started(executors, f"file:{path}")
    caplog.set_level(logging.INFO)

    def messages_of(*entries: str) -> list[str]:
        caplog.clear()
        discovery.reload(executor_entries(entries))
        return [record.message for record in caplog.records]

    stay = "the executors stay as they are"
    assert messages_of(f"file:{path}") == ["the list of executors was read again: a:1"]
    assert messages_of() == [f"executors of the list: it is empty; {stay}"]
    assert messages_of() == []
    path.unlink()
    assert messages_of(f"file:{path}") == [f"executors of {path}: it cannot be read: No such file or directory; {stay}"]
    assert messages_of(f"file:{path}") == []
    assert executors.calls == ["add a:1"]
    assert messages_of("a:1") == ["the list of executors was read again: a:1"]
    assert messages_of() == [f"executors of the list: it is empty; {stay}"], "it is empty again"
    await discovery.stop()


@pytest.mark.parametrize("entry", ["a:0", ":0", "dns:///a:0", "", " "])
def test_an_address_that_cannot_work_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT of an executor"):
        executor_entries([entry])
    if not entry.startswith("dns"):
        with pytest.raises(ValueError, match=r"HOST:PORT of an executor"):
            executor_address(entry)


@pytest.mark.parametrize(
    ("target", "listen", "same"),
    [
        ("127.0.0.1:7", "127.0.0.1:7", True),
        ("localhost:7", "0.0.0.0:7", True),
        ("[::1]:7", "[::]:7", True),
        ("10.0.0.1:7", "10.0.0.1:7", True),
        ("127.0.0.1:8", "127.0.0.1:7", False),
        ("10.0.0.2:7", "10.0.0.1:7", False),
        ("10.0.0.2:7", "0.0.0.0:7", False),
    ],
)
def test_the_address_of_the_scheduler_itself_is_known(target: str, listen: str, same: bool) -> None:
    assert is_same_listener(target, listen) is same


async def test_the_system_resolves_a_name() -> None:
    assert "127.0.0.1:7" in await resolve_name("localhost", 7)
    with pytest.raises(OSError, match=r"."):
        await resolve_name("no-such-name.invalid", 7)
