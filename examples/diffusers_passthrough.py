"""Any pipeline of diffusers behind the same call, with a backend of ours where its attention is.

python examples/diffusers_passthrough.py THUDM/CogVideoX-2b "a red circle moving left" [out.mp4]
"""

from __future__ import annotations

import sys

from diffusion_runtime import DiffusionRuntimeError, GenerationRequest, load_pipeline


def main(model: str, prompt: str, path: str = "diffusers_passthrough.mp4", backend: str = "torch_sdpa") -> None:
    # Reaching no attention module at all would be an error here, before the first step.
    pipeline = load_pipeline(model, backend="diffusers", attention={"default": backend})
    media = pipeline(GenerationRequest(prompt=prompt, num_inference_steps=4, seed=1))
    print(media.save(path))
    print(media.attention_report, file=sys.stderr)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except DiffusionRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
