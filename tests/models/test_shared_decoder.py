"""Decoding for several processes: what a request says of its decoding reaches the decoder."""

from __future__ import annotations

from unittest import mock

from diffusion_runtime import GenerationRequest
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.shared_decoder import SharedDecoder
from diffusion_runtime.parallel.world import World


def test_a_request_reaches_the_decoder_of_every_process() -> None:
    world = mock.create_autospec(World, instance=True, size=2)
    world.from_first.side_effect = lambda compute: compute()
    decoder = mock.MagicMock(spec=LatentDecoder, library="torch", implementation="own", chosen="", splits_rows=False)
    request = GenerationRequest("a", decode_timestep=0.05)
    shared = SharedDecoder(decoder, world)
    assert shared.for_request(request)._decoder is decoder.for_request.return_value  # type: ignore[attr-defined]
    decoder.for_request.assert_called_once_with(request)
    assert shared._decoder is decoder
