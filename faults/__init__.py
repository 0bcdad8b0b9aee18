"""Faults injected on purpose, as scenarios that can be replayed and judged again later (docs/FAULTS.md)."""
