"""C2PA (Content Credentials): signed manifests inside media files, which say that a model made them and from which
recipe (https://spec.c2pa.org). The package c2pa-python writes and checks them.

A file may be untrusted, and so may its manifest: nothing that it names is fetched.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import io
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ConfigError, MissingPackageError, OutputError, first_line, shown
from diffusion_runtime.media.sidecar import parse_recipe, to_json
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import check_file, open_file, read_file, shown_path, user_path
from diffusion_runtime.untrusted.json_text import parse_json

INSTALL = "pip install 'diffusion-runtime[c2pa]'"
# Our formats by what C2PA calls them; an array of numpy has no place for a manifest.
MEDIA_TYPES = {
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
    "wav": "audio/wav",
}
# IPTC's term for what a trained model made alone.
SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
RECIPE_LABEL = "diffusion_runtime.recipe"
_ACTIONS = ("c2pa.actions.v2", "c2pa.actions")
_MAX_PEM_BYTES = 256 * 1024
# The start of a manifest store: a JUMBF description box with C2PA's UUID (ISO 19566-5). Writers put a store near the
# start of a file (PNG, GIF, MP4) or at its end (WebP, WAV).
_STORE = b"jumdc2pa\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71"
_WINDOW = 2**20
# Neither a manifest elsewhere nor the state of a certificate is asked of another host; a picture of the picture is left
# out.
_SETTINGS = {
    "verify": {"remote_manifest_fetch": False, "ocsp_fetch": False, "verify_after_sign": True},
    "builder": {"thumbnail": {"enabled": False}},
}
# Of a certificate that is on no list of trusted ones, which is no fault of the signature.
_UNTRUSTED = "signingCredential.untrusted"


@dataclass(frozen=True)
class Manifest:
    """The C2PA manifest of a file, as its signature covers it.

    holds: whether the signature and every digest are right, so that neither file nor manifest was changed; None where
    the package that checks it is missing. problems: why not. is_trusted: whether the certificate is on a list of
    trusted ones; this package has no such list. signed_by, issuer, algorithm: of the certificate and the signature.
    generator: the program that wrote it; source_type: how the content was made; recipe: None without one of ours.
    """

    holds: bool | None
    problems: tuple[str, ...] = ()
    is_trusted: bool = False
    signed_by: str = ""
    issuer: str = ""
    algorithm: str = ""
    generator: str = ""
    source_type: str = ""
    recipe: Mapping[str, Any] | None = None

    @property
    def is_made_by_model(self) -> bool:
        """True if the manifest says that a model made the content."""
        return self.source_type == SOURCE_TYPE

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values, without the recipe, which the file has too."""
        return {
            "holds": self.holds,
            "problems": list(self.problems),
            "is_trusted": self.is_trusted,
            "signed_by": self.signed_by,
            "issuer": self.issuer,
            "algorithm": self.algorithm,
            "generator": self.generator,
            "source_type": self.source_type,
            "is_made_by_model": self.is_made_by_model,
            "holds_recipe": self.recipe is not None,
        }


