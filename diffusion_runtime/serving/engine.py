"""Engine: the process that holds the model. `python -m diffusion_runtime.serving.engine FOLDER`

FOLDER, which the server's user alone can read, has `config.json` and the socket over which lines of JSON go: `check`,
`explain`, `load`, `run`, `cancel`, `prompt` and `fork` come in; `prepared`, `loading`, `ready`, `checked`, `progress`,
`preview`, `frames`, `finished`, `failed` and `done` go out. With several processes rank 0 holds the socket and hands
every batch to the others. A server that is gone ends the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from diffusion_runtime.config import LoraConfig, RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, Cancelled, DiffusionRuntimeError, OutputError
from diffusion_runtime.parallel.process_info import read_process_info
from diffusion_runtime.serving.engine_channel import BatchProgress, Channel
from diffusion_runtime.serving.files import INPUTS
from diffusion_runtime.serving.input_images import refuse_elsewhere
from diffusion_runtime.serving.machine_share import take_share
from diffusion_runtime.serving.results import publish
from diffusion_runtime.session.failures import Failure
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import OnProgress
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.serving.served_model import ServedModel
    from diffusion_runtime.session.coordinator import Coordinator, MultiProcessCoordinator

# Makes the requests of a message; told of its progress.
_Make: TypeAlias = "Callable[[Mapping[str, Any], BatchProgress | None], list[GeneratedMedia]]"
CONFIG_FILE = "config.json"
_logger = logging.getLogger("diffusion_runtime.serving")


class Engine:
    """Rank 0 of the processes that hold the model. names: public names of paths. storage: the folder with the images of
    requests, beside which none is read; None where whoever starts the engine also names the files."""

    def __init__(
        self, channel: Channel, model: ServedModel, names: Mapping[str, str], storage: str | Path | None
    ) -> None:
        self._inputs = None if storage is None else Path(storage) / INPUTS
        self._channel = channel
        self._model = model
        self._names = dict(names)

    def warm_up(self, make: _Make) -> None:
        """Make one request of the default size, whose result nobody sees, and say how long it took or why there is
        none."""
        started = time.perf_counter()
        self._channel.send("loading", stage="warm-up")
        try:
            make({"works": [{"request": self._model.warm_up_request()}]}, None)
        except DiffusionRuntimeError as error:
            self._channel.send("warmed", error=str(error))
        else:
            self._channel.send("warmed", error=None, seconds=time.perf_counter() - started)

    def answer_questions(self) -> None:
        """Answer questions from here on; no weights are needed."""
        threading.Thread(target=self._answer, name="questions", daemon=True).start()

    def announce(self) -> None:
        """Tell the server that batches may come."""
        self._channel.send("ready", card=self._model.card())

    def run(self, message: Mapping[str, Any], make: _Make) -> None:
        """Make the works of one message. A batch that fails is made again one by one, so that each fails alone."""
        works = message["works"]
        try:
            self._make(message, works, make)
        except Exception as error:
            if len(works) == 1:
                self._fail(works, error)
            else:
                for work in works:
                    try:
                        self._make(message, [work], make)
                    except Exception as own:
                        self._fail([work], own)
        self._channel.cancelled -= {work["job"] for work in works}
        self._channel.send("done")

    def _make(self, message: Mapping[str, Any], works: Sequence[Mapping[str, Any]], make: _Make) -> None:
        watch = BatchProgress(self._channel, works)
        watch.leave_out_cancelled()
        if not watch.wanted:
            return
        works = [works[index] for index in watch.wanted]
        for work in works:
            refuse_elsewhere(work["request"], self._inputs)
        if message.get("stream"):
            self._stream(message, works[0])
            return
        watch = BatchProgress(self._channel, works)
        try:
            media = make({**message, "works": works}, watch)
        except Cancelled:
            media = []
        kept = [work for index, work in enumerate(works) if index in watch.wanted] if media else []
        for work, each in zip(kept, media, strict=True):
            self._publish(work, each, has_pictures=message.get("pictures", True))

    def _publish(
        self, work: Mapping[str, Any], media: GeneratedMedia, *, has_pictures: bool = True, **more: Any
    ) -> None:
        """Write the file of a work, and tell the server. more: added to what is told."""
        self._channel.send("progress", jobs=[work["job"]], stage="write", step=0, num_steps=1)
        # Files leave this machine, and name nothing of it.
        names = {**self._names, **work.get("names", {})}
        recipe = work.get("recipe")
        result = publish(media, Path(work["target"]), names, recipe=recipe, has_pictures=has_pictures)
        self._channel.send("finished", job=work["job"], index=work["index"], **result, **more)

    def _stream(self, message: Mapping[str, Any], work: Mapping[str, Any]) -> None:
        """Make a stream and its forks."""
        from diffusion_runtime.request.generation_request import GenerationRequest
        from diffusion_runtime.serving.served_model import Choice
        from diffusion_runtime.serving.streams import Streams

        def publish(made: Mapping[str, Any], media: GeneratedMedia) -> None:
            # With the prompts that came on the way, which repeat it.
            self._publish(made, media, request=media.recipe["request"])

        streams = Streams(self._channel, publish, lambda failed, error: self._fail([failed], error))
        request = GenerationRequest.from_dict(work["request"])
        with self._model.streaming(request, Choice.of(message)) as stream:
            streams.run(work, stream)

    def _fail(self, works: Sequence[Mapping[str, Any]], error: Exception) -> None:
        failure = Failure.of(error)
        if not isinstance(error, DiffusionRuntimeError):
            _logger.error("%s", failure.trace)
        for work in works:
            self._channel.send("failed", job=work["job"], **described(error))

    def _answer(self) -> None:
        """Answer `check` and `explain`, while the main thread computes."""
        while True:
            question = self._channel.questions.get()
            try:
                for request in question["work"]["requests"]:
                    refuse_elsewhere(request, self._inputs)
                asked = self._model.check if question["type"] == "check" else self._model.explain
                self._channel.send("checked", id=question["id"], answer=asked(question["work"]))
            except Exception as error:
                if not isinstance(error, DiffusionRuntimeError):
                    _logger.error("%s", Failure.of(error).trace)
                self._channel.send("checked", id=question["id"], error=described(error))


def described(error: Exception) -> dict[str, Any]:
    """Return what a client is told of an error; `is_callers_fault` as of DiffusionRuntimeError."""
    failure = Failure.of(error)
    is_known = isinstance(error, DiffusionRuntimeError)
    return {
        "kind": failure.kind,
        # What is none of ours may quote anything.
        "message": failure.message if is_known or failure.exit_code == 4 else f"unexpected {failure.kind}",
        "is_callers_fault": isinstance(error, DiffusionRuntimeError) and error.is_callers_fault,
        "reasons": [list(pair) for pair in error.reasons] if isinstance(error, BackendUnavailableError) else [],
    }


def _make_batch(
    model: ServedModel,
    message: Mapping[str, Any],
    on_progress: OnProgress | None,
    watch: BatchProgress | None = None,
) -> list[GeneratedMedia]:
    """Make the requests of a message on this rank. watch: of rank 0, which is told of previews and profiles."""
    from diffusion_runtime.request.generation_request import GenerationRequest
    from diffusion_runtime.serving.recorded import recorded
    from diffusion_runtime.serving.served_model import Choice

    requests = [GenerationRequest.from_dict(work["request"]) for work in message["works"]]
    previews = int(message.get("previews") or 0)
    on_preview = None if watch is None else watch.preview
    # Files are rank 0's.
    works = () if watch is None else message["works"]
    with (
        _profiled(model, message, on_progress or (lambda _: None), watch) as on_progress,
        recorded(model.pipeline, message, works),
    ):
        return model.generate(requests, Choice.of(message), on_progress, on_preview, previews)


@contextlib.contextmanager
def _profiled(
    model: ServedModel, message: Mapping[str, Any], on_progress: OnProgress, watch: BatchProgress | None
) -> Iterator[OnProgress]:
    """Context manager: the on_progress of a batch, which is recorded where an admin asked for it."""
    asked = message.get("profile")
    if asked is None or watch is None:
        yield on_progress
        return
    from diffusion_runtime.profiling.request_profile import RequestProfile

    profile = RequestProfile(model.pipeline, asked["num_steps"])
    try:
        with profile:
            yield profile.watching(on_progress)
    finally:
        try:
            profile.save(asked["target"])
        except OutputError as error:
            watch.profiled(asked["id"], str(error))
        else:
            watch.profiled(asked["id"], None)


def _serve(folder: Path, coordinator: Coordinator, make_model: Callable[..., ServedModel] | None) -> int:
    """Load the model and make batches until the server is gone, on every rank. make_model: in place of ServedModel."""
    given = read_json_file(folder / CONFIG_FILE)
    config = RuntimeConfig.from_dict(given["config"])
    channel = Channel(folder) if coordinator.is_first else None
    try:
        from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
        from diffusion_runtime.serving.served_model import ServedModel

        tune_cpu_allocator()
        loras = {name: LoraConfig.parse(value) for name, value in given["loras"].items()}
        model = (make_model or ServedModel)(config, loras, coordinator.world, given["preview"])
        engine = None if channel is None else Engine(channel, model, given["names"], given.get("storage"))
        if given.get("waits"):
            _wait_to_load(model, channel, engine, coordinator)
        model.load(None if channel is None else lambda stage: channel.send("loading", stage=stage))
        make = _maker(model, coordinator)
        if engine is not None:
            if given["warm_up"]:
                engine.warm_up(make)
            if not given.get("waits"):
                engine.answer_questions()
            engine.announce()
    except DiffusionRuntimeError as error:
        if channel is not None:
            channel.send("load_failed", exit_code=Failure.of(error).exit_code, **described(error))
        raise
    while True:
        if channel is None or engine is None:
            _follow(model, coordinator)
        else:
            engine.run(channel.runs.get(), make)


def _wait_to_load(model: ServedModel, channel: Channel | None, engine: Engine | None, coordinator: Coordinator) -> None:
    """Answer questions until `load` comes: what is asked can be refused before any weight is read."""
    from diffusion_runtime.serving.served_model import Choice

    if channel is not None and engine is not None:
        model.prepared(Choice())
        engine.answer_questions()
        channel.send("prepared")
        channel.runs.get()
    if (world := coordinator.world) is not None:
        with world.idle():
            world.from_first(lambda: "")


def _maker(model: ServedModel, coordinator: Coordinator) -> _Make:
    """Return the function with which rank 0 makes a batch, together with the other ranks where there are some."""
    from diffusion_runtime.session.following import agreed_progress

    world = coordinator.world
    if world is None:
        return lambda message, watch: _make_batch(model, message, watch, watch)

    def make(message: Mapping[str, Any], watch: BatchProgress | None) -> list[GeneratedMedia]:
        world.from_first(lambda: json.dumps(message))
        try:
            media = _make_batch(model, message, agreed_progress(world, watch), watch)
        except Exception as error:
            world.agree(world.failure_of(error))
            raise
        world.agree(None)
        return media

    return make


def _follow(model: ServedModel, coordinator: Coordinator) -> None:
    """Make the next batch that rank 0 hands out."""
    from diffusion_runtime.session.following import agreed_progress

    world = coordinator.world
    assert world is not None
    with world.idle():
        message = parse_json(world.from_first(lambda: ""))
    try:
        _make_batch(model, message, agreed_progress(world, None))
    except Exception as error:
        # Rank 0, which met it too, reports it.
        world.agree(world.failure_of(error))
    else:
        world.agree(None)


def main(arguments: Sequence[str], make_model: Callable[..., ServedModel] | None = None) -> int:
    """Run one engine process; with `num_gpus` above 1 start the ranks and wait for them. make_model: as of _serve."""
    from diffusion_runtime.session.coordinator import SingleProcessCoordinator

    folder = Path(arguments[0])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    process_info = read_process_info()
    num_processes = 1
    if process_info is None:
        given = read_json_file(folder / CONFIG_FILE)
        config = RuntimeConfig.from_dict(given["config"])
        num_processes = config.parallel.num_processes
        try:
            take_share(config, *given.get("replica", (0, 1)))
        except DiffusionRuntimeError as error:
            # Before the ranks, of which the first one would have said so.
            Channel(folder).send("load_failed", exit_code=error.exit_code, **described(error))
            return error.exit_code
    if process_info is not None:
        from diffusion_runtime.session.rank_runner import RankRunner

        def work(coordinator: MultiProcessCoordinator) -> int:
            return _serve(folder, coordinator, make_model)

        RankRunner(process_info, lambda failure: _logger.error("%s", failure.message)).run(work)
    if num_processes > 1:
        return _launch(arguments, config, num_processes)
    try:
        return _serve(folder, SingleProcessCoordinator(), make_model)
    except DiffusionRuntimeError as error:
        return error.exit_code


def _launch(arguments: Sequence[str], config: RuntimeConfig, num_processes: int) -> int:
    from diffusion_runtime.core.hardware import device_of_process
    from diffusion_runtime.parallel.launch import Interrupted, launch

    on_cpu = device_of_process(config.device, 0, num_processes) == "cpu"
    program = ("-m", "diffusion_runtime.serving.engine", *arguments)
    try:
        failure = launch(
            program,
            num_processes,
            on_cpu=on_cpu,
            verbose=False,
            end_at_once=lambda _: os._exit(1),
            check=lambda: None,
        )
    except Interrupted:
        return 1
    return 0 if failure is None else failure.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
