"""Who has signed a device's request, by its headers alone: before any of its body is read.

Flower checks the same again, with what the body says of the node, but reads the body first. The
cryptography is Flower's.
"""

from __future__ import annotations

import binascii
import datetime
from base64 import b64decode
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
    return scope["app"].state.linkstate_factory.state().get_node_id_by_public_key(key) is not None
