"""`python -m diffusion_runtime`: the same as the `diffusion-runtime` command."""

from __future__ import annotations

from diffusion_runtime.cli.app import main

if __name__ == "__main__":
    main()
