"""`serve`: the HTTP server, with the flags of `generate` for the model that it loads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.generate import flags_of
from diffusion_runtime.cli.generate import generate as generate_verb
from diffusion_runtime.errors import ConfigError, MissingPackageError
from diffusion_runtime.untrusted.json_text import parse_json

if TYPE_CHECKING:
    from diffusion_runtime.config import LoraConfig, RuntimeConfig

EPILOG = """[bold]Examples[/]

diffusion-runtime serve

diffusion-runtime serve wan2.1-1.3b --host 0.0.0.0 --api-key-file keys.txt --storage /var/lib/videos

curl http://127.0.0.1:8000/v1/videos -F "prompt=a fox running left in the snow"
"""
_SERVER, _LIMITS = "Server", "Limits"
_KEY_VARIABLE = "DIFFUSION_RUNTIME_API_KEY"
_ANY_PROMPT = "-"
_MAX_KEY_FILE = 64 * 1024


def serve(context: typer.Context, **given: Any) -> None:
    """Serve a model over HTTP: OpenAI's images and videos.

    Accepted jobs are in --storage and outlive the process. Flags of the model as in
    generate; requests bring prompts, sizes and steps. See docs/serving.md.
    """
    del context
    own = {name: given.pop(name) for name in _OWN}
    given["model_path"] = own["model"] if own["model"] is not None else given["model_path"]
    runtime, lora = runtime_of(given), named_loras(own["named_lora"] or ())
    try:
        from diffusion_runtime.serving.server import serve as run_server
        from diffusion_runtime.serving.server import settings_to_dict
        from diffusion_runtime.serving.settings import Access, Limits, ServerSettings
    except ImportError as error:
        raise MissingPackageError(
            f"serve needs packages that are not installed ({error.name}): pip install 'diffusion-runtime[serve]'"
        ) from error
    limits = {name: own[name] for name in _LIMIT_FLAGS if own[name] is not None}
    access = Access(
        api_keys=_keys("--api-key-file", own["api_key_file"], _KEY_VARIABLE),
        admin_keys=_keys("--admin-key-file", own["admin_key_file"]),
        hosts=tuple(own["allowed_host"] or ()),
        url_hosts=tuple(given["allow_url"] or ()),
        origins=tuple(own["allow_origin"] or ()),
    )
    settings = ServerSettings(
        storage=Path(own["storage"]),
        name=own["model_name"] or _name_of(runtime.model_path),
        host=own["host"],
        port=own["port"],
        limits=Limits(**limits),
        access=access,
        loras=lora,
        insecure=own["insecure"],
        has_metrics=not own["no_metrics"],
        warm_up=not own["no_warmup"],
        preview=own["preview"],
        replicas=_replicas(own["replicas"]),
        ray=own["ray"],
    )
    config, log_format = plain_config(runtime), given["log_format"]
    if "torch" in sys.modules:
        _become_server({"settings": settings_to_dict(settings), "config": config, "log_format": log_format})
    raise typer.Exit(run_server(settings, config, log_format))


def runtime_of(given: dict[str, Any]) -> RuntimeConfig:
    """Return what to load. Raises ConfigError for a config file with request values, which no request would see."""
    from diffusion_runtime.cli.settings import resolve_settings
    from diffusion_runtime.request.generation_request import UNSET

    missing: dict[str, Any] = dict.fromkeys(inspect.signature(generate_verb).parameters)
    settings = resolve_settings(flags_of({**missing, **given}), _ANY_PROMPT)
    if set_here := [name for name, value in settings.requests[0].to_dict().items() if value != UNSET[name]]:
        raise ConfigError(
            f"--config: request values come with each request: {', '.join(set_here)}; leave them out, or send them"
        )
    if settings.runtime.pipeline_arguments:
        raise ConfigError(
            "pipeline_arguments: keywords of a pipeline are for the command line, not for the requests of a server's "
            "clients; leave out --set pipeline.NAME"
        )
    return settings.runtime


def plain_config(runtime: RuntimeConfig) -> dict[str, Any]:
    """Return the fields of a config as JSON has them, of which RuntimeConfig.from_dict makes the same config."""
    levels = {name: getattr(runtime, name) for name in ("attention", "attention_override")}
    plain = dataclasses.asdict(dataclasses.replace(runtime, attention=None, attention_override=None))
    values = {name: level.to_dict() if hasattr(level, "to_dict") else level for name, level in levels.items()}
    parsed: dict[str, Any] = parse_json(json.dumps({**plain, **values}))
    return parsed


def _become_server(given: dict[str, Any]) -> None:
    """Replace this process by one that has not imported torch, which attention flags are read with: 300 MB."""
    from diffusion_runtime.media.publish import publish_text

    # mkdtemp: nobody but this user may read the keys in it.
    folder = Path(tempfile.mkdtemp(prefix="diffusion-runtime-"))
    publish_text(folder / "settings.json", json.dumps(given))
    os.execv(sys.executable, (sys.executable, "-m", "diffusion_runtime.serving.server", str(folder)))


def _replicas(text: str) -> tuple[int, int]:
    """Return the fewest and the most replicas of `N` or `MIN..MAX`."""
    fewest, dots, most = text.partition("..")
    if not fewest.isdecimal() or (dots and not most.isdecimal()):
        raise ConfigError(f"--replicas: expected N, or MIN..MAX such as 0..4, got {text[:40]!r}")
    return int(fewest), int(most if dots else fewest)


def named_loras(texts: Sequence[str]) -> dict[str, LoraConfig]:
    """Return LoRA files by the names that requests give: NAME=FILE, or NAME=FILE@0.8."""
    from diffusion_runtime.cli.lora_flags import pair_loras
    from diffusion_runtime.config import RuntimeConfig

    found: dict[str, LoraConfig] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not name or not rest or name in found:
            raise ConfigError(f"--named-lora: expected NAME=FILE, each name once, got {text[:80]!r}")
        (found[name],) = RuntimeConfig(lora=pair_loras((), (), (rest,)) or ()).lora
    return found


def _keys(flag: str, path: str | None, variable: str = "") -> tuple[str, ...]:
    """Return the keys of a file, one per line, and of a variable of the environment."""
    given = os.environ.get(variable) if variable else None
    keys = [given] if given else []
    if path is not None:
        from diffusion_runtime.untrusted.files import read_file

        lines = read_file(path, flag, max_bytes=_MAX_KEY_FILE).decode(errors="replace").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"{flag} {path}: expected a key per line, and it has none")
        keys += found
    return tuple(keys)


def _name_of(model_path: str) -> str:
    """Return the name of a model in requests: that of its folder."""
    return Path(model_path).name if os.path.isabs(model_path) or model_path.startswith(".") else model_path


def _flag(panel: str, kind: Any, name: str, text: str, default: Any, metavar: str | None = None) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=text,
        rich_help_panel=panel,
        metavar=metavar,
        show_default=default is not None,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_SERVER_FLAGS = (
    _flag(_SERVER, str, "host", "Address to listen on.", "127.0.0.1"),
    _flag(_SERVER, int, "port", "Port to listen on; 0 takes a free one.", 8000),
    _flag(_SERVER, str, "storage", "Folder of the jobs and their files.", "server-storage", "FOLDER"),
    _flag(_SERVER, str | None, "api_key_file", f"Keys, one per line; also the variable {_KEY_VARIABLE}.", None, "FILE"),
    _flag(
        _SERVER, str | None, "admin_key_file", "Keys, one per line, that also set LoRA files and profile.", None, "FILE"
    ),
    _flag(_SERVER, bool, "insecure", "Listen on other addresses without a key.", False),
    _flag(_SERVER, list[str] | None, "allowed_host", "A name by which clients call this server.", None, "NAME"),
    _flag(_SERVER, list[str] | None, "allow_origin", "A web site whose pages may call (CORS).", None, "ORIGIN"),
    _flag(_SERVER, list[str] | None, "named_lora", "A LoRA that requests may name.", None, "NAME=FILE[@0.8]"),
    _flag(_SERVER, str | None, "model_name", "Name of the model in requests.", None, "NAME"),
    _flag(_SERVER, bool, "no_metrics", "Do not answer /metrics.", False),
    _flag(_SERVER, bool, "no_warmup", "Be ready without a first generation.", False),
    _flag(_SERVER, str, "replicas", "Engines, each of --num-gpus processes.", "1", "N|MIN..MAX"),
    _flag(_SERVER, str | None, "ray", "Run them on a Ray cluster (extra \\[ray]).", None, "auto|ADDRESS"),
    _flag(_SERVER, str, "preview", "Estimates of running jobs.", "auto", "auto|linear|decode|off"),
)


def _limit_flags() -> tuple[inspect.Parameter, ...]:
    texts = {
        "max_queue": "Jobs that may wait.",
        "max_queue_per_key": "Jobs of one key that may wait.",
        "max_batch_size": "Requests that run together; 4, or 1 on a CPU.",
        "max_overtakes": "How often a job may be overtaken by a batch.",
        "request_timeout": "Seconds that a job may run.",
        "queue_timeout": "Seconds that a job may wait; 0: any.",
        "max_pixels": "Width x height of a frame.",
        "max_frames": "Frames of a video.",
        "max_steps": "Denoising steps.",
        "max_body": "Bytes of a request.",
        "max_upload_pixels": "Pixels of an image that is sent.",
        "keep": "Seconds that a finished job is kept.",
        "max_storage": "Bytes of all results; the oldest go first.",
        "drain": "Seconds that running jobs have after SIGTERM.",
        "hang_timeout": "Seconds without progress until an engine is replaced.",
        "idle": "Seconds without a job until a replica above MIN ends.",
    }
    seconds = ("request_timeout", "queue_timeout", "keep", "drain", "hang_timeout", "idle")
    return tuple(
        _flag(_LIMITS, float | None if name in seconds else int | None, name, text, None, "N")
        for name, text in texts.items()
    )


_LIMIT_FLAGS = tuple(flag.name for flag in _limit_flags())
_OWN = ("model", *(flag.name for flag in _SERVER_FLAGS), *_LIMIT_FLAGS)
_LEFT_OUT = ("from_file", "preset", "as_json", "quiet", "verbose", *options.OUTPUT_FLAGS)


def _parameters() -> list[inspect.Parameter]:
    """Return the flags of `generate` about the model, and the server's."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    argument = typer.Argument(metavar="MODEL", help="As --model-path of generate.", show_default=False)
    model = inspect.Parameter(
        "model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, argument]
    )
    flags = [*options.source_parameters(), *options.run_parameters()]
    kept = [flag for flag in flags if flag.name not in _LEFT_OUT]
    return [context, model, *_SERVER_FLAGS, *_limit_flags(), *kept]


options.set_parameters(serve, _parameters())
