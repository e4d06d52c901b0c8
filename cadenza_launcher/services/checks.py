"""What can be checked before a service is started: the model's files, the device, the address.

A service would find the same out after it has loaded its libraries, seconds later. Everything here raises OptionError.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import errno
import importlib.metadata
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cadenza.errors import OptionError
from cadenza_common.hub.download import cached_model, list_files, local_model
from cadenza_common.hub.names import HubError, choose, parse
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.files import PemFile, TlsError, first_name
from cadenza_common.wire.tls_server import is_loopback
from cadenza_common.wire.transport import format_address
from cadenza_launcher.services.options import LISTENER_OPTIONS, Setting

_IN_USE_HINT = "; another program listens there: choose another port, or 0 for any free one"


def check_model(model: str | os.PathLike[str]) -> str:
    """The model's folder, GGUF file or hub id in the form for the services; raises OptionError if it is missing."""
    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(f"option model: must be a folder, a GGUF file or a hub id, not {model!r}")
    model = os.fspath(model)
    if not model.strip():
        raise OptionError("option model: it is empty: give a folder, a GGUF file or a hub id")
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        # Links stay: the hub's cache links a name that ends in .gguf to one that does not.
        return str(path.absolute())
    if path.exists():
        raise OptionError(f"option model: {model!r} is neither a folder nor a GGUF file, whose name ends in .gguf")
    if not _is_path(model):
        return model
    if path.suffix == ".gguf":
        raise OptionError(f"option model: there is no file {model!r}")
    raise OptionError(f"option model: there is no folder {model!r}{_nearest_folder(path)}")


def local_path(model: str, settings: Mapping[str, Setting], on_event: Callable[[str], None]) -> str:
    """The path of a model that `check_model` has let pass: of a model of the hub in its cache, downloaded if need be.

    With `simulate` and where Ray places the executors it is `model`: nothing reads it, or others do. on_event gets
    lines on what is chosen and downloaded. Raises OptionError.
    """
    name = parse(model)
    if _value(settings, "simulate") is not None or name is None or Path(model).exists():
        return model
    try:
        if _value(settings, "distributed_executor_backend") == "ray":
            list_files(name.repo)
            return model
        return str(local_model(name, _value(settings, "load_format") != "dummy", on_event))
    except HubError as error:
        raise _no_model(model, error) from None


def check_known(model: str, settings: Mapping[str, Setting]) -> None:
    """Check that a model that is not on this machine is on the hub, without a download; raises OptionError."""
    name = parse(model)
    if _value(settings, "simulate") is not None or name is None or Path(model).exists():
        return
    try:
        if cached_model(name) is None:
            choose(name, list_files(name.repo).files)
    except HubError as error:
        raise _no_model(model, error) from None


def _no_model(model: str, error: HubError) -> OptionError:
    reason = _nearest_folder(Path(model)) or f", and {error}"
    if "/" not in model and ":" in model:
        reason += "; names of ollama's library are not known: give OWNER/REPO:TAG, as `ollama run hf.co/OWNER/REPO:TAG`"
    return OptionError(f"option model: there is no folder {model!r}{reason}")


def check_files(model: str, settings: Mapping[str, Setting]) -> None:
    """Check that the model's files are whole; nothing is checked with `simulate`, and of a model elsewhere."""
    if _value(settings, "simulate") is not None or not Path(model).exists():
        return
    from executor_svc.errors import StartError
    from executor_svc.models.folder import check_files as check_model_files

    tokenizer = settings.get("tokenizer")
    if tokenizer is not None and _is_path(str(tokenizer.value)) and not Path(tokenizer.value).expanduser().exists():
        raise tokenizer.refused("tokenizer", f"there is no folder {tokenizer.value!r}")
    try:
        check_model_files(Path(model), with_weights=_value(settings, "load_format") != "dummy")
    except StartError as error:
        raise OptionError(f"option model: {str(error).removeprefix(f'--model {model}: ')}") from None


