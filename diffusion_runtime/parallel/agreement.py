"""Agreement of the processes of a group, by one small collective: what each of them has against doing something."""

from __future__ import annotations

import torch

from diffusion_runtime.parallel.collectives import RankGroup, all_gather

# A reason that is longer is cut off: all processes send as many bytes.
_MAX_BYTES = 400


def reasons_of(group: RankGroup, reason: str | None, device: torch.device | None) -> list[str | None]:
    """Return the reason that each member gives, by member; None for a member without one. A collective call of all
    members, which waits for the device. device: where the group's tensors are; None for one process, which sends none.
    """
    if group.size == 1:
        return [reason]
    written = b"" if reason is None else (reason.encode()[:_MAX_BYTES] or b" ")
    # Room for the length in front.
    padded = len(written).to_bytes(2, "big") + written.ljust(_MAX_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    return [_read(bytes(each.cpu().tolist())) for each in all_gather(group, sent)]


def agreed_refusal(group: RankGroup, reason: str | None, device: torch.device | None) -> str | None:
    """Return why no member of the group proceeds, the same decision on all of them: the own reason, else that of the
    first member with one, or None. A collective call."""
    found = reasons_of(group, reason, device)
    if reason is not None:
        return reason
    return next((f"rank {rank}: {each}" for rank, each in zip(group.members, found, strict=True) if each), None)


def _read(padded: bytes) -> str | None:
    length = int.from_bytes(padded[:2], "big")
    return padded[2 : 2 + length].decode(errors="replace") if length else None
