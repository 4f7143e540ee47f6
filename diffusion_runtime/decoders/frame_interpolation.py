"""Frame interpolation by RIFE 4.x: files of its weights, and the frames between two frames of a clip.

A file is recognised by its tensors alone. Versions whose tensors have the same shapes are computed alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.decoders.interpolation_network import InterpolationNetwork, InterpolationShape
from diffusion_runtime.errors import DiffusionRuntimeError, ModelLoadError, shown_name
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.request.interpolation import CONVERTED, PUBLISHED
from diffusion_runtime.untrusted.files import check_file, user_path
from diffusion_runtime.weights.tensor_files import read_tensors
from diffusion_runtime.weights.weight_files import DAMAGED, SAFETENSORS, listed, stored_heads

KEY = "interpolation_path"
_FINE, _COARSE = (8, 4, 2, 1), (16, 8, 4, 2, 1)
VERSIONS: Mapping[str, InterpolationShape] = {
    "4.21, 4.22 or 4.23": InterpolationShape((256, 192, 96, 48), _FINE, 32, 8),
    "4.22.lite": InterpolationShape((192, 128, 64, 32), _FINE, 16, 4),
    "4.25 or 4.26": InterpolationShape((192, 128, 96, 64, 32), _COARSE, 16, 4),
    "4.25.lite": InterpolationShape((192, 128, 96, 64, 24), (32, 16, 8, 4, 1), 16, 4),
    "4.25.heavy": InterpolationShape((384, 256, 192, 128, 64), _COARSE, 16, 4),
    "4.26.heavy": InterpolationShape((192, 128, 96, 64, 32), _COARSE, 16, 16),
}
"""The sizes of the versions that are computed here, by their names: those whose blocks hand features to the next."""
_KNOWN = f"known are {'; '.join(VERSIONS)}"
_FLOATS = ("F32", "F16", "BF16")
# The authors' files number their blocks without a dot.
_BLOCK = re.compile(r"block(\d)\.")
TWICE = f"two tensors are one by another spelling of their blocks; {DAMAGED}"
Shapes = Mapping[str, tuple[int, ...]]


def own_name(name: str) -> str:
    """Return a tensor's name in an authors' file as the network has it."""
    return _BLOCK.sub(r"blocks.\1.", name)


def is_of_network(name: str) -> bool:
    """Return whether a tensor, by its own name, is one of a network's; other parts of files were for training."""
    return name.startswith(("encode.", "blocks."))


def version_of(shapes: Shapes, where: str) -> str:
    """Return the name of the version whose tensors have these shapes, by own names. where: of the file, for messages.

    Raises ModelLoadError for other tensors, which says what is known of them.
    """
    if "encode.cnn0.weight" not in shapes and "blocks.0.conv0.0.0.weight" not in shapes:
        raise ModelLoadError(f"{where}: not the tensors of RIFE 4.x; {_KNOWN}. Take {PUBLISHED}")
    for version, shape in VERSIONS.items():
        expected = _shapes_of(shape)
        if expected == shapes:
            return version
        first = "blocks.0.conv0.1.0.weight"
        last = f"blocks.{len(shape.widths) - 1}.conv0.1.0.weight"
        tells = ("encode.cnn3.weight", "blocks.0.lastconv.0.weight", first, last)
        if all(shapes.get(name) == expected[name] for name in tells):
            differing = [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]
            raise ModelLoadError(
                f"{where}: RIFE {version} with tensors that are missing, unknown or of another shape: "
                f"{listed(map(shown_name, differing))}; copy or download it again"
            )
    raise ModelLoadError(f"{where}: a version of RIFE that is not computed here: {_difference(shapes)}; {_KNOWN}")


def _shapes_of(shape: InterpolationShape) -> Shapes:
    with empty_modules():
        return {name: tuple(each.shape) for name, each in InterpolationNetwork(shape).state_dict().items()}


def _difference(shapes: Shapes) -> str:
    """Return how tensors of a RIFE differ from those that are known."""
    if "encode.cnn0.weight" not in shapes:
        return "its frames have no encoder of four convolutions, as those before 4.13"
    given = shapes.get("blocks.0.lastconv.0.weight", ())
    if given[1:2] == (24,):
        return (
            "its blocks hand no features on, as those of 4.13 to 4.20 and of 4.24, whose tensors have the same shapes "
            "and are not computed alike"
        )
    widths = [shape[0] for name, shape in shapes.items() if name.endswith(".conv0.1.0.weight") and shape]
    return f"its blocks are {', '.join(map(str, widths[:8])) or 'unknown'} channels wide"


