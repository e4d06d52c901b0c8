"""docs/errors.md against real services: every row of its tables."""

from __future__ import annotations

import grpc
import pytest
import pytest_asyncio

from cadenza import errors
from tests.checkpoints import make_llama
from tests.helpers.errors import error_servers
from tests.helpers.errors.error_calls import in_session, perform, perform_in_session
from tests.helpers.errors.error_table import matches, read_rows

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

ROWS = read_rows()
MAIN = [row for row in ROWS if not row.server]
EXCEPTIONS = {
    "INVALID_ARGUMENT": errors.InvalidRequestError,
    "FAILED_PRECONDITION": errors.FailedPreconditionError,
    "NOT_FOUND": errors.NotFoundError,
    "ABORTED": errors.CadenzaError,
    "ALREADY_EXISTS": errors.AlreadyExistsError,
    "UNAVAILABLE": errors.UnavailableError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "UNIMPLEMENTED": errors.UnsupportedError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
}


def name_of(row):
    return f"L{row.line}-{row.call}{'-' + row.server if row.server else ''}"


def check(row, outcome):
    assert (outcome.status, outcome.field) == (row.status, row.field), outcome
    assert matches(row.message, outcome.message), outcome.message
    if row.status == "OK":
        return
    is_full = row.server in ("full", "tenant_full")
    too_large = row.status == "RESOURCE_EXHAUSTED" and not is_full
    expected = errors.QueueFullError if is_full else EXCEPTIONS.get(row.status)
    assert type(outcome.error) is (errors.InvalidRequestError if too_large else expected)
    assert outcome.error.code.name == row.status
    assert row.field in str(outcome.error)
    hinted = is_full or row.status == "UNAVAILABLE"
    assert (outcome.retry_s is not None and outcome.retry_s > 0) == hinted
    assert getattr(outcome.error, "retry_after_s", None) == outcome.retry_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    folder = make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    async with error_servers.main_server(folder) as services:
        yield services


@pytest.mark.parametrize("row", MAIN, ids=name_of)
async def test_row(services, row):
    s = services
    if row.call.startswith("Session"):
        healthy = s.healthy if row.call == "Session" else None
        check(row, await perform_in_session(s.scheduler, s.target, row.payload(), healthy))
    else:
        channel = s.executor if row.call == "Profile" else s.scheduler
        check(row, await perform(channel, s.target, row.call, row.payload()))


@pytest.mark.parametrize("row", [row for row in MAIN if row.holds_in_session], ids=name_of)
async def test_row_of_generate_in_a_session(services, row):
    payload = in_session(row.payload(request_id="row"))
    check(row, await perform_in_session(services.scheduler, services.target, payload, services.healthy))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("row", [row for row in ROWS if row.server], ids=name_of)
async def test_row_on_another_server(tokenizer_folders, row):
    async with (
        error_servers.server(row.server, tokenizer_folders) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        if row.call.startswith("Session"):
            beside = server.healthy, server.release
            check(
                row, await perform_in_session(channel, server.target, row.payload(), *beside, metadata=server.metadata)
            )
        else:
            sent = perform(channel, server.target, row.call, row.payload(), server.timeout, server.metadata)
            check(row, await sent)
