"""A process mesh without process groups, for dry runs: which attention would be chosen on it, and what it would
refuse."""

from __future__ import annotations

from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.rank_group import RankGroup


def planned_mesh(ulysses_degree: int, ring_degree: int, branch_degree: int) -> ProcessMesh:
    """The mesh as rank 0 would see it, without torch's process groups: nothing can be exchanged on it."""
    return ProcessMesh(
        ulysses=_planned(ulysses_degree),
        ring=_planned(ring_degree),
        sequence=_planned(ulysses_degree * ring_degree),
        branch=_planned(branch_degree),
    )


def _planned(size: int) -> RankGroup:
    members = tuple(range(size))
    return RankGroup(members, 0, None, members)
