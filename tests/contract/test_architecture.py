"""The import rule of ARCHITECTURE.md, as a test: every arrow points down."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "diffusion_runtime"

# Top row first. A module may import rows below its own and its own folder, nothing else.
ROWS = [
    {"cli"},
    {"batches", "tuning"},
    {"benchmark", "comparison", "serving"},
    {"explanation", "profiling"},
    {"loading"},
    {"pipeline"},
    {"diffusers_bridge", "session", "streaming"},
    {"generation"},
    {"diagnosis", "rules", "workflows"},
    {"models", "quality"},
    {"decoders"},
    {"denoising", "text_encoders", "weights"},
    {"layers"},
    {"attention"},
    {"kernels", "media", "memory", "parallel"},
    {"config", "page", "report", "request", "startup"},
    {"core"},
    {"untrusted"},
    {"errors"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

# The rows inside attention/, top row first: files and folders; a file of backends/ that is not named is a backend.
ATTENTION_ROWS = [
    {"self_check"},
    {"self_test"},
    {"self_test_cases", "catalogue", "measured"},
    {"functional", "autotune", "machine_cache"},
    {"token_order", "never_sparse", "unread_gates", "reference_frames"},
    {"layers", "sparse"},
    {"cached_calls", "layer_decisions"},
    {"policy", "measured_error"},
    {"select"},
    {"force"},
    {"config"},
    {"backends", "backends/refusals"},
    {"backends/calling", "backends/packages"},
    {"backends/registry"},
    {"backends/requirements"},
    {"backends/masks"},
    {"backends/interface"},
    {"backends/capability"},
    {"opaque", "opaque_plan", "fixed_state"},
    {"recorded_values"},
    {"context", "schedule"},
    {"handles", "forward_plans", "normalized_guidance"},
    {"cache", "roles"},
]
ATTENTION_ROW_OF = {name: row for row, names in enumerate(ATTENTION_ROWS) for name in names}

# A third-party package, and the places that may import it.
HOMES = {
    "diffusers": ("diffusers_bridge", "decoders", "models"),
    "transformers": ("text_encoders", "quality/clip_score.py"),
    "triton": ("kernels",),
    "cudnn": ("kernels/fp8_attention",),
    "flash_attn": ("attention/backends", "kernels"),
    "torch.distributed": ("parallel",),
    "safetensors": ("weights/tensor_files.py",),
    "huggingface_hub": ("models/hub.py",),
    "imageio_ffmpeg": ("media/",),
    "typer": ("cli",),
    "yaml": ("untrusted/yaml_text.py",),
    "fastapi": ("serving",),
    "starlette": ("serving",),
    "uvicorn": ("serving/server.py",),
    "httpx": ("serving", "untrusted/image_urls.py"),
    "prometheus_client": ("serving/metrics.py",),
    "sqlite3": ("serving",),
    "matplotlib": ("benchmark/plot",),
    "c2pa": ("media/content_credentials.py",),
    "cryptography": ("media/content_credentials.py",),
    "lpips": ("comparison/frame_metrics.py",),
    "pyarrow": ("batches/row_files.py", "batches/ray_data.py"),
    "ray": ("serving/on_ray", "batches/ray_data.py"),
    "skimage": ("comparison/frame_metrics.py",),
}
# The two files at the package root that only re-export are exempt; folder __init__ files are not.
EXEMPT = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
MODULES = sorted(set(PACKAGE.rglob("*.py")) - EXEMPT)
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}
# What is read of files and JSON elsewhere: messages between processes of one run, a file of the system, our own values;
# media/content_credentials.py, media/generated.py and media/reading.py open what was written or checked.
OWN_TEXTS = {
    "attention/machine_cache.py",
    "batches/result_folder.py",
    "core/cache_folder.py",
    "attention/self_check.py",
    "cli/generation.py",
    "cli/terminal.py",
    "media/content_credentials.py",
    "media/generated.py",
    "media/reading.py",
    "memory/machine_memory.py",
    "decoders/shared_decoder.py",
    "parallel/failure.py",
    "parallel/launch.py",
    "parallel/signs_of_life.py",
    "parallel/watchdog.py",
    "parallel/world.py",
    "profiling/request_profile.py",
    "session/following.py",
    "session/resume.py",
    "text_encoders/shared.py",
}
# Calls that would let a model folder, a config or a prompt from a stranger run code.
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load", "os.system"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def here(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported_names(path: Path) -> list[str]:
    """Every dotted name `path` imports, TYPE_CHECKING blocks and function bodies included."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def unit_of(path: Path) -> str:
    """Folder or file directly under the package: 'attention', 'pipeline', ..."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def upward_imports() -> Iterator[str]:
    for path in MODULES:
        for name in imported_names(path):
            package, _, rest = name.partition(".")
            there = rest.partition(".")[0]
            if package == PACKAGE.name and there != unit_of(path) and ROW_OF[there] <= ROW_OF[unit_of(path)]:
                yield f"{here(path)} imports {name}"


def attention_unit(parts: list[str]) -> str:
    """The entry of ATTENTION_ROWS that a file or a dotted name below attention/ belongs to."""
    longest = "/".join(parts[:2])
    return longest if longest in ATTENTION_ROW_OF else parts[0]


def upward_imports_in_attention() -> Iterator[str]:
    folder, prefix = PACKAGE / "attention", f"{PACKAGE.name}.attention."
    for path in MODULES:
        if folder not in path.parents or path == folder / "__init__.py":
            continue
        mine = attention_unit(list(path.relative_to(folder).with_suffix("").parts))
        if mine not in ATTENTION_ROW_OF:
            yield f"{here(path)} has no row in ATTENTION_ROWS"
            continue
        for name in imported_names(path):
            if name.startswith(prefix):
                there = attention_unit(name.removeprefix(prefix).split("."))
                if there != mine and ATTENTION_ROW_OF.get(there, 0) <= ATTENTION_ROW_OF[mine]:
                    yield f"{here(path)} imports {name}"


def strayed_packages() -> Iterator[str]:
    for path in MODULES:
        for name in imported_names(path):
            for package, homes in HOMES.items():
                if (name == package or name.startswith(f"{package}.")) and not here(path).startswith(homes):
                    yield f"{here(path)} imports {name}, which belongs in {homes}"


# In the package of a family that stands on another one, whose classes it names.
BASED_ON = re.compile(r"^BASED_ON = \"(\w+)\"$", re.MULTILINE)


def strayed_families() -> Iterator[str]:
    """Identifiers that hold a family's name, outside its folder."""
    families = {p.parent.name for p in (PACKAGE / "models").glob("*/family.py")}
    for path in MODULES:
        identifiers = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
        words = {word.lower() for name in identifiers for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)}
        based_on = BASED_ON.search((path.parent / "__init__.py").read_text())
        allowed = {path.parent.name, based_on[1] if based_on else ""}
        if here(path) != "models/registry.py":
            yield from (f"{here(path)} names {f}" for f in families & words - allowed)


