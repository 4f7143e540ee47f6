"""Nodes of diffusion-runtime for ComfyUI (V3 schema)."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .attach import AttachAttention, AttentionReport
from .nodes import AttentionChoice, GenerateImage, GenerateVideo, Server


class DiffusionRuntimeExtension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Server, AttentionChoice, GenerateImage, GenerateVideo, AttachAttention, AttentionReport]


async def comfy_entrypoint() -> DiffusionRuntimeExtension:
    """Return the extension; called by ComfyUI when it loads the folder."""
    return DiffusionRuntimeExtension()
