"""`strata fleet server`: a SuperLink behind TLS and the guard, with the registered devices and no others."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from strata.core.errors import BadInput
from strata.core.files import locked
from strata.core.importing import child_command
from strata.core.paths import writing_to
from strata.core.processes import Stopped, end, last_lines, start, stopped_by_signals, wait_until
from strata.fleet.app_processes import new_secret
from strata.fleet.environment import environment
from strata.fleet.security.addresses import Address, Unreachable, need_free, need_loopback, need_server
from strata.fleet.security.audit import AuditLog, audit_folder, this_user
from strata.fleet.security.keys import KeyFolder
from strata.fleet.security.tokens import digest_of, new_token
from strata.fleet.server.admission import Admission
from strata.fleet.server.control import Access
from strata.fleet.server.superlink import KEYS, OWN_TOKEN

START = 120.0  # seconds for the server to answer
LOOK = 2.0  # seconds between looks at the registered keys
SOON = 30  # days
DATABASE = "fleet.sqlite"  # in --data-dir


def serve(
    address: Address, keys: Path | None, *, insecure: bool, data_dir: Path | None, say: Callable[[str], None]
) -> int:
    """Until Ctrl-C or SIGTERM (0), or until the server's process fails (1)."""
    if insecure:
        need_loopback(address)
    elif keys is None:
        raise BadInput(
            "give --keys DIR (made by `strata fleet keys`), or --insecure for a plain-text server on this machine alone"
        )
    folder = None if insecure or keys is None else KeyFolder(keys.absolute())
    if folder is not None:
        folder.check_server()
        _check_expiry(folder, say)
    need_free(address)
    own = new_token()  # to register devices with: an operator's token is no right to that
    access = Access.of(address.local, keys, insecure)
    if folder is not None:
        access = replace(access, token=own)
    audit = None if folder is None else AuditLog(audit_folder(folder.path), say)
    with stopped_by_signals(), _state(data_dir, say) as state, _recorded(audit, address):
        env = environment(state / "flower")
        if folder is not None:
            env[KEYS] = str(folder.path)
            env[OWN_TOKEN] = digest_of(own)
        log = state / "server.log"
        before = log.stat().st_size if log.exists() else 0
        process = start(_command(address, folder, data_dir, new_secret(state / "flower")), env, log)
        try:
            if not wait_until(lambda: _answers(access), process, START):
                raise _Failed(f"the server did not start; the end of {log}:\n{last_lines(log, since=before)}")
            admission = Admission(folder, access, say, audit)
            admission.look()
            security = "plain text, this machine only" if folder is None else "TLS, registered devices only"
            say(f"serving at {address} ({security}); log: {log}")
            say("stop with Ctrl-C")
            while process.poll() is None:
                time.sleep(LOOK)
                admission.look()
                if audit is not None:
                    audit.look()
            raise _Failed(f"the server's process ended; the end of {log}:\n{last_lines(log, since=before)}")
        except Stopped:
            say("stopping")
            return 0
        except _Failed as failure:
            say(str(failure))
            return 1
        finally:
            end(process)


class _Failed(Exception):
    pass


@contextlib.contextmanager
def _recorded(audit: AuditLog | None, address: Address) -> Iterator[None]:
    """From when to when the server was there. It ends otherwise than by this where it was killed."""
    if audit is None:
        yield
        return
    audit.record("server started", user=this_user(), at=str(address))
    try:
        yield
    finally:
        audit.record("server stopped", at=str(address))


def _command(address: Address, folder: KeyFolder | None, data_dir: Path | None, secret: Path) -> list[str]:
    command = child_command(
        "strata.fleet.server.superlink",
        "--host",
        address.host,
        "--port",
        str(address.port),
        "--isolation",
        "process",
        "--superexec-auth-secret-file",
        str(secret),
        "--disable-runtime-dependency-installation",
    )
    if data_dir is not None:
        command += ["--database", str(data_dir.absolute() / DATABASE)]
    if folder is None:
        return [*command, "--insecure"]
    return [
        *command,
        "--enable-supernode-auth",
        "--ssl-ca-certfile",
        str(folder.authority),
        "--ssl-certfile",
        str(folder.certificate),
        "--ssl-keyfile",
        str(folder.key),
    ]


def _answers(access: Access) -> bool:
    try:
        need_server(access.address, access.authority)
    except Unreachable:
        return False
    return True


def _check_expiry(folder: KeyFolder, say: Callable[[str], None]) -> None:
    import datetime

    from strata.fleet.security.certificates import expiry_of

    left = expiry_of(folder.certificate.read_bytes()) - datetime.datetime.now(datetime.UTC)
    if left.days < 0:
        raise BadInput(
            f"the server's certificate has expired: make another with `strata fleet keys {folder.path} --renew`"
        )
    if left.days < SOON:
        say(f"the server's certificate expires in {left.days} days: `strata fleet keys {folder.path} --renew`")


@contextlib.contextmanager
def _state(data_dir: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of the server's log and records: the user's, for one server at a time, or one that is removed."""
    if data_dir is None:
        with tempfile.TemporaryDirectory(prefix="strata-server-") as folder:
            yield Path(folder)
        return
    with writing_to(data_dir):
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data_dir.stat().st_mode & 0o077:
            say(f"other users can look into {data_dir}, though not into the database: `chmod 700 {data_dir}` closes it")
        for file in data_dir.glob(f"{DATABASE}*"):  # has tokens in it; SQLite's own files beside it take after it
            file.chmod(0o600)
    with locked(data_dir / "lock", f"another server is using {data_dir}: end it, or choose another --data-dir"):
        yield data_dir.absolute()
