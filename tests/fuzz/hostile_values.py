"""What strangers write where something else is due, and mutations of texts, bytes and JSON values."""

from __future__ import annotations

import json
import random
from typing import Any

SPECIAL_PATHS = (
    "/dev/zero /dev/full /dev/urandom /dev/null /dev/stdin /dev/tty /proc/self/mem /proc/self/status /proc/1/environ "
    "/ . .. ~ ~nobody-of-this-name /root/.. a//b ./missing missing/missing.json"
).split()
LONG_NAME = "n" * 300
STRANGE_TEXTS = (
    "", " ", "\n", "\0", "a\0b", "\udcff", "\ud800", "é", "日本", "\u202e", "\x1b[31m", "{", "[", "]", "}", "{}", "[]",
    "[[1]]", "null", "true", "nan", "NaN", "inf", "-inf", "1e999", "-1", "0", "1", "-0", "1.5", "0x10", "010", "1_000",
    "9" * 30, "9" * 5000, "1:99", "0b_", "2001-13-45", "2001-12-14", "<<", "*a", "&a", "!!float foo", "!!bool maybe",
    "%", "@", "`", "'", '"', "=", "a=b", "a=", "=b", ",", "a,b", "a.b", ".", "..", "-", "--", "---", "auto", "none",
    "../../etc/passwd", "$(id)", "fa", "torch_sdpa", "sliding_tile_attn", "measured", LONG_NAME, "x" * 100_000,
    LONG_NAME + ".json", "/" + "d/" * 3000, "a/b", "owner/name", "native", "cuda:99", "cpu", "meta", "float16",
    *SPECIAL_PATHS,
)  # fmt: skip
STRANGE_NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 2**15, 2**31, 2**31 - 1, 2**32, 2**53, 2**63, 2**63 - 1, -(2**63), 2**64, 10**18, 10**60,
    0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e300, 1e18, 1e6,
)  # fmt: skip
STRANGE_CONSTANTS = (None, True, False, float("nan"), float("inf"), -float("inf"))


def strange_value(random: random.Random, depth: int = 2) -> Any:
    """Any value that JSON, or nearly JSON, can hold."""
    kind = random.randrange(8 if depth else 4)
    if kind < 2:
        return random.choice(STRANGE_TEXTS)
    if kind == 2:
        return random.choice(STRANGE_NUMBERS)
    if kind == 3:
        return random.choice(STRANGE_CONSTANTS)
    if kind == 4:
        return [strange_value(random, depth - 1) for _ in range(random.choice((0, 1, 2, 3, 3, 16)))]
    if kind == 5:
        return {random.choice(STRANGE_TEXTS): strange_value(random, depth - 1) for _ in range(random.randrange(4))}
    if kind == 6:
        return [[]] * random.choice((1, 1000))
    nested: Any = strange_value(random, 0)
    for _ in range(random.choice((2, 40, 500))):
        nested = [nested] if random.random() < 0.5 else {"a": nested}
    return nested


def mutate_value(random: random.Random, value: Any) -> Any:
    """One change somewhere inside `value`: another value, a key that is gone, renamed or new, an item repeated."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        action = random.randrange(10)
        if action == 0:
            return {name: item for name, item in value.items() if name != key}
        if action == 1:
            return {**value, random.choice((*STRANGE_TEXTS, key + "x", key[:-1])): value[key]}
        return {**value, key: mutate_value(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        action = random.randrange(6)
        if action == 0:
            return value[:place] + value[place + 1 :]
        if action == 1:
            return value * random.choice((2, 100))
        return [*value[:place], mutate_value(random, value[place]), *value[place + 1 :]]
    if isinstance(value, bool) or value is None or random.random() < 0.5:
        return strange_value(random)
    if isinstance(value, int | float):
        return random.choice((value * 2, value + 1, -value, value / 3, 10**18, str(value), *STRANGE_NUMBERS))
    if isinstance(value, str):
        return random.choice((value.upper(), value + "x", value[:-1], value * 3, [value], *STRANGE_TEXTS))
    return strange_value(random)


def mutate_text(random: random.Random, text: str) -> str:
    """A piece cut, repeated or put in."""
    for _ in range(random.choice((1, 1, 2, 5))):
        start, stop = sorted(random.randrange(len(text) + 1) for _ in range(2))
        stop = min(stop, start + 40)
        action = random.randrange(5)
        if action == 0:
            text = text[:start] + text[stop:]
        elif action == 1:
            text = text[:start] + text[start:stop] * random.choice((2, 3, 50)) + text[stop:]
        elif action == 2:
            text = text[:start] + random.choice(("[" * 200_000, "{" * 5000, "- " * 3000, "? ", "<<: ", "\t", "#"))
        else:
            text = text[:start] + random.choice(STRANGE_TEXTS) + text[stop:]
    return text


def mutate_bytes(random: random.Random, content: bytes) -> bytes:
    """Bits flipped, a piece cut off, zeroed, repeated or put in."""
    damaged = bytearray(content)
    for _ in range(random.choice((1, 1, 3, 20))):
        if not damaged:
            break
        # Heads of files decide more than what comes after them.
        place = random.randrange(min(len(damaged), random.choice((16, 200, len(damaged)))))
        action = random.randrange(6)
        if action == 0:
            del damaged[place:]
        elif action == 1:
            damaged[place : place + 4] = random.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
        elif action == 2:
            damaged[place:place] = random.randbytes(random.choice((1, 8, 100)))
        elif action == 3:
            del damaged[place : place + random.choice((1, 8, 100))]
        else:
            damaged[place] ^= 1 << random.randrange(8)
    return bytes(damaged)


def to_json(value: Any) -> bytes:
    """With lone surrogates as escapes, and NaN as Python writes it."""
    return json.dumps(value).encode()
