"""`generate --stream`: one video written while it is made, and prompts that are typed on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.options import OutputFlags
from diffusion_runtime.cli.prepared_items import import_libraries, prepare_items, warn_of_changed_files
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.cli.settings import Settings
from diffusion_runtime.cli.tables import attention_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, RequestError
from diffusion_runtime.session.batch import title_of
from diffusion_runtime.session.coordinator import Coordinator
from diffusion_runtime.session.failures import INTERRUPTED, kept_frames
from diffusion_runtime.session.interruptions import interruptions
from diffusion_runtime.session.outputs import Outputs

if TYPE_CHECKING:
    from diffusion_runtime.loading.interface import InspectableModel, Prepared
    from diffusion_runtime.media.growing_clip import GrowingClip
    from diffusion_runtime.streaming.segment_stream import AnyStream

SCHEMA = "diffusion_runtime.stream/1"
STANDARD_OUTPUT = "-"
# The end of the prompts that are typed.
_END = ""


def for_stream(flags: OutputFlags, settings: Settings) -> OutputFlags:
    """The flags with the place of the stream as that of the output.

    Raises ConfigError for what does not go with it, and MissingPackageError where there is no ffmpeg.
    """
    if flags.stream is None:
        raise ConfigError("--interactive: it goes with --stream FILE.mp4, or --stream - for standard output")
    others = {
        "--output-path": flags.output_path,
        "--format": flags.file_format,
        "--resume": flags.resume,
        "--save-latents": flags.save_latents,
        "--profile": flags.profile,
        "--attention-plot": flags.attention_plot,
        "--sign": flags.sign,
        "--cert": flags.cert,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(f"--stream: {name} does not go with it; leave it out")
    if len(settings.requests) != 1:
        raise ConfigError(f"--stream: expected one prompt and one seed, got {len(settings.requests)} generations")
    from diffusion_runtime.media.growing_clip import check_ffmpeg, check_streamable

    if flags.stream == STANDARD_OUTPUT:
        if flags.as_json:
            raise ConfigError("--stream -: standard output carries the video; leave --json out, or name a file")
        if not flags.dry_run and sys.stdout.isatty():
            raise ConfigError("--stream -: standard output is a terminal; pipe it, as in `| ffplay -`, or name a file")
        check_ffmpeg("--stream")
        return flags
    check_streamable(flags.stream)
    check_ffmpeg("--stream")
    return dataclasses.replace(flags, output_path=flags.stream)


def _native_model(prepared: Prepared) -> InspectableModel:
    """Return a native model. Raises ConfigError for a pipeline of diffusers, with what is its own way to long video."""
    if (native := prepared.inspectable) is not None:
        return native
    from diffusion_runtime.diffusers_bridge.long_video import long_video_way

    way = long_video_way(prepared.description.family)
    if way is not None:
        raise ConfigError(f"--stream: {way.instead_of_streaming}")
    raise ConfigError("--stream: diffusers' own pipelines make a clip at once; leave it out, or use a native model")


def run_stream(
    settings: Settings,
    outputs: Outputs,
    flags: OutputFlags,
    terminal: Terminal,
    coordinator: Coordinator,
    started: float,
) -> int:
    """The verb: returns its exit code. flags: of for_stream. Raises DiffusionRuntimeError for whatever ends it; what
    was written until then stays playable."""
    from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator

    tune_cpu_allocator()
    load_started = time.perf_counter()
    import_seconds = import_libraries()
    terminal.say(f"loading {settings.runtime.model_path}")
    prepared, items = prepare_items(settings, outputs, coordinator.world)
    warn_of_changed_files(settings, items, prepared.description, terminal)
    request = items[0].request
    is_endless = flags.interactive and all(
        value is None for value in (settings.requests[0].num_frames, settings.requests[0].seconds)
    )
    native = _native_model(prepared)
    rules = native.rules
    from diffusion_runtime.streaming.generation_stream import check_streamable

    check_streamable(rules, rules.settings(request), endless=is_endless)
    prepare_seconds = time.perf_counter() - load_started - import_seconds
    pipeline = native.load(lambda stage: terminal.say(f"  {stage}"), [request])
    pipeline.note_load({"import": import_seconds, "prepare": prepare_seconds})
    load_seconds = time.perf_counter() - started
    terminal.say(title_of(request))
    with contextlib.ExitStack() as stack:
        typed = stack.enter_context(_typed_prompts()) if flags.interactive and coordinator.is_first else None
        stream: AnyStream = pipeline.stream(request, endless=is_endless)
        stack.enter_context(stream)
        clip = stack.enter_context(_clip(stream, flags.stream)) if coordinator.is_first else None
        if growing := coordinator.from_first(lambda: "" if clip is None or clip.path is None else str(clip.path)):
            coordinator.note_growing_file(Path(growing))
        ended_by: BaseException | None = None
        try:
            _write(stream, clip, typed, terminal, coordinator, is_interactive=flags.interactive, is_endless=is_endless)
        except (KeyboardInterrupt, DiffusionRuntimeError) as error:
            # What was made is worth keeping, whatever ended it.
            ended_by = error
        stream.close()
        is_interrupted = isinstance(ended_by, KeyboardInterrupt)
        path = None
        if clip is not None and clip.num_frames:
            with interruptions.reporting() if is_interrupted else contextlib.nullcontext():
                try:
                    path = clip.finish(_sidecar(stream, is_interrupted=is_interrupted))
                except DiffusionRuntimeError as error:
                    ended_by = error if ended_by is None else ended_by
                _report(stream, terminal)
                where = "standard output" if clip.path is None else str(clip.path)
                if is_interrupted:
                    terminal.error(f"interrupted: the {clip.num_frames} frames made so far are in {where}")
                elif ended_by is None:
                    terminal.say(f"wrote {clip.num_frames} frames to {where}")
        if path is not None and isinstance(ended_by, DiffusionRuntimeError):
            assert clip is not None
            ended_by.args = (f"{ended_by}; {kept_frames(clip.num_frames, path)}", *ended_by.args[1:])
        if ended_by is not None and not (is_interrupted and (clip is None or clip.num_frames)):
            raise ended_by
    timings = {"load": load_seconds, **stream.timings, "total": time.perf_counter() - started}
    exit_code = INTERRUPTED if is_interrupted else 0
    if coordinator.is_first and path is not None:
        if flags.as_json:
            put_on_stdout(json_text(_to_json_object(stream, str(path), timings, exit_code)))
        else:
            put_path_on_stdout(path)
    if coordinator.world is None:
        interruptions.all_is_reported(exit_code)
    return exit_code


def _clip(stream: AnyStream, target: str | None) -> GrowingClip:
    from diffusion_runtime.media.growing_clip import GrowingClip

    assert target is not None
    request = stream.request
    assert request.height is not None
    assert request.width is not None
    return GrowingClip(target, request.height, request.width, fps=stream.fps, fragment_frames=stream.frames_per_chunk)


def _write(
    stream: AnyStream,
    clip: GrowingClip | None,
    typed: queue.Queue[str] | None,
    terminal: Terminal,
    coordinator: Coordinator,
    *,
    is_interactive: bool,
    is_endless: bool,
) -> None:
    """All chunks of the stream into the clip. Processes that share the model take the prompts that the first one was
    given, at the same chunk."""
    shown = ""
    for number, chunk in enumerate(stream):
        if clip is not None:
            clip.write(chunk.frames)
        if chunk.prompt != shown:
            shown = chunk.prompt
            if number:
                terminal.say(f"  frame {chunk.first_frame} ({chunk.first_frame / stream.fps:.1f} s): {shown}")
        if _is_told_of(number):
            terminal.say(f"  {_progress(stream)}")
        if not is_interactive:
            continue
        for line in _agreed(coordinator, typed):
            if line == _END and is_endless:
                return
            if line.strip():
                # One that is refused is no reason to lose the video.
                try:
                    stream.prompt(line.strip())
                except RequestError as error:
                    terminal.warn(f"{error}; the prompt stays as it was")


def _is_told_of(number: int) -> bool:
    """After the chunks 0, 1, 3, 7 and every eighth from there."""
    return number in (0, 1, 3) or number % 8 == 7


def _progress(stream: AnyStream) -> str:
    whole = stream.num_frames_of_video
    of = "" if whole is None else f" of {whole}"
    rate = stream.rate.frames_per_second
    speed = f"first frames after {stream.rate.first_frame_seconds:.2f} s"
    if rate is not None:
        speed = f"{rate:.1f} frames per second"
        left = 0 if whole is None else whole - stream.num_frames
        speed += f", about {left / rate:.0f} s left" if left else ""
    return f"{stream.num_frames}{of} frames ({stream.num_frames / stream.fps:.1f} s of video), {speed}"


def _agreed(coordinator: Coordinator, typed: queue.Queue[str] | None) -> list[str]:
    """The lines that wait on the first process, on all of them; each behind a line break: none is not _END."""
    text = coordinator.from_first(lambda: "".join(f"\n{line.rstrip()}" for line in _waiting(typed)))
    return text.split("\n")[1:]


def _waiting(typed: queue.Queue[str] | None) -> list[str]:
    lines = []
    with contextlib.suppress(queue.Empty):
        while typed is not None:
            lines.append(typed.get_nowait())
    return lines


@contextlib.contextmanager
def _typed_prompts() -> Iterator[queue.Queue[str]]:
    """Lines of standard input as they come, without waiting for them; _END behind the last one."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        # An input that is closed, or is no text, is one without prompts.
        with contextlib.suppress(OSError, ValueError):
            for line in sys.stdin:
                if line.strip():
                    lines.put(line)
        lines.put(_END)

    # A daemon: a read that waits for a line must not keep the process.
    threading.Thread(target=read, name="prompts", daemon=True).start()
    yield lines


