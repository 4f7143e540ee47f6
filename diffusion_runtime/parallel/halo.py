"""Halo exchange: each process holds one band of an image's rows, and receives the rows beyond its edges from its
neighbours."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from diffusion_runtime.parallel.collectives import RankGroup, all_gather


def band_of(num_rows: int, group: RankGroup) -> slice:
    """Return the rows of this process. Bands differ by at most one row, and none is empty when num_rows >= the group's
    size."""
    return _bands_of(num_rows, group.size)[group.index]


def _bands_of(num_rows: int, size: int) -> list[slice]:
    return [slice(index * num_rows // size, (index + 1) * num_rows // size) for index in range(size)]


def with_neighbour_rows(x: torch.Tensor, num_rows: int, group: RankGroup) -> torch.Tensor:
    """x: [..., rows, width] of a band. Returns [..., rows + 2 * num_rows, width]: with the halo rows of both
    neighbours, and zeros at the image's edges.

    Every band needs at least num_rows rows.
    """
    above, below = x[..., :num_rows, :].contiguous(), x[..., -num_rows:, :].contiguous()
    from_above, from_below = torch.zeros_like(above), torch.zeros_like(below)
    operations = []
    if group.index > 0:
        neighbour = group.members[group.index - 1]
        operations.append(dist.P2POp(dist.isend, above, neighbour, group.process_group))
        operations.append(dist.P2POp(dist.irecv, from_above, neighbour, group.process_group))
    if group.index < group.size - 1:
        neighbour = group.members[group.index + 1]
        operations.append(dist.P2POp(dist.isend, below, neighbour, group.process_group))
        operations.append(dist.P2POp(dist.irecv, from_below, neighbour, group.process_group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return torch.cat([from_above, x, from_below], dim=-2)


def gather_bands(x: torch.Tensor, dim: int, group: RankGroup, num_rows: int | None = None) -> torch.Tensor:
    """Return all bands along `dim`, in order, on every process; they may differ in size.

    num_rows: that `band_of` cut, of each of which this process has as many along `dim`; None where the processes are to
    tell each other, for which the host waits for the device.
    """
    if num_rows is None:
        sizes = [int(size) for size in all_gather(group, torch.tensor([x.shape[dim]], device=x.device))]
    else:
        lengths = [band.stop - band.start for band in _bands_of(num_rows, group.size)]
        sizes = [length * (x.shape[dim] // lengths[group.index]) for length in lengths]
    behind = x.dim() - 1 - dim % x.dim()
    padded = F.pad(x, (0, 0) * behind + (0, max(sizes) - x.shape[dim]))
    bands = all_gather(group, padded)
    return torch.cat([band.narrow(dim, 0, size) for band, size in zip(bands, sizes, strict=True)], dim=dim)
