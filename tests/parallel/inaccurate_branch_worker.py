"""Two processes that run a guidance branch each, one of which finds its attention too inaccurate. Each writes how its
requests ended; test_inaccurate_branch.py runs it with a model and a folder for results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionCall, AttentionResult, register_backend
from diffusion_runtime.errors import BackendInaccurateError
from diffusion_runtime.parallel import collectives
from diffusion_runtime.parallel.groups import ProcessMesh
from tests.attention.test_measured_error import Coarse, NoPadding

WORLD, NUM_STEPS = 2, 3


class OfOneBranch(Coarse):
    """Beyond its bound in the branch `wrong`, of one layer."""

    name = "of_one_branch"
    wrong = ""

    def run(self, call: AttentionCall) -> AttentionResult:
        result = super().run(call)
        is_wrong = call.step.branch == type(self).wrong and call.layer.index == 1
        return result._replace(out=result.out * 1.3) if is_wrong else result


def work(rank: int, model: str, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    register_backend(OfOneBranch)
    register_backend(NoPadding)
    attention = {"per_role": {"cross": "no_padding,of_one_branch"}}
    pipeline = load_pipeline(model, device="cpu", attention=attention)
    size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": NUM_STEPS}
    size |= {"guidance_scale": 4.0, "guidance_mode": "two_pass", "seed": 1}

    def requests(padded: str) -> list[GenerationRequest]:
        """Two, with texts of two lengths in one branch: there the second backend serves."""
        long = {branch: "a red circle and a square" if branch == padded else "a dog" for branch in ("cond", "uncond")}
        return [
            GenerationRequest("a dog", negative_prompt="a dog", **size),
            GenerationRequest(long["cond"], negative_prompt=long["uncond"], **size),
        ]

    alone = pipeline.latents(requests("cond"))
    pipeline.mesh = ProcessMesh.create(branch_degree=2)
    asked: list[str | None] = []
    reasons_of = collectives.reasons_of
    collectives.reasons_of = lambda group, own, device: (asked.append(own), reasons_of(group, own, device))[1]
    lines = []
    for wrong, padded in (("cond", "cond"), ("uncond", "uncond"), ("", "cond")):
        OfOneBranch.wrong = wrong
        try:
            lines.append(f"equal: {torch.equal(pipeline.latents(requests(padded)), alone)}")
        except BackendInaccurateError as error:
            lines.append(f"{wrong}: {error.reasons} {error}")
    # The last one in its first step alone.
    lines.append(f"asked: {len(asked)}")
    (folder / f"ended-{rank}.txt").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork_ranks(lambda rank: work(rank, sys.argv[1], Path(sys.argv[2])), WORLD))
