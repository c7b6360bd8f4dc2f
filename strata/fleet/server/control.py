"""The server's control interface: devices, runs, logs. Each failure is one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.fleet.environment import be_quiet, require_flower
from strata.fleet.security.addresses import Address, need_loopback, need_server
from strata.fleet.security.connection_guard import NOT_BY_ROLE
from strata.fleet.security.keys import KeyFolder, need_file


class Refused(BadInput):
    """The server answers, but not to this: it knows neither us (401) nor what we ask for (404). Waiting helps with
    neither."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Where the server is, and by what right we talk to it."""

    address: Address
    authority: Path | None  # None: in plain text
    token: str | None

    @classmethod
    def of(cls, address: Address, keys: Path | None, insecure: bool) -> Access:
        """`keys` is the key folder, or a copy of its ca.pem and operator.token."""
        if insecure:
            need_loopback(address)
            return cls(address, None, None)
        if keys is None:
            raise BadInput(
                "give --keys DIR with the fleet's keys (or --insecure for a plain-text server on this machine)"
            )
        folder = KeyFolder(keys)
        for path in (folder.authority, folder.token):
            need_file(path, "give the folder that `strata fleet keys` made, or one with its ca.pem and operator.token")
        return cls(address, folder.authority.absolute(), folder.token.read_text().strip())


class _Operator:
    """Shows the operator's token with each request."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers["authorization"] = f"Bearer {self.token}"
        return call_next(context)


@contextlib.contextmanager
def connect(access: Access) -> Iterator[Any]:
    """Flower's client of the control interface. Errors of its calls become BadInput."""
    require_flower()
    need_server(access.address, access.authority)
    be_quiet()
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    if access.token is not None:
        interceptors.append(_Operator(access.token))
    certificate = None if access.authority is None else access.authority.read_bytes()
    client = ControlHttpClient.from_server_address(
        str(access.address), access.authority is None, certificate, interceptors
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in (401, 404):
            raise Refused(_sentence(error, access), status) from None
        raise BadInput(_sentence(error, access)) from None
    except httpx.HTTPError as error:
        raise BadInput(f"the server at {access.address} stopped answering ({type(error).__name__})") from None
    finally:
        client.close()


def _sentence(error: Any, access: Access) -> str:
    if error.response.status_code == 401:
        return f"the server at {access.address} refused this operator.token: use the one of its own key folder"
    if error.response.status_code == 403 and NOT_BY_ROLE.format(role="watch") in error.response.text:
        return (
            f"the server at {access.address} lets this operator.token watch and nothing else: use one with --role run"
        )
    return f"the server at {access.address} answered {error.response.status_code}: {one_line(error.response.text, 300)}"
