"""Collectives over torch.distributed that compress what they send without losing a bit."""

from .communicator import Communicator
from .exchange import Work

__all__ = ["Communicator", "Work"]
