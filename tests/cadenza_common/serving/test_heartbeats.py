"""Silence of a peer: counted only while this process could have received something."""

from __future__ import annotations

from cadenza_common.serving.heartbeats import CHECK_S, HEARTBEAT_S, SILENCE_S, PeerSilence


def checks(silence: PeerSilence, start: float, end: float, *, heard_every: float | None = None) -> float | None:
    """The moment at which the peer counts as lost, with a check every CHECK_S; None: not until `end`."""
    now, next_heard = start, start + (heard_every or end)
    while now < end:
        now += CHECK_S
        if now >= next_heard and heard_every is not None:
            silence.heard()
            next_heard += heard_every
        if silence.is_lost(now):
            return now
    return None


def test_a_silent_peer_is_lost_after_two_seconds() -> None:
    silence = PeerSilence(SILENCE_S, 100.0)
    assert checks(silence, 100.0, 160.0) == 102.0
    assert silence.silent_s == SILENCE_S


def test_a_peer_that_sends_heartbeats_is_not_lost() -> None:
    assert checks(PeerSilence(SILENCE_S, 100.0), 100.0, 160.0, heard_every=HEARTBEAT_S) is None
    assert checks(PeerSilence(SILENCE_S, 100.0), 100.0, 160.0, heard_every=3 * HEARTBEAT_S) is None


def test_a_suspended_process_does_not_misjudge_its_peer() -> None:
    """Messages wait in its buffers; it reads them before the next check."""
    silence = PeerSilence(SILENCE_S, 0.0)
    assert checks(silence, 0.0, 1.0) is None
    silence.heard()
    assert not silence.is_lost(1.0 + 3600.0)
    silence.heard()
    assert checks(silence, 3601.0, 3660.0) == 3603.0


def test_a_process_that_is_always_late_notices_a_silent_peer_later() -> None:
    silence = PeerSilence(SILENCE_S, 0.0)
    lost = [silence.is_lost(float(second)) for second in range(1, 6)]
    assert lost == [False, False, False, True, True]
