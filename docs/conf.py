"""Sphinx: these pages and the API reference as a site. `python -m sphinx -W -b html docs OUTPUT` builds it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from diffusion_runtime import GenerationRequest, __version__
from diffusion_runtime.request.generation_request import REQUEST_FIELDS

project = "diffusion_runtime"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
html_theme = "furo"
html_title = "diffusion-runtime"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# Links to headings, as GitHub names them.
myst_heading_anchors = 3
# Docstrings name code in single backquotes.
default_role = "code"
# Two hyphens are those of a flag.
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
# One argument per line.
maximum_signature_line_length = 88
# Fields of dataclasses are described in the class's own text; their types stand in the signature.
autodoc_default_options = {"members": True, "undoc-members": False}
python_use_unqualified_type_names = True

# `name, other: what it is`, at the start of a paragraph or behind a sentence.
FIELD = re.compile(r"(?:^|(?<=[.;:] ))(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")


def format_docstring(_app: Any, _kind: str, _name: str, found: object, _options: object, lines: list[str]) -> None:
    """Our docstrings as reStructuredText: descriptions of arguments and fields as lists, no markup but `code`."""
    formatted: list[str] = []
    names = names_of(found)
    before = ""
    for paragraph in "\n".join(lines).split("\n\n"):
        # A drawing or a table is shown as it stands; an example has its mark behind the sentence before.
        is_indented = paragraph.startswith(" ") and not before.startswith(" ")
        if is_indented and ">>>" not in paragraph and not before.endswith("::"):
            formatted += ["::", ""]
        formatted += [*format_paragraph(paragraph, names), ""]
        before = paragraph
    if found is GenerationRequest:
        formatted += [f"- ``{name}``: {escape(declared.help)}" for name, declared in REQUEST_FIELDS.items()]
    lines[:] = formatted


def format_signature(
    _app: Any, _kind: str, _name: str, _found: object, _options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Defaults that a factory or a lambda makes, as `...`: what they are otherwise shown as does not parse."""
    plain = signature and re.sub(r"<factory>|<function [\w.]*(<lambda>)?( at \w+)?>", "...", signature)
    return plain, returned


def skip_values(_app: Any, _kind: str, _name: str, found: object, _skip: bool, _options: object) -> bool | None:
    """Fields of dataclasses are in the signature and in their class's text: not a third time."""
    is_code = callable(found) or isinstance(found, property | classmethod | staticmethod | functools.cached_property)
    return True if not is_code else None


def names_of(found: object) -> set[str]:
    """What a docstring may describe: arguments of a function, and what a class has."""
    try:
        names = set(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        names = set()
    if isinstance(found, type):
        names |= {name for each in found.__mro__ for name in (*vars(each), *vars(each).get("__annotations__", {}))}
    return names


def format_paragraph(paragraph: str, names: set[str]) -> list[str]:
    """A paragraph that describes some of `names` becomes a list of them; any other stays, as one block of text."""
    if paragraph.startswith(" ") or ">>>" in paragraph:
        return paragraph.splitlines()
    text = " ".join(paragraph.split())
    parts = FIELD.split(text)
    # Texts and names by turns; names that are none of the object's belong to the text before them.
    formatted = [escape(parts[0])]
    for described, what in zip(parts[1::2], parts[2::2], strict=True):
        if {name.lstrip("*") for name in described.split(", ")} <= names:
            shown = ", ".join(f"``{name}``" for name in described.split(", "))
            formatted += ["", f"- {shown}: {escape(what)}"]
        else:
            formatted[-1] += escape(f"{described}: {what}")
    return formatted


def escape(line: str) -> str:
    """Stars and bars that are no markup, outside of code."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*|])", r"\\\1", part) for part in parts)


def complete_source(_app: Any, page: str, source: list[str]) -> None:
    """Links out of docs/, and the sidebar's tree, which is the list of links in index.md: GitHub and site share it."""
    # Markdown files beside docs/ are no pages: they are offered as files.
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])
    if page != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = re.findall(r"^- \[[^\]]+\]\((\w+)\.md\)", text, flags=re.MULTILINE)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", complete_source)
    app.connect("autodoc-process-docstring", format_docstring)
    app.connect("autodoc-process-signature", format_signature)
    app.connect("autodoc-skip-member", skip_values)
