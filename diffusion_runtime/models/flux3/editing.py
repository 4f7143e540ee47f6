"""FLUX.3's reference images (Black Forest Labs, 2026): an only one is kept whole; several are scaled down and cut as
FLUX.2's."""

from __future__ import annotations

import dataclasses
import math

from diffusion_runtime.models.flux2.editing import references as references_of_several
from diffusion_runtime.models.reference_images import ReferenceImages, Size

# Maximum of the authors' model card.
MOST = 10
# Limits of the canvas of an only image.
_AREA, _LONGEST, _SHORTEST = 4 * 1024 * 1024, 4096, 64


def references(multiple: int) -> ReferenceImages:
    """Return the rules for reference images. multiple: pixels along each side of a token.

    An only image is scaled down to 4 megapixels, and its reflection fills it up to whole tokens.
    """

    def canvas(size: Size) -> Size:
        height, width = (min(_LONGEST, max(_SHORTEST, side + -side % multiple)) for side in size)
        return height, width

    def scaled(size: Size) -> Size:
        scale = min(1.0, math.sqrt(_AREA / (size[0] * size[1])), _LONGEST / max(size))
        while True:
            height, width = (max(1, round(side * scale)) for side in size)
            if math.prod(canvas((height, width))) <= _AREA:
                return height, width
            # Where whole tokens lead above the area.
            scale *= 0.995

    several = references_of_several(MOST, multiple)
    return dataclasses.replace(several, alone=dataclasses.replace(several, most=1, scaled=scaled, cropped=canvas))
