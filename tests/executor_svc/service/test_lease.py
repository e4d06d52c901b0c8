"""Leases on a clock that the test moves: which scheduler gets the executor, and what the refused ones learn."""

from __future__ import annotations

import grpc
import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.serving.heartbeats import CHECK_S, SILENCE_S
from executor_svc.service.lease import Lease, Leases, SessionRefusal


class World:
    """Leases of one executor."""

    def __init__(self) -> None:
        self.now = 500.0
        self.leases = Leases(SILENCE_S, lambda: self.now)

    def open(self, epoch: int, scheduler_id: str = "A", incarnation: int = 1) -> Lease:
        opening = pb.OpenSession(
            scheduler_id=scheduler_id, epoch=epoch, protocol_version=1, scheduler_incarnation=incarnation
        )
        return self.leases.take(opening, f"ipv4:10.0.0.{incarnation}:7000")

    def refused(self, epoch: int, scheduler_id: str = "A", incarnation: int = 1) -> SessionRefusal:
        with pytest.raises(SessionRefusal) as caught:
            self.open(epoch, scheduler_id, incarnation)
        return caught.value


@pytest.fixture
def world() -> World:
    return World()


def test_a_refused_epoch_comes_with_the_next_one(world: World) -> None:
    refusal = world.refused(0)
    assert (refusal.code, refusal.detail) == (
        grpc.StatusCode.FAILED_PRECONDITION, pb.SessionRefusal(next_epoch=1)
    )  # fmt: skip
    world.open(41)
    for epoch in (1, 40, 41):
        assert world.refused(epoch).detail == pb.SessionRefusal(next_epoch=42)
    world.open(42)


def test_epochs_go_on_after_the_lease_of_another_scheduler(world: World) -> None:
    world.leases.release(world.open(41, "A"))
    assert world.refused(1, "B").detail == pb.SessionRefusal(next_epoch=42)
    assert world.open(42, "B").epoch == 42


def test_another_scheduler_is_refused_with_the_holder_and_its_age(world: World) -> None:
    lease = world.open(3, "A")
    world.now += 1.25
    refusal = world.refused(9, "B", 2)
    assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
    assert refusal.message == (
        "scheduler A at ipv4:10.0.0.1:7000 holds this executor, in epoch 3; its last message came 1.2 s ago"
    )
    assert refusal.detail == pb.SessionRefusal(next_epoch=4, holder_id="A", holder_silent_ns=1_250_000_000)
    lease.renew()
    world.now += 0.5
    later = world.refused(9, "B", 2).detail
    assert later is not None
    assert later.holder_silent_ns == 500_000_000
    assert lease.refusal is None


def test_a_released_executor_is_free_at_once(world: World) -> None:
    world.leases.release(world.open(3, "A"))
    assert world.open(4, "B").scheduler_id == "B"


def test_a_lease_that_was_replaced_releases_nothing(world: World) -> None:
    old = world.open(3)
    world.open(4)
    world.leases.release(old)
    assert world.refused(5, "B").code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(("incarnation", "by"), [(1, "this process"), (2, "another process")])
def test_the_same_scheduler_takes_over_at_once(world: World, incarnation: int, by: str) -> None:
    old = world.open(3)
    new = world.open(4, incarnation=incarnation)
    assert new.refusal is None
    assert old.refusal is not None
    assert old.refusal.code is grpc.StatusCode.ABORTED
    assert f"{by} of scheduler A, at ipv4:10.0.0.{incarnation}:7000, has opened a newer session" in old.refusal.message


def test_a_replaced_process_never_comes_back(world: World) -> None:
    """Neither while its successor holds the executor nor later, whatever its epoch is."""
    world.open(3, incarnation=1)
    new = world.open(4, incarnation=2)
    for _ in range(2):
        refusal = world.refused(99, incarnation=1)
        assert refusal.code is grpc.StatusCode.ABORTED
        assert refusal.message == "a newer process of scheduler A has taken this executor over"
        world.leases.release(new)
    world.open(5, incarnation=2)


def test_a_scheduler_that_lost_the_executor_to_another_one_may_come_back(world: World) -> None:
    world.leases.release(world.open(3, "A"))
    world.leases.release(world.open(4, "B", 2))
    assert world.open(5, "A").epoch == 5


def test_the_memory_of_processes_is_bounded(world: World) -> None:
    for number in range(1, 1000):
        world.open(number, incarnation=number)
    assert len(world.leases._processes) < 100
    assert world.refused(2000, incarnation=998).code is grpc.StatusCode.ABORTED


def test_a_lease_is_lost_after_two_seconds_without_a_message(world: World) -> None:
    lease = world.open(3)
    lost_at = None
    for number in range(40):
        world.now += CHECK_S
        if lease.silence.is_lost(world.now):
            lost_at = world.now
            break
        if number == 3:
            lease.renew()
    assert lost_at == 500.0 + 4 * CHECK_S + SILENCE_S


@pytest.mark.parametrize("scheduler_id", ["", "x" * 257])
def test_an_id_has_a_length(world: World, scheduler_id: str) -> None:
    assert world.refused(1, scheduler_id).code is grpc.StatusCode.INVALID_ARGUMENT
    assert world.open(1, "x" * 256).epoch == 1


def test_an_epoch_that_leaves_none_for_later_is_refused(world: World) -> None:
    """The executor would be of no use until its next start."""
    assert world.refused(2**64 - 1).code is grpc.StatusCode.INVALID_ARGUMENT
    assert world.open(1).epoch == 1
