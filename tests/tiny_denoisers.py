"""Denoisers of diffusers with random weights and inputs for them, small enough for a forward pass in milliseconds.

Each function returns (model, keyword arguments of one forward pass). Text comes with padding wherever a model takes a
mask, in two samples of unequal length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Built = tuple[Any, dict[str, Any]]
NUM_TEXT_TOKENS = 7


def text_mask(kind: str = "right", dtype: torch.dtype = torch.long) -> torch.Tensor:
    """[2, 7], 1 for real tokens: padding on the right, on the left, or in the middle."""
    rows = {
        "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]],
        "left": [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]],
        "middle": [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1]],
    }
    return torch.tensor(rows[kind], dtype=dtype)


def ready(model: Any) -> Any:
    """Weights that make attention matter: norms that are not one, projections that are not tiny."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def video_cross(grid: tuple[int, int, int] = (3, 4, 4)) -> Built:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
    }


def video_joint(grid: tuple[int, int, int] = (3, 4, 4), padding: str = "right") -> Built:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask(padding),
        "pooled_projections": torch.randn(2, 8),
        "guidance": torch.tensor([1000.0, 1000.0]),
    }


def video_joint_reordered() -> Built:
    from diffusers import HunyuanVideo15Transformer3DModel

    model = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 9, 3, 4, 4),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask("right"),
        "encoder_hidden_states_2": torch.randn(2, 3, 12),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "image_embeds": torch.zeros(2, 2, 8),
    }


def video_packed(padding: str = "right") -> Built:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 3 * 4 * 4, 8),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask(padding),
        "num_frames": 3,
        "height": 4,
        "width": 4,
    }


def video_with_sound() -> Built:
    from diffusers import LTX2VideoTransformer3DModel

    model = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 2 * 4 * 4, 8),
        "audio_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.tensor([[500.0], [500.0]]),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "audio_encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask("left"),
        "audio_encoder_attention_mask": text_mask("left"),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 5,
    }


def video_text_first() -> Built:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=NUM_TEXT_TOKENS,
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 3, 4, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
    }


def video_text_gathered() -> Built:
    from diffusers import MochiTransformer3DModel

    model = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=NUM_TEXT_TOKENS,
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask("right").bool(),
    }


def image_text_first(padding: str = "right") -> Built:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_hidden_states_mask": text_mask(padding).bool(),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
    }


def image_joint() -> Built:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 16, 8),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(NUM_TEXT_TOKENS, 3),
        "guidance": torch.tensor([3.5]),
    }


def image_lists() -> Built:
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    return ready(model), {
        "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 12)],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [torch.randn(3, 16), torch.randn(40, 16)],
    }


def image_two_attentions() -> Built:
    """The kind of SD3.5 medium: a second self-attention in some blocks."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([500, 500]),
    }


def image_linear() -> Built:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    )
    return ready(model), {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": text_mask("left"),
    }


def image_unet() -> Built:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    return ready(model), {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, NUM_TEXT_TOKENS, 16),
        "encoder_attention_mask": text_mask("middle"),
    }


# Name of the diffusers class -> (builder, attention modules reached, attention modules).
EVERY: dict[str, tuple[Callable[[], Built], int, int]] = {
    "WanTransformer3DModel": (video_cross, 4, 4),
    "HunyuanVideoTransformer3DModel": (video_joint, 3, 3),
    "HunyuanVideo15Transformer3DModel": (video_joint_reordered, 3, 3),
    "LTXVideoTransformer3DModel": (video_packed, 4, 4),
    "LTX2VideoTransformer3DModel": (video_with_sound, 12, 12),
    "CogVideoXTransformer3DModel": (video_text_first, 2, 2),
    "MochiTransformer3DModel": (video_text_gathered, 3, 3),
    "QwenImageTransformer2DModel": (image_text_first, 2, 2),
    "FluxTransformer2DModel": (image_joint, 2, 2),
    "ZImageTransformer2DModel": (image_lists, 4, 4),
    "SD3Transformer2DModel": (image_two_attentions, 3, 3),
    "SanaTransformer2DModel": (image_linear, 2, 4),
    "UNet2DConditionModel": (image_unet, 8, 8),
}


def forward(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What the model predicts, as one tensor."""
    with torch.no_grad():
        result = model(**arguments, return_dict=False)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    flat = [part for parts_of in parts for part in (parts_of if isinstance(parts_of, list | tuple) else [parts_of])]
    return torch.cat([part.flatten() for part in flat if isinstance(part, torch.Tensor)])


