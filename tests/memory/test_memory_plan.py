"""Memory plans: which offloading fits, how many blocks stay, and what is said where nothing fits."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.memory.plan import (
    ACCELERATOR,
    MACHINE,
    NUM_SLOTS,
    OFFLOADS,
    WEIGHTS,
    WORKSPACE_BYTES,
    MemoryDemand,
    MemoryPlan,
    PartSize,
    Remedies,
    Remedy,
    make_plan,
    spread,
)

GB = 10**9
MB = 10**6


def demand(**changes: object) -> MemoryDemand:
    """About Wan 14B at 480p: 40 blocks, and an encoder of 24 layers."""
    values = {
        "text": PartSize("text_encoder", 11 * GB, (380 * MB,) * 24),
        "transformers": (PartSize("transformer", 28 * GB, (590 * MB,) * 40, 4 * GB),),
        "decoder": PartSize("decoder", 250 * MB),
        "text_activations": 50 * MB,
        "step_activations": 4 * GB,
        "decode_activations": 3 * GB,
        **changes,
    }
    return MemoryDemand(**values)  # type: ignore[arg-type]


def test_auto_takes_what_costs_the_least_and_fits() -> None:
    chosen = {limit: make_plan(demand(), OFFLOADS, limit * GB).offload for limit in (80, 45, 40, 24, 12, 8)}
    assert chosen == {80: "none", 45: "none", 40: "model", 24: "layers", 12: "layers", 8: "layers"}
    plan = make_plan(demand(), OFFLOADS, 40 * GB)
    assert plan.reason == "none would take 43.53 GB in denoise"


def test_no_plan_that_fits_takes_more_than_the_limit_and_more_memory_never_streams_more() -> None:
    plans = [make_plan(demand(), OFFLOADS, limit * GB // 4) for limit in range(32, 200, 3)]
    assert all(plan.limit is not None and plan.peak <= plan.limit for plan in plans)
    streamed = [plan.resident["transformer"] for plan in plans if plan.offload == "layers"]
    assert streamed == sorted(streamed)
    assert max(streamed) > 20
    order = [OFFLOADS.index(plan.offload) for plan in plans]
    assert order == sorted(order, reverse=True)


def test_a_streamed_transformer_is_its_rest_two_slots_and_the_blocks_that_stay() -> None:
    plan = make_plan(demand(), ["layers"], 12 * GB)
    (part,) = plan.demand.transformers
    count = plan.resident["transformer"]
    weights = part.rest + (NUM_SLOTS + count) * 590 * MB
    assert part.rest == 28 * GB - 40 * 590 * MB - 4 * GB
    assert plan.phases["denoise"] == 250 * MB + weights + WORKSPACE_BYTES + int(4 * GB * 1.02)
    assert plan.limit is not None
    assert 0 <= plan.limit - plan.phases["denoise"] < 590 * MB
    # 11 GB of encoder fit into 12 GB with all that is beside them; into 11 they are streamed.
    assert "text_encoder" not in plan.resident
    assert 0 < make_plan(demand(), ["layers"], 11 * GB).resident["text_encoder"] < 24


def test_slots_are_as_large_as_the_largest_block_that_is_streamed() -> None:
    """The first and the last block are not quantised: where they stay, no slot is for them."""
    blocks = (590 * MB, *(300 * MB,) * 38, 590 * MB)
    part = PartSize("transformer", sum(blocks), blocks)
    for limit in range(12, 16):
        plan = make_plan(demand(transformers=(part,)), ["layers"], limit * GB)
        resident = spread(plan.resident["transformer"], 40)
        slots = NUM_SLOTS * max(size for index, size in enumerate(blocks) if index not in resident)
        weights = slots + sum(blocks[index] for index in resident)
        assert plan.parts["denoise"]["transformer, streamed"] == weights
        assert plan.peak <= limit * GB
    assert {0, 39} <= resident
    assert slots == NUM_SLOTS * 300 * MB


def test_the_transformer_leaves_before_decoding_where_both_do_not_fit() -> None:
    assert make_plan(demand(), ["model"], 40 * GB).keeps_transformer
    large = demand(decode_activations=14 * GB)
    plan = make_plan(large, ["model"], 40 * GB)
    assert not plan.keeps_transformer
    assert plan.phases["decode"] < 15 * GB


def test_two_transformers_are_on_the_device_one_at_a_time() -> None:
    experts = tuple(PartSize(name, 28 * GB, (590 * MB,) * 40, 4 * GB) for name in ("transformer", "transformer_2"))
    plan = make_plan(demand(transformers=experts), ["model"], 40 * GB)
    assert plan.phases["denoise"] == make_plan(demand(), ["model"], 40 * GB).phases["denoise"]
    assert plan.host == 67 * GB


@pytest.mark.parametrize(
    ("changes", "choices", "limit", "message"),
    [
        (
            {},
            OFFLOADS,
            4,
            r"layers: the plan takes 6\.\d\d GB on the device in denoise, 2\.\d\d GB more than the 4.00 GB",
        ),
        ({}, ["none"], 12, "none: the plan takes 43.53 GB .*What would fit: --offload layers$"),
        (
            {"decode_activations": 30 * GB},
            OFFLOADS,
            12,
            r"in decode, .*of decode 30.00 GB.*fit: --memory-limit 31\.1GB, --vae-tiling on \(11\.\d\d GB\)$",
        ),
        ({"text": PartSize("text_encoder", 11 * GB)}, OFFLOADS, 8, "in text, .*: text encoder 11.00 GB"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(
    changes: dict[str, object], choices: list[str], limit: int, message: str
) -> None:
    remedies = Remedies(((Remedy("--vae-tiling on", demand, frozenset({"decode"})),),))
    with pytest.raises(DeviceMemoryError, match=message):
        make_plan(demand(**changes), choices, limit * GB, remedies=remedies, free=80 * GB)  # type: ignore[arg-type]


def test_remedies_are_tried_before_they_are_named() -> None:
    tried: list[str] = []
    whole = demand().text

    def remedy(flags: str, step: int, text: PartSize = whole, *, lowers: tuple[str, ...] = ("denoise",)) -> Remedy:
        def compute() -> MemoryDemand:
            tried.append(flags)
            return demand(step_activations=step, text=text)

        return Remedy(flags, compute, frozenset(lowers))

    def said(*groups: tuple[Remedy, ...], limit: int = 12, host: int | None = None, **changes: object) -> str:
        tried.clear()
        together = (remedy("--all", GB, PartSize("text_encoder", GB), lowers=("text", "denoise", "decode", WEIGHTS)),)
        large: dict[str, object] = {"step_activations": 20 * GB, **changes}
        with pytest.raises(DeviceMemoryError) as caught:
            make_plan(demand(**large), ["layers"], limit * GB, host, Remedies(groups, together))  # type: ignore[arg-type]
        return str(caught.value).partition("What would fit: ")[2]

    small, large, smallest = remedy("--small", 6 * GB), remedy("--large", 19 * GB), remedy("--smallest", GB)
    # Of a group the first that fits; not what lowers another phase; several together where nothing else fits.
    other = remedy("--other", GB, lowers=("decode",))
    answer = said((large,), (large, small, smallest), (other,))
    assert re.fullmatch(r"22\.\d\d GB of memory, --small \(1[01]\.\d\d GB\)", answer)
    assert tried == ["--large", "--large", "--small"]
    assert re.fullmatch(r"22\.\d\d GB of memory, --all \([\d.]+ GB\)", said((large,), (other,)))
    assert re.fullmatch(r"22\.\d\d GB of memory\. Even --all takes [\d.]+ GB", said((large,), limit=2))
    # Where the machine's memory is short, weights are what counts.
    light = remedy("--light", 4 * GB, PartSize("text_encoder", GB), lowers=("text", WEIGHTS))
    answer = said((small,), (light,), limit=12, host=30 * GB, step_activations=4 * GB)
    assert re.fullmatch(r"39\.00 GB free in the machine, --light \(1[01]\.\d\d GB\)", answer)


def test_a_refusal_names_parts_that_sum_to_what_the_plan_takes() -> None:
    for limit, kind, choices in itertools.product((1, 4, 5), (ACCELERATOR, MACHINE), (OFFLOADS, ["none"], ["layers"])):
        with pytest.raises(DeviceMemoryError) as caught:
            make_plan(demand(), choices, limit * GB, kind=kind)  # type: ignore[arg-type]
        taken, missing, given, *parts = re.findall(r"([\d.]+) (GB|MB)", str(caught.value).split("What would")[0])
        total, over, there = (float(number) * (GB if unit == "GB" else MB) for number, unit in (taken, missing, given))
        named = sum(float(number) * (GB if unit == "GB" else MB) for number, unit in parts)
        assert abs(named - total) < 30 * MB, str(caught.value)
        assert abs(total - over - there) < 30 * MB


def test_on_a_cpu_blocks_wait_in_their_files_one_at_a_time_and_no_library_has_a_workspace() -> None:
    plan = make_plan(demand(), ("none", "layers"), 16 * GB, kind=MACHINE)
    assert (plan.offload, plan.host, plan.waits_in_files) == ("layers", 0, True)
    (part,) = plan.demand.transformers
    weights = part.rest + (1 + plan.resident["transformer"]) * 590 * MB
    assert plan.phases["denoise"] == 250 * MB + weights + int(4 * GB * 1.02)
    # A text encoder that fits is whole while it is used.
    assert "text_encoder" not in plan.resident
    assert dict(plan.rows())["machine, weights"] == "read from their files"
    with pytest.raises(DeviceMemoryError, match=r"What would fit: --offload auto$"):
        make_plan(demand(), ["none"], 16 * GB, possible=("none", "layers"), kind=MACHINE)


def test_on_a_cpu_text_encoders_are_read_by_blocks_where_the_limit_needs_it_and_their_layout_allows() -> None:
    small = {"step_activations": 2 * GB, "decode_activations": 2 * GB}
    plans = {limit: make_plan(demand(**small), ("none", "layers"), limit * GB, kind=MACHINE) for limit in (12, 8, 5)}
    counts = {limit: plan.resident.get("text_encoder") for limit, plan in plans.items()}
    assert counts[12] is None
    assert 0 < counts[5] < counts[8] < 23
    for limit in (8, 5):
        weights = 11 * GB - (23 - counts[limit]) * 380 * MB
        assert plans[limit].phases["text"] == weights + 250 * MB + int(50 * MB * 1.02)
        assert plans[limit].phases["text"] + 380 * MB > limit * GB
    rows = dict(plans[8].rows())
    assert rows["text encoder, streamed"] == f"{counts[8]} of 24 blocks stay in memory, the others are read from files"
    # Where the files cannot be read so, the encoder is whole, and the plan says why, also where it does not fit.
    whole = demand(**small, whole_text="of a reason")
    plan = make_plan(whole, ("none", "layers"), 12 * GB, kind=MACHINE)
    assert dict(plan.rows())["text encoder"] == "whole while it encodes: of a reason"
    assert plan.to_dict()["whole_text"] == "whole while it encodes: of a reason"
    with pytest.raises(
        DeviceMemoryError, match=r"in text, .*\. The text encoder is whole while it encodes: of a reason\."
    ):
        make_plan(whole, ("none", "layers"), 8 * GB, kind=MACHINE)
    # From the machine's memory any layout is streamed to a device.
    plan = make_plan(whole, OFFLOADS, 8 * GB)
    assert (plan.resident["text_encoder"] < 24, plan.whole_text) == (True, "")


def test_the_machine_must_hold_what_waits_there() -> None:
    with pytest.raises(DeviceMemoryError, match=r"take 39.00 GB of the machine's memory, and 16.00 GB are free"):
        make_plan(demand(), ["layers"], 12 * GB, 16 * GB)
    assert make_plan(demand(), ["none"], 80 * GB, 16 * GB).host == 0
    plan = make_plan(demand(), ["layers"], 12 * GB, 64 * GB)
    assert dict(plan.rows())["machine, weights"] == "39.00 GB of 64.00 GB that are free"
    assert plan.to_dict()["host_free"] == 64 * GB


def test_each_process_of_a_machine_holds_transformers_of_its_own_and_the_first_the_encoders() -> None:
    plan = make_plan(demand(num_local=2), ["layers"], 12 * GB, 80 * GB)
    assert plan.host == 11 * GB + 2 * 28 * GB
    assert dict(plan.rows())["machine, weights"] == "67.00 GB in 2 processes of 80.00 GB that are free"
    with pytest.raises(DeviceMemoryError, match=r"take 67.00 GB of the machine's memory in 2 processes, and 64.00 GB"):
        make_plan(demand(num_local=2), ["layers"], 12 * GB, 64 * GB)
    assert make_plan(demand(num_local=2), ["none"], 80 * GB, 16 * GB).host == 0


def test_a_plan_is_shown_and_recorded() -> None:
    plan = make_plan(demand(), OFFLOADS, 12 * GB)
    assert isinstance(plan, MemoryPlan)
    rows = dict(plan.rows())
    assert rows["weights, text encoder"] == "11.00 GB"
    number = plan.resident["transformer"]
    count = f"{number} of 40 blocks stay on the device, {(40 - number) * 0.59:.2f} GB are copied in every pass"
    assert rows["transformer, streamed"] == f"{count}; 4.00 GB of the weights are read once a request"
    assert plan.to_dict()["phases"]["denoise"] == plan.phases["denoise"]


def test_resident_blocks_are_spread() -> None:
    assert sorted(spread(4, 40)) == [5, 15, 25, 35]
    for count, total in itertools.product(range(0, 9), range(8, 12)):
        found = sorted(spread(count, total))
        assert len(found) == count
        gaps = [b - a for a, b in itertools.pairwise(found)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_peak_is_what_is_alive_at_once() -> None:
    layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    sizes = {}
    for device in ("cpu", "meta"):
        x = torch.empty(100, 8, device=device)
        placed = layers.to(device)
        sizes[device] = peak_bytes(lambda: placed(x), x.device)  # noqa: B023 - called at once
    # The hidden layer and its activation.
    assert sizes == {"cpu": 2 * 100 * 64 * 4, "meta": 2 * 100 * 64 * 4}


def test_convolutions_of_16_bits_hold_their_tensors_twice_unless_their_channels_lie_last() -> None:
    def peak(x: torch.Tensor, *, copies_layout: bool = True) -> int:
        convolution = nn.Conv2d(4, 8, 3, padding=1, bias=False, dtype=x.dtype, device="meta")
        return peak_bytes(lambda: convolution(x), x.device, copies_layout=copies_layout)

    x = torch.empty(1, 4, 32, 32, dtype=torch.bfloat16, device="meta")
    out, weight = 8 * 32 * 32 * 2, 8 * 4 * 9 * 2
    assert peak(x) == out + x.nbytes + weight + out
    assert peak(x, copies_layout=False) == out
    assert peak(x.contiguous(memory_format=torch.channels_last)) == out
    assert peak(x.float()) == 2 * out
