"""The kinds of fault, one a file: name → class."""

from __future__ import annotations

from faults.fault import Fault
from faults.kinds.arguments import Arguments
from faults.kinds.compressibility import Compressibility
from faults.kinds.delay import Delay
from faults.kinds.duplicate import Duplicate
from faults.kinds.escapes import Escapes
from faults.kinds.exit import Exit
from faults.kinds.flip import Flip
from faults.kinds.forge import Forge
from faults.kinds.format_version import FormatVersion
from faults.kinds.hold_gil import HoldGil
from faults.kinds.imbalance import Imbalance
from faults.kinds.misdeliver import Misdeliver
from faults.kinds.order import Order
from faults.kinds.policy import OtherPolicy
from faults.kinds.raise_error import RaiseError
from faults.kinds.signal import Signal
from faults.kinds.stale import Stale
from faults.kinds.stop import Stop
from faults.kinds.swap import Swap
from faults.kinds.truncate import Truncate
from faults.kinds.wrong_sigma import WrongSigma

KINDS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        *(Delay, HoldGil, Stop),
        *(Imbalance, Compressibility),
        *(Escapes, WrongSigma),
        *(Flip, Forge, Truncate, Duplicate, Stale, Swap, Misdeliver),
        *(Exit, RaiseError, Signal),
        *(OtherPolicy, FormatVersion, Arguments, Order),
    )
}
