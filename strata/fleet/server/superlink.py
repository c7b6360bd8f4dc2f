"""The server's process: `python -m strata.fleet.server.superlink ...`, flower-superlink with the guard before its door.

It starts Strata's own app and no other: the operator's token is no right to send code here. It is a right to name code:
a run's `--model package.module:callable` is imported and called, so what is importable here can be run by who has it.

Where the keys are comes by the environment variable STRATA_KEYS, and the hash of the launcher's own token by
STRATA_SERVER_TOKEN_SHA256. No token does: /proc shows a process's environment as it was at its start.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from strata.core.processes import end_with_launcher
from strata.fleet.app_processes import AppStarter, StartedApps
from strata.fleet.environment import be_quiet
from strata.fleet.flower_patches import patch_server
from strata.fleet.security.addresses import Address
from strata.fleet.security.audit import AUDIT, AuditLog, audit_folder
from strata.fleet.security.keys import KEY_FOLDER, KeyFolder
from strata.fleet.security.tokens import Tokens
from strata.fleet.server.run_endings import RunEndings

KEYS, OWN_TOKEN = "STRATA_KEYS", "STRATA_SERVER_TOKEN_SHA256"


def main() -> None:
    umask = os.umask(0o077)  # the database has tokens in it
    end_with_launcher()
    be_quiet()
    keys, own = os.environ.pop(KEYS, None), os.environ.pop(OWN_TOKEN, "")
    from flwr.superlink.cli.flower_superlink import flower_superlink

    parser = argparse.ArgumentParser()
    for name in ("--host", "--port", "--ssl-ca-certfile", "--superexec-auth-secret-file"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args()
    if keys is not None:
        os.environ[KEY_FOLDER] = keys  # for the server apps, which sign programs
    address = Address(given.host, int(given.port)).local
    authority = None if given.ssl_ca_certfile is None else Path(given.ssl_ca_certfile)
    secret = Path(given.superexec_auth_secret_file)
    # run folders are as the user wants them, hence the umask
    starter = AppStarter(str(address), secret, authority, StartedApps("flwr-serverapp", secret.parent, umask))
    starter.start()
    audit = None
    if keys is not None:
        audit = AuditLog(audit_folder(Path(keys)), partial(print, flush=True))
        os.environ[AUDIT] = str(audit.folder)  # for the apps, which know who joins a run
    known = None if keys is None else Tokens(KeyFolder(Path(keys)), own).of
    patch_server(known, starter.told, audit, RunEndings(audit).began)
    flower_superlink()


if __name__ == "__main__":
    main()
