"""`symbiosis-priv keys`: create, request, sign, rotate, revoke and show certificates."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from rich.markup import escape
from rich.table import Table

from symbiosis_priv.certificates import issuing, reading, revocation
from symbiosis_priv.certificates.naming import NEXT, PREVIOUS
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CertificateError, ConfigError, one_line

app = typer.Typer(no_args_is_help=True, help="Create, request, sign, rotate, revoke and show certificates.")

Directory = Annotated[Path, typer.Option("--directory", "-d", help="Folder of the files.")]
Name = Annotated[str, typer.Option("--name", "-n", help="Base name of the files, and the name in the certificate.")]
Authority = Annotated[str, typer.Option(help="Name of the signing authority.")]
Days = Annotated[int, typer.Option("--days", min=1, max=issuing.MAX_DAYS, help="Lifetime in days.")]
KEYS = Path("keys")
_REVOKED = "revoked.txt"


@app.command()
def authority(*, name: Name = "authority", directory: Directory = KEYS, days: Days = 3650) -> None:
    """Create a certificate authority: a provider's, for its tenants, or a federation's, for its providers."""
    identity, revoked = issuing.create_authority(directory, name=name, days=days), directory / _REVOKED
    revocation.create_list(revoked)
    _report(identity)
    terminal.say(f"  revoked          {revoked} (`symbiosis-priv keys revoke` adds entries)")
    _set("An authority for tenants: in provider.toml", "tls", tenant_authority=identity.certificate, revoked=revoked)
    _next("Send the certificate and the list, never the key, to the operators of your tenants' helpers.")
    _next(
        "Sign the requests of your tenants or providers (`symbiosis-priv keys request`):",
        f"symbiosis-priv keys sign NAME.csr --authority {shlex.quote(name)} --directory {shlex.quote(str(directory))}",
    )
    what = "An authority for providers that a registry lists: in provider.toml and federation.toml"
    _set(what, "registry", authority=identity.certificate, revoked=revoked)


@app.command()
def provider(
    *,
    name: Name,
    host: Annotated[
        list[str] | None, typer.Option(help="DNS name or IP address; repeatable. Default: localhost.")
    ] = None,
    directory: Directory = KEYS,
    days: Days = 365,
) -> None:
    """Create a provider's certificate, which tenants pin. For a registry's list, see `keys request --provider`."""
    identity = issuing.issue(directory, authority=None, kind=Kind.PROVIDER, name=name, hosts=host or (), days=days)
    _report(identity)
    _set("In provider.toml", "tls", certificate=identity.certificate, key=identity.key)
    _next(
        "Give the certificate, never the key, to your tenants. In their federation.toml:",
        f"[[provider]]\n{_settings(name=name, certificate=identity.certificate)}",
    )


@app.command()
def request(
    *,
    name: Name,
    provider: Annotated[bool, typer.Option("--provider", help="For a registry, or a provider that it lists.")] = False,
    directory: Directory = KEYS,
) -> None:
    """Make a key, which stays on this machine, and a certificate request.

    The executor's operator signs a tenant's request, and the owner of the federation's authority a provider's.

    If the key exists, the request is for the existing key. Use this to renew a certificate.
    """
    path = issuing.create_request(directory, name=name, kind=Kind.PROVIDER if provider else Kind.TENANT)
    terminal.say(f"{path}", style="bold green")
    key = reading.pair(directory, name).key
    terminal.say(
        f"  name             {name}\n  key              {key} (secret, mode 0600; it never leaves this machine)"
    )
    terminal.say(f"  key fingerprint  {issuing.load_request(path).key_fingerprint}")
    signer = "the owner of the federation's authority" if provider else "the executor's operator"
    vouched = " --authority federation --operator 'YOUR COMPANY' --host YOUR.HOST" if provider else ""
    _next(f"Send {path} to {signer}, and the key fingerprint by another channel. The signer runs:")
    terminal.say(f"symbiosis-priv keys sign {path.name}{vouched}")
    _next(f"Put the {name}.pem that you receive into {directory}.")


@app.command()
def sign(
    request: Annotated[Path, typer.Argument(help="The NAME.csr of a tenant or of a provider.")],
    *,
    key_fingerprint: Annotated[
        str | None, typer.Option(help="The key fingerprint, received by another channel. Any other key is refused.")
    ] = None,
    operator: Annotated[
        str | None, typer.Option(help="Company that runs the provider, which you certify: 'Alpha GmbH'.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="DNS name or IP address of the provider, which you certify; repeatable.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Let a new key take over the name.")] = False,
    authority: Authority = "authority",
    directory: Directory = KEYS,
    days: Days = 365,
) -> None:
    """Sign a request: issue a certificate to a tenant, or to a provider of your federation."""
    if not request.exists():
        raise CertificateError(
            f"{request} does not exist: the owner of the key makes it with `symbiosis-priv keys request --name "
            f"{shlex.quote(request.stem)}` and sends it to you"
        )
    wanted = issuing.load_request(request)
    if key_fingerprint not in (None, wanted.key_fingerprint):
        raise CertificateError(
            f"{request} is for the key {wanted.key_fingerprint}, not {key_fingerprint}: do not sign it"
        )
    path = issuing.sign_request(
        wanted,
        authority=_identity(directory, authority),
        directory=directory,
        operator=operator,
        hosts=host or (),
        days=days,
        renew=renew,
    )
    _print_certificates(path)
    if renew:
        _next(
            f"The old key stays valid until its certificate expires, or until you run `symbiosis-priv keys revoke "
            f"--name {wanted.name}.previous`."
        )
    if key_fingerprint is None:
        _next(f"Has {wanted.name} told you this key fingerprint by another channel? If not, ask before you go on.")
    _next(f"Send {path} back. Keep a copy: it is the record that the name is taken.")


@app.command()
def rotate(
    *,
    name: Name,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only make the next pair, NAME.next: tenants pin it before it is used.")
    ] = False,
    directory: Directory = KEYS,
    days: Days = 365,
) -> None:
    """Replace a provider's certificate and key, by the next pair if it exists. The old pair is kept as NAME.previous.

    A certificate that an authority has signed is renewed with `keys request`.
    """
    path = _existing(directory, name).certificate
    prepared = reading.pair(directory, f"{name}{NEXT}").certificate.exists()
    identity = (issuing.prepare_rotation if prepare else issuing.rotate)(path, days=days)
    _report(identity)
    if prepare:
        _next(
            f"Send {identity.certificate} to your tenants. They put it into the folder of the current one, and accept "
            f"both certificates when this provider's entry in federation.toml also says:",
            f"next_certificate = {json.dumps(f'keys/{identity.certificate.name}')}",
        )
        _next(
            "After they have done so, run:",
            f"symbiosis-priv keys rotate --name {name} --directory {shlex.quote(str(directory))}",
        )
        return
    _next("The provider uses the new certificate from its next start or reload on.")
    if not prepared:
        _next(f"Tenants that pin only the old certificate will refuse the new one: send them {path} first.")


@app.command()
def revoke(*, name: Name, directory: Directory = KEYS) -> None:
    """Add the current, previous and next certificates of a tenant or a provider to revoked.txt in the folder.

    For a tenant, every executor and helper needs the list; for a provider, every registry and tenant needs it.
    """
    path = _existing(directory, name).certificate
    previous, following = (path.with_name(f"{path.stem}{ending}.pem") for ending in (PREVIOUS, NEXT))
    listed = directory / _REVOKED
    added = revocation.revoke(listed, [path, *(other for other in (previous, following) if other.exists())])
    for shown in added:
        terminal.say(f"revoked {shown}")
    if not added:
        terminal.say(f"{listed} already has every certificate of {name}")
    if following.exists():
        _next(f"{following} is revoked too: remove it and its key before you rotate.")
    if reading.kind_of(reading.load_certificates(path)[0]) is Kind.PROVIDER:
        _next(f"Send {listed} to registries (`registry serve --revoked`) and to all tenants.")
        _set("In federation.toml", "registry", revoked=listed)
        return
    _next(f"Send {listed} to every provider of the tenant, executors and helpers: each provider checks its own copy.")
    _set("It takes effect within a second where provider.toml says", "tls", revoked=listed)


@app.command()
def show(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders to show. Default: the folder keys.")
    ] = None,
) -> None:
    """Show certificates: kind, hosts, lifetime and fingerprints. Of a folder, a list.

    Compare the fingerprint of a certificate by another channel. The key fingerprint stays when a certificate is renewed
    with the same key: logs and quotas name an authority by the first 16 digits of it.
    """
    for path in files or [KEYS]:
        if path.is_dir() or (path == KEYS and not path.exists()):
            _print_folder(path)
        else:
            _print_certificates(path)


def _identity(directory: Path, name: str) -> Identity:
    if Path(name).name != name:
        raise ConfigError(f"name {name!r}: pass a bare name, and the folder with --directory")
    return reading.pair(directory, name)


def _existing(directory: Path, name: str) -> Identity:
    found = _identity(directory, name)
    if not found.certificate.exists():
        known = ", ".join(sorted(path.stem for path in directory.glob("*.pem"))) or "no certificate"
        raise CertificateError(f"--name {name}: {found.certificate} does not exist; {directory} has {known}")
    return found


def _report(identity: Identity) -> None:
    _print_certificates(identity.certificate)
    terminal.say(f"  key              {identity.key} (secret, mode 0600)")


def _print_certificates(path: Path) -> None:
    for certificate in reading.load_certificates(path):
        kind, until = _kind(certificate), certificate.not_valid_after_utc
        identity = Identity(path, path.with_suffix(".key"))
        days = (until - reading.now()).days
        left = f"{days} days left"
        if days < 0:
            how = reading.how_to_renew(identity) if identity.key.exists() else "ask its owner for the next one"
            if kind == "authority":
                how = "make another with `symbiosis-priv keys authority`, and list both until all certificates are new"
            left = f"EXPIRED: {how}"
        terminal.say(f"{path}", style="bold green" if days >= 0 else "bold red")
        terminal.say(f"  kind             {kind}\n  subject          {one_line(certificate.subject.rfc4514_string())}")
        if hosts := reading.hosts_of(certificate):
            terminal.say(f"  hosts            {one_line(', '.join(hosts))}")
        terminal.say(f"  not after        {until:%Y-%m-%d %H:%M} UTC ({left})")
        terminal.say(f"  fingerprint      {reading.fingerprint(certificate)}")
        terminal.say(f"  key fingerprint  {reading.key_fingerprint(certificate)}")


def _print_folder(folder: Path) -> None:
    """List the certificates and requests of a folder, with the digits of fingerprints that logs show. Raises
    `CertificateError` if there are none."""
    paths = sorted(path for ending in ("pem", "csr") for path in folder.glob(f"*.{ending}"))
    if not paths:
        raise CertificateError(
            f"no certificates in {folder}: create some with `symbiosis-priv keys authority` or "
            f"`symbiosis-priv keys provider`"
        )
    listed = Table("file", "kind", "not after, UTC", "fingerprint", "key fingerprint")
    for path in paths:
        name = escape(one_line(path.name))
        try:
            if path.suffix == ".csr":
                listed.add_row(name, "request", "", "", issuing.load_request(path).key_fingerprint[: reading.SHOWN])
                continue
            for certificate in reading.load_certificates(path):
                until = certificate.not_valid_after_utc
                digits = (of(certificate)[: reading.SHOWN] for of in (reading.fingerprint, reading.key_fingerprint))
                style = "" if until >= reading.now() else "bold red"
                listed.add_row(name, _kind(certificate), f"{until:%Y-%m-%d %H:%M}", *digits, style=style)
        except CertificateError:
            listed.add_row(name, "unreadable")
    terminal.console().print(listed)
    terminal.say(f"All digits: symbiosis-priv keys show {shlex.quote(str(folder / 'FILE'))}")


def _kind(certificate: x509.Certificate) -> str:
    return "authority" if reading.is_authority(certificate) else reading.kind_of(certificate) or "other"


def _next(what: str, paste: str = "") -> None:
    terminal.say(f"\n{what}", style="bold")
    if paste:
        terminal.say(paste)


def _set(what: str, section: str, **values: str | Path) -> None:
    """Prints settings without the header of their section, because the file may already have that section."""
    _next(f"{what}, under [{section}]:", _settings(**values))


def _settings(**values: str | Path) -> str:
    # A JSON string is a valid TOML basic string.
    return "\n".join(f"{key} = {json.dumps(str(value))}" for key, value in values.items())