@dataclass(frozen=True)
class InterpolationFile:
    """A file of weights whose tensors are those of a version, by its head."""

    path: Path
    version: str

    @property
    def shape(self) -> InterpolationShape:
        """The sizes of the version."""
        return VERSIONS[self.version]

    @property
    def num_bytes(self) -> int:
        """The weights in memory, which are float32."""
        return 4 * sum(torch.Size(each).numel() for each in _shapes_of(self.shape).values())

    def activation_bytes(self, height: int, width: int) -> int:
        """Return what one frame between two takes on the device."""
        multiple = self.shape.multiple
        pixels = -(-height // multiple) * -(-width // multiple) * multiple**2
        return pixels * _bytes_per_pixel(self.version)

    def load(self, device: torch.device) -> FrameInterpolator:
        """Read the weights. Raises ModelLoadError for a file that changed meanwhile, and for numbers that are none."""
        tensors, _ = read_tensors(self.path, KEY)
        tensors = {own_name(name): tensor for name, tensor in tensors.items()}
        if version_of({name: tuple(each.shape) for name, each in tensors.items()}, str(self.path)) != self.version:
            raise ModelLoadError(f"{self.path}: the file has changed since it was opened; run the command again")
        for name, tensor in tensors.items():
            unusable = unusable_numbers(tensor, torch.float32)
            if unusable is not None:
                raise ModelLoadError(f"{self.path}: tensor {name!r} {unusable}. {DAMAGED}")
        with empty_modules():
            network = InterpolationNetwork(self.shape)
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return FrameInterpolator(network.to(device).requires_grad_(False).eval(), self.version)


@functools.cache
def _bytes_per_pixel(version: str) -> int:
    """Return the activations of one frame, counted on the meta device: they grow with the padded size alone."""
    side = VERSIONS[version].multiple
    with empty_modules():
        interpolator = FrameInterpolator(InterpolationNetwork(VERSIONS[version]), version)
        frame = torch.empty(side, side, 3, dtype=torch.uint8)

    def one() -> torch.Tensor:
        return interpolator.picture(interpolator.prepare(frame), interpolator.prepare(frame), 0.5)

    return -(-peak_bytes(one, torch.device("meta")) // side**2)


def open_interpolation(path: str) -> InterpolationFile:
    """Open what RuntimeConfig.interpolation_path names, from its head alone.

    Raises ConfigError for a path that is no file's; ModelLoadError for a file that is missing, damaged, of another kind
    or of a version that is not known.
    """
    place = user_path(path, KEY)
    if place.suffix in (".pkl", ".pth", ".pt"):
        raise ModelLoadError(
            f"{place}: a pickle can run code when it is opened, and is not: take {PUBLISHED}; {CONVERTED}"
        )
    check_file(place, KEY, missing=ModelLoadError)
    if place.suffix not in SAFETENSORS:
        raise ModelLoadError(f"{place}: expected a .safetensors file: {PUBLISHED}; {CONVERTED}")
    heads, _ = stored_heads(place)
    named = {own_name(name): head for name, head in heads.items()}
    if len(named) != len(heads):
        raise ModelLoadError(f"{place}: {TWICE}")
    version = version_of({name: tuple(head.shape) for name, head in named.items()}, str(place))
    odd = sorted({head.kind for head in named.values()} - set(_FLOATS))
    if odd:
        raise ModelLoadError(f"{place}: expected tensors of {', '.join(_FLOATS)}, got {listed(odd)}")
    return InterpolationFile(place, version)


@dataclass(frozen=True)
class PreparedFrame:
    """A frame as the network reads it, [1, 3, height, width] in [0, 1], padded, with its features."""

    picture: torch.Tensor
    features: torch.Tensor


class FrameInterpolator:
    """A loaded network, in float32. version: its name, for the report."""

    def __init__(self, network: InterpolationNetwork, version: str) -> None:
        self._network = network
        self._device = next(network.parameters()).device
        self.version = version

    def prepare(self, frame: torch.Tensor) -> PreparedFrame:
        """Return a frame, uint8 [height, width, 3], as `between` takes it: each is encoded once for two pairs."""
        with torch.inference_mode():
            height, width = frame.shape[:2]
            multiple = self._network.shape.multiple
            picture = frame.to(self._device).permute(2, 0, 1)[None].float() / 255
            # As in the authors' scripts, black on the right and below.
            picture = F.pad(picture, (0, -width % multiple, 0, -height % multiple))
            return PreparedFrame(picture, self._network.encode(picture))

    def between(self, first: PreparedFrame, second: PreparedFrame, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return so many frames at even times between two, uint8 on the CPU, [number, height, width, 3]; one by one, so
        that they do not depend on how many there are. like: a frame of their size. Raises DiffusionRuntimeError for
        frames that are not numbers, which finite weights can make."""
        height, width = like.shape[:2]
        made = []
        with torch.inference_mode():
            for index in range(1, number + 1):
                picture = self.picture(first, second, index / (number + 1))
                if not bool(picture.isfinite().all()):
                    raise DiffusionRuntimeError(
                        "interpolate: a frame between two is not made of numbers, so the weights of "
                        f"--interpolation-path are damaged or not those of RIFE {self.version}: copy or download them "
                        "again"
                    )
                pixels = (picture[0, :, :height, :width] * 255).round_().clamp_(0, 255).to(torch.uint8)
                made.append(pixels.permute(1, 2, 0).cpu())
        return torch.stack(made)

    def picture(self, first: PreparedFrame, second: PreparedFrame, time: float) -> torch.Tensor:
        """Return the frame at a time from 0 to 1 between two, float32 [1, 3, height, width], padded as they are."""
        made: torch.Tensor = self._network(first.picture, second.picture, (first.features, second.features), time)
        return made
