"""One causal training: models, optimizers, average and error bank; one step, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from scripts.train_embedded.architecture import build_text_encoder, build_tokenizer, build_transformer
from scripts.train_embedded.causal_checkpoint import load_checkpoint, save_checkpoint
from scripts.train_embedded.causal_forward import RunBlock, run_masked_block
from scripts.train_embedded.causal_mask import block_mask, dense_mask
from scripts.train_embedded.causal_objective import CausalLoss, ErrorBank, StepPlan, causal_loss
from scripts.train_embedded.causal_pool import StreamTrainingBatch
from scripts.train_embedded.muon import Muon
from scripts.train_embedded.ranks import GradientAverage, Ranks
from scripts.train_embedded.session import Average
from scripts.train_embedded.train_transformer import initial_states, split_parameters
from scripts.train_embedded.world import CAPTION_TOKENS

EOS_ID = 1


def build_models(init: Path | None) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
    """Transformer and text encoder with the vocabulary of streams, from a folder of clips or of streams."""
    transformer, text_encoder = build_transformer(), build_text_encoder(len(build_tokenizer(streams=True)))
    if init is not None:
        states = initial_states(init)
        transformer.load_state_dict({name: tensor.float() for name, tensor in states["transformer"].items()})
        text_encoder.load_state_dict(with_new_words(states["text_encoder"], text_encoder.state_dict()))
    return transformer, text_encoder


def with_new_words(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """A text encoder's state with rows for words that it does not know yet: the mean of those it knows, and as
    untrained as `wanted` in what tells them apart."""
    grown = {}
    for name, target in wanted.items():
        held = state[name].float()
        if held.shape != target.shape:
            new = target[len(held) :].float()
            spread = held.std() / new.std().clamp(min=1e-6)
            held = torch.cat([held, held.mean(dim=0) + 0.5 * spread * (new - new.mean(dim=0))])
        grown[name] = held
    return grown


class CausalTraining:
    """`step` is one update. Modules are float32; on CUDA they compute in bfloat16.

    Several processes (`ranks`) take the same steps with other data and noise: each calls `step` and `save` as often.
    """

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        text_encoder: UMT5EncoderModel,
        *,
        seed: int,
        ranks: Ranks | None = None,
        optimizer: str = "muon",
        muon_factor: float = 2.0,
        decay: float = 0.999,
        compiled: bool = False,
    ) -> None:
        ranks = Ranks(0, 1, "cpu") if ranks is None else ranks
        self.device = device = ranks.device
        self._ranks, self._seed = ranks, seed
        self.transformer, self.text_encoder = transformer.to(device), text_encoder.to(device)
        self._parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        self._names = [
            *(f"transformer.{name}" for name, _ in self.transformer.named_parameters()),
            *(f"text_encoder.{name}" for name, _ in self.text_encoder.named_parameters()),
        ]
        ranks.align(self._parameters)
        self._average_gradients = GradientAverage(self._parameters, ranks)
        matrices, others = split_parameters(self.transformer, self.text_encoder)
        if optimizer == "adamw":
            matrices, others = [], [*matrices, *others]
        self._others = others
        self._adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
        self._muon, self._muon_factor = Muon(matrices), muon_factor
        self.average = Average(self._parameters, decay)
        self.bank = ErrorBank()
        self.generator = torch.Generator(device).manual_seed(ranks.seed(seed))
        self._empty_ids = torch.zeros(CAPTION_TOKENS, dtype=torch.int64, device=device)
        self._empty_ids[0] = EOS_ID
        self._run: RunBlock = torch.compile(run_masked_block, fullgraph=True) if compiled else run_masked_block
        # FlexAttention is fast compiled alone, and has no gradients on a CPU.
        self._make_mask = block_mask if compiled else dense_mask
        self.steps = 0

    def step(self, batch: StreamTrainingBatch, plan: StepPlan, rate: float) -> CausalLoss:
        """One update at AdamW's learning rate `rate`."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            loss = causal_loss(
                self.transformer,
                self.text_encoder,
                batch,
                plan,
                self._empty_ids,
                self.bank,
                self.generator,
                run=self._run,
                make_mask=self._make_mask,
            )
        loss.total.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._muon.step(rate * self._muon_factor)
        for parameter in self._parameters:
            parameter.grad = None
        self.average.update()
        self.steps += 1
        return loss

    def align(self) -> float:
        """Give every process the first one's weights; returns how far apart they were."""
        return self._ranks.align(self._parameters)

    def _halved(self) -> Iterator[tuple[str, Tensor]]:
        """What is stored in bfloat16: average, momenta, Adam's moments."""
        for name, value in zip(self._names, self.average.values, strict=True):
            yield f"average.{name}", value
        for index, value in enumerate(self._muon.momenta):
            yield f"momentum.{index}", value
        for index, parameter in enumerate(self._others):
            # A parameter without a gradient so far has no moments.
            for key, value in self._adamw.state.get(parameter, {}).items():
                if key in ("exp_avg", "exp_avg_sq"):
                    yield f"adam.{index}.{key}", value

    @torch.no_grad()
    def save(self, folder: Path, **state: float) -> None:
        """Write a checkpoint; of several processes the first one does. What is not stored, or in fewer bits, is dropped
        in all of them, so that a training that goes on and one that resumes are the same."""
        tensors = {f"weight.{name}": each for name, each in zip(self._names, self._parameters, strict=True)}
        for name, value in self._halved():
            stored = value.bfloat16()
            value.copy_(stored)
            tensors[name] = stored
        tensors["generator"] = self.generator.get_state()
        self.bank.clear()
        if self._ranks.is_first:
            save_checkpoint(folder, tensors, {"steps": self.steps, "average_steps": self.average.steps, **state})

    @torch.no_grad()
    def resume(self, folder: Path) -> dict[str, object]:
        """Go on from a checkpoint; returns its state. Raises ValueError for one of another model."""
        tensors, state = load_checkpoint(folder)
        names = {name.removeprefix("weight.") for name in tensors if name.startswith("weight.")}
        if names != set(self._names):
            raise ValueError(f"{folder}: a checkpoint of another model: {sorted(names ^ set(self._names))[:4]}")
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.copy_(tensors[f"weight.{name}"])
        for index, parameter in enumerate(self._others):
            if f"adam.{index}.exp_avg" in tensors:
                step = torch.tensor(float(str(state["steps"])))
                self._adamw.state[parameter] = {
                    "step": step.to(self.device) if self.device == "cuda" else step,
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        for name, value in self._halved():
            value.copy_(tensors[name])
        self.steps, self.average.steps = int(str(state["steps"])), int(str(state["average_steps"]))
        if self._ranks.is_first:
            self.generator.set_state(tensors["generator"])
        else:
            # The stored state is the first process's; the others go on with other noise.
            self.generator.manual_seed(self._ranks.seed(self._seed + self.steps))
        return state


def averaged_models(folder: Path) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
    """The averaged weights of a checkpoint, float32: what is evaluated and exported."""
    tensors, _ = load_checkpoint(folder)
    transformer, text_encoder = build_models(None)
    for prefix, module in (("average.transformer.", transformer), ("average.text_encoder.", text_encoder)):
        state = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        missing = module.load_state_dict({name: each.float() for name, each in state.items()}, strict=False)
        # Tied tables are stored once.
        if missing.unexpected_keys or any(key not in ("encoder.embed_tokens.weight",) for key in missing.missing_keys):
            raise ValueError(f"{folder}: a checkpoint of another model: {missing}")
    return transformer, text_encoder
