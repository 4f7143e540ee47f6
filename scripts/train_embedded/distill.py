"""Distil an embedded model to a few steps without guidance, as a LoRA or as a second set of weights.

python -m scripts.train_embedded.distill diffusion_runtime/assets/shapes --minutes 8 --rank 64 --out $OUT
python -m scripts.train_embedded.distill FOLDER --world emoji --judge DETECTOR --sigmas 1 0.977 0.933 0.824 --out $OUT
torchrun --standalone --nproc-per-node 4 -m scripts.train_embedded.distill ...    # several GPUs

Two losses, one after the other, both on states that the student itself arrives at:

- flow map: from the student's state at one of its noise levels, the teacher (guided, several small steps) goes to the
  next one; the student must arrive there in one step. A regression, and so an average where the layout is still open.
- distribution matching (Yin et al., arXiv:2405.14867): the student's clean latents, with noise added, are moved along
  the difference of the guided teacher's prediction and that of a critic trained on the student's own results.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, UMT5EncoderModel

from diffusion_runtime.quality.emoji.detector import load_detector
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, PromptKind
from scripts.train_embedded.architecture import LATENT_CHANNELS, MAX_PROMPT_TOKENS, embed_prompts
from scripts.train_embedded.attention import TrainingAttention
from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.contact_sheet import save_sheet
from scripts.train_embedded.evaluate import Examine, Figures, examine_emoji, examine_shapes, parallel_checker
from scripts.train_embedded.export import load_component
from scripts.train_embedded.ranks import GradientAverage, Ranks, join_ranks
from scripts.train_embedded.session import Average, Clock, Log, cosine
from scripts.train_embedded.train_vae import clip_to_frames
from scripts.train_embedded.world import CAPTION_TOKENS, EMOJI, SHAPES, WORLDS, World

TEACHER_SUBSTEPS = 3
CRITIC_STEPS = 2
"""Updates of the critic per update of the student, once distribution matching has begun."""
CRITIC_WARMUP = 150
NUM_CAPTIONS = 24_000
LOG_EVERY, CLOCK_EVERY = 100, 8


@dataclass(frozen=True)
class Shape:
    """One static shape of a training step, and how often it comes relative to the others."""

    num_frames: int
    size: int
    batch: int
    share: float
    shift: float

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent frames, rows, columns."""
        return 1 + (self.num_frames - 1) // 4, self.size // 8, self.size // 8


STEP_SHAPES = {
    SHAPES.name: (Shape(29, 256, 48, 0.82, 12.0), Shape(29, 128, 192, 0.09, 8.0), Shape(1, 256, 192, 0.09, 6.0)),
    EMOJI.name: (Shape(29, 256, 48, 0.70, 8.0), Shape(29, 128, 192, 0.14, 5.0), Shape(1, 256, 192, 0.16, 4.0)),
}
"""By world; the first is the size that is judged."""
TOY_SHAPES = (Shape(9, 64, 4, 0.6, 12.0), Shape(1, 64, 4, 0.4, 6.0))


