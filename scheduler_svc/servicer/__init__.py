"""The client-facing API: GenerationService over one engine."""

from scheduler_svc.servicer.front import Front, abort_with
from scheduler_svc.servicer.generation import GenerationServicer
from scheduler_svc.servicer.unreadable import UnreadableMessages

__all__ = ["Front", "GenerationServicer", "UnreadableMessages", "abort_with"]
