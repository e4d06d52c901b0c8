"""Makes workloads from specs; their requests are made one by one and depend on the spec and the seed alone."""

from __future__ import annotations

from typing import cast

from cadenza_common.settings.names import flag
from cadenza_loadtest.requests import Workload
from cadenza_loadtest.workloads.adapters import PREFIX, parse_adapters
from cadenza_loadtest.workloads.files import FileWorkload
from cadenza_loadtest.workloads.lengths import Lengths, parse_lengths
from cadenza_loadtest.workloads.mixes import Labels, parse_mix, parse_tenants
from cadenza_loadtest.workloads.spec import KINDS, WorkloadSpec, find_file
from cadenza_loadtest.workloads.synthetic import Drawing, Independent, LongShort, Plain, Sessions, SharedPrefix

__all__ = ["KINDS", "WorkloadSpec", "make_workload"]


def make_workload(spec: WorkloadSpec) -> Workload:
    """The workload of a spec; options that are not given have the kind's defaults.

    Raises a LoadTestError that names the option, and for a file that cannot be read.
    """
    adapters = parse_adapters(
        spec.adapters,
        1.0 if spec.adapter_share is None else spec.adapter_share,
        PREFIX if spec.adapter_prefix is None else spec.adapter_prefix,
    )
    labels = Labels(parse_mix(spec.mix), parse_tenants(spec.tenants), adapters)
    if spec.from_file:
        given = None if spec.output_len is None else parse_lengths(spec.output_len, "--output-len")
        return FileWorkload(find_file(spec), given, labels, spec.max_total_len)
    spec = spec.resolved()
    if spec.workload == "multi-turn":
        turns, inputs, outputs = (_lengths(spec, name) for name in ("num_turns", "input_len", "output_len"))
        return Sessions(turns, inputs, outputs, cast(float, spec.think_s), labels, spec.max_total_len)
    return Independent(_drawing(spec), labels, spec.max_total_len)


def _drawing(spec: WorkloadSpec) -> Drawing:
    inputs, outputs = _lengths(spec, "input_len"), _lengths(spec, "output_len")
    if spec.workload == "long-short":
        return LongShort(inputs, outputs, _lengths(spec, "long_len"), cast(float, spec.long_share))
    if spec.workload == "shared-prefix":
        prefixes = cast(int, spec.num_prefixes), _lengths(spec, "prefix_len")
        return SharedPrefix(inputs, outputs, *prefixes, cast(float, spec.prefix_share), cast(float, spec.prefix_skew))
    return Plain(inputs, outputs)


def _lengths(spec: WorkloadSpec, name: str) -> Lengths:
    return parse_lengths(getattr(spec, name), flag(name))
