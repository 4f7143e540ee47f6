"""Import check of diffusers, which imports xformers wherever that is installed, and fails with it."""

from __future__ import annotations

from collections.abc import Mapping

from diffusion_runtime.core.hardware import installed_packages
from diffusion_runtime.errors import InstallationError
from diffusion_runtime.startup.importing import import_failure

# What diffusers imports as soon as it is installed, and the module that it takes of it.
IMPORTED_BY_DIFFUSERS = {"xformers": "xformers.ops"}


def check_diffusers_import() -> None:
    """Raises InstallationError where an installed package keeps diffusers from being imported. Called before that is.

    Imports that package alone, which diffusers would do next, and nothing where it is not installed.
    """
    packages = installed_packages()
    for name, module in IMPORTED_BY_DIFFUSERS.items():
        failure = import_failure(module) if name in packages else None
        if failure is not None:
            what, fix = blocking_package(name, packages, failure)
            raise InstallationError(f"{what}; fix: {fix}")


def blocking_package(name: str, packages: Mapping[str, str], failure: str) -> tuple[str, str]:
    """Return the fault and the package to remove when `name` cannot be imported. packages: name to version."""
    what = (
        f"package {name} {packages[name]} is installed and cannot be imported: {failure}; diffusers imports it "
        "wherever it is installed, so nothing that needs diffusers can be loaded"
    )
    if name == "xformers" and "flash-attn-4" in packages and "flash-attn" not in packages:
        # Both bring a package called flash_attn, and xformers takes any of that name for FlashAttention-2.
        what += f". It takes flash-attn-4 {packages['flash-attn-4']} for FlashAttention-2"
        return what, "pip uninstall xformers, which keeps the faster fa4; or pip uninstall flash-attn-4"
    return what, f"pip uninstall {name}"
