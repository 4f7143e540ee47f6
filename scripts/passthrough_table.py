"""Write the table of docs/diffusers.md: what each of diffusers' pipelines that takes a prompt does in the passthrough.

    python scripts/passthrough_table.py                 # every class, some minutes
    python scripts/passthrough_table.py --only FluxPipeline --show

Every class has a row, and rows of one outcome share a line. A class that no request can run says why; any other is
built of tiny random components (scripts/passthrough_parts.py), written as a folder, loaded by
`load_pipeline(backend="diffusers")`, run for two steps on a CPU, attached to, and run again with a sparse backend on
its self-attention. Each row is made in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
PAGE = ROOT / "docs" / "diffusers.md"
BEGIN, END = "<!-- of scripts/passthrough_table.py -->", "<!-- end of the table -->"
SPARSE = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [1, 1, 1]}}
# Sizes that are tried, the smallest first; None for the pipeline's own.
_SMALL, _LARGE = ((32, 32), (64, 64), (128, 128)), ((480, 832), None)
_FRAMES = (5, 9, 8, 16, None)
_MAX_TRIES = 16
_SECONDS = 120
_MAX_CHARACTERS = 120


@dataclass(frozen=True)
class Row:
    """runs: `yes`, or why not: `refused: `, `not shown: ` or `no, and diffusers alone runs it: `. reached: attention
    modules with our attention, of all, or `all`; empty where it did not run. sparse: `yes`, or why not."""

    pipeline: str
    runs: str
    reached: str = ""
    sparse: str = ""


def make_row(name: str) -> Row:
    """Make the row of one class."""
    from passthrough_parts import NotBuiltError, build_pipeline, prompt_taking_classes

    from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface

    warnings.filterwarnings("ignore")
    pipeline_class = prompt_taking_classes()[name]
    reasons = PipelineInterface.of(pipeline_class).refusals()
    if reasons:
        return Row(name, f"refused: {_short('; '.join(reasons))}")
    try:
        pipeline = build_pipeline(pipeline_class)
    except NotBuiltError as error:
        return Row(name, f"not shown: {_short(error)}")
    except Exception as error:  # a class of diffusers raises anything when its components do not fit
        return Row(name, f"not shown: the tiny components do not fit it: {_short(error)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        try:
            pipeline.save_pretrained(folder)
        except Exception as error:  # as above
            return Row(name, f"not shown: it cannot be written as a folder: {_short(error)}")
        return _run(name, folder, Path(temporary))


def _run(name: str, folder: Path, temporary: Path) -> Row:
    from diffusion_runtime import attach, load_pipeline

    request, reason = None, "no size was taken"
    try:
        loaded = load_pipeline(str(folder), backend="diffusers", device="cpu")
    except Exception as error:  # whatever it is, it is the row
        return Row(name, f"not shown: {_short(error)}")
    for request in _requests(loaded, temporary):
        try:
            loaded(request)
            break
        except Exception as error:  # as above; a larger size may do
            reason = _short(error)
            if _runs_alone(loaded, request):
                return Row(name, f"no, and diffusers alone runs it: {reason}")
            request = None
    if request is None:
        return Row(name, f"not shown: {reason}")
    with attach(loaded.pipeline, "torch_sdpa") as handle:
        is_all = handle.num_reached == handle.num_modules
        reached = "all" if is_all else f"{handle.num_reached} of {handle.num_modules}"
    try:
        sparse = load_pipeline(
            str(folder), backend="diffusers", device="cpu", attention={"per_role": {"self": SPARSE}}
        )(request)
    except Exception as error:  # as above
        return Row(name, "yes", reached, _sparse_reason(error))
    served = sum(row.count for row in sparse.attention_report.rows if row.backend == SPARSE["backend"])
    return Row(name, "yes", reached, "yes" if served else "no call was served")


def _runs_alone(loaded: Any, request: Any) -> bool:
    """Whether diffusers' own call with the same values runs, outside the passthrough."""
    from PIL import Image

    interface = loaded.rules.interface
    given = {
        parameter: getattr(request, field)
        for field in ("prompt", "num_inference_steps", "height", "width", "num_frames")
        if (parameter := interface.parameter(field)) is not None and getattr(request, field) is not None
    }
    if request.image_path is not None:
        given[str(interface.parameter("image_path"))] = Image.open(request.image_path).convert("RGB")
    try:
        loaded.pipeline(**given)
    except Exception:  # the tiny components, then
        return False
    return True


def _sparse_reason(error: Exception) -> str:
    text = str(error)
    if "grid" in text:
        return "no grid is known"
    if "it would serve no attention call" in text:
        return "no self-attention is reached"
    return _short(error)


def _requests(loaded: Any, temporary: Path) -> Iterator[Any]:
    """Requests of a few steps that the pipeline takes, the smallest first; with the image, mask and video it needs."""
    from diffusion_runtime import GenerationRequest
    from diffusion_runtime.errors import RequestError

    interface = loaded.rules.interface
    # Of an image to start from a part of the steps runs.
    num_steps = 4 if "strength" in interface.parameters else 2
    steps = {"num_inference_steps": num_steps} if interface.parameter("num_inference_steps") is not None else {}
    has_size = interface.parameter("height") is not None
    num_tried = 0
    lengths = _FRAMES if interface.makes_video else (None,)
    sizes = (_SMALL, _LARGE) if has_size else ((None,),)
    for frames, size in itertools.chain(*(itertools.product(lengths, several) for several in sizes)):
        height, width = size or (64, 64)
        needed = {
            name: str(path) for name, path in _write_inputs(temporary, width, height).items() if interface.needs(name)
        }
        sides = {} if size is None else {"height": height, "width": width}
        given = {**steps, **sides} | ({} if frames is None else {"num_frames": frames})
        try:
            request = GenerationRequest(prompt="a red circle", **needed, **given)
            loaded.resolve(request)
        except RequestError:
            continue
        # The pipeline's own sizes take a minute on a CPU: for those that make no other.
        if num_tried < _MAX_TRIES and (size is not None or not num_tried):
            num_tried += 1
            yield request


