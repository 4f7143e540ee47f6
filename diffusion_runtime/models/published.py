"""What the published models of a family need: plain values, known without torch."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PublishedModel:
    """A model folder that others publish.

    name: short, that of its file in configs/. model_path: a hub id, or `shapes`. makes: `video`, `image`,
    `video from image`, or `video from text or image`. parameters: of each component, in billions. stored_bytes: of one
    stored number, for the size of the download.
    """

    name: str
    family: str
    model_path: str
    makes: str
    parameters: tuple[tuple[str, float], ...]
    stored_bytes: int = 2

    @property
    def total_billions(self) -> float:
        return sum(billions for _, billions in self.parameters)

    @property
    def download_gb(self) -> float:
        """10 ** 9 bytes that the hub sends; 0 for the embedded model."""
        return 0.0 if "/" not in self.model_path else self.total_billions * self.stored_bytes

    def memory_gb(self, dtype: str) -> float:
        """10 ** 9 bytes that the weights of all components take; what a generation adds depends on its size."""
        return self.total_billions * BYTES_OF[dtype]
