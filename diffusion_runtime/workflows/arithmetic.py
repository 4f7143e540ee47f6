"""Arithmetic of ComfyUI's expression nodes, by a parser of its own: numbers, names, operators, a few functions.

Nothing is evaluated but what stands in this file: no attribute, index, text or call of anything else exists in the
grammar.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from diffusion_runtime.errors import shown
from diffusion_runtime.workflows.graph import WorkflowError

Number: TypeAlias = int | float

_MAX_CHARACTERS = 2000
_MAX_DEPTH = 50
# A float64 holds every whole number below it; sizes and seeds are smaller by far.
_MAX_MAGNITUDE = 2.0**64
_MAX_EXPONENT = 64
_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+)|([A-Za-z_]\w*)|(\*\*|//|<=|>=|==|!=|[-+*/%(),<>&|]))"
)
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "sum": lambda *values: sum(values),
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "abs": abs,
    "round": round,
    "pow": lambda base, exponent: _power(base, exponent),
    "sqrt": math.sqrt,
    "ceil": math.ceil,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "int": int,
    "float": float,
}
_COMPARISONS: Mapping[str, Callable[[Number, Number], bool]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}
_OPERATORS: Mapping[str, Callable[[Number, Number], Number]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
    # Of whole numbers alone.
    "&": lambda left, right: operator.and_(left, right),
    "|": lambda left, right: operator.or_(left, right),
}


def evaluate(expression: str, names: Mapping[str, Number]) -> Number:
    """Return the value of an expression such as `max(5, round(a * 24))`, as Python would compute it.

    Raises WorkflowError for anything but arithmetic, names that have no value, and results that are no finite number.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise WorkflowError(f"expected at most {_MAX_CHARACTERS} characters of arithmetic, got {len(expression)}")
    try:
        return _Parser(expression, names).whole()
    except (ArithmeticError, ValueError, TypeError) as error:
        # A WorkflowError is a ValueError, and says what is wrong itself.
        if isinstance(error, WorkflowError):
            raise
        raise WorkflowError(f"{shown(expression)} has no value: {error}") from error


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > _MAX_EXPONENT:
        raise WorkflowError(f"expected exponents up to {_MAX_EXPONENT}, got {exponent}")
    value = base**exponent
    if isinstance(value, complex):
        raise WorkflowError(f"{base} ** {exponent} is no real number")
    return float(value) if isinstance(value, float) else int(value)


class _Parser:
    """Recursive descent through: or, and, not, comparison, bits, sum, product, sign, power, value; both sides of `or`
    and `and` are evaluated, which changes no value."""

    def __init__(self, text: str, names: Mapping[str, Number]) -> None:
        self._text = text
        self._names = names
        self._tokens = self._split(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> Number:
        value = self._either()
        if self._next() is not None:
            raise self._error(f"expected its end at {shown(self._next())}")
        return value

    def _split(self, text: str) -> Sequence[str]:
        tokens, at, end = [], 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error(f"expected arithmetic at {shown(text[at : at + 20].strip())}")
            tokens.append(found.group(found.lastindex or 0))
            at = found.end()
        return tokens

    def _error(self, what: str) -> WorkflowError:
        known = "numbers, names, + - * / // % ** & |, comparisons, and, or, not and functions are read"
        return WorkflowError(f"{shown(self._text)}: {what}; {known}")

    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *wanted: str) -> str | None:
        token = self._next()
        if token is None or token not in wanted:
            return None
        self._at += 1
        return token

    def _either(self) -> Number:
        value = self._both()
        while self._take("or") is not None:
            other = self._both()
            value = value or other
        return value

    def _both(self) -> Number:
        value = self._negated()
        while self._take("and") is not None:
            other = self._negated()
            value = value and other
        return value

    def _negated(self) -> Number:
        if self._take("not") is None:
            return self._comparison()
        self._deeper()
        value = not self._negated()
        self._depth -= 1
        return value

    def _comparison(self) -> Number:
        left = self._bits()
        sign = self._take(*_COMPARISONS)
        if sign is None:
            return left
        holds = True
        while sign is not None:
            # 1 < 2 < 3 compares both pairs.
            right = self._bits()
            holds = holds and _COMPARISONS[sign](left, right)
            left, sign = right, self._take(*_COMPARISONS)
        return holds

    def _bits(self) -> Number:
        return self._chain(("|",), lambda: self._chain(("&",), self._sum))

    def _sum(self) -> Number:
        return self._chain(("+", "-"), lambda: self._chain(("*", "/", "//", "%"), self._signed))

    def _chain(self, operators: tuple[str, ...], part: Callable[[], Number]) -> Number:
        value = part()
        while (sign := self._take(*operators)) is not None:
            value = self._bounded(_OPERATORS[sign](value, part()))
        return value

    def _signed(self) -> Number:
        sign = self._take("-", "+")
        if sign is None:
            return self._powered()
        self._deeper()
        value = self._signed()
        self._depth -= 1
        return -value if sign == "-" else value

    def _powered(self) -> Number:
        base = self._value()
        if self._take("**") is None:
            return base
        self._deeper()
        value = self._bounded(_power(base, self._signed()))
        self._depth -= 1
        return value

    def _value(self) -> Number:
        token = self._next()
        if token is None:
            raise self._error("expected a number at its end")
        self._at += 1
        if token == "(":
            return self._arguments(1)[0]
        if token[0].isdigit() or token[0] == ".":
            return self._bounded(int(token) if token.isdigit() else float(token))
        if self._take("(") is not None:
            if token not in _FUNCTIONS:
                raise self._error(f"{shown(token)} is no function of {', '.join(_FUNCTIONS)}")
            return self._bounded(_FUNCTIONS[token](*self._arguments(_MAX_DEPTH)))
        if token not in self._names:
            known = ", ".join(self._names) or "none"
            raise self._error(f"the name {shown(token)} has no value; with values: {known}")
        return self._names[token]

    def _arguments(self, most: int) -> list[Number]:
        """Return what stands between brackets, the first of which is taken."""
        self._deeper()
        values: list[Number] = []
        while len(values) < most:
            values.append(self._either())
            if self._take(",") is None:
                break
        if self._take(")") is None:
            raise self._error("expected a closing bracket")
        self._depth -= 1
        return values

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"it nests more than {_MAX_DEPTH} levels deep")

    def _bounded(self, value: Number) -> Number:
        if not abs(value) <= _MAX_MAGNITUDE:
            raise self._error(f"it leads to {value:.3g}, which is too large")
        return value