class Signer:
    """A private key with its certificates, that signs the manifests of files.

    key: a PEM file of an EC, RSA or Ed25519 key, without a password, that its user alone may read; certificates: a PEM
    file, the key's own first and then those that signed it. Both are tried by signing a small image.

    Raises MissingPackageError without c2pa-python, and ConfigError for files that cannot be read, a key that others can
    read, and a key and certificates that make no valid signature.
    """

    def __init__(self, key: str | Path, certificates: str | Path) -> None:
        if importlib.util.find_spec("c2pa") is None:
            raise MissingPackageError(f"--sign: the package c2pa-python is not installed: {INSTALL}")
        key_path, certificate_path = user_path(key, "--sign"), user_path(certificates, "--cert")
        check_file(key_path, "--sign", max_bytes=_MAX_PEM_BYTES)
        _check_private(key_path)
        key_text = read_file(key_path, "--sign", max_bytes=_MAX_PEM_BYTES)
        chain = read_file(certificate_path, "--cert", max_bytes=_MAX_PEM_BYTES)
        self._algorithm, self._key = _checked_key(key_text, key_path, chain, certificate_path)
        self._chain = chain
        self._try(certificate_path)

    def sign(self, source: Path, target: Path, file_format: str, recipe: Mapping[str, Any]) -> None:
        """Write the file at `source` with a manifest to `target`, which exists. Raises OSError, and OutputError for a
        file that cannot be signed."""
        with source.open("rb") as original, target.open("w+b") as signed:
            self._sign(original, signed, MEDIA_TYPES[file_format], recipe)

    def _sign(self, source: Any, target: Any, media_type: str, recipe: Mapping[str, Any]) -> None:
        import c2pa

        manifest = _manifest_of(to_json(recipe))
        info = c2pa.C2paSignerInfo(self._algorithm, self._chain, self._key, None)
        try:
            with (
                c2pa.Signer.from_info(info) as signer,
                c2pa.Context.from_dict(_SETTINGS) as context,
                c2pa.Builder(manifest, context) as builder,
            ):
                builder.sign(signer, media_type, source, target)
        except c2pa.C2paError as error:
            raise OutputError(f"cannot sign: {first_line(error)}") from error

    def _try(self, path: Path) -> None:
        """Raises ConfigError where a signature by this key is not valid. path: of the certificates."""
        signed = io.BytesIO()
        try:
            self._sign(io.BytesIO(_small_png()), signed, MEDIA_TYPES["png"], {})
        except OutputError as error:
            raise ConfigError(f"--cert: {shown_path(path)}: {_advice(str(error))}") from error
        found = _read(signed, MEDIA_TYPES["png"])
        if not found.holds:
            raise ConfigError(f"--cert: {shown_path(path)}: {_advice('; '.join(found.problems))}")


def check_signable(file_format: str) -> None:
    """Raises ConfigError for a format that has no place for a manifest."""
    if file_format not in MEDIA_TYPES:
        raise ConfigError(
            f"--sign: {file_format} has no place for a C2PA manifest; use --format with one of {', '.join(MEDIA_TYPES)}"
        )


def signer_of(key: str | None, certificates: str | None) -> Signer | None:
    """Return the signer of the flags --sign and --cert, None without both. Raises what `Signer` raises, and ConfigError
    for one without the other."""
    if key is None and certificates is None:
        return None
    if key is None:
        raise ConfigError("--cert: it goes with --sign KEY, the private key of its first certificate")
    if certificates is None:
        raise ConfigError("--sign: it goes with --cert FILE, the key's certificate and those that signed it")
    return Signer(key, certificates)


def read_manifest(path: Path, file_format: str) -> Manifest | None:
    """Return the manifest of a file, None for a file without. Raises OutputError for one that cannot be read."""
    if file_format not in MEDIA_TYPES or not _has_store(path):
        return None
    if importlib.util.find_spec("c2pa") is None:
        return Manifest(None, (f"the package c2pa-python is not installed: {INSTALL}",))
    with open_file(path, error=OutputError) as file:
        return _read(file, MEDIA_TYPES[file_format])


def _has_store(path: Path) -> bool:
    with open_file(path, error=OutputError) as file:
        head = file.read(_WINDOW)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _WINDOW))
        return _STORE in head or _STORE in file.read(_WINDOW)


def _read(file: Any, media_type: str) -> Manifest:
    import c2pa

    file.seek(0)
    try:
        with c2pa.Context.from_dict(_SETTINGS) as context, c2pa.Reader(media_type, file, context=context) as reader:
            found = parse_json(reader.json())
            state = reader.get_validation_state()
    except c2pa.C2paError as error:
        return Manifest(False, (first_line(error),))
    except DocumentError as error:
        return Manifest(False, (f"it cannot be read: {error}",))
    return _manifest(found, state)