def check_device(settings: Mapping[str, Setting]) -> None:
    """Check that there is a GPU if one is requested. Triton's interpreter, on the CPU, may stand in for it."""
    setting = settings.get("device")
    if setting is None or setting.value != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    missing = _missing_for_cuda()
    if missing:
        raise setting.refused("device", f"cuda: {missing}; use cpu or auto")


def check_listener(host: str, settings: Mapping[str, Setting]) -> None:
    """Check that other machines cannot reach the scheduler without credentials, and the files of TLS."""
    values = {name: _value(settings, name) for name in (*LISTENER_OPTIONS, "tenants")}
    proves = values["tls_cert"] is not None and (values["tls_client_ca"] or values["tenants"]) is not None
    if not (proves or values["insecure"] or is_loopback(host)):
        raise OptionError(
            f"option host: {host}: other machines could use the server without credentials: give --tls-cert, --tls-key "
            "and --tls-client-ca or --tenants (`cadenza certs` makes the files), or --insecure to allow it"
        )


def check_scaling(values: Mapping[str, Any], settings: Mapping[str, Setting]) -> None:
    """Check that the number of executors can change, if it is to; `values` are checked options."""
    most, least = values.get("max_executors"), values.get("executors", 1)
    if most is None:
        return
    if values.get("distributed_executor_backend") != "ray":
        reason = "the number of executors changes only where Ray places them: --distributed-executor-backend ray"
        raise settings["max_executors"].refused("max_executors", reason)
    if most < least:
        raise settings["max_executors"].refused("max_executors", f"{most} is less than executors {least}")


def own_tls(settings: Mapping[str, Setting]) -> TLS | None:
    """How this process connects to a scheduler that it starts with these options; None: in plain text.

    It trusts the scheduler's own certificate, and shows it.
    """
    cert, key = _value(settings, "tls_cert"), _value(settings, "tls_key")
    if cert is None or key is None:
        return None
    try:
        return TLS(str(cert), str(cert), str(key), first_name(PemFile("--tls-cert", str(cert))))
    except TlsError as error:
        raise OptionError(f"option {str(error).removeprefix('--')}") from None


def check_address(host: str, port: object, option: str = "") -> None:
    """Check that a service can listen on `host` and `port`; port 0 is any free one.

    option: the one that gives both, if it is not `host` and `port`. Raises OptionError.
    """
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise OptionError(f"option {option or 'port'}: must be an integer from 0 to 65535, not {port!r}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"option {option or 'host'}: {host!r}: {reason[:1].lower()}{reason[1:]}") from None
    kind, _, _, _, address = found[0]
    with contextlib.closing(socket.socket(kind, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            # The address belongs to another machine; anything else is about the port.
            name = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
            hint = _IN_USE_HINT if error.errno == errno.EADDRINUSE else ""
            reason = (error.strerror or str(error)).lower()
            where = f"option {option or name}: cannot listen on {format_address(host, port)}"
            raise OptionError(f"{where}: {reason}{hint}") from None


def _is_path(name: str) -> bool:
    """Whether a name cannot be one of the hub."""
    return parse(name) is None


def _value(settings: Mapping[str, Setting], name: str) -> object:
    return settings[name].value if name in settings else None


def _nearest_folder(path: Path) -> str:
    """The end of a sentence about a missing folder: a model's folder beside it with a similar name; empty if none."""
    try:
        beside = [each.name for each in path.parent.iterdir() if (each / "config.json").is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def count_gpus() -> int:
    """The GPUs that an executor could use here. PyTorch is not imported: that takes seconds."""
    return _find_gpus()[0]


def _missing_for_cuda() -> str:
    """What a GPU executor lacks on this machine; empty if nothing."""
    return _find_gpus()[1]


def _find_gpus() -> tuple[int, str]:
    """The number of GPUs, or 0 and the reason."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("torch")
        if "+cpu" in version:
            return 0, f"PyTorch {version} here is a build for the CPU"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "there is no NVIDIA driver here (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return 0, "the NVIDIA driver sees no GPU here"
    return count.value, ""
