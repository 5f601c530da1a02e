"""What rendering a chat template may cost. A template comes with a model and may be hostile; the router must go on.

The unit of work is about a step of the template or a few characters of text, a fraction of a microsecond. Whatever a
template does charges its work before it is done, so nothing has to be interrupted and no clock is asked.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2.utils import Namespace

from common.errors import KVRelayError

BASE = 20_000  # units for any conversation: a few milliseconds
PER_UNIT_OF_INPUT = 64  # times that a template may pass over the conversation
MOST = 50_000_000  # units, whatever the conversation: some seconds
AT_ONCE = (
    2**17
)  # units that one step may take, beside one pass over the conversation: some 20 ms in which nobody else runs
CHARS_A_UNIT = 4
FLOAT_UNITS = 8  # a float takes long to write
MAX_BITS = 60  # of an integer: Python's hashes of larger ones can be made to collide
MAX_DEPTH = 100  # of values in values
MAX_PADDING = 999  # characters that a formatting width, a precision or an indent may make up

ENOUGH = "it asks for more work than a conversation can need"
ATOMS = frozenset((int, float, bool, type(None)))
PLAIN = ATOMS | {str, dict, list, tuple}  # looking at a type is quicker than asking whether it is an Iterator

TemplateValue = TypeVar("TemplateValue")


class TooMuchWork(KVRelayError):
    """The template asks for more work than any honest one needs."""


class _Budget:
    __slots__ = ("at_once", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.at_once = left


_current: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def budget_for(messages: Any) -> Iterator[None]:
    """For one rendering of these messages."""
    budget = _Budget(MOST)
    token = _current.set(budget)
    try:
        charge_deep(messages)
        units = MOST - budget.left
        budget.left, budget.at_once = min(BASE + PER_UNIT_OF_INPUT * units, MOST), AT_ONCE + units
        yield
    finally:
        _current.reset(token)


def charge(units: int) -> None:
    """Raises TooMuchWork."""
    budget = _current.get()
    budget.left -= units
    if budget.left < 0 or units > budget.at_once:
        raise TooMuchWork(ENOUGH)


def charge_text(chars: int) -> None:
    charge(1 + chars // CHARS_A_UNIT)


def step(value: TemplateValue) -> TemplateValue:
    """One more turn of a loop."""
    charge(1)
    return value


def charge_deep(value: TemplateValue) -> TemplateValue:
    """For work on all that a value holds, however deep: a list that holds another one twice counts it twice.

    What is too deep is refused: Python's own recursion over it has no limit everywhere.
    """
    if isinstance(value, str):
        charge_text(len(value))
        return value
    budget = _current.get()
    before = min(budget.left, budget.at_once)
    left = before
    outer: list[Iterator[Any]] = [iter((value,))]
    while outer:
        for item in outer[-1]:
            left -= 1
            if type(item) is str:
                left -= len(item) // CHARS_A_UNIT
            elif type(item) is range:
                left -= len(item)
            elif type(item) is float:
                left -= FLOAT_UNITS
            elif type(item) not in ATOMS:
                outer.append(iter(_inside(item)))
                break
            if left < 0:
                break
        else:
            outer.pop()
        if left < 0 or len(outer) > MAX_DEPTH:
            budget.left = 0
            raise TooMuchWork(ENOUGH if left < 0 else f"it nests values more than {MAX_DEPTH} deep")
    budget.left -= before - left
    return value


def charge_times(value: TemplateValue, times: int) -> TemplateValue:
    """For work that goes through all of a value so many times."""
    budget = _current.get()
    left = budget.left
    charge_deep(value)
    charge((times - 1) * (left - budget.left))
    return value


def charge_sorted(value: TemplateValue) -> TemplateValue:
    """For putting a container's items in order, and looking at all that they hold."""
    count = len(value) if isinstance(value, Collection) else 1
    charge(4 * count * count.bit_length())
    return charge_deep(value)


def check_key(key: TemplateValue) -> TemplateValue:
    """Of a dictionary, or one of values that are to differ: no tuple, since their hashes can be made to collide.

    A dictionary of such keys takes a time that grows with their square; the hashes of texts are random.
    """
    if isinstance(key, tuple):
        raise TooMuchWork("it uses a tuple as a key")
    return key


def check_number(value: TemplateValue) -> TemplateValue:
    """An integer is to stay small."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TooMuchWork(f"it makes an integer of more than {MAX_BITS} bits")
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str):  # a subclass
        return (str(value),)
    if isinstance(value, Namespace):
        return (value._Namespace__attrs,)
    if isinstance(value, dict | Mapping):
        return (*value.keys(), *value.values())
    return value if isinstance(value, Collection) else ()


def charge_indents(value: Any, size: int) -> None:
    """For a value that is written with so many characters before each item, a level."""
    level, depth = [value], 0
    while level and size:
        charge_text(len(level) * depth * size)
        level = [item for outer in level if isinstance(outer, dict | list | tuple) for item in _items(outer)]
        depth += 1


def _items(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def charge_shallow(value: TemplateValue) -> TemplateValue:
    """For work on a text or on a container's items, not on what they hold."""
    if isinstance(value, str):
        charge_text(len(value))
    elif type(value) not in ATOMS and isinstance(value, Collection):
        charge(1 + len(value))
    return value


def counted(value: Any) -> Any:
    """An iterator of unknown length charges as it goes."""
    return map(step, value) if type(value) not in PLAIN and isinstance(value, Iterator) else value


def held(value: Any) -> Any:
    """With its items at hand, where they only come one by one."""
    return list(counted(value)) if isinstance(value, Iterator) else value


def joined(pieces: Iterable[str]) -> str:
    """All pieces as one text."""
    taken = []
    for piece in pieces:
        charge_text(len(piece))
        taken.append(piece)
    return "".join(taken)


def narrow(number: Any, what: str) -> None:
    """Refuses a number of characters that nobody pads to."""
    if isinstance(number, int) and abs(number) > MAX_PADDING:
        raise TooMuchWork(f"it asks for {what} of more than {MAX_PADDING}")


def charge_product(operator: str, left: Any, right: Any) -> None:
    """For `*` and `**`: numbers must stay small, a repeated text or list is charged at its full length."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TooMuchWork(f"it makes an integer of more than {MAX_BITS} bits")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and times > 0:
            _charge_times(repeated, times)


def _charge_times(repeated: Any, times: int) -> None:
    if isinstance(repeated, str):
        charge_text(len(repeated) * times)
    elif isinstance(repeated, Collection):
        charge(len(repeated) * times)