def _write_inputs(folder: Path, width: int, height: int) -> dict[str, Path]:
    """A file for each request field that names one."""
    from PIL import Image

    frames = [Image.new("RGB", (width, height), (10 * index, 40, 80)) for index in range(17)]
    paths = {name: folder / f"{name}.{kind}" for name, kind in (("image_path", "png"), ("mask_path", "png"))}
    frames[0].save(paths["image_path"])
    Image.new("RGB", (width, height), "white").save(paths["mask_path"])
    paths["video_path"] = folder / "video.gif"
    frames[0].save(paths["video_path"], save_all=True, append_images=frames[1:])
    return paths


def _short(reason: object) -> str:
    text = " ".join(str(reason).split())
    text = re.sub(r"diffusers' own \w+ failed .*?\(\S+, line \d+\): ", "", text)
    text = re.sub(r"/tmp/[\w./-]*/model(/[\w.]+)*:? ?", "", text).replace("|", "/")
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def make_rows(names: Sequence[str]) -> list[Row]:
    """One after the other, each in a process of its own that is ended after some minutes."""
    # What every row imports, once.
    from passthrough_parts import prompt_taking_classes

    from diffusion_runtime import attach, load_pipeline

    del attach, load_pipeline
    prompt_taking_classes()
    context = multiprocessing.get_context("fork")
    rows = []
    for number, name in enumerate(names, 1):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            future = pool.submit(make_row, name)
            try:
                row = future.result(timeout=_SECONDS)
            except Exception as error:  # a process that was killed, or took too long
                for process in pool._processes.values():
                    process.kill()
                row = Row(name, f"not shown: {_short(error) or type(error).__name__} (limit {_SECONDS} s)")
        print(f"{number} of {len(names)} {row}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def table_of(rows: Sequence[Row], version: str) -> str:
    """The text between the marks."""
    from passthrough_parts import absent_classes

    runs = sum(row.runs == "yes" for row in rows)
    sparse = sum(row.sparse == "yes" for row in rows)
    refused = sum(row.runs.startswith("refused") for row in rows)
    absent = "; ".join(f"{name} ({', '.join(packages)})" for name, packages in absent_classes().items())
    lines = [
        f"Of {len(rows)} classes of diffusers {version}, {runs} ran here on tiny random components, {sparse} of them "
        f"with a sparse backend too; {refused} no request can run; the others say what was missing.",
        "",
        f"Not in the table, as diffusers has them only where these packages are installed: {absent}.",
        "",
        "| runs | with a sparse backend | pipelines; in brackets the attention modules reached, where not all are |",
        "|---|---|---|",
        *_lines_of(rows),
    ]
    return "\n".join(lines)


def _lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """One line for all classes of one outcome; what runs comes first, then by the reason."""
    outcomes: dict[tuple[str, str], list[Row]] = {}
    shown = [replace(row, runs=_outcome(row.runs)) for row in rows]
    for row in sorted(shown, key=lambda row: (row.runs != "yes", row.sparse != "yes", row.runs, row.sparse)):
        outcomes.setdefault((row.runs, row.sparse), []).append(row)
    for (runs, sparse), found in outcomes.items():
        names = ", ".join(
            f"{row.pipeline} ({row.reached})" if " of " in row.reached else row.pipeline
            for row in sorted(found, key=lambda row: row.pipeline)
        )
        yield f"| {runs} | {sparse} | {names} |"


def _outcome(runs: str) -> str:
    """Return the outcome as the page shows it: a row that is not shown names a missing package, or no more than that
    the tiny components gave nothing (`--show` prints the whole reason)."""
    if not runs.startswith("not shown: "):
        return runs
    package = next((name for name in ("torchvision", "PyAV", "cosmos_guardrail") if name in runs), None)
    if package is not None:
        return f"not shown: it needs {package}"
    return "not shown: no tiny components" if "no tiny " in runs else "not shown: its tiny components do not run"


def rows_of(page: str) -> list[Row]:
    """Return the rows of the table in a page, sorted by class."""
    inside = page.split(BEGIN)[1].split(END)[0]
    lines = [line.strip("|").split("|") for line in inside.splitlines() if line.startswith("| ")]
    found = []
    for cells in lines[1:]:
        runs, sparse, names = (cell.strip() for cell in cells)
        for each in names.split(", "):
            pipeline, _, reached = each.partition(" ")
            found.append(Row(pipeline, runs, reached.strip("()") or ("all" if runs == "yes" else ""), sparse))
    return sorted(found, key=lambda row: row.pipeline)


def write_table(rows: Sequence[Row], page: Path = PAGE) -> None:
    import diffusers

    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table_of(rows, diffusers.__version__)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="of these classes alone; the other rows stay")
    parser.add_argument("--show", action="store_true", help="print the rows as JSON and write nothing")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    from passthrough_parts import prompt_taking_classes

    names = given.only if given.only else list(prompt_taking_classes())
    rows = make_rows(names)
    if given.show:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    if given.only:
        kept = {row.pipeline: row for row in rows_of(PAGE.read_text(encoding="utf-8"))}
        rows = [(kept | {row.pipeline: row for row in rows})[name] for name in sorted({*kept, *names})]
    write_table(rows)


if __name__ == "__main__":
    main()
