"""ImageInputs: which images a model takes in a request, and the size that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diffusion_runtime.models.reference_images import ReferenceImages, Size
from diffusion_runtime.models.reference_media import ReferenceMedia


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """The image fields of a model.

    images: the fields of images that requests may set, image_path, last_image_path and mask_path -> whether they must;
    in models with control blocks, those of the control video too. references: how a model for editing takes its images.
    media: how a model takes references of several kinds. size_of_image: of the height and width of an image, those of
    what is made of it where a request says none. missing: by field, what is said where a request lacks it, in place of
    what every model says.
    """

    images: Mapping[str, bool] = field(default_factory=dict)
    references: ReferenceImages | None = None
    media: ReferenceMedia | None = None
    size_of_image: Callable[[Size], Size] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_masks(self) -> bool:
        """True for a model whose condition a mask is a part of."""
        return "mask_path" in self.images

    @property
    def needed(self) -> frozenset[str]:
        """The fields that a request must set."""
        return frozenset(name for name, is_needed in self.images.items() if is_needed)

    @property
    def wanted(self) -> frozenset[str]:
        """The fields that a request must set, and the images of a model that is made for editing."""
        edits = self.references is not None and self.references.usual > 0
        return self.needed | (frozenset({"image_path"}) if edits else frozenset())
