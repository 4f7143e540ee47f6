"""Dry run (`generate --dry-run`): what would run, why, and the names of the files. Loads and writes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.tables import facts_table, plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.config import runtime_options
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.diffusers_bridge.dispatcher_names import dispatcher_name
from diffusion_runtime.explanation.request_remarks import request_remarks
from diffusion_runtime.models.lora_sources import recorded_loras, waits_on_hub
from diffusion_runtime.models.published import published_model_of
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS
from diffusion_runtime.request.given_images import recorded_images
from diffusion_runtime.session.batch import Item
from diffusion_runtime.session.outputs import Outputs

if TYPE_CHECKING:
    from diffusion_runtime.attention.select import Decision
    from diffusion_runtime.config import LoraConfig, RuntimeConfig
    from diffusion_runtime.explanation.expected_time import ExpectedTime
    from diffusion_runtime.loading.description import PipelineDescription
    from diffusion_runtime.request.generation_request import GenerationRequest

# Laying out a table of thousands of rows takes longer than anybody reads.
_MAX_ROWS = 100
# Options that change the output and have rows of their own.
_OWN_ROWS = ("lora", "quantization", "quantization_ignored_layers", "compile")
SCHEMA = "diffusion_runtime.dry_run/1"


def show_plan(
    description: PipelineDescription, items: Sequence[Item], outputs: Outputs, terminal: Terminal, *, as_json: bool
) -> int:
    """Show what `description` and `items` lead to; the exit code is the one an item that cannot be made has, else 0."""
    from diffusion_runtime.explanation.expected_time import planned_times, seconds_text

    made = [item for item in items if item.failure is None]
    makeable = [item.request for item in made]
    paths = outputs.predict(makeable)
    failures = [item.failure for item in items if item.failure is not None]
    exit_code = failures[0].exit_code if failures else 0
    done = [0 if item.begin is None else item.begin.num_steps_done for item in made]
    expected = planned_times(description, makeable, outputs.format_for, done)
    if as_json:
        put_on_stdout(json_text(_to_json_object(description, items, paths, exit_code, expected)))
        return exit_code
    terminal.say("Dry run: no weights are loaded and nothing is written.")
    facts: list[tuple[str, object]] = [
        ("model", f"{description.config.model_path} ({description.family})"),
        ("folder", _folder_row(description)),
        ("device", device_row(description)),
        ("dtype", description.dtype),
    ]
    if description.degrees.num_processes > 1:
        facts.append(("processes", f"{description.degrees.num_processes}: {description.degrees}"))
    if description.quantization is not None:
        facts.append(("quantization", description.quantization))
    if description.config.compile != "off":
        facts.append(("compile", description.config.compile))
    if description.config.cuda_graphs != "auto":
        facts.append(("cuda_graphs", description.config.cuda_graphs))
    facts += [("lora", _lora_row(lora)) for lora in description.config.lora]
    facts += [
        (name, value)
        for name, option in runtime_options().items()
        if option.changes_output and option.recorded_as is None and name not in _OWN_ROWS
        if (value := getattr(description.config, name)) != option.default
    ]
    for name, declared in REQUEST_FIELDS.items():
        value = recorded_images(getattr(makeable[0], name)) if name in INPUT_FIELDS else getattr(makeable[0], name)
        if not declared.differs_in_batch and not (value is None and declared.may_stay_none):
            facts.append((name, "the pipeline's own" if value is None else _shown(value)))
    negative_prompts = dict.fromkeys(request.negative_prompt or "" for request in makeable)
    facts.append(("negative_prompt", "\n".join(negative_prompts)))
    terminal.show(facts_table(facts, "\nWhat would run"))
    if description.planned_on is not None:
        terminal.say(description.planned_on.note)
    for note in dict.fromkeys(note for request in makeable if (note := description.rules.sampling_note(request))):
        terminal.say(note)
    if segments := planned_segments(description, makeable[0]):
        rows_of_segments = [tuple(each.values()) for each in segments]
        title = "Segments that would be made" if len(makeable) == 1 else "Segments of the first file"
        terminal.show(plain_table(tuple(segments[0]), rows_of_segments[:_MAX_ROWS], title))
    for remark in dict.fromkeys(remark for request in makeable for remark in request_remarks(description, request)):
        terminal.warn(remark)
    if description.memory is not None:
        terminal.show(facts_table(description.memory.rows(), "Memory that it would take"))
        for note in description.memory.demand.notes:
            terminal.warn(note)
    if expected:
        terminal.show(facts_table(expected[0].rows(), "Seconds that it would take on this machine, without loading"))
        together = [each.total for each in expected if each.total is not None]
        if len(expected) > 1 and len(together) == len(expected):
            terminal.say(f"{len(expected)} files together: {seconds_text(sum(together))}")
    else:
        terminal.say("Seconds: not known of a device that is not here")
    if description.attention:
        terminal.show(attention_plan(description))
    else:
        terminal.say(f"Attention: {_unplanned_attention(description.config)}")
    for check in description.self_checks:
        terminal.say(str(check), wraps=True)
    for library in description.libraries:
        terminal.say(str(library), wraps=True)
    rows = [(path, request.seed, request.prompt) for path, request in zip(paths, makeable, strict=True)]
    terminal.show(plain_table(("file", "seed", "prompt"), rows[:_MAX_ROWS], "What would be written"))
    if len(rows) > _MAX_ROWS:
        terminal.say(f"and {len(rows) - _MAX_ROWS} more; --json lists all")
    for path, request in list(zip(paths, makeable, strict=True))[:_MAX_ROWS]:
        if (numbered := outputs.explain_number(request, path)) is not None:
            terminal.say(numbered)
    for failure in failures:
        terminal.error(failure.message, failure.trace)
    return exit_code


def planned_segments(description: PipelineDescription, request: GenerationRequest) -> list[dict[str, object]]:
    """Return the segments of a resolved request's video, a row for each; none of one that is made at once."""
    from diffusion_runtime.rules.batch_settings import prompt_at
    from diffusion_runtime.rules.request_rules import RequestRules

    if not isinstance(description.rules, RequestRules):
        return []
    settings = description.rules.settings(request)
    if len(settings.segments) == 1:
        return []
    return [
        {
            "segment": segment.index,
            "frames": f"{start}-{min(segment.start + segment.num_frames, segment.num_frames_of_video) - 1}",
            "begins with": _frames_text(segment.start, start - 1) if start > segment.start else "",
            "seed": settings.seed_of_segment(segment.index),
            "prompt": prompt_at(request, start),
        }
        for segment, start in zip(settings.segments, settings.segments.starts, strict=True)
    ]


