"""The rows of `scaling_gpu.py`: what is measured on 2, 4 or 8 GPUs, and what `scaling_model.py` says of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scaling_model import Constants, Degrees, decode_seconds, models, predict, programs

WAN_1B, WAN_14B, H3, FLUX2 = "wan2.1-1.3b", "wan2.2-t2v-a14b", "minimax-h3", "flux.2-dev"
# Height, width, frames.
SIZES = {"480p": (480, 832, 81), "720p": (720, 1280, 81), "5 s": (768, 1344, 124), "1024": (1024, 1024, 1)}
SMALL_SIZES = {WAN_1B: (64, 96, 5), WAN_14B: (64, 96, 5), H3: (64, 96, 124), FLUX2: (64, 64, 1)}
# Of --small: as many heads as the real models have, which is what degrees divide, and little else.
SMALL: Mapping[str, Mapping[str, Any]] = {
    WAN_1B: {"num_layers": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32},
    WAN_14B: {"num_layers": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32},
    H3: {
        "attention_head_dim": 32,
        "hidden_size": 64,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 128,
        "text_dim": 32,
        "freq_dim": 32,
        "time_embed_hidden_dim": 32,
        "time_embed_dim": 32,
        "rope_freq_dim": 4,
    },
    FLUX2: {
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 4, 4, 4],
        "joint_attention_dim": 32,
    },
}
SMALL_DECODERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    WAN_1B: {"vae/config.json": {"base_dim": 8, "num_res_blocks": 1}},
    H3: {
        "vae/config.json": {
            "block_out_channels": [8, 8, 8, 8, 16, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "decoder_num_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 64,
        },
        "audio_vae/config.json": {"encoder_dim": 4, "num_attention_heads": 2, "decoder_dim": 128},
    },
}


@dataclass(frozen=True)
class Row:
    """One measurement. seconds: that it may take, its processes' start included. num_processes: that run it; of a
    `step` without degrees all ranks compute it alone. bar: speed-up over one GPU, or seconds, as its kind has it.
    environment: variables of its processes. arguments: of a program's module, `{output}` where it writes its JSON."""

    name: str
    kind: str
    num_processes: int
    seconds: float = 60.0
    model: str = ""
    size: str = ""
    degrees: Degrees = field(default_factory=Degrees)
    quantization: str = "none"
    is_guided: bool = False
    bar: float | None = None
    num_steps: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @property
    def alone(self) -> tuple[str, str, str, str]:
        """The key of the row on one GPU that this one is compared with; a guided step has twice its time."""
        return self.kind, self.model, self.size, self.quantization

    @property
    def team(self) -> tuple[Any, ...]:
        """Rows of one team share their processes."""
        return self.kind, self.num_processes, tuple(sorted(self.environment.items()))


def step(model: str, size: str, num: int, degrees: Degrees, **changes: Any) -> Row:
    """Return the row of a step on `num` ranks. A mesh of fewer processes is not made: all ranks are its processes."""
    quantization = changes.get("quantization", "none")
    words = [
        f"branches {degrees.branches}" if degrees.branches > 1 else "",
        f"tensor {degrees.tensor}" if degrees.tensor > 1 else "",
        f"ulysses {degrees.ulysses}" if degrees.ulysses > 1 else "",
        f"ring {degrees.ring}" if degrees.ring > 1 else "",
    ]
    shown = " x ".join(word for word in words if word) or "one GPU"
    if degrees.ulysses > 1 and degrees.num_head_groups != 2:
        shown += f", {degrees.num_head_groups} head group" + ("s" if degrees.num_head_groups > 1 else "")
    shown += ", guided" if changes.get("is_guided") else ""
    shown += "" if quantization == "none" else f", {quantization}"
    shown += "".join(f", {name}={value}" for name, value in changes.get("environment", {}).items())
    return Row(f"{model} {size}: {shown}", "step", num, model=model, size=size, degrees=degrees, **changes)


def by(num_head_groups: int = 2, **degrees: int) -> Degrees:
    """Return degrees with the head groups that a GPU has by default."""
    return Degrees(num_head_groups=num_head_groups, **degrees)