class LowRankUpdate:
    """W = base + up @ down for every linear map of a model, trained through the gradient of W itself.

    The model stays what it was, so one compiled graph serves teacher and student. down: [rank, in]; up: [out, rank].
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        self._names = [name for name, _ in linears]
        self._weights = [module.weight for _, module in linears]
        self._base = [weight.detach().clone() for weight in self._weights]
        device = self._weights[0].device
        ranks = [min(rank, *weight.shape) for weight in self._weights]
        self.down = [
            torch.randn(r, weight.shape[1], device=device).div_(weight.shape[1] ** 0.5).requires_grad_()
            for r, weight in zip(ranks, self._weights, strict=True)
        ]
        self.up = [
            torch.zeros(weight.shape[0], r, device=device).requires_grad_()
            for r, weight in zip(ranks, self._weights, strict=True)
        ]
        self.parameters = [*self.down, *self.up]

    @property
    def weights(self) -> list[Tensor]:
        """The weights that the update changes; their gradients are what `pull` reads."""
        return list(self._weights)

    @torch.no_grad()
    def pull(self) -> None:
        """Gradients of down and up from those of the weights."""
        for weight, down, up in zip(self._weights, self.down, self.up, strict=True):
            assert weight.grad is not None
            down.grad, up.grad = up.T @ weight.grad, weight.grad @ down.T

    @torch.no_grad()
    def push(self) -> None:
        """Write base + up @ down into the weights."""
        for weight, base, down, up in zip(self._weights, self._base, self.down, self.up, strict=True):
            torch.addmm(base, up, down, out=weight)

    def state(self) -> dict[str, Tensor]:
        """The factors in the format of diffusers and PEFT, bfloat16."""
        factors = {}
        for name, down, up in zip(self._names, self.down, self.up, strict=True):
            factors[f"transformer.{name}.lora_A.weight"] = down.detach().to("cpu", torch.bfloat16).contiguous()
            factors[f"transformer.{name}.lora_B.weight"] = up.detach().to("cpu", torch.bfloat16).contiguous()
        return factors


class Captions:
    """Tokenised captions of random scenes, drawn as the training of the teacher drew them; none is held out."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, count: int, seed: int, device: str, world: World, *, image: bool
    ) -> None:
        random, generator = Random(seed), torch.Generator().manual_seed(seed)
        scenes = world.sample(count, generator, world.two_object_fraction).attributes()
        texts = [world.write_caption(scene, random, image).text for scene in scenes]
        encoded = tokenizer(texts, padding="max_length", max_length=CAPTION_TOKENS, truncation=True)
        self._ids = torch.tensor(encoded["input_ids"], device=device)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, CAPTION_TOKENS]."""
        rows = torch.randint(len(self._ids), (count,), generator=generator, device=self._ids.device)
        return self._ids[rows]


class Distillation:
    """Teacher, student and critic; `step` is one update of the student, of the critic, or of both."""

    def __init__(
        self, folder: Path, sigmas: Sequence[float], guidance: float, rank: int, seed: int, ranks: Ranks
    ) -> None:
        torch.manual_seed(seed)
        self._guidance = guidance
        self._device = device = ranks.device
        self.sigmas = (*sigmas, 0.0)
        self._generator = torch.Generator(device).manual_seed(ranks.seed(seed))
        self._random = Random(ranks.seed(seed))
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.text_encoder = load_component(folder, UMT5EncoderModel).to(device)
        self.text_encoder.requires_grad_(False)
        self.teacher = load_component(folder, WanTransformer3DModel).to(device)
        self.teacher.set_attn_processor(TrainingAttention())
        self.student, self.critic = copy.deepcopy(self.teacher), copy.deepcopy(self.teacher)
        self.teacher.requires_grad_(False)
        for model in (self.teacher, self.student, self.critic):
            if device == "cuda":
                model.compile_repeated_blocks(fullgraph=True)
        self.low_rank = LowRankUpdate(self.student, rank) if rank else None
        if self.low_rank is not None:
            self.student.requires_grad_(False)
            for weight in self.low_rank.weights:
                weight.requires_grad_(True)
        self._weights = [weight for weight in self.student.parameters() if weight.requires_grad]
        self.trained = self._weights if self.low_rank is None else self.low_rank.parameters
        self._optimizer = torch.optim.AdamW(self.trained, betas=(0.9, 0.95), weight_decay=0.0)
        self._critic_weights = list(self.critic.parameters())
        self._critic_optimizer = torch.optim.AdamW(self._critic_weights, lr=3e-4, betas=(0.0, 0.95), weight_decay=0.0)
        self._average_gradients = GradientAverage(self._weights, ranks)
        self._average_critic = GradientAverage(self._critic_weights, ranks)
        self.average = Average(self.trained, decay=0.995)
        empty = torch.zeros(1, CAPTION_TOKENS, dtype=torch.int64, device=device)
        empty[0, 0] = self.tokenizer.eos_token_id
        self._empty = embed_prompts(self.text_encoder, empty, MAX_PROMPT_TOKENS)

    def velocity(self, model: WanTransformer3DModel, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """The model's velocity, float32. sigma: [B]."""
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            return model(latents, sigma * 1000, text, return_dict=False)[0].float()

    @torch.no_grad()
    def guided(self, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """The teacher's velocity under guidance, in two passes of the student's shape."""
        cond = self.velocity(self.teacher, latents, sigma, text)
        uncond = self.velocity(self.teacher, latents, sigma, self._empty.expand_as(text).contiguous())
        return uncond + self._guidance * (cond - uncond)

    @torch.no_grad()
    def rollout(self, latents: Tensor, text: Tensor, until: int) -> Tensor:
        """Noise [B, 16, t, h, w] to the student's own state before step `until`."""
        for index in range(until):
            here, there = self.sigmas[index], self.sigmas[index + 1]
            latents = latents + (there - here) * self.velocity(self.student, latents, self._full(here, latents), text)
        return latents

    def step(self, shape: Shape, captions: Captions, rate: float, *, matching: bool, train_student: bool) -> Tensor:
        """One update; returns the loss. matching: distribution matching, with its critic; otherwise the flow map."""
        text = self._embed(captions.draw(shape.batch, self._generator))
        noise = torch.randn(shape.batch, LATENT_CHANNELS, *shape.grid, generator=self._generator, device=self._device)
        index = self._random.randrange(len(self.sigmas) - 1)
        state = self.rollout(noise, text, index)
        if not matching:
            return self._update_student(self._flow_map_loss(state, text, index), rate)
        if not train_student:
            with torch.no_grad():
                clean = self._clean(state, text, index)
            return self._update_critic(clean, text, shape.shift)
        clean = self._clean(state, text, index)
        loss = self._update_student(self._matching_loss(clean, text, shape.shift), rate)
        self._update_critic(clean.detach(), text, shape.shift)
        return loss

    def _flow_map_loss(self, state: Tensor, text: Tensor, index: int) -> Tensor:
        here, there = self.sigmas[index], self.sigmas[index + 1]
        latents, levels = state, torch.linspace(here, there, TEACHER_SUBSTEPS + 1).tolist()
        if there == 0:  # Where one step of the student is long, the teacher's are shorter at high noise.
            shares = torch.linspace(1, 0, TEACHER_SUBSTEPS + 2)
            levels = (here * 3 * shares / (1 + 2 * shares)).tolist()
        for level, following in itertools.pairwise(levels):
            latents = latents + (following - level) * self.guided(latents, self._full(level, latents), text)
        wanted = (latents - state) / (there - here)
        found = self.velocity(self.student, state, self._full(here, state), text)
        return (found - wanted).square().mean()

    def _clean(self, state: Tensor, text: Tensor, index: int) -> Tensor:
        here = self.sigmas[index]
        return state - here * self.velocity(self.student, state, self._full(here, state), text)

    def _noised(self, clean: Tensor, shift: float) -> tuple[Tensor, Tensor, Tensor]:
        """(latents with noise, the noise, its level [B])."""
        count = clean.shape[0]
        share = torch.sigmoid(1.4 * torch.randn(count, generator=self._generator, device=self._device))
        share = (shift * share / (1 + (shift - 1) * share)).clamp(0.02, 0.999)
        noise = torch.randn(clean.shape, generator=self._generator, device=self._device)
        return torch.lerp(clean, noise, share.view(-1, 1, 1, 1, 1)), noise, share

    def _matching_loss(self, clean: Tensor, text: Tensor, shift: float) -> Tensor:
        with torch.no_grad():
            noised, _, share = self._noised(clean.detach(), shift)
            level = share.view(-1, 1, 1, 1, 1)
            real = noised - level * self.guided(noised, share, text)
            fake = noised - level * self.velocity(self.critic, noised, share, text)
            scale = (clean - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True).clamp_min(1e-3)
            direction = (fake - real) / scale
        return 0.5 * (clean - (clean.detach() - direction)).square().mean()

    def _update_student(self, loss: Tensor, rate: float) -> Tensor:
        loss.backward()
        self._average_gradients()
        if self.low_rank is not None:
            self.low_rank.pull()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self._optimizer.step()
        if self.low_rank is not None:
            self.low_rank.push()
        for parameter in (*self._weights, *self.trained):
            parameter.grad = None
        self.average.update()
        return loss.detach()

    def _update_critic(self, clean: Tensor, text: Tensor, shift: float) -> Tensor:
        noised, noise, share = self._noised(clean, shift)
        loss = (self.velocity(self.critic, noised, share, text) - (noise - clean)).square().mean()
        loss.backward()
        self._average_critic()
        torch.nn.utils.clip_grad_norm_(self._critic_weights, 1.0)
        self._critic_optimizer.step()
        for parameter in self._critic_weights:
            parameter.grad = None
        return loss.detach()

    def swap(self) -> None:
        """Exchange the student's weights and their average: call again to undo."""
        self.average.swap()
        if self.low_rank is not None:
            self.low_rank.push()

    def save(self, path: Path, metadata: dict[str, str]) -> None:
        """The averaged student: low-rank factors, or the whole transformer, bfloat16."""
        self.swap()
        if self.low_rank is not None:
            state = self.low_rank.state()
        else:
            state = {key: value.detach().to("cpu", torch.bfloat16) for key, value in self.student.state_dict().items()}
        self.swap()
        save_file(state, path.with_suffix(".partial"), metadata)
        path.with_suffix(".partial").rename(path)

    def _embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return embed_prompts(self.text_encoder, ids, MAX_PROMPT_TOKENS)

    def _full(self, sigma: float, latents: Tensor) -> Tensor:
        return torch.full(latents.shape[:1], sigma, device=latents.device)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], seeds: Sequence[int], grid: tuple[int, int, int], *, guided_teacher: bool
    ) -> Tensor:
        """Latents of prompts by Euler steps over the student's noise levels: the student's, or the guided teacher's."""
        noise = [
            torch.randn(1, LATENT_CHANNELS, *grid, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        latents = torch.cat(noise).to(self._device)
        encoded = self.tokenizer(list(prompts), padding="max_length", max_length=CAPTION_TOKENS, truncation=True)
        text = self._embed(torch.tensor(encoded["input_ids"], device=self._device))
        if not guided_teacher:
            return self.rollout(latents, text, len(self.sigmas) - 1)
        for here, there in itertools.pairwise(self.sigmas):
            latents = latents + (there - here) * self.guided(latents, self._full(here, latents), text)
        return latents


class Judge:
    """Prompt accuracy of what a distillation makes."""

    def __init__(self, folder: Path, device: str, examine: Examine) -> None:
        self._device, self._examine = device, examine
        module = load_component(folder, AutoencoderKLWan).to(device)
        self._vae = WholeClipVae(module)
        self._mean, self._std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
            for values in (module.config.latents_mean, module.config.latents_std)
        )

    @torch.no_grad()
    def measure(
        self,
        model: Distillation,
        kind: PromptKind,
        count: int,
        shape: Shape,
        *,
        sheet: Path | None = None,
        guided_teacher: bool = False,
    ) -> Figures:
        """Accuracy on the first `count` prompts of a kind, with the student's averaged weights."""
        kept: list[Tensor] = []

        def generate(prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
            # Of one shape, so that nothing is compiled again.
            missing = shape.batch - len(prompts)
            padded = [*prompts, *prompts[:1] * missing], [*seeds, *seeds[:1] * missing]
            latents = model.sample(*padded, shape.grid, guided_teacher=guided_teacher)
            with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
                parts = [clip_to_frames(self._vae.decode(part * self._std + self._mean)) for part in latents.split(16)]
            frames = torch.cat(parts).cpu()[: len(prompts)]
            kept.extend(frames[:16] if len(kept) < 16 else [])
            return frames

        examined = self._examine(generate, kind, count, shape.batch, shape.num_frames == 1)
        if sheet is not None:
            save_sheet(sheet, kept[:16])
        return examined.accuracy


@contextmanager
def examiner(detector: Path | None, device: str) -> Iterator[Examine]:
    """Yield the judge of the world `emoji` with a detector's file, without one the checker of `shapes`, which runs in
    processes of its own."""
    if detector is not None:
        yield examine_emoji(load_detector(detector, device))
        return
    workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("SHARED_BY", "1")))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield examine_shapes(parallel_checker(pool))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the teacher, an exported folder")
    parser.add_argument("--world", choices=tuple(WORLDS), default=SHAPES.name)
    parser.add_argument("--judge", type=Path, help="detector.safetensors of the world `emoji`")
    parser.add_argument("--guidance", type=float, default=2.0, help="of the teacher")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall minutes, preparation and judging included")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 0.984, 0.952, 0.87], help="noise levels")
    parser.add_argument("--rank", type=int, default=64, help="of the LoRA; 0 trains the whole transformer")
    parser.add_argument("--matching-from", type=float, default=0.45, help="share of the time before matching begins")
    parser.add_argument("--peak", type=float, default=1e-3, help="learning rate of the flow map")
    parser.add_argument("--matching-peak", type=float, default=2e-4, help="learning rate of distribution matching")
    parser.add_argument("--init", type=Path, help="a LoRA of an earlier run to go on from")
    parser.add_argument("--judge-prompts", type=int, default=256)
    parser.add_argument("--judge-teacher", action="store_true", help="also the guided teacher at these noise levels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fast")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    arguments = parser.parse_args()
    if (arguments.judge is None) == (arguments.world == EMOJI.name):
        parser.error("--judge: the world `emoji` needs its detector, and no other world has one")
    return arguments


