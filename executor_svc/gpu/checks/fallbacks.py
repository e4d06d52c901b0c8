"""What is computed where a kernel is not right on the GPU at hand: attention by other tiles, the rest by PyTorch.

Attention without right tiles is PyTorch's, too, which is very slow. In the place of cuBLAS's products stand those of
exact mode.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.checks.linears import dense_rows
from executor_svc.gpu.checks.meanings import Values, heads_of
from executor_svc.gpu.checks.operations import MEANINGS, RecordedCall, bound, label_of, shape_text
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.exact.linear import ExactLinear
from executor_svc.gpu.kernels.attention.by_torch import BY_TORCH
from executor_svc.gpu.kernels.few_bits.widening import rows_at_once, widen
from executor_svc.gpu.kernels.step_ways import StepWays
from executor_svc.gpu.linear import Fp8Linear, PlainLinear, SumsWorkspace, W8Linear
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.gpu.stored_linear import GpuStoredLinear, PackedRows

KERNEL, TORCH, HOST, OWN, _TILES_OF = "kernel", "torch", "host", "product of exact mode", "tiles of "
NO_DRAFTS = "no drafts"
"""The way of what prepares the passes of a draft model or head: without these, drafts of none."""
SAMPLING, PENALTIES, LOGPROBS = "sampling/sampling", "sampling/penalties", "sampling/logprobs"
NGRAMS, COPIES = "slots/ngram_drafts", "copy_pages"
PASSES, HEAD_ROWS, VOCABULARY = "slots/draft_passes", "slots/head_rows", "sampling/draft_vocabulary"
"""Kernels of steps that have another way, as their labels begin."""
_ATTENTIONS = "attention", "latent_attention"
_TILES = (80, 86)
"""Compute capabilities whose tiles of attention other GPUs can have: less shared memory, and no copy engine."""


class Fallbacks:
    """By which way calls are computed, by their labels; those that are not named, by their kernel."""

    def __init__(self, kernels: GpuStateKernels, checks: KernelChecks, *, divided: bool = False) -> None:
        """divided: whether the model is divided among ranks, whose steps must have the same sizes and parts."""
        self._kernels, self._checks, self._divided = kernels, checks, divided
        self._name = kernels.name
        kernels.tiles_of = self.tiles_of
        self.ways: dict[str, str] = {}
        self.reasons: dict[str, dict[str, str]] = {}
        """By label, then by way: why it is not used."""
        self.kept: dict[str, str] = {}
        """By label: why it is not right, and used all the same."""
        self.seconds: dict[str, str] = {}
        """By label of attention by PyTorch: how slow it is."""
        self._own = OwnProducts()

    def way_of(self, label: str) -> str:
        """Return the name of the way of calls with this label."""
        return self.ways.get(label, KERNEL)

    def adopt(self, ways: Mapping[str, str], reasons: Mapping[str, dict[str, str]], seconds: Mapping[str, str]) -> None:
        """Take what an earlier start has found."""
        self.ways |= ways
        self.reasons |= reasons
        self.seconds |= seconds
        self._install()

    def once(self, key: str, compare: Callable[[], None]) -> None:
        """Compare, unless an earlier start has and this key says what it found; what is kept is said at each start."""
        known = self._checks.store.known(key)
        if known is not None:
            self.adopt(known["ways"], known["reasons"], known["seconds_of"])
            self._checks.num_known += known["compared"]
            return
        before, began = self._checks.num_compared, time.monotonic()
        compare()
        if not self.kept:
            self._checks.store.keep(key, {
                "ways": self.ways, "reasons": self.reasons, "compared": self._checks.num_compared - before,
                "seconds": round(time.monotonic() - began, 2), "seconds_of": self.seconds,
            })  # fmt: skip

    def fall_back(self, call: RecordedCall, reason: str) -> None:
        """Give calls of this label their next way. Raises KernelError, naming it, if there is none.

        What is to be reported alone keeps its way, if that gives results.
        """
        hint = "; --numerics exact has no other way, fast may have" if self._kernels.exact is not None else ""
        self.next_way(call.label, self._possible(call), reason, hint)

    def next_way(self, label: str, possible: Sequence[str], reason: str, hint: str = "") -> None:
        """Give what a label names the next of its possible ways, as its way is off for this reason; see `fall_back`.

        hint: what a refusal says beside the reasons.
        """
        if self._checks.reports and self._checks.runs(label, self.way_of(label)):
            self.kept[label] = reason
            return
        self.kept.pop(label, None)
        reasons = self.reasons.setdefault(label, {})
        reasons[self.way_of(label)] = reason
        # With ranks, all would have to know that the host has a part of steps.
        possible = [each for each in possible if not (each == HOST and self._divided)]
        way = next((each for each in possible if each not in reasons), None)
        if way is None:
            tried = ", ".join(f"{each} {why}" for each, why in reasons.items())
            raise KernelError(f"{label}: no way is right on this GPU: {tried}{hint}{self._checks.hint(label, reasons)}")
        self.ways[label] = way
        self._install()

    def lines(self) -> list[str]:
        """Return a line for each label that has fallen back."""
        return [
            f"{label}: {way}, as " + ", ".join(f"{each} {why}" for each, why in self.reasons[label].items())
            for label, way in self.ways.items()
        ]

    def tiles_of(self, shape: AttentionShape) -> int:
        """Return the compute capability whose tiles attention of a shape has, or BY_TORCH."""
        text = shape_text(shape)
        for label, way in self.ways.items():
            if label.startswith(_ATTENTIONS) and (f", {text}," in label or f", {text})" in label):
                return BY_TORCH if way == TORCH else int(way.removeprefix(_TILES_OF))
        return self._kernels.arch

    def attends_by_torch(self, label: str) -> bool:
        """Return whether attention of a label is PyTorch's."""
        return label.startswith(_ATTENTIONS) and self.way_of(label) == TORCH

    @property
    def is_slow(self) -> bool:
        """Whether some attention is PyTorch's: as many operations as a graph would hold for the longest sequences."""
        return any(map(self.attends_by_torch, self.ways))

    @property
    def has_passes(self) -> bool:
        """Whether a draft model or head may draft."""
        return not self._has(NO_DRAFTS, PASSES, HEAD_ROWS, VOCABULARY)

    def _possible(self, call: RecordedCall) -> list[str]:
        """Return the ways of a call, in order; in exact mode there is one, as another may not keep a row's bits."""
        if self._kernels.exact is not None:
            return [KERNEL]
        if call.name in _ATTENTIONS:
            tiles = [f"{_TILES_OF}{arch}" for arch in _TILES if arch != self._kernels.arch]
            return [KERNEL, *tiles, *([] if self._divided else [TORCH])]
        if call.name == "linear" and isinstance(call.values["linear"], PlainLinear):
            return [KERNEL, OWN]
        if call.name == "linear" and not _is_replaceable(call.values["linear"]):
            return [KERNEL]
        return [KERNEL, TORCH] if call.meaning.replaceable else [KERNEL]

    def _install(self) -> None:
        kernels, changed = self._kernels, sorted(f"{label} {way}" for label, way in self.ways.items())
        for name in MEANINGS:
            kernels.__dict__.pop(name, None)
        for name in {
            label.partition(" ")[0]
            for label, way in self.ways.items()
            if way in (TORCH, OWN) and not label.startswith(_ATTENTIONS)
        } & set(MEANINGS):
            setattr(kernels, name, partial(self._call, name, getattr(kernels, name)))
        kernels.step_ways = StepWays(
            draws_on_host=self._has(HOST, SAMPLING, PENALTIES),
            logprobs_by_torch=self._has(TORCH, LOGPROBS),
            drafts_on_host=self._has(HOST, NGRAMS),
            copies_by_torch=self._has(TORCH, COPIES),
        )
        # Executors that compute otherwise have other fingerprints.
        digest = hashlib.sha256("\n".join(changed).encode()).hexdigest()[:8]
        kernels.name = f"{self._name} other-{digest}" if changed else self._name

    def _has(self, way: str, *names: str) -> bool:
        """Return whether a label that begins with one of these names has this way."""
        return any(each == way and label.startswith(names) for label, each in self.ways.items())

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        kernels, recording = self._kernels, self._kernels.current_recording
        values = bound(name, kernels, args, named)
        way = self.way_of(label_of(name, values))
        if way == OWN:
            return method(values["x"], self._own.of(values["linear"]), values["out_dtype"])
        if way != TORCH:
            return method(*args, **named)
        if recording is None:  # at once: the recording gives memory, and runs nothing
            with kernels.passing(), kernels.recording():
                result = method(*args, **named)
            _compute(name, values, result, len(_first(result)))
            return result
        first = len(recording.operations)
        result = method(*args, **named)
        del recording.operations[first:]
        kernels.run(_first(result), partial(_compute, name, values, result))
        return result


