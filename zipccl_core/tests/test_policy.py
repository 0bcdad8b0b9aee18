"""Policy and decision: pure functions of what all ranks know."""

from itertools import pairwise

import numpy as np
import pytest

from zipccl_core import Codebook, Policy
from zipccl_core.errors import InvalidArgument
from zipccl_core.frame import max_frame_bytes, static_bytes
from zipccl_core.policy.switch import Switch, explain, prefix_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"compress": "sometimes"},
        {"codebook": "best"},
        {"reduction": "fast"},
        {"min_bytes": -1},
        {"prefix_percent": 101},
        {"prefix_percent": float("nan")},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"timeout_s": float("nan")},
        {"timeout_s": 1.1e8},
        {"timeout_s": 10**400},
        {"timeout_s": None},
        {"timeout_s": "5"},
        {"timeout_s": True},
        {"min_bytes": 0.5},
        {"min_bytes": 1 << 63},
        {"min_bytes": "1"},
        {"prefix_percent": None},
        {"retransmit": 1},
        {"compress": np.array(["auto"])},
        {"codebook": np.array(["fitted", "best"])},
    ],
)
def test_a_wrong_field_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]


def test_a_number_of_any_type_is_the_same_policy() -> None:
    """Ranks compare policies by how they are written."""
    plain = Policy(timeout_s=5.0, min_bytes=1000, prefix_percent=3.0)
    assert type(plain.min_bytes) is int
    for other in (
        Policy(timeout_s=5, min_bytes=1000.0, prefix_percent=3),  # type: ignore[arg-type]
        Policy(timeout_s=np.float32(5), min_bytes=np.int64(1000), prefix_percent=np.int8(3)),  # type: ignore[arg-type]
    ):
        assert repr(other) == repr(plain)
    assert repr(Policy(compress=np.str_("always"), prefix_percent=-0.0)) == repr(  # type: ignore[arg-type]
        Policy(compress="always", prefix_percent=0)
    )
    assert Policy(timeout_s=1e8).timeout_s == 1e8


def test_auto_is_a_threshold_on_the_bytes_of_a_message() -> None:
    policy = Policy(min_bytes=100)
    assert policy.codes("bfloat16", 100)
    assert not policy.codes("bfloat16", 99)
    assert not policy.codes("int32", 1000)


def test_always_and_never_mean_it_and_nothing_is_not_coded() -> None:
    assert Policy(compress="always").codes("float32", 4)
    assert not Policy(compress="always").codes("float32", 0)
    assert not Policy(compress="always").codes("float16", 1000)
    assert not Policy(compress="never").codes("bfloat16", 1 << 30)


def test_policies_that_differ_look_different() -> None:
    a, b = Policy(codebook=Codebook.gaussian(1.0)), Policy(codebook=Codebook.gaussian(3.0))
    assert repr(a) != repr(b)
    assert a.fingerprint() != b.fingerprint()
    assert a.fingerprint() == Policy(codebook=Codebook.gaussian(1.0)).fingerprint()


@pytest.mark.parametrize("n", [0, 1, 8, 8192, 8193, 1 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("percent", [0.0, 3.0, 100.0])
def test_a_prefix_never_exceeds_the_dynamic_part(n: int, dtype: str, percent: float) -> None:
    prefix = prefix_bytes(Policy(prefix_percent=percent), n, dtype)
    assert 0 <= prefix <= max_frame_bytes(n, dtype) - static_bytes(n)
    if percent == 0:
        assert prefix == 0


def test_the_default_prefix_holds_a_gaussian_s_escapes() -> None:
    assert prefix_bytes(Policy(), 1 << 20, "bfloat16") >= 0.03 * (1 << 20)


def test_reasons_say_what_happened() -> None:
    policy = Policy(min_bytes=64)
    assert "float16 is not coded" in explain(policy, "float16", 0, 3, 1000)
    assert "less than min_bytes = 64" in explain(policy, "bfloat16", 0, 3, 20)
    assert "2 of 3 messages" in explain(policy, "bfloat16", 2, 3, 1000)
    assert "nothing to send" in explain(policy, "bfloat16", 0, 0, 0)
    assert explain(Policy(compress="never"), "bfloat16", 0, 3, 9) == 'compress="never"'


PLACE = ("all_gather_into_tensor", 0, "bfloat16", 20)


def decisions(switch: Switch, shrinks: list[bool]) -> list[bool]:
    """What a switch decides at one place, call by call, when coded calls shrink or not."""
    made = []
    for good in shrinks:
        made.append(switch.codes_now(PLACE))
        switch.learn(PLACE, 100 if made[-1] else 0, 70 if good else 100)
    return made


def test_coding_that_does_not_pay_pauses_twice_as_long_each_time() -> None:
    made = decisions(Switch(Policy()), [False] * 400)
    coded = [i for i, decision in enumerate(made) if decision]
    assert [b - a - 1 for a, b in pairwise(coded)][:9] == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_coding_that_pays_again_stays_on_without_flapping() -> None:
    made = decisions(Switch(Policy()), [True] * 5 + [False] * 20 + [True] * 40)
    assert made[:6] == [True] * 6
    assert [i for i in range(6, 25) if made[i]] == [7, 10, 15, 24]  # after pauses of 1, 2, 4 and 8
    first_on = made.index(True, 25)
    assert first_on == 25 + 16
    assert made[first_on:] == [True] * len(made[first_on:])


def test_a_pause_at_one_place_is_none_at_another() -> None:
    switch = Switch(Policy())
    switch.learn(PLACE, 100, 100)
    assert not switch.codes_now(PLACE)
    assert switch.codes_now(("all_gather_into_tensor", 0, "bfloat16", 21))


def test_always_means_always() -> None:
    assert decisions(Switch(Policy(compress="always")), [False] * 10) == [True] * 10