def train(model: Distillation, clock: Clock, ranks: Ranks, log: Log, arguments: argparse.Namespace) -> int:
    """Train until the first process's clock is over; returns the number of steps."""
    shapes = TOY_SHAPES if arguments.toy else STEP_SHAPES[arguments.world]
    captions = {
        image: Captions(
            model.tokenizer,
            64 if arguments.toy else NUM_CAPTIONS,
            ranks.seed(arguments.seed),
            ranks.device,
            WORLDS[arguments.world],
            image=image,
        )
        for image in (False, True)
    }
    random, step, progress, matching_steps = Random(arguments.seed), 0, 0.0, 0
    losses: dict[str, list[Tensor]] = {}
    since = time.monotonic()
    begin = arguments.matching_from
    while True:
        if step % CLOCK_EVERY == 0:
            progress = ranks.agree(clock.progress)
            if progress >= 1.0:
                return step
        shape = random.choices(shapes, [shape.share for shape in shapes])[0]
        matching = progress >= begin
        if matching:
            rate = cosine((progress - begin) / (1 - begin), arguments.matching_peak, 1e-5)
            warm = 2 if arguments.toy else CRITIC_WARMUP
            train_student = matching_steps >= warm and matching_steps % CRITIC_STEPS == 0
            matching_steps += 1
        else:
            rate, train_student = cosine(progress / min(begin, 1.0), arguments.peak, 2e-5), True
        name = ("student" if train_student else "critic") if matching else "flow map"
        loss = model.step(shape, captions[shape.num_frames == 1], rate, matching=matching, train_student=train_student)
        losses.setdefault(f"{name} {shape.num_frames}x{shape.size}", []).append(loss)
        step += 1
        if step % LOG_EVERY == 0:
            means = {key: round(torch.stack(values).mean().item(), 5) for key, values in losses.items()}
            speed = 1000 * (time.monotonic() - since) / LOG_EVERY
            log.write(step=step, seconds=clock.trained, lr=rate, loss=means, ms=speed)
            losses, since = {}, time.monotonic()


