"""Collectives over torch.distributed that compress what they send without losing a bit."""

from .communicator import Communicator
from .work import Work

__all__ = ["Communicator", "Work"]