def _frames_text(first: int, last: int) -> str:
    return f"frame {first}" if first == last else f"frames {first}-{last}"


def device_row(description: PipelineDescription) -> str:
    planned_on = description.planned_on
    return description.device if planned_on is None else f"{planned_on.hardware.device_name}, which is not here"


def _folder_row(description: PipelineDescription) -> str:
    folder = description.model_folder
    if folder.download_gb is None:
        return str(folder)
    size = size_text(round(folder.download_gb * 10**9))
    what = f"a run downloads {f'{size} from the hub' if folder.download_gb else 'no weights'}"
    published = published_model_of(description.config.model_path)
    if published is not None and published.files_alone:
        what = f"a run reads its files, {size}, which are given: --model-path FILE of the transformer"
    if (variant := description.config.variant) is not None and folder.download_gb:
        # A folder's json counts its default weights; only the hub's list of files has the others.
        what += f"; that is the size of the default weights, not of the variant {variant}"
    where = "none yet: planned from the configs inside the package" if folder.is_packaged else str(folder)
    return f"{where}; {what}"


def _shown(value: Any) -> Any:
    """Several paths in a line each, prompts and images with their frames, noise levels as their flag takes them."""
    if not isinstance(value, tuple):
        return value
    if all(isinstance(each, tuple) and len(each) == 3 for each in value):
        return "\n".join(f"at frame {frame}: {path}, strength {strength:g}" for frame, path, strength in value)
    if all(isinstance(each, tuple) for each in value):
        return "\n".join(f"from frame {at}: {prompt}" for at, prompt in value)
    return "\n".join(value) if all(isinstance(each, str) for each in value) else ",".join(f"{each:g}" for each in value)


