"""What users import, pinned; and how light importing it is."""

from __future__ import annotations

import inspect
import subprocess
import sys

import diffusion_runtime
import diffusion_runtime.attention
from diffusion_runtime import errors

PACKAGE_NAMES = """AttentionConfig AttentionSpec BackendUnavailableError BatchFailedError Cancelled Client ConfigError
DeviceMemoryError DiffusionRuntimeError GeneratedMedia GenerationRequest MissingPackageError ModelLoadError OutputError
Pipeline PipelineBusyError PipelineClosedError RequestError RuntimeConfig ThirdPartyError UsageError __version__ attach
follow force_attention_backend global_force_attn_backend join_processes lead load_pipeline parse_flags
upscale_request""".split()

ATTENTION_NAMES = """AttentionCall AttentionConfig AttentionContext AttentionPolicy AttentionRecorder AttentionReport
AttentionResult AttentionSpec Availability Backend BackendInfo Capability Decision HeadSizes
KeyCounts LayerInfo LibraryAttention LocalAttention ReportRow RequestCache SparseBackend
SparseOptions SparsePlan StepInfo TokenLayout USPAttention UlyssesAttention attention
force_attention_backend list_backends plan_attention plan_of_call register_backend register_role
select_backend tiles_of unregister_backend""".split()


def test_names_are_pinned_and_importable() -> None:
    assert sorted(diffusion_runtime.__all__) == sorted(PACKAGE_NAMES)
    assert sorted(diffusion_runtime.attention.__all__) == sorted(ATTENTION_NAMES)
    for name in PACKAGE_NAMES:
        assert getattr(diffusion_runtime, name) is not None
    for name in ATTENTION_NAMES:
        assert getattr(diffusion_runtime.attention, name) is not None


def test_errors_say_whose_fault_they_are_and_the_tree_lists_each() -> None:
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each) and name[0] != "_"}
    classes = {name: each for name, each in classes.items() if issubclass(each, errors.DiffusionRuntimeError)}
    callers = {name for name, each in classes.items() if each.is_callers_fault}
    of_marked = {"ConfigError", "RequestError", "ForbiddenAddressError", "BackendInaccurateError"}
    assert callers == {"UsageError", "BackendUnavailableError", *of_marked}
    for name in classes:
        (line,) = (line for line in (errors.__doc__ or "").splitlines() if f" {name} " in f" {line} " and "  " in line)
        is_marked = "  caller  " in line
        assert is_marked == (name in callers - of_marked), line


def test_importing_the_package_and_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys, diffusion_runtime, diffusion_runtime.cli.app\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