def plan(num: int) -> list[Row]:
    """Return the rows for `num` GPUs, the most valuable first."""
    half = num // 2
    if num == 2:
        return two_gpus()
    bars = {4: 3.5, 8: 6.6}
    h3_clip = Row(
        f"{H3} 5 s: a whole clip, ulysses {num}, fp8",
        "clip",
        num,
        150.0,
        H3,
        "5 s",
        by(ulysses=num),
        "fp8",
        num_steps=49,
        bar=45.0 if num == 8 else None,
    )
    start = Row(
        f"start to first step, {num} processes",
        "program",
        num,
        110.0,
        arguments=("benchmarks.start_gpu", "--only", "cold-warm", "--num-gpus", str(num), "--output", "{output}"),
        bar=15.0,
    )
    replicas, gangs = (
        Row(
            f"{num} replicas{beside}, {label}",
            "program",
            num,
            130.0,
            arguments=(
                *("benchmarks.replicas_gpu", "--num-gpus", str(num), "--parts", part, "--rounds", "2"),
                *("--output", "{output}"),
            ),
            bar=bar,
        )
        for part, label, beside, bar in (
            ("flux", "FLUX.1 [dev]", "", 0.975 * num),
            ("embedded", "shapes", f" and a gang of {num}", None),
        )
    )
    of_14b = [
        step(WAN_14B, "720p", num, Degrees(), seconds=90.0),
        step(WAN_14B, "720p", num, by(ulysses=half, branches=2), is_guided=True, bar=bars[num]),
        step(WAN_14B, "720p", num, by(ulysses=num), bar=bars[num]),
        step(WAN_14B, "720p", num, by(1, ulysses=num)),
        step(WAN_14B, "720p", num, by(ulysses=half, ring=2)),
        step(WAN_14B, "720p", num, by(ring=num)),
        step(WAN_14B, "720p", num, by(tensor=num)),
        step(WAN_14B, "720p", num, by(ulysses=half, tensor=2)),
    ]
    of_h3 = [
        step(H3, "5 s", num, Degrees(), quantization="fp8"),
        step(H3, "5 s", num, by(ulysses=num), quantization="fp8"),
        step(H3, "5 s", num, Degrees()),
        step(H3, "5 s", num, by(ulysses=num)),
    ]
    of_flux2 = [
        step(FLUX2, "1024", num, Degrees()),
        step(FLUX2, "1024", num, by(tensor=4, **({"ulysses": num // 4} if num > 4 else {}))),
        step(FLUX2, "1024", num, by(ulysses=num)),
    ]
    of_480p = [
        row
        for model in (WAN_14B, WAN_1B)
        for row in (
            step(model, "480p", num, Degrees()),
            step(model, "480p", num, by(ulysses=half, branches=2), is_guided=True),
            step(model, "480p", num, by(ulysses=num)),
            step(model, "480p", num, by(ulysses=half, ring=2)),
            step(model, "480p", num, by(ulysses=half, tensor=2)),
        )
    ]
    of_1b_720p = [
        step(WAN_1B, "720p", num, Degrees()),
        step(WAN_1B, "720p", num, by(ulysses=half, branches=2), is_guided=True),
        step(WAN_1B, "720p", num, by(ulysses=half, ring=2)),
    ]
    decodes = [
        Row(f"{WAN_1B} {size}: a clip of 2 steps, {num} processes", "clip", num, 60.0, WAN_1B, size)
        for size in ("720p", "480p")
    ]
    stream = Row(
        f"causal {WAN_1B} 480p: a stream, {num} processes", "stream", num, 60.0, WAN_1B, "480p", by(ulysses=num)
    )
    variants = Row(
        "wan2.1-1.3b 480p: sparse and other variants (parallel_gpu)",
        "program",
        num,
        90.0,
        arguments=(
            *("torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m", "benchmarks.parallel_gpu"),
            *("--rounds", "3", "--output", "{output}"),
        ),
    )
    first = [*of_14b, *of_h3, h3_clip, start, replicas]
    return [*first, *of_flux2, *of_480p, *of_1b_720p, *decodes, stream, gangs, variants]


def two_gpus() -> list[Row]:
    """Return the rows that tell what an overlapping exchange costs, in a minute: 14B's is where the model is farthest
    off. NCCL with fewer multiprocessors leaves more of them to attention."""
    rows = [step(WAN_14B, "480p", 2, Degrees())]
    for channels in ("", "8", "4"):
        environment = {"NCCL_MAX_CTAS": channels} if channels else {}
        for num_head_groups in (1, 2, 4) if not channels else (2, 4):
            rows.append(step(WAN_14B, "480p", 2, by(num_head_groups, ulysses=2), environment=environment))
    rows.insert(4, step(WAN_14B, "480p", 2, by(ring=2)))
    return rows


def predicted(row: Row, constants: Constants) -> dict[str, Any]:
    """What the model says of a row: ms of a step with its bound, seconds of a clip's decoding, figures of a program."""
    if row.kind == "program":
        of_row = [each for each in programs(row.num_processes) if each.topic in row.name]
        return {"predicted": {each.name: round(each.predicted, 2) for each in of_row}} if of_row else {}
    if row.kind == "clip":
        decode = decode_seconds()[row.model, row.size] / row.num_processes
        if row.model != H3:
            return {"predicted_decode_s": decode}
        steps = row.num_steps * _step(row, constants)["predicted_ms"] / 1e3
        return {"predicted_s": steps + decode, "predicted_decode_s": decode}
    return _step(row, constants) if row.kind == "step" else {}


def num_tokens_of(model: str, size: str) -> int:
    """Return the tokens of the grid at a size of SIZES; models other than Wan are known in one size alone."""
    if model not in (WAN_1B, WAN_14B):
        return models()[model].num_tokens
    height, width, num_frames = SIZES[size]
    return ((num_frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def _step(row: Row, constants: Constants) -> dict[str, Any]:
    made = predict(
        models()[row.model],
        row.degrees,
        constants,
        num_tokens=num_tokens_of(row.model, row.size),
        quantization=row.quantization,
        is_guided=row.is_guided,
    )
    return {"predicted_ms": made.total, "predicted_bound": made.bound}