# Where `models convert` reads the tensors of a pickle, and nothing else of it.
TENSORS_OF_PICKLES = "models/conversion/pickle_file.py"


def _reads_tensors_alone(path: Path, call: ast.Call) -> bool:
    is_torch = here(path) == TENSORS_OF_PICKLES and ast.unparse(call.func) == "torch.load"
    return is_torch and any(ast.unparse(keyword) == "weights_only=True" for keyword in call.keywords)


def dangerous_calls() -> Iterator[str]:
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and not _reads_tensors_alone(path, node):
                through_shell = any(keyword.arg == "shell" for keyword in node.keywords)
                if through_shell or ast.unparse(node.func) in FORBIDDEN_CALLS:
                    yield f"{here(path)}:{node.lineno}: {ast.unparse(node)[:80]}"


def scattered_readers() -> Iterator[str]:
    """Calls that read a file or JSON, elsewhere than where limits hold."""
    for path in MODULES:
        if here(path).startswith("untrusted/") or here(path) in OWN_TEXTS:
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            modes = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            reads = called.endswith((".read_text", ".read_bytes")) or called in ("json.load", "json.loads")
            opens = (called == "open" or called.endswith(".open")) and not called.startswith(
                ("Image.", "wave.", "os.", "family.")
            )
            if reads or (opens and modes != ["wb"]):
                yield f"{here(path)}:{node.lineno}: {called}"


# Files that write elsewhere than through media/publish.py, and why nobody finds half a result of theirs.
OWN_WRITERS = {
    "attention/machine_cache.py": "a cache, renamed from core.cache_folder.complete_file; media is not below it",
    "batches/result_folder.py": "a journal of lines; what a kill leaves of one is cut when it is begun again",
    "benchmark/plot.py": "into what published() gives",
    "benchmark/sample_images.py": "images in a temporary folder",
    "explanation/stage_times.py": "a cache, renamed from core.cache_folder.complete_file",
    "generation/segmented_clip.py": "into what published() gives, in a temporary folder",
    "core/cache_folder.py": "the temporary file of a cache, renamed by its user",
    "cli/launching.py": "prompts for other processes, in a temporary folder",
    "decoders/latent_upsampler.py": "settings in a temporary folder",
    "cli/terminal.py": "the standard streams",
    "startup/kept_kernels.py": "a lock, without content",
    "startup/remembered_imports.py": "a cache, renamed from core.cache_folder.complete_file; media is not below it",
    "media/attention_plot.py": "into what published() gives",
    "media/audio.py": "an encoder: into the file that it is given, a temporary one",
    "media/content_credentials.py": "signed copies: into the file that it is given, a temporary one",
    "media/encode.py": "encoders: into the file that they are given, a temporary one",
    "media/generated.py": "a sidecar, renamed with its clip by publish_pair",
    "media/growing_clip.py": "a file that is watched while it grows; finished by a rename",
    "media/notebook.py": "a picture in memory",
    "models/conversion/conversion.py": "into a temporary folder, which take_name puts in its place",
    "models/part_files.py": "a mark in a temporary folder",
    "models/published_folders.py": "json in a temporary folder",
    "request/given_images.py": "images given as values, in a temporary folder",
    "weights/tensor_files.py": "a format: into the file that it is given",
    "parallel/failure.py": "records for the launcher, in its temporary folder",
    "profiling/request_profile.py": "a trace, renamed by publish_numbered",
    "session/outputs.py": "a byte in a temporary file, to see whether there is room",
}
WRITING = (".write_text", ".write_bytes", ".savefig", ".touch", ".copytree", ".copyfile", "json.dump", "save_file")
RENAMING = ("os.replace", "os.rename", "os.link", "shutil.copy", "shutil.move")


