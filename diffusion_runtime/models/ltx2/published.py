"""The published LTX-2 model."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

PUBLISHED = (
    PublishedModel(
        "ltx-2",
        "ltx2",
        "Lightricks/LTX-2",
        "video with sound",
        (
            ("transformer", 18.876),
            ("text_encoder", 12.203),
            ("connectors", 1.431),
            ("vae", 1.222),
            ("audio_vae", 0.053),
            ("vocoder", 0.056),
        ),
    ),
)
