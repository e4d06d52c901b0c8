"""Whether a model fits, in words: of `cadenza fit`, and in the errors of models that do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cadenza_common.hub.download import human
from executor_svc.config import CPU_MEMORY_SHARE, ExecutorConfig
from executor_svc.models.fit.sizes import BLOCK, ModelSizes, read_sizes
from executor_svc.models.folder import LoaderError

_DEFAULT_SEQS = int(ExecutorConfig.model_fields["max_num_seqs"].default)


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for a model."""

    free: int
    """Bytes of memory, before it is loaded."""
    share: float = CPU_MEMORY_SHARE
    max_num_seqs: int = _DEFAULT_SEQS
    max_model_len: int | None = None
    read_rate: float | None = None
    """Bytes of memory that this machine reads in a second; None: not measured."""

    mapped: bool = False
    """Whether experts stay in their files (`--expert-weights mapped`)."""

    def for_tokens(self, sizes: ModelSizes) -> int:
        """Return the bytes for keys and values, of each rank; below 0: not even the weights fit."""
        mapped = sizes.mapped_bytes if self.mapped else 0
        room = int(self.share * self.free / sizes.num_ranks) - (sizes.weight_bytes - mapped)
        return max(room // 2, room - mapped) if mapped else room

    def fits(self, sizes: ModelSizes) -> bool:
        """Return whether the model can be served, with a context of any length."""
        return self.for_tokens(sizes) >= sizes.kv_of(BLOCK)


def fit_lines(sizes: ModelSizes, room: Room) -> list[str]:
    """Return what the model takes, what there is, and what follows."""
    weights, length = sizes.weight_bytes, room.max_model_len or sizes.context_limit
    ranks = sizes.num_ranks
    on_each = f", on each of {ranks} ranks" if ranks > 1 else ""
    state = f"a state of {human(sizes.state_bytes)} a request" if sizes.state_bytes else "no state"
    formats = ", ".join(f"{kind} {human(size)}" for kind, size in sizes.weights.items())
    lines = [
        f"weights: {human(weights)} ({formats}){on_each}",
        f"keys and values: {_of_tokens(sizes)} in {sizes.dtype}; {state} beside them{on_each}",
        f"memory: {human(room.free)} are free, and {room.share:.0%} of them for this model (--gpu-memory-utilization)"
        f"{f', in equal parts for {ranks} ranks' if ranks > 1 else ''}",
    ]
    if room.mapped and sizes.mapped_bytes:
        held = weights - sizes.mapped_bytes
        lines.append(
            f"experts: {human(sizes.mapped_bytes)} of weights stay in the file, {human(held)} must be in memory; "
            "the system reads those that are chosen, and keeps as many as there is room for beside keys and values"
        )
    if not room.fits(sizes):
        needed = ranks * (weights + sizes.kv_of(BLOCK)) / room.share
        lines.append(f"it does not fit: {human(needed)} would have to be free, or a smaller model or quantization")
        if not room.mapped and sizes.mapped_bytes and replace(room, mapped=True).fits(sizes):
            lines.append(
                f"with --expert-weights mapped it does: {human(sizes.mapped_bytes)} of experts stay in the file then, "
                "of which the system reads those that are chosen"
            )
        return lines
    longest, together = (_most_tokens(sizes, room, requests, length) for requests in (1, room.max_num_seqs))
    limit, each = f" of {length}" if longest < length else "", sizes.kv_of(longest)
    lines.append(f"longest context: {longest}{limit} tokens, {human(each)} a request")
    at_once = min(room.max_num_seqs, room.for_tokens(sizes) // max(1, each))
    lines.append(
        f"requests at once: {at_once} of {longest} tokens each, of shorter ones up to {room.max_num_seqs} "
        f"(--max-num-seqs) with {together} tokens together"
    )
    if room.read_rate is not None:
        read = ranks * (weights - sizes.unread_bytes)
        which = "all weights" if not sizes.unread_bytes else f"{human(read)} of weights, those of its experts"
        lines.append(
            f"expected speed: about {room.read_rate / read:.1f} tokens/s at most for one request: each token reads "
            f"{which}, and this machine reads {room.read_rate / 1e9:.1f} GB/s (measured once)"
            f"{', where they are in memory' if room.mapped and sizes.mapped_bytes else ''}"
        )
    return lines


def _of_tokens(sizes: ModelSizes) -> str:
    """Return what tokens take, in words."""
    parts = [f"{human(sizes.kv_bytes)} a token"] if sizes.kv_bytes or not sizes.windows else []
    parts += [f"{human(each.token_bytes)} for each of the last {each.positions} tokens" for each in sizes.windows]
    return " and ".join(parts)


def _most_tokens(sizes: ModelSizes, room: Room, requests: int, length: int) -> int:
    """Return the most tokens of so many requests of equal length, of `length` at most."""
    least, most = 0, requests * length
    while least < most:
        middle = (least + most + 1) // 2
        if sizes.kv_of(middle, requests) <= room.for_tokens(sizes):
            least = middle
        else:
            most = middle - 1
    return least


def fit_sentence(path: Path, free: int, config: ExecutorConfig | None = None, num_ranks: int = 1) -> str:
    """Return the same for the end of an error's sentence; empty for a model whose headers cannot be read.

    free: for all num_ranks of this machine together.
    """
    room = Room(free)
    if config is not None:
        share = config.gpu_memory_utilization or CPU_MEMORY_SHARE
        mapped = config.expert_weights == "mapped"
        room = Room(free, share, config.max_num_seqs, config.max_model_len, mapped=mapped)
    try:
        return "; " + "; ".join(fit_lines(read_sizes(path, num_ranks), room))
    except LoaderError:
        return ""
