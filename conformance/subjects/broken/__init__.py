"""Planted defects: subjects that are wrong on purpose, and the one test that must catch each (conformance/meta).

To add one, write a module here and register a `Defect` in BROKEN. Factories import what they need when they are called,
so that this module costs nothing and needs no product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from conformance.subject import Subject


@dataclass(frozen=True)
class Defect:
    """One planted defect.

    Attributes:
        subject_factory: makes the broken subject.
        caught_by: node id of the test that must FAIL with it (and passes without it); `[...]` may be left out, then
            every case of the test runs and at least one must FAIL.
        what: the defect in one sentence.
        ranks: world size it is run with.
        like: the sound subject that must pass the same test.
    """

    subject_factory: Callable[[], Subject]
    caught_by: str
    what: str
    ranks: int = 2
    like: str = "zipccl"


def _lazy(target: str) -> Callable[[], Subject]:
    """A factory that imports `module:attribute` of this folder when called, and calls it."""
    module, attribute = target.split(":")

    def make() -> Subject:
        subject: Subject = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)()
        return subject

    return make


_COLLECTIVES = "conformance/test_collectives.py::"
_BITS = "conformance/test_bit_exactness.py::"
_SUM = "conformance/test_sum.py::"
_EXCHANGE = "conformance/test_exchange.py::"

BROKEN: dict[str, Defect] = {
    "unordered_sum": Defect(
        _lazy("plain:unordered_sum"),
        f"{_COLLECTIVES}test_reduce_scatter_is_the_ordered_sum[native-sum-bfloat16]",
        "sums in the backend's order and rounds at every step, and calls it the ordered sum",
        ranks=3,
    ),
    "first_rank_only": Defect(
        _lazy("plain:first_rank_only"),
        f"{_COLLECTIVES}test_all_gather_returns_the_bits_of_every_rank[native-bfloat16]",
        "gathers right on rank 0 and wrong on every other rank",
        like="torch_native",
    ),
    "writes_behind": Defect(
        _lazy("plain:writes_behind"),
        f"{_COLLECTIVES}test_all_gather_returns_the_bits_of_every_rank[native-bfloat16]",
        "writes two bytes behind the output",
        like="torch_native",
    ),
    "silent_on_mismatch": Defect(
        _lazy("plain:silent_on_mismatch"),
        f"{_COLLECTIVES}test_wrong_arguments_are_one_value_error_on_every_rank[all_gather_output_too_small]",
        "claims to check arguments, and cuts what does not fit",
    ),
    "canonical_nan": Defect(
        _lazy("ours:canonical_nan"),
        f"{_BITS}test_all_65536_patterns_survive[always-bfloat16-all_gather_into_tensor]",
        "computes with words: NaN payloads are lost",
    ),
    "sum_from_zero": Defect(
        _lazy("ours:sum_from_zero"),
        f"{_SUM}test_minus_zero_of_all_ranks_stays_minus_zero",
        "starts the sum at +0: −0 becomes +0",
    ),
    "rounds_each_addition": Defect(
        _lazy("ours:rounds_each_addition"),
        f"{_SUM}test_one_rounding_at_the_end_and_not_one_an_addition",
        "rounds to bfloat16 after every addition",
        ranks=3,
    ),
    "native_sum_when_raw": Defect(
        _lazy("ours:native_sum_when_raw"),
        f"{_SUM}test_the_bits_are_the_same_whichever_way_the_words_went[bfloat16-sum]",
        "takes the backend's order of summation when it does not compress",
        ranks=4,
    ),
    "lazy_work": Defect(
        _lazy("ours:lazy_work"),
        f"{_EXCHANGE}test_waits_in_reverse_order_on_some_ranks_give_each_call_its_own_data",
        "moves data only inside wait(): waits in another order pair up wrongly",
    ),
    "swallows_errors": Defect(
        _lazy("ours:swallows_errors"),
        f"{_COLLECTIVES}test_ranks_that_disagree_get_one_error_on_every_rank",
        "returns as if all were well, whatever the verdict was",
    ),
    "every_piece_from_offset_zero": Defect(
        _lazy("ours:every_piece_from_offset_zero"),
        f"{_COLLECTIVES}test_all_to_all_with_uneven_and_zero_splits",
        "uneven all-to-all reads every piece at the start of the input",
    ),
    "ignores_strides": Defect(
        _lazy("ours:ignores_strides"),
        f"{_COLLECTIVES}test_inputs_that_are_not_contiguous_are_taken_in_their_logical_order",
        "takes elements as they lie in memory",
    ),
    "no_digest_check": Defect(
        _lazy("ours:no_digest_check"),
        "conformance/test_reject.py::test_no_flipped_bit_gives_other_words",
        "decodes without looking at the digest",
    ),
    "dirty_padding": Defect(
        _lazy("ours:dirty_padding"),
        f"{_BITS}test_a_golden_frame_is_written_and_read",
        "leaves a byte of padding as it finds it",
    ),
    "trusts_the_size": Defect(
        _lazy("ours:trusts_the_size"),
        "conformance/test_reject.py::test_every_truncation_is_found",
        "reads a frame that is cut short as if zeros followed",
    ),
}
