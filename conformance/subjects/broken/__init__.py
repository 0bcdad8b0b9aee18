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
_OPERATIONS = "conformance/test_operations.py::"
_SLOW = "conformance/test_slow_rank.py::"
_DETERMINISM = "conformance/test_determinism.py::"
_ESCAPES = "conformance/test_escape_path.py::"

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
        f"{_SUM}test_minus_zero_of_all_ranks_stays_minus_zero[2ranks-always]",
        "starts the sum at +0: −0 becomes +0",
    ),
    "rounds_each_addition": Defect(
        _lazy("ours:rounds_each_addition"),
        f"{_SUM}test_one_rounding_at_the_end_and_not_one_an_addition[3ranks-always]",
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
        f"{_EXCHANGE}test_waits_in_reverse_order_on_some_ranks_give_each_call_its_own_data[always-all_gather_into_tensor]",
        "moves data only inside wait(): waits in another order pair up wrongly",
    ),
    "swallows_errors": Defect(
        _lazy("ours:swallows_errors"),
        f"{_COLLECTIVES}test_ranks_that_disagree_get_one_error_on_every_rank[numel]",
        "returns as if all were well, whatever the verdict was",
    ),
    "every_piece_from_offset_zero": Defect(
        _lazy("ours:every_piece_from_offset_zero"),
        f"{_COLLECTIVES}test_all_to_all_with_uneven_and_zero_splits[each_pair_another]",
        "uneven all-to-all reads every piece at the start of the input",
    ),
    "ignores_strides": Defect(
        _lazy("ours:ignores_strides"),
        f"{_COLLECTIVES}test_inputs_that_are_not_contiguous_are_taken_in_their_logical_order[transposed-all_gather_into_tensor]",
        "takes elements as they lie in memory",
    ),
    "no_digest_check": Defect(
        _lazy("ours:no_digest_check"),
        "conformance/test_reject.py::test_no_flipped_bit_gives_other_words[bfloat16-gaussian]",
        "decodes without looking at the digest",
    ),
    "dirty_padding": Defect(
        _lazy("ours:dirty_padding"),
        f"{_BITS}test_a_golden_frame_is_written_and_read[sizes:bfloat16_of_9_words]",
        "leaves a byte of padding as it finds it",
    ),
    "trusts_the_size": Defect(
        _lazy("ours:trusts_the_size"),
        "conformance/test_reject.py::test_every_truncation_is_found[bfloat16]",
        "reads a frame that is cut short as if zeros followed",
    ),
    "gather_swaps_two_ranks": Defect(
        _lazy("ours:gather_swaps_two_ranks"),
        f"{_OPERATIONS}test_every_size_from_every_root[gather]",
        "gather swaps the pieces of two ranks",
    ),
    "broadcast_from_rank_zero": Defect(
        _lazy("ours:broadcast_from_rank_zero"),
        f"{_OPERATIONS}test_every_size_from_every_root[broadcast]",
        "broadcast ignores src",
    ),
    "scatter_shifted": Defect(
        _lazy("ours:scatter_shifted"),
        f"{_OPERATIONS}test_every_size_from_every_root[scatter]",
        "scatter gives every rank the piece of the next",
    ),
    "all_reduce_differs_in_one_bit": Defect(
        _lazy("ours:all_reduce_differs_in_one_bit"),
        f"{_OPERATIONS}test_all_ranks_of_an_all_reduce_have_the_same_bits[always]",
        "one rank's all_reduce is one bit off",
    ),
    "all_reduce_forgets_the_rest": Defect(
        _lazy("ours:all_reduce_forgets_the_rest"),
        f"{_OPERATIONS}test_all_reduce_of_whole_numbers_is_exact[always]",
        "all_reduce leaves out what does not divide by the world size",
    ),
    "ignores_tags": Defect(
        _lazy("ours:ignores_tags"),
        f"{_OPERATIONS}test_tags_may_be_taken_in_another_order_than_they_were_sent[always]",
        "messages are matched without their tags",
    ),
    "last_in_first_out": Defect(
        _lazy("ours:last_in_first_out"),
        f"{_OPERATIONS}test_many_messages_of_a_tag_keep_their_order[always]",
        "two messages of one tag arrive in each other's place",
    ),
    "names_nobody": Defect(
        _lazy("ours:names_nobody"),
        f"{_SLOW}test_every_rank_over_the_limit_is_named_and_a_new_communicator_works",
        "a timeout does not say who was late",
    ),
    "blames_the_first": Defect(
        _lazy("ours:blames_the_first"),
        f"{_SLOW}test_arrivals_tell_the_straggler_and_how_late_it_was",
        "takes the first rank to arrive for the straggler",
    ),
    "barrier_does_not_wait": Defect(
        _lazy("ours:barrier_does_not_wait"),
        f"{_COLLECTIVES}test_barrier_returns_only_when_the_last_rank_has_come[always]",
        "barrier returns at once",
    ),
    "done_too_early": Defect(
        _lazy("ours:done_too_early"),
        f"{_EXCHANGE}test_a_work_knows_when_it_is_done[always]",
        "is_completed() is True while a peer has not come",
    ),
    "writes_after_wait": Defect(
        _lazy("ours:writes_after_wait"),
        f"{_OPERATIONS}test_nothing_is_read_or_written_once_wait_has_returned[always]",
        "keeps the output and writes it after wait() has returned",
    ),
    "reads_beyond_odd_sizes": Defect(
        _lazy("ours:reads_beyond_odd_sizes"),
        f"{_COLLECTIVES}test_all_gather_returns_the_bits_of_every_rank[always-bfloat16]",
        "the last of an odd number of words is read from behind the input",
    ),
    "decides_alone": Defect(
        _lazy("ours:decides_alone"),
        f"{_COLLECTIVES}test_last_decision_and_stats_tell_what_was_done[always]",
        "a fall-back is decided by each rank for itself",
    ),
    "fixed_sigma": Defect(
        _lazy("ours:fixed_sigma"),
        f"{_ESCAPES}test_a_distribution_that_shifts_between_calls_stays_exact[always]",
        "what was learned from the first call is taken to hold for all",
    ),
    "stored_one_too_early": Defect(
        _lazy("ours:stored_one_too_early"),
        f"{_ESCAPES}test_a_block_up_to_the_rule_costs_a_byte_an_escape[5120]",
        "the stored rule is off by one",
    ),
    "loses_the_sign_of_zero": Defect(
        _lazy("ours:loses_the_sign_of_zero"),
        f"{_BITS}test_drawn_words_and_codebooks_round_trip",
        "−0 is written as +0",
    ),
    "frame_remembers_the_last": Defect(
        _lazy("ours:frame_remembers_the_last"),
        f"{_DETERMINISM}test_every_rank_writes_the_same_frame",
        "a frame holds something of the process that wrote it",
    ),
}