def _sidecar(stream: AnyStream, *, is_interrupted: bool) -> dict[str, Any]:
    from diffusion_runtime.media.sidecar import RECIPE_SCHEMA, sidecar_of
    from diffusion_runtime.memory.machine_memory import peaks

    request = stream.request
    return sidecar_of(
        file={
            "format": "mp4",
            "num_frames": stream.num_frames,
            "height": request.height,
            "width": request.width,
            "fps": stream.fps,
        },
        recipe={"schema": RECIPE_SCHEMA, **stream.recipe},
        attention_report=stream.attention_report.to_dict(),
        timings=stream.timings,
        peak_memory=peaks(stream.device),
        stream={
            **stream.rate.to_dict(),
            "cache_bytes": stream.cache_bytes,
            "decodes_beside": stream.decodes_beside,
            "interrupted": is_interrupted,
        },
    )


def _report(stream: AnyStream, terminal: Terminal) -> None:
    report = stream.attention_report.to_dict()
    terminal.show(attention_table([report]))
    for remark in remarks_of([report]):
        terminal.say(remark, wraps=True)
    rate = stream.rate
    speed = (
        ""
        if rate.frames_per_second is None
        else (
            f", then {rate.frames_per_second:.1f} frames per second, the slowest chunk {rate.worst_gap_seconds:.2f} s"
        )
    )
    terminal.say(f"first frames after {rate.first_frame_seconds:.2f} s{speed}", wraps=True)


def _to_json_object(stream: AnyStream, path: str, timings: dict[str, float], exit_code: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "path": path,
        "num_frames": stream.num_frames,
        "stream": stream.rate.to_dict(),
        "request": stream.recipe["request"],
        "attention_report": stream.attention_report.to_dict(),
        "timings": {name: round(seconds, 4) for name, seconds in timings.items()},
        "exit_code": exit_code,
    }
