"""An authority, and certificates of it, made for one test."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """Its certificate is in `ca_file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder, self._name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, common_name: str, *, stem: str = "", days: int = 7) -> tuple[Path, Path]:
        """Return the files of a certificate, for 127.0.0.1 and localhost, and of its key; written in place."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = self._builder(common_name, key, days).add_extension(x509.SubjectAlternativeName(hosts), False)
        stem = stem or common_name
        cert_file, key_file = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        certificate = builder.sign(self._key, hashes.SHA256())
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_file, key_file

    def _builder(self, subject: str, key: ec.EllipticCurvePrivateKey, days: int = 7) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=days))
        )
