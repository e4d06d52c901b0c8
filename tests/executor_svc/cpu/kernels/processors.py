"""The instruction sets that this processor can run. For tests only."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, Isa, forced_isa, host_isa


def _isas() -> dict[str, Isa]:
    found = {}
    for name in ISA_NAMES:
        try:
            found[name] = forced_isa(name)
        except ValueError:
            continue
    return found or {"native": host_isa()}


ISAS = _isas()
"""By name, from the lowest to the highest."""