class OwnProducts:
    """The products of exact mode that stand in the place of cuBLAS's, over the same weights."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[PlainLinear, ExactLinear] = WeakKeyDictionary()
        self._workspaces: dict[tuple[int, int], SumsWorkspace] = {}
        """By shape: none grows once a graph reads it."""

    def of(self, linear: PlainLinear) -> ExactLinear:
        """Return the product that takes its place."""
        if linear not in self._made:
            shape = linear.out_features, linear.in_features
            workspace = self._workspaces.setdefault(shape, SumsWorkspace(linear.weight.device))
            self._made[linear] = ExactLinear(linear.weight, linear.bias, "none", workspace)
        return self._made[linear]


def _first(result: Any) -> Tensor:
    """Return the first of an operation's results."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _compute(name: str, values: Values, result: Any, n: int) -> None:
    """Write the first n rows of an operation's results by PyTorch, without a wait for the device."""
    if name == "rope_write_kv":
        _rope_write_kv(values, result, n)
    elif name == "linear":
        _multiply(values["linear"], values["x"][:n], result[:n])
    else:
        meaning = MEANINGS[name]
        expected = meaning.expected(values, n, _stays)
        for found, value in zip(meaning.found(values, result, n), expected, strict=True):
            found.copy_(value)


def _stays(tensor: Tensor) -> Tensor:
    return tensor


