"""Hypothesis across ranks: rank 0 draws, the others replay, and all fail, shrink and report as one.

Each of three ways makes a ranked test property-based:

    def test_a(world):                                  def test_b(world, words): ...
        in_step(world, words(), check)                  test_b = given(words=words())(test_b)

    class Calls(Program): ...                           # a RuleBasedStateMachine whose rules append to a program
    def test_c(world):
        programs_in_step(world, Calls, play)

Only rank 0 runs Hypothesis. It sends every example through torchrun's store; every rank runs it, and the ranks exchange
the hash of what they ran and how it went. If any rank failed, rank 0 tells Hypothesis that the example failed, and so
goes on to smaller ones, the others with it: no rank shrinks alone, none is left in a collective. In the end all ranks
raise one error: the minimal example, what each rank did with it, and the command that runs it again.

Drawing everywhere from one seed would not do: what Hypothesis draws depends on which modules a process has imported.

Options: --example-seed N ("nightly": the date), --example-factor F (so many times the examples), --example CODE (only
this one). The default seed is fixed, so that two runs draw the same; each test has a seed of its own.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, reproduce_failure, seed, settings
from hypothesis import __version__ as hypothesis_version
from hypothesis import strategies as st
from hypothesis.errors import HypothesisDeprecationWarning, UnsatisfiedAssumption
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

if TYPE_CHECKING:
    from conformance.plugin import World

BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")
TEXT_LIMIT_CHARS = 4000
DRAW_LIMIT_S = 30.0
SHRINK_LIMIT_S = 45.0
LINE_LIMIT_CHARS = 300


class ExampleFailed(AssertionError):
    """Some rank failed with an example; raised with the minimal one on all ranks."""


class OutOfStep(BaseException):
    """The ranks cannot go on together. Hypothesis must not take it for a failing example, hence BaseException."""


class _Steps:
    """The examples of one test. `perform` runs one of them on this rank; the next begins without its Communicators."""

    def __init__(self, world: World, perform: Callable[[Any], None]) -> None:
        self.world, self.perform = world, perform
        self.examples = 0
        self.failed: list[str] = []
        self.failing: Any = None
        self.failing_digests: set[str] = set()
        self.passed: set[str] = set()
        self.first_failure = float("inf")

    def run(self, drive: Callable[[], None]) -> None:
        """Rank 0: have `drive` run Hypothesis, which calls `lead` with examples. The others follow until it is done."""
        if self.world.rank:
            self._follow()
            return
        error: BaseException | None = None
        try:
            drive()
        except OutOfStep as e:
            raise e.args[0] from None
        except Exception as e:
            error = e
        text = self._minimal(error) if error else ""
        self._exchange(("end", text))
        if text:
            raise ExampleFailed(text)

    def lead(self, example: Any) -> None:
        """On rank 0, for Hypothesis: one example on all ranks; raises if any of them failed."""
        digest = digest_of(example)
        if digest in self.passed or self._shrunk_enough(digest):
            return
        self.examples += 1
        try:
            sent = pickle.dumps(example)
        except Exception as e:
            self._exchange(("end", f"in_step: this example cannot be sent to other ranks: {e}"))
            raise OutOfStep(TypeError(f"in_step: this example cannot be sent to other ranks: {e}")) from None
        try:
            self._exchange(("example", sent))
            rejected, failed = self._perform(example)
        except Exception as e:
            raise OutOfStep(e) from None
        if failed:
            self.failed, self.failing = failed, example
            self.failing_digests.add(digest)
            self.first_failure = min(self.first_failure, time.monotonic())
            raise ExampleFailed(failed[0])  # always of this line: Hypothesis takes it for one bug, as it must
        if rejected:
            raise UnsatisfiedAssumption
        self.passed.add(digest)

    def _shrunk_enough(self, digest: str) -> bool:
        """After a while of shrinking, let Hypothesis believe that nothing new fails."""
        return time.monotonic() - self.first_failure > SHRINK_LIMIT_S and digest not in self.failing_digests

    def _follow(self) -> None:
        while True:
            kind, content = self._exchange(None)
            if kind == "end":
                if content:
                    raise ExampleFailed(content)
                return
            self._perform(pickle.loads(content))

    def _exchange(self, mine: Any) -> Any:
        """What rank 0 has to say; its drawing of the next example may take a while."""
        return self.world.exchange(mine, DRAW_LIMIT_S)[0]

    def _perform(self, example: Any) -> tuple[bool, list[str]]:
        """(some rank rejected it, what failed: the first failure's text, then a line a rank)."""
        digest = digest_of(example)
        rejected, order, line, text = False, 0, "passed", ""
        try:
            with warnings.catch_warnings():
                if self.world.rank:  # assume() is deprecated outside Hypothesis, and only rank 0 is inside
                    warnings.simplefilter("ignore", HypothesisDeprecationWarning)
                with self.world.apart(), self.world.released():
                    try:
                        self.perform(example)
                    except UnsatisfiedAssumption:
                        raise
                    except Exception:
                        order = self.world.take_number()  # before what follows from it can fail on other ranks
                        raise
        except UnsatisfiedAssumption:
            rejected = True
        except Exception as e:
            order = order or self.world.take_number()
            line = "".join(traceback.format_exception_only(e)).strip()[:LINE_LIMIT_CHARS]
            text = "".join(traceback.format_exception(e))[-TEXT_LIMIT_CHARS:]
        told = self.world.exchange((digest, rejected, order, line, text))
        if others := [r for r, t in enumerate(told) if t[0] != told[0][0]]:
            raise RuntimeError(f"in_step: ranks {others} ran another example than rank 0")
        if not any(t[2] for t in told):
            return any(t[1] for t in told), []
        first = min((r for r, t in enumerate(told) if t[2]), key=lambda r: told[r][2])
        return False, [
            f"rank {first} failed first:\n{told[first][4]}",
            *(f"  rank {r}: {t[3]}" for r, t in enumerate(told)),
        ]

    def _minimal(self, error: BaseException) -> str:
        """The one report: the minimal example as Hypothesis prints it, what the ranks did, and how to run it again."""
        notes = "\n".join(getattr(error, "__notes__", []))
        blob = BLOB.search(notes)
        shown = "\n".join(line for line in notes.splitlines() if not BLOB.search(line))
        if not isinstance(error, ExampleFailed):
            shown = f"{type(error).__name__}: {error}\n{shown}"
        command = self.world.command(*(("--example", blob[1]) if blob else ()))
        return "\n".join(
            [
                f"minimal example of {self.examples} run: {_shown(self.failing)[:LINE_LIMIT_CHARS]}",
                shown,
                *(self.failed[1:] + self.failed[:1]),
                f"run it again: {command}",
            ]
        )


def _shown(example: Any) -> str:
    """An example on one line, whole."""
    with np.printoptions(threshold=1 << 16):
        return " ".join(repr(example).split())


def digest_of(example: Any) -> str:
    """A hash of all of an example: arrays by dtype, shape and bits."""
    return hashlib.sha256(repr(_plain(example)).encode()).hexdigest()


def _plain(example: Any) -> Any:
    if isinstance(example, np.ndarray):
        return (example.dtype.str, example.shape, example.tobytes())
    if isinstance(example, (tuple, list)):
        return [_plain(e) for e in example]
    if isinstance(example, dict):
        return [(k, _plain(v)) for k, v in example.items()]
    return example


def settings_of(world: World, parent: settings | None = None, **more: Any) -> settings:
    """Hypothesis's settings for a ranked test: no deadline, no database, the run's factor of examples."""
    parent = parent or settings.default
    fixed: dict[str, Any] = {"deadline": None, "database": None, "derandomize": False, "print_blob": True}
    fixed |= {"suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}
    fixed |= {"phases": (Phase.explicit, Phase.generate, Phase.shrink)}
    wanted = more.pop("max_examples", None) or parent.max_examples
    return settings(parent, max_examples=max(1, int(wanted * world.example_factor)), **fixed, **more)


def _aimed(world: World, test: Any) -> Any:
    """The test with this run's seed, or with the one example that was asked for."""
    if world.example:
        return reproduce_failure(hypothesis_version, world.example.encode())(test)
    return seed(world.example_seed)(test)


def in_step(
    world: World, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], max_examples: int = 50
) -> None:
    """Run check on drawn examples, all ranks in step, failures and shrinking included.

    Args:
        strategy: of examples that can be pickled. Only rank 0 draws.
        check: called on every rank with the same example; raises if it finds something wrong. It must leave nothing
            behind: one that fails is run again and again with other examples, so what can break (a Communicator) is
            made in it.
        max_examples: times --example-factor.

    Raises:
        ExampleFailed: on all ranks, with the minimal example.
    """
    steps = _Steps(world, check)

    def run(example: Any) -> None:
        steps.lead(example)

    steps.run(_aimed(world, settings_of(world, max_examples=max_examples)(given(strategy)(run))))


def given_in_step(world: World, function: Any, fixtures: dict[str, Any]) -> None:
    """Run a test function that is decorated with Hypothesis's @given and has the fixture `world`."""
    handle = function.hypothesis
    inner = handle.inner_test

    def perform(drawn: dict[str, Any]) -> None:
        inner(**fixtures, **drawn)

    steps = _Steps(world, perform)

    def publish(**arguments: Any) -> None:
        steps.lead({name: value for name, value in arguments.items() if name not in fixtures})

    def drive() -> None:
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        handle.inner_test = publish
        try:
            function._hypothesis_internal_use_settings = settings_of(world, own)
            _aimed(world, function)(**fixtures)
        finally:
            handle.inner_test = inner
            function._hypothesis_internal_use_settings = own

    steps.run(drive)


class Program(RuleBasedStateMachine):
    """A state machine whose rules only append to `program`: what all ranks are then to do, each at its own speed.

    Ranks that met after every step could never be in different steps, which is where asynchronous calls go wrong. So a
    program is complete before any rank begins; the rule `run` hands it out and begins the next one.
    """

    publish: ClassVar[Callable[[list[Any]], None]]

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Start an empty program; extend it to reset what the rules remember."""
        self.program: list[Any] = []

    @precondition(lambda self: self.program)
    @rule()
    def run(self) -> None:
        """Run the program on all ranks."""
        complete = self.program
        self.begin()
        self.publish(complete)


def programs_in_step(
    world: World,
    machine: type[Program],
    play: Callable[[list[Any]], None],
    max_examples: int = 20,
    max_steps: int = 30,
) -> None:
    """Run play on drawn programs, all ranks in step, failures and shrinking included.

    Args:
        machine: its rules append plain data to self.program.
        play: called on every rank with the same program. As for `in_step`, it makes what can break.
        max_examples: runs of the machine, of several programs each; times --example-factor.
        max_steps: rules in one run.

    Raises:
        ExampleFailed: on all ranks, with the minimal program.
    """
    steps = _Steps(world, play)
    bound = type(machine.__name__, (machine,), {"publish": staticmethod(steps.lead)})
    how = settings_of(world, max_examples=max_examples, stateful_step_count=max_steps)
    steps.run(lambda: run_state_machine_as_test(_aimed(world, bound), settings=how))


__all__ = [
    "ExampleFailed",
    "Program",
    "digest_of",
    "given_in_step",
    "in_step",
    "programs_in_step",
    "settings_of",
]
