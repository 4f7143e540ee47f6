"""Process groups as values: a mesh of guidance branches, sequence parallel (Ulysses, ring) and tensor parallel groups.

A mesh has four axes. `branch`: the two guidance branches. `ring`: blocks of keys. `ulysses`: heads of a call. `tensor`:
weights, and with them the heads of a layer (tensor parallel, Shoeybi et al., arXiv:1909.08053). The grid's tokens are
cut into ring.size * ulysses.size slices, and this process holds slice ring.index * ulysses.size + ulysses.index,
whatever its rank: the slices of an Ulysses group are neighbours in the sequence, so each block of a ring is contiguous.
The processes of a tensor group hold the same slice, and are neighbours by rank: they communicate in every linear layer.
The order of the other ranks is independent of that; either order is a mesh (Fang and Zhao, arXiv:2405.07719, section
4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.sharding import SequenceSharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


AXES = ("branch", "ring", "ulysses", "tensor")


@dataclass(frozen=True)
class ProcessMesh:
    """The processes of one generation. The default is a single process, which needs no torch.distributed.

    ulysses, ring, branch, tensor: the processes that differ from this one along that axis alone. sequence: all
    processes that share the sequence with it, by slice, and have the same part of the weights. forward: all that run a
    forward pass together, those of a tensor group side by side.
    """

    ulysses: RankGroup = field(default_factory=RankGroup)
    ring: RankGroup = field(default_factory=RankGroup)
    sequence: RankGroup = field(default_factory=RankGroup)
    branch: RankGroup = field(default_factory=RankGroup)
    tensor: RankGroup = field(default_factory=RankGroup)
    forward: RankGroup = field(default_factory=RankGroup)

    def __post_init__(self) -> None:
        if self.ulysses.size * self.ring.size != self.sequence.size:
            raise ConfigError(
                f"ProcessMesh: {self.ulysses.size} (ulysses) x {self.ring.size} (ring) processes must make up the "
                f"{self.sequence.size} that share the sequence"
            )
        if self.tensor.size == 1:
            object.__setattr__(self, "forward", self.sequence)

    @property
    def size(self) -> int:
        """Number of processes of the whole generation."""
        return self.sequence.size * self.branch.size * self.tensor.size

    @property
    def sharding(self) -> SequenceSharding:
        """Cut of a transformer's tokens among the processes that share the sequence."""
        return SequenceSharding(self.sequence)

    @classmethod
    def create(
        cls,
        *,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        branch_degree: int = 1,
        tensor_degree: int = 1,
        ring_inside: bool = False,
        timeout: timedelta | None = None,
    ) -> Self:
        """Create the mesh of all processes; torch.distributed must be initialised for more than one. A collective call:
        all processes make it with the same arguments.

        ring_inside: False makes the processes of an Ulysses group neighbours by rank, which suits all-to-alls within a
        host and rings across hosts; True those of a ring. Guidance branches are always furthest apart, the processes of
        a tensor group always neighbours. timeout: of the groups' collectives; None is torch's default.

        Raises ConfigError when the product of the degrees is not the number of processes.
        """
        degrees = {
            "ulysses_degree": ulysses_degree,
            "ring_degree": ring_degree,
            "branch_degree": branch_degree,
            "tensor_degree": tensor_degree,
        }
        for name, degree in degrees.items():
            if degree < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {degree}")
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        product = math.prod(degrees.values())
        if product != world:
            tensor = f" x tensor parallel {tensor_degree}" if tensor_degree > 1 else ""
            raise ConfigError(
                f"ulysses_degree {ulysses_degree} x ring_degree {ring_degree} x guidance branches {branch_degree}"
                f"{tensor} = {product} processes, {world} are running; the product of the degrees must be the number "
                "of processes"
            )
        if world == 1:
            return cls()
        ranks = torch.arange(world, device="cpu")
        if ring_inside:
            ranks = ranks.view(branch_degree, ulysses_degree, ring_degree, tensor_degree).transpose(1, 2)
        return cls._of_ranks(ranks.reshape(branch_degree, ring_degree, ulysses_degree, tensor_degree), timeout)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Self:
        """Create the mesh of a torch DeviceMesh whose axes are named after some of AXES, in any order.

        New groups are made over its ranks, so all of its processes must call it. Raises ConfigError for other names.
        """
        names = device_mesh.mesh_dim_names or ()
        if not names or set(names) - set(AXES):
            raise ConfigError(f"from_device_mesh: expected axes named after some of {', '.join(AXES)}, got {names}")
        ranks = device_mesh.mesh
        for axis in AXES:
            if axis not in names:
                names, ranks = (*names, axis), ranks[..., None]
        return cls._of_ranks(ranks.permute([names.index(axis) for axis in AXES]))

    @classmethod
    def _of_ranks(cls, ranks: torch.Tensor, timeout: timedelta | None = None) -> Self:
        """ranks: [branch, ring, ulysses, tensor]. All processes create every group, in one order, as torch requires."""
        mine = dist.get_rank()
        groups = {
            name: RankGroup.create(rows.tolist(), mine, timeout)
            for name, rows in (
                ("ulysses", ranks.transpose(2, 3).flatten(0, 2)),
                ("ring", ranks.movedim(1, 3).flatten(0, 2)),
                ("sequence", ranks.movedim(3, 1).flatten(2).flatten(0, 1)),
                ("branch", ranks.flatten(1).T),
                ("tensor", ranks.flatten(0, 2)),
                ("forward", ranks.flatten(1) if ranks.shape[3] > 1 else ranks.flatten()[:, None]),
            )
        }
        if ranks.shape[1] == 1:
            groups["sequence"] = groups["ulysses"]
        return cls(**groups)


def planned_mesh(ulysses_degree: int, ring_degree: int, branch_degree: int, tensor_degree: int = 1) -> ProcessMesh:
    """Return the mesh as rank 0 would see it, without torch's process groups: nothing can be exchanged on it."""
    return ProcessMesh(
        ulysses=_planned(ulysses_degree),
        ring=_planned(ring_degree),
        sequence=_planned(ulysses_degree * ring_degree),
        branch=_planned(branch_degree),
        tensor=_planned(tensor_degree),
        forward=_planned(ulysses_degree * ring_degree * tensor_degree),
    )


def _planned(size: int) -> RankGroup:
    members = tuple(range(size))
    return RankGroup(members, 0, None, members)