def _five_dimensions(name: str, grid: tuple[int, int, int] = (3, 4, 5), **arguments: Any) -> Built:
    """A model of Wan's shape: latents [batch, channels, frames, height, width], patches of 1 x 2 x 2."""
    import diffusers

    common = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 1,
        "rope_max_seq_len": 64,
    }
    model = getattr(diffusers, name)(**common, **arguments)
    return ready(model), {
        "hidden_states": torch.randn(1, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
    }


def video_controlled() -> Built:
    model, arguments = _five_dimensions("WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=4)
    return model, {**arguments, "control_hidden_states": torch.randn(1, 4, 3, 8, 10)}


def video_distilled_in_time() -> Built:
    model, arguments = _five_dimensions("AnyFlowTransformer3DModel")
    return model, {
        **arguments,
        "hidden_states": arguments["hidden_states"].transpose(1, 2),
        "timestep": torch.full((1, 3), 500.0),
        "r_timestep": torch.full((1, 3), 250.0),
    }


def video_world() -> Built:
    from diffusers import CosmosTransformer3DModel

    model = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 4, 3, 8, 10),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
        "fps": 16,
    }


def video_cross_and_caption() -> Built:
    from diffusers import AllegroTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    model = AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=48,
        sample_width=10,
        sample_height=8,
        sample_frames=3,
        caption_channels=16,
    )
    *rope, frames, rows, columns = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (4, 5)), (4, 5), 3)
    places = torch.cartesian_prod(*(axis.long() for axis in (frames, rows, columns))).T[:, None]
    return ready(model), {
        "hidden_states": torch.randn(1, 4, 3, 8, 10),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
        "image_rotary_emb": (tuple(rope), tuple(places)),
    }


def video_joint_with_decoder() -> Built:
    from diffusers import MotifVideoTransformer3DModel

    model = MotifVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        text_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 4, 3, 8, 10),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
    }


def video_text_first_in_frames() -> Built:
    from diffusers import EasyAnimateTransformer3DModel

    model = EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        num_layers=1,
        mmdit_layers=1,
        time_embed_dim=8,
        text_embed_dim=16,
        sample_width=10,
        sample_height=8,
        time_position_encoding_type=None,
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 4, 3, 8, 10),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT_TOKENS, 16),
    }


# Builders of models with a grid of (3, 4, 5) tokens, patches of 1 x 2 x 2 and five-dimensional latents, and how many
# other tokens stand before and behind the grid in their self-attention. Frames are the second or third dimension.
GRIDS: dict[str, tuple[Callable[[], Built], int, int]] = {
    "AllegroTransformer3DModel": (video_cross_and_caption, 0, 0),
    "AnyFlowTransformer3DModel": (video_distilled_in_time, 0, 0),
    "ChronoEditTransformer3DModel": (lambda: _five_dimensions("ChronoEditTransformer3DModel"), 0, 0),
    "CosmosTransformer3DModel": (video_world, 0, 0),
    "EasyAnimateTransformer3DModel": (video_text_first_in_frames, NUM_TEXT_TOKENS, 0),
    "MotifVideoTransformer3DModel": (video_joint_with_decoder, 0, NUM_TEXT_TOKENS),
    "SkyReelsV2Transformer3DModel": (lambda: _five_dimensions("SkyReelsV2Transformer3DModel"), 0, 0),
    "WanTransformer3DModel": (lambda: _five_dimensions("WanTransformer3DModel"), 0, 0),
    "WanVACETransformer3DModel": (video_controlled, 0, 0),
}

_REACHED = {"EasyAnimateTransformer3DModel": 1, "WanVACETransformer3DModel": 4}
EVERY |= {
    name: (build, _REACHED.get(name, 2), _REACHED.get(name, 2))
    for name, (build, _, _) in GRIDS.items()
    if name not in EVERY
}
