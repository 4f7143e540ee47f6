"""Tables keep words whole on a narrow terminal."""

from __future__ import annotations

import io

from rich.console import Console

from diffusion_runtime.cli.tables import attention_table


def test_the_attention_table_at_80_columns_breaks_no_word() -> None:
    row = {
        "role": "self",
        "backend": "video_sparse_attn",
        "implementation": "reference, 64-token blocks, 10 % of the pairs",
        "layers": "0-29",
        "steps": "0-49",
        "source": "default",
        "reason": "video_sparse_attn is not made for role 'cross'",
        "count": 1500,
    }
    console = Console(width=80, file=io.StringIO())
    console.print(attention_table([{"rows": [row]}]))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, said.splitlines())) <= 80
    words = said.split()
    for value in row.values():
        assert set(str(value).split()) - {"default"} <= set(words)
