"""Call record, envelope, sizes and verdict: what is packed is parsed, and what is damaged is refused."""

import pytest

from zipccl_core.collectives.wire import ALL_RANKS, ERROR_KINDS, MOST_CHUNKS, CallRecord, Envelope, Sizes, Verdict
from zipccl_core.errors import CorruptFrame, UnsupportedFrame

RECORD = CallRecord(7, "reduce_scatter_tensor", 2, "bfloat16", "premul_sum", 0x3F000000, 5, 6)
ENVELOPE = Envelope(1 << 40, 3, ALL_RANKS, True, 1 << 50, (1 << 64) - 1)
SIZES = Sizes(9, 1, None, False, 1 << 40, 1 << 39, tuple((1 << 33, (1 << 64) - 1 - i) for i in range(MOST_CHUNKS)))
VERDICT = Verdict(9, 1, CorruptFrame("message from rank 0 to rank 1: Digest …"), True, (0, 70_000))


@pytest.mark.parametrize("sent", [RECORD, ENVELOPE, SIZES, Sizes(9, 1), Verdict(9, 1)], ids=lambda m: type(m).__name__)
def test_what_is_packed_is_parsed(sent: CallRecord | Envelope | Sizes | Verdict) -> None:
    packed = sent.pack()
    assert len(packed) == sent.BYTES
    assert type(sent).parse(packed) == sent


@pytest.mark.parametrize("kind", ERROR_KINDS)
@pytest.mark.parametrize("carrier", [Verdict, Sizes])
def test_an_error_keeps_kind_and_text(carrier: type, kind: type) -> None:
    came = carrier.parse(carrier(3, 2, kind("rank 2 − this")).pack())
    assert type(came.error) is kind
    assert str(came.error) == "rank 2 − this"


def test_a_verdict_names_the_ranks_whose_messages_were_damaged() -> None:
    assert Verdict.parse(VERDICT.pack()).damaged == (0, 70_000)
    many = tuple(range(64))
    assert Verdict.parse(Verdict(1, 0, CorruptFrame("all of them"), damaged=many).pack()).damaged == many


def test_a_long_text_is_cut_and_stays_readable() -> None:
    came = Verdict.parse(Verdict(3, 2, CorruptFrame("é" * 5000)).pack())
    assert str(came.error).startswith("é" * 350)


@pytest.mark.parametrize("sent", [RECORD, ENVELOPE, SIZES, VERDICT], ids=lambda m: type(m).__name__)
def test_every_flipped_bit_is_refused(sent: CallRecord | Envelope | Sizes | Verdict) -> None:
    packed = sent.pack()
    for byte in range(len(packed)):
        for bit in range(8):
            damaged = bytearray(packed)
            damaged[byte] ^= 1 << bit
            with pytest.raises(CorruptFrame, match="CRC-32"):
                type(sent).parse(bytes(damaged))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises((CorruptFrame, UnsupportedFrame)):
        CallRecord.parse(ENVELOPE.pack())
    with pytest.raises(CorruptFrame):
        Envelope.parse(RECORD.pack())


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (CallRecord(7, "barrier", 4), "rank 2 calls reduce_scatter_tensor #7, rank 4 calls barrier #7"),
        (CallRecord(8, "reduce_scatter_tensor", 4), "rank 4 calls reduce_scatter_tensor #8"),
        (CallRecord(7, "reduce_scatter_tensor", 4, "float32"), "'float32'"),
        (CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", device="cuda"), "with device 'cuda'"),
        (CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", "avg"), "'avg'"),
        (CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", "premul_sum", 1), "factor_bits 1"),
        (
            CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", "premul_sum", 0x3F000000, 6, 4),
            "rank 2 sends 5 elements to rank 4, which expects 4",
        ),
        (
            CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", "premul_sum", 0x3F000000, 7, 5),
            "rank 4 sends 7 elements to rank 2, which expects 6",
        ),
    ],
)
def test_a_disagreement_names_the_pair_and_what(peer: CallRecord, words: str) -> None:
    assert words in RECORD.disagreement(peer)


def test_records_that_fit_agree() -> None:
    peer = CallRecord(7, "reduce_scatter_tensor", 4, "bfloat16", "premul_sum", 0x3F000000, 6, 5)
    assert RECORD.disagreement(peer) == ""


@pytest.mark.parametrize("sequence", [0, 1, 2**40 + 3])
def test_the_sequence_is_where_it_is_looked_for_without_parsing(sequence: int) -> None:
    record = CallRecord(sequence, "all_reduce", 3)
    assert CallRecord.sequence_of(record.pack()) == sequence == CallRecord.parse(record.pack()).sequence