def _manifest(found: Any, state: str | None) -> Manifest:
    """found: what the package read of an untrusted file, state: its judgement."""
    active = _mapping(_mapping(_mapping(found).get("manifests")).get(str(_mapping(found).get("active_manifest"))))
    signature = _mapping(active.get("signature_info"))
    statuses = _listed(_mapping(found).get("validation_status"))
    problems = [
        str(status.get("explanation") or status.get("code"))
        for status in map(_mapping, statuses)
        if status.get("code") != _UNTRUSTED
    ]
    generators = [
        " ".join(str(each[name]) for name in ("name", "version") if name in each)
        for each in map(_mapping, _listed(active.get("claim_generator_info")))
    ]
    assertions = {str(_mapping(each).get("label")): _mapping(each).get("data") for each in _assertions(active)}
    actions = (_mapping(assertions.get(label)).get("actions") for label in _ACTIONS)
    sources = (_mapping(action).get("digitalSourceType") for each in actions for action in _listed(each))
    text = _mapping(assertions.get(RECIPE_LABEL)).get("json")
    holds = state in ("Valid", "Trusted")
    return Manifest(
        holds=holds,
        problems=() if holds else tuple(dict.fromkeys(problems)) or (f"its state is {shown(state)}",),
        is_trusted=state == "Trusted",
        signed_by=str(signature.get("common_name") or ""),
        issuer=str(signature.get("issuer") or ""),
        algorithm=str(signature.get("alg") or ""),
        generator=", ".join(generators),
        source_type=next((each for each in sources if isinstance(each, str)), ""),
        recipe=parse_recipe(text) if isinstance(text, str) else None,
    )


def _assertions(active: Mapping[str, Any]) -> Iterator[Any]:
    # C2PA 2.0 keeps those of the generator apart from those that others gathered.
    for name in ("assertions", "created_assertions", "gathered_assertions"):
        yield from _listed(active.get(name))


def _manifest_of(recipe: str) -> dict[str, Any]:
    """recipe: as JSON, so that it is read as it was written: the package shows a list of small numbers as bytes."""
    program = {"name": "diffusion-runtime", "version": importlib.import_module("diffusion_runtime").__version__}
    created = {"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE, "softwareAgent": program}
    return {
        "claim_generator_info": [program],
        "assertions": [
            {"label": _ACTIONS[0], "data": {"actions": [created]}},
            {"label": RECIPE_LABEL, "data": {"json": recipe}},
        ],
    }


def _check_private(path: Path) -> None:
    """Raises ConfigError for a private key that other users may read, as ssh refuses it."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"--sign: {shown_path(path)}: others may use this private key (its mode is {mode:04o}); expected one that "
            "you alone can read: chmod 600 on it"
        )


def _checked_key(text: bytes, path: Path, chain: bytes, chain_path: Path) -> tuple[bytes, bytes]:
    """Return the name of the signature's algorithm, and the key as PKCS 8, without a password."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_private_key(text, None)
    except TypeError as error:
        raise ConfigError(
            f"--sign: {shown_path(path)}: expected a key without a password; `openssl pkey -in FILE -out KEY` takes it "
            "off"
        ) from error
    # Any exception: a broken key ends in whatever the library of OpenSSL says.
    except Exception as error:
        raise ConfigError(f"--sign: {shown_path(path)}: expected a private key in PEM: {first_line(error)}") from error
    algorithm = _algorithm_of(key)
    if algorithm is None:
        raise ConfigError(
            f"--sign: {shown_path(path)}: expected a key of EC (P-256, P-384, P-521), RSA or Ed25519, which C2PA signs "
            "with"
        )
    try:
        certificates = x509.load_pem_x509_certificates(chain)
    except ValueError as error:
        raise ConfigError(
            f"--cert: {shown_path(chain_path)}: expected certificates in PEM: {first_line(error)}"
        ) from error
    own, now = certificates[0], datetime.datetime.now(datetime.UTC)
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if own.public_key().public_bytes(*form) != key.public_key().public_bytes(*form):
        raise ConfigError(
            f"--cert: {shown_path(chain_path)}: its first certificate is not the key's of --sign; put that one first"
        )
    begin, end = own.not_valid_before_utc, own.not_valid_after_utc
    if not begin <= now <= end:
        raise ConfigError(
            f"--cert: {shown_path(chain_path)}: its first certificate is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
            "; renew it"
        )
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return algorithm, plain


def _algorithm_of(key: Any) -> bytes | None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if isinstance(key, ec.EllipticCurvePrivateKey):
        return {"secp256r1": b"es256", "secp384r1": b"es384", "secp521r1": b"es512"}.get(key.curve.name)
    if isinstance(key, rsa.RSAPrivateKey):
        return b"ps256"
    return b"ed25519" if isinstance(key, ed25519.Ed25519PrivateKey) else None


def _small_png() -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (1, 1)).save(written, format="PNG")
    return written.getvalue()


def _advice(reason: str) -> str:
    return (
        f"no valid signature can be made with it: {reason}; C2PA asks for a certificate that another one signed, with "
        "the usages digitalSignature and emailProtection, followed by the one that signed it"
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
