"""Who has signed a device's request, by its headers alone: before any of its body is read.

Flower checks the same again, with what the body says of the node, but reads the body first. The
cryptography is Flower's.
"""

from __future__ import annotations

import binascii
import datetime
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

GREETINGS = frozenset({"/v1/fleet/register-node", "/v1/fleet/activate-node"})


def signer(scope: Mapping[str, Any]) -> bytes | None:
    """The registered public key whose owner signed these headers just now; None where there is none. A greeting, which
    is short, may be anybody's: Flower tells a device that is not registered so."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    shown = {name.decode("latin-1"): value for name, value in scope["headers"]}
    try:
        key = b64decode(shown[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(shown[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        timestamp = shown[TIMESTAMP_HEADER]
        signed_at = datetime.datetime.fromisoformat(timestamp.decode("ascii"))
        age = (datetime.datetime.now(datetime.UTC) - signed_at).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        if scope["path"] not in GREETINGS and not _is_registered(scope, key):
            return None
        if not verify_signature(bytes_to_public_key(key), timestamp, signature):
            return None
    except (KeyError, ValueError, TypeError, UnicodeError, binascii.Error):
        return None
    return key


def _is_registered(scope: Mapping[str, Any], key: bytes) -> bool:
    return _state(scope).get_node_id_by_public_key(key) is not None


def registered_name(scope: Mapping[str, Any], key: bytes) -> str:
    """Empty where nobody has registered this key."""
    node = _state(scope).get_node_id_by_public_key(key)
    found = [] if node is None else _state(scope).get_node_info(node_ids=[node])
    return str(found[0].name) if found else ""


def _state(scope: Mapping[str, Any]) -> Any:
    return scope["app"].state.linkstate_factory.state()


def fingerprint(key: bytes) -> str:
    """Of a public key as Flower has it: what `ssh-keygen -lf registered/NAME.pub` shows."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key

    return fingerprint_of_file(bytes_to_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def fingerprint_of_file(public: bytes) -> str:
    """Of what is in registered/NAME.pub; empty where that is no public key."""
    try:
        blob = b64decode(public.split()[1], validate=True)
    except (IndexError, ValueError, binascii.Error):
        return ""
    return "SHA256:" + b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
