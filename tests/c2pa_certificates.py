"""Certificates for tests of C2PA: a chain of two, as a signer would get one, and others that C2PA refuses."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def write_chain(
    folder: Path, *, days: int = 20, is_self_signed: bool = False, password: bytes | None = None
) -> tuple[Path, Path]:
    """Write `key.pem`, which this user alone can read, and `chain.pem`; return their paths. days: until the first
    certificate ends, negative for one that has ended. is_self_signed: the key signs its own certificate."""
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = "a signer" if is_self_signed else "an authority"
    own = _certificate("a signer", issuer, key, key if is_self_signed else authority, days)
    chain = [own] if is_self_signed else [own, _certificate(issuer, issuer, authority, authority, 30)]
    key_path, chain_path = folder / "key.pem", folder / "chain.pem"
    hidden = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_path.write_bytes(key.private_bytes(*form, hidden))
    key_path.chmod(0o600)
    chain_path.write_bytes(b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain))
    return key_path, chain_path


def _certificate(subject: str, issuer: str, key: Any, issuer_key: Any, days: int) -> x509.Certificate:
    now, is_authority = datetime.datetime.now(datetime.UTC), subject == issuer and key is issuer_key
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=40))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority, **usage),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if subject == "a signer":
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    named = ((NameOID.ORGANIZATION_NAME, "a test"), (NameOID.COMMON_NAME, text))
    return x509.Name([x509.NameAttribute(*each) for each in named])