def scattered_writers() -> Iterator[tuple[str, str]]:
    """(file, where) of calls that write a file, or give one its name, elsewhere than in media/publish.py."""
    for path in MODULES:
        if here(path) == "media/publish.py":
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called, text = ast.unparse(node.func), ast.unparse(node)
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            modes = [str(each.value) for each in given if isinstance(each, ast.Constant)]
            opens = (called == "open" or called.endswith(".open")) and any(
                set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes
            )
            opens |= called == "os.open" and any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
            # Pictures of Pillow, which say their format.
            saves = called.endswith(".save") and ("format=" in text or called.startswith("Image."))
            if opens or saves or called.endswith(WRITING) or called in RENAMING:
                yield here(path), f"{here(path)}:{node.lineno}: {called}"


# Files that print past the consoles, and what.
OWN_PRINTERS = {
    "cli/consoles.py": "the consoles",
    "cli/log_lines.py": "JSON in ASCII",
    "cli/script_flags.py": "an error of a script, printable",
    "cli/terminal.py": "JSON in ASCII, paths for programs; to a terminal what is printable",
    "session/processes.py": "an error of a script, printable",
}


def scattered_printers() -> Iterator[tuple[str, str]]:
    """(file, where) of what prints elsewhere than through a console that keeps control characters back."""
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            streams = ("sys.stdout.write", "sys.stderr.write", "stream.buffer.write")
            if called in ("print", "Console", "typer.echo", "click.echo", *streams):
                yield here(path), f"{here(path)}:{node.lineno}: {called}"


# What a cache of the whole process may hold in attention/ and kernels/ though it is asked per device: plain values.
PLAIN_VALUES = {"KeyCounts", "FlashAttention", "int | None", "str | None"}


def process_wide_device_caches() -> Iterator[str]:
    """Cached functions of a device whose result is not a plain value: tensors belong to a RequestCache."""
    for path in MODULES:
        if not here(path).startswith(("attention/", "kernels/")):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef) or "cache" not in " ".join(map(ast.unparse, node.decorator_list)):
                continue
            takes_device = any(each.annotation and "device" in ast.unparse(each.annotation) for each in node.args.args)
            if takes_device and node.returns is not None and ast.unparse(node.returns) not in PLAIN_VALUES:
                yield f"{here(path)}:{node.lineno}: {node.name}"


# Files that load modules by name, which no import statement shows: registries, which import what is asked for, and
# values of the package root. One of them points up: attention/roles.py asks the registries of models for the roles that
# they declare, when a choice names one that no loaded model has registered; those registries import it.
LOADERS_BY_NAME = {
    "attention/backends/registry.py": "a backend's file, when its name is first used",
    "attention/machine_cache.py": "the version, of the package root",
    "attention/roles.py": "the registries of models, for the roles that they declare",
    "cli/verbs.py": "the version, of the package root, and the verb that a command line names",
    "denoising/registry.py": "a sampler's file, when its name is first used",
    "loading/description.py": "the version, of the package root",
    "serving/engines.py": "the version, of the package root",
    "startup/importing.py": "packages of others",
    "decoders/autoencoder.py": "packages of others",
    "text_encoders/gemma.py": "packages of others",
    "media/content_credentials.py": "the version, of the package root",
    "media/__init__.py": "its own files, so that programs that write text alone need no numpy",
    "models/registry.py": "a family's files, when a folder asks for it",
}


