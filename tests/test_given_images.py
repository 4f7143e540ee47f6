"""Images of a request as values."""

from __future__ import annotations

import io

import numpy
from PIL import Image

from diffusion_runtime import GenerationRequest
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.request.given_images import as_image_paths


def test_bytes_and_pillow_images_are_read_as_their_file_would_be() -> None:
    pixels = numpy.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=numpy.uint8)
    image = Image.fromarray(pixels)
    # Turned on its side by its orientation, as phones write it.
    exif = Image.Exif()
    exif[0x0112] = 6
    content = io.BytesIO()
    image.save(content, "PNG", exif=exif)
    turned = Image.open(io.BytesIO(content.getvalue()))
    request = GenerationRequest("a", image_path=[image, content.getvalue()], last_image_path=turned)
    assert isinstance(request.image_path, tuple)
    whole, upright = (numpy.array(open_picture(path)) for path in request.image_path)
    assert (whole == pixels).all()
    assert upright.shape == (32, 24, 3)
    assert request.last_image_path is not None
    assert (numpy.array(open_picture(request.last_image_path)) == upright).all()
    assert GenerationRequest.from_dict(request.to_dict()) == request
    # The same content is one file; a path stays what it is.
    assert as_image_paths(image.copy()) == request.image_path[0]
    assert GenerationRequest("a", image_path="cat.png").image_path == "cat.png"
