"""What `cadenza up` says of several models at start."""

from __future__ import annotations

from collections.abc import Iterator

from cadenza_cli.text import size
from cadenza_launcher.pool.several import SeveralModels


def several_lines(models: SeveralModels) -> Iterator[str]:
    """Lines of text: each model, what bounds them, and where they are served."""
    for spec in models.specs:
        own = "".join(f", {name} {each}" for name, each in {**spec.options, **spec.gateway}.items())
        yield f"model     {spec.name}: {spec.model}, {size(models.need(spec.name))} at most{own}"
    bounds = models.bounds
    memory = f"{size(bounds.memory_bytes)} of memory" if bounds.memory_bytes else "memory not counted"
    most = f", {bounds.max_loaded} loaded at most" if bounds.max_loaded else ""
    idle = f"after {bounds.unload_after_s:g} s without a request" if bounds.unload_after_s else "for another one alone"
    yield f"limits    {memory}{most}; unloaded {idle}"
    yield f"listens   http on {models.http}, gRPC on {models.target}: Client(target, model=NAME)"
