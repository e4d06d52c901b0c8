"""Models of a process share their kernels by name: a name says all that its instructions depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from llvmlite import ir

from executor_svc.cpu.kernels import cpu_kernels
from executor_svc.cpu.kernels.codegen.compiled import Code, shared_code
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model

_FAMILIES = ("llama", "gemma2", "gemma3_text", "qwen3")
_OTHER_SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 56, "vocab_size": 90}


class Noted(Code):
    """Writes its own functions, and notes what each was written as. Those of one text are compiled once."""

    texts: ClassVar[dict[str, str]] = {}
    compiled: ClassVar[dict[str, int]] = {}
    owners: ClassVar[list[Code]] = []

    def _define(self, name: str, num_arguments: int, body: Callable[..., None]) -> Any:
        function = super()._define(name, num_arguments, body)
        text = str(function)
        assert self.texts.setdefault(name, text) == text, f"{name} has other instructions in another model"
        return function

    def function(self, name: str, num_arguments: int, body: Callable[..., None]) -> str:
        if name in self.compiled and name not in self._addresses:
            own, self._module = self._module, ir.Module("compared")
            self._define(name, num_arguments, body)
            self._module = own
            self._addresses[name] = self.compiled[name]
        return super().function(name, num_arguments, body)

    def _compile(self) -> None:
        super()._compile()
        self.compiled |= self._addresses
        self.owners.append(self)


@pytest.mark.long
def test_a_name_has_the_same_instructions_in_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "shared_code", lambda isa: Noted(isa))
    for name, empty in (("texts", {}), ("compiled", {}), ("owners", [])):
        monkeypatch.setattr(Noted, name, empty)
    counts = []
    for number, (family, shape) in enumerate([*((each, {}) for each in _FAMILIES), ("llama", _OTHER_SHAPE)]):
        folder = make_checkpoint(tmp_path / str(number), family, **shape)
        for dtype in ("float32", "bfloat16"):
            Model(folder, dtype=dtype).whole(list(range(3, 40)))
            counts.append(len(Noted.texts))
    assert counts[0] > 10
    assert counts[-1] > counts[0] + 30, "models differ, and so do their kernels"


def test_all_models_of_a_process_have_one_code() -> None:
    assert shared_code() is shared_code()
    assert cpu_kernels.CpuKernels().code is cpu_kernels.CpuKernels().code