def main() -> None:
    """Train by the clock, save the averaged student, judge it."""
    arguments = parse_arguments()
    began, ranks = time.monotonic(), join_ranks()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 64
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / f"{arguments.name}_log.jsonl" if ranks.is_first else None)
    log.write(event="start", ranks=ranks.count, device=ranks.device, sigmas=list(arguments.sigmas), rank=arguments.rank)
    model = Distillation(arguments.folder, arguments.sigmas, arguments.guidance, arguments.rank, arguments.seed, ranks)
    if arguments.init is not None:
        load_low_rank(model, arguments.init)
    judging = 5.0 if arguments.toy else 60.0
    clock = Clock(max(5.0, arguments.minutes * 60 - (time.monotonic() - began) - judging))
    step = train(model, clock, ranks, log, arguments)
    if ranks.is_first:
        sigmas = " ".join(f"{sigma:g}" for sigma in arguments.sigmas)
        metadata = {"sigmas": sigmas, "guidance": "none", "steps": str(len(arguments.sigmas)), "base": arguments.world}
        model.save(arguments.out / f"{arguments.name}.safetensors", metadata)
        log.write(event="end", step=step, seconds=clock.trained, wall=time.monotonic() - began)
        judge(model, arguments, log)
    ranks.leave()


def load_low_rank(model: Distillation, path: Path) -> None:
    """Go on from a LoRA that `save` wrote."""
    assert model.low_rank is not None
    factors = load_file(path)
    own = model.low_rank.state()
    assert own.keys() == factors.keys(), "another rank or model"
    names = [key.removesuffix(".lora_A.weight") for key in own if key.endswith(".lora_A.weight")]
    with torch.no_grad():
        for name, down, up in zip(names, model.low_rank.down, model.low_rank.up, strict=True):
            down.copy_(factors[f"{name}.lora_A.weight"])
            up.copy_(factors[f"{name}.lora_B.weight"])
    model.low_rank.push()
    for value, parameter in zip(model.average.values, model.trained, strict=True):
        value.copy_(parameter.detach())


def judge(model: Distillation, arguments: argparse.Namespace, log: Log) -> None:
    """Prompt accuracy of the averaged student, one line per kind; contact sheets beside the weights."""
    shape = TOY_SHAPES[0] if arguments.toy else STEP_SHAPES[arguments.world][0]
    count = 4 if arguments.toy else arguments.judge_prompts
    results = []
    model.swap()
    with examiner(arguments.judge, model._device) as examine:
        referee = Judge(arguments.folder, model._device, examine)
        for who in ("student", "teacher") if arguments.judge_teacher else ("student",):
            for kind in PROMPT_KINDS:
                start = time.monotonic()
                sheet = arguments.out / f"{arguments.name}_{who}_{kind}.png"
                accuracy = referee.measure(model, kind, count, shape, sheet=sheet, guided_teacher=who == "teacher")
                rates = {key: round(part["rate"], 3) for key, part in accuracy.items()}
                log.write(event="judged", who=who, kind=kind, **rates, seconds=time.monotonic() - start)
                results.append({"who": who, "kind": kind, "accuracy": accuracy})
    model.swap()
    (arguments.out / f"{arguments.name}_accuracy.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
