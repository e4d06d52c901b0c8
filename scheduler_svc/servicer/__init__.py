"""The client-facing API: GenerationService over one engine."""

from scheduler_svc.servicer.front import Front, abort_with
from scheduler_svc.servicer.generation import GenerationServicer

__all__ = ["Front", "GenerationServicer", "abort_with"]
