"""Request fields that a request may leave open although no model fills them, as they are declared."""

from __future__ import annotations

from diffusion_runtime.request.generation_request import REQUEST_FIELDS

OPEN_FIELDS = {name for name, declared in REQUEST_FIELDS.items() if declared.may_stay_none}
