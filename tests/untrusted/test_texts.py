"""JSON and YAML of strangers: one table of texts that are refused, and what the others mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import table

import diffusion_runtime
from diffusion_runtime.errors import ModelLoadError, nearest, shown
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.document import MAX_DEPTH, DocumentError, check_depth
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.untrusted.yaml_text import parse_yaml, read_packaged_yaml, read_yaml_file

JSON_REFUSED = {
    "not JSON": ("{not json", "line 1, column 2"),
    "nothing": ("", "line 1, column 1"),
    "nested without end": ("[" * 100_000, "nests"),
    "nested deep": ("[" * 100_000 + "]" * 100_000, "nests"),
    "nested a little too deep": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
    "a number of 5000 digits": ("9" * 5000, "a number of 5000 characters"),
    "a fraction of 5000 digits": ("0." + "9" * 5000, "a number of 5002 characters"),
    "beyond float64": ("1e999", "larger than a float64"),
    "NaN": ('{"a": NaN}', "NaN is not JSON"),
    "Infinity": ("-Infinity", "-Infinity is not JSON"),
    "a key twice": ('{"a": 1, "b": 2, "a": 3}', "key 'a' is given twice"),
    "a key twice, inside": ('[{"a": {"b": 1, "b": 1}}]', "key 'b' is given twice"),
    "a million values": ("[" + "0," * 1_000_001 + "0]", "more than 1000000 values"),
    "bytes that are no text": (b"\xff\xfe\x00", "not UTF-8"),
    "two values": ("{} {}", "Extra data"),
}


@table("name", JSON_REFUSED)
def test_json_past_the_limits_is_refused(name: str) -> None:
    text, said = JSON_REFUSED[name]
    with pytest.raises(DocumentError, match=said) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_json_means_what_it_says() -> None:
    text = '{"a": [1, -2, 0.5, 1e-3, true, null], "b": {"c": "\\ud83d\\ude00"}, "seed": 9223372036854775807}'
    assert parse_json(text) == {"a": [1, -2, 0.5, 0.001, True, None], "b": {"c": "😀"}, "seed": 2**63 - 1}
    assert parse_json(text.encode("utf-16")) == parse_json(text)
    assert parse_json("[-Infinity]", allow_constants=True) == [-float("inf")]


# Nine levels of nine aliases each: 387 million values.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{inner}: &{inner} [{', '.join(['*' + outer] * 9)}]\n" for outer, inner in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_REFUSED = {
    "a tag of Python": ("!!python/object/apply:os.system [echo]", "the tag .*python/object"),
    "a truth by tag": ("a: !!bool maybe", "the tag .*bool"),
    "a number by tag": ("a: !!float foo", "the tag .*float"),
    "a text by tag": ("a: ! 2", "the tag '!'"),
    "a time by tag": ("a: !!timestamp x", "the tag .*timestamp"),
    "bytes by tag": ("a: !!binary ====", "the tag .*binary"),
    "merging a text": ("a:\n  <<: foo", "line 2: <<: expected a mapping"),
    "merging numbers": ("<<: [1, 2]", "<<: expected a mapping"),
    "a list as a key": ("? [1]\n: 2", "line 1: a key that is no text"),
    "a mapping as a key": ("{{a: b}: 1}", "a key that is no text"),
    "a key twice": ("a: 1\nb: 2\na: 3", "line 3: key 'a' is given twice"),
    "an alias of nothing": ("a: *b", r"\*b is not defined"),
    "an alias of itself": ("a: &a [*a]", r"\*a is not defined"),
    "aliases in aliases": (BOMB, "more than 20000 values"),
    "aliases in aliases, nested": (
        "a: &a0 [x]\n" + "".join(f"k{n}: &a{n + 1} [*a{n}]\n" for n in range(99)),
        "levels",
    ),
    "many values": ("a: 1\n" + "".join(f"k{n}: 1\n" for n in range(11_000)), "more than 20000 values"),
    "nested without end": ("[" * 200_000, f"more than {MAX_DEPTH} levels"),
    "nested blocks": ("- " * 5000, f"more than {MAX_DEPTH} levels"),
    "two documents": ("--- {}\n--- {}", "line 2: a second document"),
    "NUL": ("a: \0", "special characters are not allowed"),
    "half a flow": ("{", "line 1"),
    "a tab": ("a:\n\tb: 1", "line 2"),
    "a colon too many": ("a: b: c", "line 1"),
    "YAML of the future": ("%YAML 9.9\n--- {}", "incompatible YAML"),
}


@table("name", YAML_REFUSED)
def test_yaml_past_the_limits_is_refused(name: str) -> None:
    text, said = YAML_REFUSED[name]
    with pytest.raises(DocumentError, match=said) as caught:
        parse_yaml(text)
    assert len(str(caught.value)) < 300


YAML_READ: list[tuple[str, Any]] = [
    ("", None),
    ("# nothing\n", None),
    ("[1, -2, +3, 0, 0.5, .5, 1., 1e-3, 2.5E+4]", [1, -2, 3, 0, 0.5, 0.5, 1.0, 0.001, 25000.0]),
    ("[yes, No, on, OFF, true, False]", [True, False, True, False, True, False]),
    ("[~, null, NULL, '']", [None, None, None, ""]),
    # Dates, numbers of other bases, and what is no number stay the text they are.
    ("[2001-12-14, 2001-13-45, 0b_, 0x10, 010, 1:99, 1_000]", "2001-12-14 2001-13-45 0b_ 0x10 010 1:99 1_000".split()),
    ("[.nan, .inf, -.inf, 1e999, +]", [".nan", ".inf", "-.inf", "1e999", "+"]),
    (f"a: {'9' * 5000}", {"a": "9" * 5000}),
    ("['1', \"true\"]", ["1", "true"]),
    # Keys are text.
    ("{1.5: a, true: b, null: c, 2001-12-14: d}", {"1.5": "a", "true": "b", "null": "c", "2001-12-14": "d"}),
    ("a: &x {k: 1, z: 2}\nb: {<<: *x, z: 3}\nc: {z: 4, <<: [*x, {q: 5}]}", {
        "a": {"k": 1, "z": 2}, "b": {"k": 1, "z": 3}, "c": {"k": 1, "z": 4, "q": 5},
    }),
    ("a: |\n  two\n  lines\nb:\n  - c: d\n    e: f\n", {"a": "two\nlines\n", "b": [{"c": "d", "e": "f"}]}),
]  # fmt: skip


@table(("text", "value"), YAML_READ)
def test_yaml_means_what_json_can_say(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, dict)


def test_values_of_a_script_are_bounded_too() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    wide: Any = 1
    for _ in range(40):
        wide = [wide] * 10
    for value in (loop, {"a": loop}, wide):
        with pytest.raises(DocumentError):
            check_depth(value)


SHOWN: list[tuple[object, str]] = [
    ("short", "'short'"),
    ("x" * 1000, "'" + "x" * 76 + "..."),
    (10**5000, "a whole number of 16610 bits"),
    ([1, 2, 3], "[1, 2, 3]"),
    ({"a": {"b": 1}}, "{'a': {'b': 1}}"),
    ("\udcff", "'\\udcff'"),
    (None, "None"),
]


@table(("value", "text"), SHOWN, ids=[text[:20] for _, text in SHOWN])
def test_values_are_cut_in_messages(value: object, text: str) -> None:
    assert shown(value) == text


def test_values_of_any_size_and_depth_are_shown() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    for value in (loop, ["x" * 10**6] * 100, dict.fromkeys(range(10**5), loop), b"x" * 10**6, [[[[[[[10**5000]]]]]]]):
        assert len(shown(value)) <= 80
    assert nearest(10**5000, ("a",)) == " Known: a."


SIZES_REFUSED = [
    {"num_layers": 10**18}, {"n_layers": 5000}, {"num_hidden_layers": 10**6}, {"layers_per_block": 10**9},
    {"layers_per_block": [4, 10**9]}, {"text_config": {"num_hidden_layers": 10**18}}, {"hidden_size": 2**40},
    {"sample_size": -(2**63)},
]  # fmt: skip


def test_sizes_that_no_component_has_are_refused() -> None:
    for values in SIZES_REFUSED:
        with pytest.raises(ModelLoadError, match=r"config.json: key '\w+': expected at most"):
            check_sizes(values, Path("config.json"))
    check_sizes(
        {
            "num_layers": 60,
            "layers_per_block": [4, 6],
            "vocab_size": 262_144,
            "rope_theta": 10**7,
            "eps": 1e-6,
            "a": None,
        },
        Path("config.json"),
    )


def test_both_parsers_read_the_files_of_the_package_alike() -> None:
    files = sorted(Path(diffusion_runtime.__file__).parent.rglob("*.yaml"))
    assert len(files) >= 7
    for file in files:
        assert read_packaged_yaml(file) == read_yaml_file(file), file.name