def _lora_row(lora: LoraConfig) -> str:
    """Return a LoRA as `--lora` takes it."""
    component = "" if lora.component == "auto" else f"{lora.component}="
    (recorded,) = recorded_loras([lora])
    revision = "" if lora.revision is None else f"@{lora.revision}"
    waits = "; a run downloads it from the hub" if waits_on_hub(lora) else ""
    return f"{component}{recorded['path']}{revision}{':' if revision else '@'}{lora.scale:g}{waits}"


def attention_plan(description: PipelineDescription) -> Any:
    from diffusion_runtime.report.attention_report import index_ranges

    rows: list[Sequence[object]] = []
    for planned in description.attention:
        decision = planned.decision
        why = f"{decision.source}: {decision.reason}" + _rejected(decision)
        if decision.dense is not None:
            why += f"\ndense calls: {decision.dense.backend} ({decision.dense.source}: {decision.dense.reason})"
        backend = decision.backend + (f" {dict(decision.options)}" if decision.options else "")
        rows.append((planned.role, planned.when, index_ranges(planned.layers), backend, why))
    return plain_table(("role", "when", "layers", "backend", "why"), rows, "Attention that would run")


def _unplanned_attention(config: RuntimeConfig) -> str:
    name = dispatcher_name(config.attention_override) or dispatcher_name(config.attention)
    if name is not None:
        return f"diffusers' own {name!r}, which its dispatcher runs"
    return "known once the weights are loaded; the generation says what ran"


def _rejected(decision: Decision) -> str:
    return "".join(f"\nnot {name}: {reason}" for name, reason in decision.rejected)


def _to_json_object(
    description: PipelineDescription,
    items: Sequence[Item],
    paths: Sequence[Path],
    exit_code: int,
    expected: Sequence[ExpectedTime],
) -> dict[str, Any]:
    waiting = iter(paths)
    rows_of_items: list[dict[str, Any]] = []
    for item in items:
        known: dict[str, Any] = {"prompt": item.request.prompt, "seed": item.request.seed}
        if item.failure is None:
            rows_of_items.append(
                {
                    "path": str(next(waiting)),
                    **known,
                    "request": item.request.recorded(),
                    "remarks": request_remarks(description, item.request),
                    "segments": planned_segments(description, item.request),
                }
            )
        else:
            rows_of_items.append({**known, **item.failure.to_dict()})
    for row, each in zip((row for row in rows_of_items if "request" in row), expected, strict=False):
        row["expected_time"] = each.to_dict()
    return {
        "schema": SCHEMA,
        **{key: value for key, value in description.to_dict().items() if key != "schema"},
        "folder": None if description.model_folder.is_packaged else str(description.folder),
        "download_gb": description.model_folder.download_gb,
        "quantization": description.quantization,
        "planned_on": None if description.planned_on is None else description.planned_on.to_dict(),
        "memory": None if description.memory is None else description.memory.to_dict(),
        "defaults": dict(description.rules.defaults),
        "presets": {name: dict(values) for name, values in description.rules.presets.items()},
        "libraries": [dataclasses.asdict(library) for library in description.libraries],
        "self_checks": [check.to_dict() for check in description.self_checks],
        "items": rows_of_items,
        "exit_code": exit_code,
    }
