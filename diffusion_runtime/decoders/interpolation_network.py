"""IFNet of RIFE 4.x (arXiv:2011.06294): the frame at a time between two frames, by intermediate optical flow.

Blocks refine, from coarse to fine, the flow from the wanted frame to either of the two, and a mask that says of which
one a pixel is taken. Each reads both frames as the flow so far brings them to that time, features of them alike, the
time, and what the block before made. The module names are those of the published files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# Of both frames three colours each, and the time; behind the first block also the flow to both frames and the mask.
_COLOURS_AND_TIME, _FLOW, _MASK = 7, 4, 1
# What a block hands to the next one beside flow and mask, and the residual convolutions of a block.
NUM_HANDED, NUM_RESIDUAL = 8, 8
_SLOPE = 0.2


@dataclass(frozen=True)
class InterpolationShape:
    """The sizes that tell versions apart. widths: of the blocks, from coarse to fine; scales: by which each one reads
    smaller pictures; encoder_width, num_features: of the encoder, inside and of what it gives."""

    widths: tuple[int, ...]
    scales: tuple[int, ...]
    encoder_width: int
    num_features: int

    @property
    def multiple(self) -> int:
        """Pixels that heights and widths are padded to a multiple of: two convolutions halve the smallest picture."""
        return 4 * max(self.scales)

    def num_inputs(self, block: int) -> int:
        """Return the channels that a block reads."""
        refined = 0 if block == 0 else _FLOW + _MASK + NUM_HANDED
        return _COLOURS_AND_TIME + 2 * self.num_features + refined


class _Encoder(nn.Module):
    """Features of one frame, at its height and width."""

    def __init__(self, width: int, num_features: int) -> None:
        super().__init__()
        self.cnn0 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.cnn1 = nn.Conv2d(width, width, 3, padding=1)
        self.cnn2 = nn.Conv2d(width, width, 3, padding=1)
        self.cnn3 = nn.ConvTranspose2d(width, num_features, 4, stride=2, padding=1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        for layer in (self.cnn0, self.cnn1, self.cnn2):
            picture = F.leaky_relu(layer(picture), _SLOPE)
        features: torch.Tensor = self.cnn3(picture)
        return features


class _Residual(nn.Module):
    """A convolution, scaled per channel, that is added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.beta = nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.conv(x) * self.beta + x, _SLOPE)


def _halving(num_inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_inputs, width, 3, stride=2, padding=1), nn.LeakyReLU(_SLOPE))


class _Block(nn.Module):
    """One refinement of flow and mask, computed on pictures `scale` times smaller."""

    def __init__(self, num_inputs: int, width: int, scale: int) -> None:
        super().__init__()
        self.conv0 = nn.Sequential(_halving(num_inputs, width // 2), _halving(width // 2, width))
        self.convblock = nn.Sequential(*(_Residual(width) for _ in range(NUM_RESIDUAL)))
        num_outputs = 4 * (_FLOW + _MASK + NUM_HANDED)
        self.lastconv = nn.Sequential(
            nn.ConvTranspose2d(width, num_outputs, 4, stride=2, padding=1), nn.PixelShuffle(2)
        )
        self.scale = scale

    def forward(self, x: torch.Tensor, flow: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is added to the flow, in pixels of the whole picture, the mask, and what the next block reads.
        flow: so far, [batch, 4, height, width], None for the first block."""
        x = _resized(x, 1 / self.scale)
        if flow is not None:
            # A smaller picture's pixels are larger.
            x = torch.cat([x, _resized(flow, 1 / self.scale) / self.scale], dim=1)
        made = _resized(self.lastconv(self.convblock(self.conv0(x))), self.scale)
        behind = _FLOW + _MASK
        return made[:, :_FLOW] * self.scale, made[:, _FLOW:behind], made[:, behind:]


class InterpolationNetwork(nn.Module):
    """The whole network, of one version's shape."""

    def __init__(self, shape: InterpolationShape) -> None:
        super().__init__()
        self.encode = _Encoder(shape.encoder_width, shape.num_features)
        self.blocks = nn.ModuleList(
            _Block(shape.num_inputs(index), width, scale)
            for index, (width, scale) in enumerate(zip(shape.widths, shape.scales, strict=True))
        )
        self.shape = shape

    def forward(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        features: tuple[torch.Tensor, torch.Tensor],
        time: float,
    ) -> torch.Tensor:
        """Return the frame at a time from 0, that of the first, to 1, that of the second.

        first, second: [batch, 3, height, width] in [0, 1], in multiples of shape.multiple. features: `encode` of them.
        """
        times = torch.full_like(first[:, :1], time)
        read = [first, second, *features, times]
        flow, mask, handed = self.blocks[0](torch.cat(read, dim=1), None)
        for block in self.blocks[1:]:
            to_first, to_second = flow.chunk(2, dim=1)
            warped = [
                _warped(picture, towards)
                for first_or_second in ((first, second), features)
                for picture, towards in zip(first_or_second, (to_first, to_second), strict=True)
            ]
            added, mask, handed = block(torch.cat([*warped, times, mask, handed], dim=1), flow)
            flow = flow + added
        to_first, to_second = flow.chunk(2, dim=1)
        share = torch.sigmoid(mask)
        return _warped(first, to_first) * share + _warped(second, to_second) * (1 - share)


def _resized(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)


def _warped(picture: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Return a picture with each pixel taken from where the flow points, between pixels linearly, and at the border
    from the border. flow: [batch, 2, height, width], pixels to the right and down."""
    height, width = picture.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=flow.device, dtype=flow.dtype).view(1, height, 1)
    columns = torch.linspace(-1, 1, width, device=flow.device, dtype=flow.dtype).view(1, 1, width)
    # grid_sample counts from -1 to 1, from the first pixel's centre to the last one's.
    x = columns + flow[:, 0] * (2 / max(width - 1, 1))
    y = rows + flow[:, 1] * (2 / max(height - 1, 1))
    places = torch.stack([x, y], dim=-1)
    return F.grid_sample(picture, places, mode="bilinear", padding_mode="border", align_corners=True)
