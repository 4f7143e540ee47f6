"""C2PA manifests: what is signed can be read back and holds, what was changed does not, and keys that cannot sign are
known at once. With certificates of our own making and the package itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from c2pa_certificates import write_chain
from cli_support import Command
from sample_media import RECIPE, make_media
from tables import table

from diffusion_runtime.errors import ConfigError, MissingPackageError
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.clips import read_clip
from diffusion_runtime.media.content_credentials import MEDIA_TYPES, Signer, read_manifest, signer_of
from diffusion_runtime.media.formats import IMAGE_FORMATS
from diffusion_runtime.media.reading import read_recipe


@table("file_format", MEDIA_TYPES)
def test_signed_file_holds_its_recipe_until_it_is_changed(file_format: str, tmp_path: Path) -> None:
    signer = Signer(*write_chain(tmp_path))
    sound = Audio(numpy.zeros((1, 800), dtype=numpy.float32), 8000) if file_format == "wav" else None
    media = make_media(1 if file_format in IMAGE_FORMATS else 5, audio=sound)
    plain = media.save(tmp_path / f"plain.{file_format}")
    path = media.save(tmp_path / f"signed.{file_format}", signer=signer)
    manifest = read_manifest(path, file_format)
    assert manifest is not None
    assert manifest.holds
    assert manifest.is_made_by_model
    assert (manifest.signed_by, manifest.issuer, manifest.algorithm) == ("a signer", "a test", "Es256")
    assert manifest.recipe == read_recipe(path) == read_recipe(plain)
    assert manifest.recipe["request"] == RECIPE["request"]
    assert read_manifest(plain, file_format) is None
    if sound is None:
        frames, unsigned = (read_clip(str(each), "", media.num_frames, 48, 64) for each in (path, plain))
        assert (frames == unsigned).all()
    changed = bytearray(path.read_bytes())
    # In the middle of the pictures or the sound, which lie before or behind the manifest.
    middle = plain.stat().st_size // 2
    changed[len(changed) - middle if file_format in ("png", "gif", "mp4") else middle] ^= 1
    path.write_bytes(changed)
    broken = read_manifest(path, file_format)
    assert broken is not None
    assert broken.holds is False
    assert broken.problems


def test_sound_beside_a_signed_file_is_signed_too(tmp_path: Path) -> None:
    media = make_media(5, audio=Audio(numpy.zeros((1, 800), dtype=numpy.float32), 8000))
    path = media.save(tmp_path / "a.gif", signer=Signer(*write_chain(tmp_path)))
    found = read_manifest(path.with_suffix(".wav"), "wav")
    assert found is not None
    assert found.holds


def _others_read(key: Path, chain: Path) -> None:
    key.chmod(0o640)


def _of_another(key: Path, chain: Path) -> None:
    (other := chain.parent / "other").mkdir()
    chain.write_bytes(write_chain(other)[1].read_bytes())


def _renew(**changes: object) -> Callable[[Path, Path], None]:
    return lambda key, _: write_chain(key.parent, **changes) and None  # type: ignore[arg-type]


FAULTS: dict[str, Callable[[Path, Path], object]] = {
    "chmod 600": _others_read,
    "without a password": _renew(password=b"x"),
    "--cert: .*valid from .* renew it": _renew(days=-1),
    "no valid signature .* another one signed": _renew(is_self_signed=True),
    "is not the key's": _of_another,
    "--sign: .*no such file": lambda key, _: key.unlink(),
    "--cert: .*no such file": lambda _, chain: chain.unlink(),
    "expected a private key in PEM": lambda key, _: key.write_text("x"),
    "expected certificates in PEM": lambda _, chain: chain.write_text("x"),
}


@table("message, spoil", FAULTS.items())
def test_unfit_keys_are_refused(message: str, spoil: Callable[[Path, Path], object], tmp_path: Path) -> None:
    key, chain = write_chain(tmp_path)
    spoil(key, chain)
    with pytest.raises(ConfigError, match=message):
        Signer(key, chain)


def test_flags_go_together_and_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signer_of(None, None) is None
    with pytest.raises(ConfigError, match="goes with --cert"):
        signer_of("key.pem", None)
    with pytest.raises(ConfigError, match="goes with --sign"):
        signer_of(None, "chain.pem")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"diffusion-runtime\[c2pa\]"):
        signer_of("key.pem", "chain.pem")


def test_generate_signs_and_info_shows_it(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    key, chain = write_chain(tmp_path)
    flags = ("--sign", str(key), "--cert", str(chain))
    assert command("generate", "a ring", *tiny_flags, "-o", "a.gif", *flags).code == 0
    shown = command("info", "a.gif")
    assert "holds: the file is as it was signed" in shown.out
    assert command("info", "a.gif", "--json").json["c2pa"]["is_made_by_model"] is True
    refused = command("generate", "a ring", *tiny_flags, "-o", "a.npy", *flags)
    assert refused.code == 2
    assert "npy has no place" in refused.said
    # Before the model is opened, which is not there.
    key.chmod(0o644)
    refused = command("generate", "a ring", "--model-path", "nowhere", *flags)
    assert refused.code == 2
    assert "chmod 600" in refused.said