def imports_between_modules() -> dict[str, set[str]]:
    """The modules that each module imports, by dotted name, TYPE_CHECKING blocks and function bodies included."""
    files = {here(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = [name.removeprefix(f"{PACKAGE.name}.") for name in imported_names(path)]
        found[module] = {target for name in names for target in (name, name.rpartition(".")[0]) if target in files}
    return found


def import_circles(imports: dict[str, set[str]]) -> list[str]:
    """A circle for each group of modules that import one another, as `a -> b -> a`; depth first."""
    circles: list[str] = []
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in finished:
            for target in sorted(imports[module]):
                visit(target, [*path, module])
            finished.add(module)

    for module in sorted(imports):
        visit(module, [])
    return circles


def loaders_by_name() -> Iterator[str]:
    """Files that call import_module."""
    for path in MODULES:
        calls = (ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        if any(called.endswith("import_module") or called == "__import__" for called in calls):
            yield here(path)


def test_no_module_imports_itself_through_others() -> None:
    circle = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set[str]()}
    assert import_circles(circle) == ["a -> b -> c -> a"]
    assert import_circles(imports_between_modules()) == []


def test_modules_are_loaded_by_name_in_registries_alone() -> None:
    assert sorted(loaders_by_name()) == sorted(LOADERS_BY_NAME)


def test_no_device_tensor_lives_in_a_cache_of_the_process() -> None:
    assert list(process_wide_device_caches()) == []


def test_imports_point_down() -> None:
    assert list(upward_imports()) == []


def test_imports_inside_attention_point_down() -> None:
    assert list(upward_imports_in_attention()) == []


def test_third_party_packages_stay_home() -> None:
    assert list(strayed_packages()) == []


def test_families_are_named_only_in_their_own_folder() -> None:
    assert list(strayed_families()) == []


def test_nothing_reads_pickles_or_runs_text() -> None:
    assert list(dangerous_calls()) == []


def test_files_are_named_for_what_they_hold() -> None:
    assert [here(path) for path in MODULES if FORBIDDEN_NAMES & set(Path(here(path)).with_suffix("").parts)] == []


def test_files_of_strangers_are_read_in_one_place() -> None:
    """A path that somebody names may be a FIFO, a device or endless; JSON may nest without end."""
    assert list(scattered_readers()) == [], "read it with diffusion_runtime.untrusted"


def test_results_are_written_in_one_place() -> None:
    """A full disk, or a run beside, must not leave half a file where a whole one was."""
    found = list(scattered_writers())
    assert [where for file, where in found if file not in OWN_WRITERS] == [], "use diffusion_runtime.media.publish"
    assert set(OWN_WRITERS) <= {file for file, _ in found}, "a reason without a writer"


def test_nothing_is_printed_past_the_consoles() -> None:
    """Names of models, folders and files, and prompts, may hold what drives a terminal."""
    found = [where for file, where in scattered_printers() if file not in OWN_PRINTERS]
    assert found == [], "use diffusion_runtime.cli.consoles, or Terminal"


# Identifiers that had another name before the field's: whoever searches for the term must find it.
RETIRED = (
    "Alone AttentionState Board DenoisingWatch EvenlyFalling InWorld Place Question QuickConvolutions RowBands "
    "ThreadObserver "
    "Together Watch Whereabouts _Patience blame competes end_without_a_word essence is_said judge_hangs "
    "capability_on is_dense_layer kept_for_text mourn_board read_place speaks_for telling_steps "
    "AttentionReportLike PlanRequest ProgressLike SequenceLayout board heard said strangers told why_dense"
).split()


def retired_identifiers() -> Iterator[str]:
    for path in MODULES:
        for node in ast.walk(tree(path)):
            name = next(filter(None, (getattr(node, kind, None) for kind in ("name", "id", "attr", "arg"))), None)
            if name in RETIRED:
                yield f"{here(path)}:{getattr(node, 'lineno', 0)}: {name}"


def test_retired_identifiers_stay_away() -> None:
    assert list(retired_identifiers()) == []


def test_no_cache_of_the_process_holds_tensors() -> None:
    """In the folders of models: a table that no request uses any more is freed with it (RequestCache)."""
    found = []
    for folder in ("denoising", "layers", "models", "parallel", "text_encoders"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for function in ast.walk(tree(path)):
                if isinstance(function, ast.FunctionDef) and function.returns is not None:
                    cached = any("cache" in ast.unparse(decorator) for decorator in function.decorator_list)
                    if cached and "Tensor" in ast.unparse(function.returns):
                        found.append(f"{here(path)}: {function.name}")
    assert not found, found


def documented_rows() -> list[set[str]]:
    """The rows of ARCHITECTURE.md: names with commas, two spaces or more, what the row holds."""
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = text.partition("## Rows")[2].partition("```text\n")[2].partition("```")[0]
    return [set(line.split("  ")[0].split(", ")) for line in block.splitlines()]


def test_the_rows_of_the_document_are_these() -> None:
    assert documented_rows() == ROWS


def test_the_document_says_what_to_change_in_every_folder() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## Where do I change...")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    assert named == set(ROW_OF) - {"pipeline"}
