"""Remarks about a batch that are known before it runs, for its report and for the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules

logger = logging.getLogger("diffusion_runtime")


def note_remarks(
    batch: Sequence[GenerationRequest],
    settings: BatchSettings,
    rules: RequestRules,
    mesh: ProcessMesh,
    recorder: AttentionRecorder,
) -> None:
    """Put what is known of resolved requests into the report, and warnings into the log."""
    if mesh.branch.size > 1 and not settings.guidance.is_guided:
        remark = "no guidance to share: the processes of one half wait for the other; leave out --cfg-parallel"
        logger.warning(remark)
        recorder.note(remark)
    for remark in dict.fromkeys(remark for request in batch for remark in rules.unused(request)):
        logger.warning(remark)
        recorder.note(remark)
    note = rules.sampling_note(settings.shared)
    if note is not None:
        logger.info(note)
        recorder.note(note)