def _rope_write_kv(values: Values, result: Tensor, n: int) -> None:
    """As `GpuKernels.rope_write_kv`; rows that are to be written nowhere write what the first row writes."""
    q, *pair = heads_of(values, n, _stays)
    result[:n].copy_(q)
    if not pair[0].shape[1]:
        return
    layer, slots = values["kv_layer"], values["plan"].slot_mappings[values["table"], :n]
    there = slots >= 0
    at = torch.where(there, slots, slots[:1].clamp(min=0))
    scales = values["plan"].scales(layer, values["scales"])
    narrow = layer.dtype.itemsize == 1
    bits = layer.view(torch.uint8) if narrow else layer
    for half, (rows, scale) in enumerate(
        zip(pair, (None, None) if scales is None else (scales.k, scales.v), strict=True)
    ):
        rows = torch.where(there[:, None, None], rows, rows[:1]).float()
        rows = rows if scale is None else rows / scale[:, None]
        stored = (rows.clamp(-448, 448) if narrow else rows).to(layer.dtype)
        bits[at // layer.shape[3], half, :, at % layer.shape[3]] = stored.view(bits.dtype)


def _is_replaceable(linear: object) -> bool:
    """Return whether a linear's product can be that of a dense weight, by cuBLAS."""
    if isinstance(linear, GpuStoredLinear):
        return any(isinstance(part, PackedRows) for part in linear.parts)
    return isinstance(linear, W8Linear | Fp8Linear)


def _multiply(linear: object, x: Tensor, out: Tensor) -> None:
    """Write the product with a weight that is made dense in every call, which is slow."""
    if not isinstance(linear, GpuStoredLinear):
        assert isinstance(linear, W8Linear | Fp8Linear)
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        PlainLinear(dense_rows(linear, x.dtype), bias)(x, out, out.dtype)
        return
    first = 0
    for part in linear.parts:
        rows = part.weight.rows if isinstance(part, PackedRows) else part.out_features
        own = out[:, first : first + rows]
        if isinstance(part, PackedRows):
            _multiply_packed(part, x, own)
        else:
            assert not isinstance(part, ExactLinear)
            part(x, own, out.dtype)
        first += rows


def _multiply_packed(part: PackedRows, x: Tensor, out: Tensor) -> None:
    x = x if part.order is None else x.index_select(1, part.order)
    for first in range(0, part.weight.rows, rows_at_once(part.weight)):
        last = min(first + rows_at_once(part.weight), part.weight.rows)
        wide = torch.empty(last - first, part.weight.columns, dtype=x.dtype, device=x.device)
        widen(part.weight, first, wide)
        bias = None if part.bias is None else part.bias[first:last]
        PlainLinear(wide, bias)(x, out[:, first:last], out.dtype)
