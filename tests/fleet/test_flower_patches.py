"""What Strata changes in Flower, and what it uses of it that is not public, is still as it was when it was looked at.

Where one of these tests fails, Flower has changed: read what stands there now, see that Strata's use of it (fleet/
flower_patches.py says what for) still holds, and only then write the new digest or name here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory

import strata
from strata.fleet import flower_patches

HANDLERS = "flwr.superlink.servicer"
DEVICE = "flwr.supernode.start_client_internal"
# the sources of what is replaced, and of what the replacements rely on, in Flower 1.41.0
DIGESTS = {
    f"{HANDLERS}.control.control_handlers.start_run": "7f9355f11d8a76fc",
    f"{HANDLERS}.control.control_handlers.stop_run": "a3e6aa83095442e2",
    f"{HANDLERS}.fleet.fleet_handlers.push_messages": "70c2fe927c6693b0",
    f"{HANDLERS}.fleet.fleet_handlers.push_object": "df7e96f1188e0a40",
    f"{HANDLERS}.fleet.fleet_handlers.get_run": "004ad390c8b38c0e",
    f"{HANDLERS}.runtime.runtime_handlers.get_nodes": "6c21f1812dd73891",
    "flwr.superlink.extensions.get_middleware": "37012f4eb789b63f",
    "flwr.superlink.routers.fleet.node_auth.authenticate_node": "f8e66372d61b3653",  # security/signatures
    "flwr.superlink.main._get_middleware": "acdbc2dce1520f8f",  # asks the former, and puts it first
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree": "34c0fe845619356a",
    "flwr.superlink.grid.http_grid.pull_objects": "31bb2de46b450e6a",
    "flwr.superlink.grid.http_grid.inflate_object_from_contents": "93b98a2ea3f35c4f",
    "flwr.superlink.grid.http_grid.HttpGrid.pull_messages": "67a5266a5a2ed515",  # calls both
    f"{DEVICE}.start_client_internal": "9e89a6eb68fbec68",  # the loop: three seconds between two questions
    f"{DEVICE}._pull_and_store_message": "eaf5d0e36dc34e4c",
    f"{DEVICE}._insert_message": "a0c6f4605e993f04",
    f"{DEVICE}._push_messages": "00bb86faffdec114",
}
# what calls the names that are replaced: by their module, else the replacement would not be seen
CALLS = {
    "flwr.superlink.routers.control.router": "control_handlers.start_run(\n        request, account, linkstate",
    "flwr.superlink.routers.fleet.router": "fleet_handlers.push_messages(request=request, state=state)",
    "flwr.superlink.main": "*extensions.get_middleware(),",
    "flwr.superlink.cli.flower_superlink": "    uvicorn.run(\n        app=fastapi_app,",
    DEVICE: "run_id = _pull_and_store_message(\n                state=state,",
}
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
# what has no public name: where it is imported from, and what
PRIVATE = {
    "flwr.common.config": {"parse_config_args"},
    "flwr.common.constant": {"ErrorCode", "SYSTEM_TIME_TOLERANCE", "TIMESTAMP_HEADER", "TIMESTAMP_TOLERANCE"},
    "flwr.common.secure_aggregation.crypto.shamir": {"combine_shares", "create_shares"},
    "flwr.common.secure_aggregation.crypto.symmetric_encryption": {"decrypt", "encrypt", "generate_shared_key"},
    "flwr.common.secure_aggregation.quantization": {"dequantize", "quantize"},
    "flwr.common.secure_aggregation.secaggplus_utils": {"share_keys_plaintext_concat", "share_keys_plaintext_separate"},
    "flwr.common.serde": {"fab_to_proto", "user_config_to_proto"},
    "flwr.proto.control_pb2": {
        "ListNodesRequest",
        "ListRunsRequest",
        "RegisterNodeRequest",
        "StartRunRequest",
        "StopRunRequest",
        "StreamLogsRequest",
        "UnregisterNodeRequest",
    },
    "flwr.proto.runtime_pb2": {"AcquireTaskRequest"},
    "flwr.supercore.constant": {"FLEET_HTTP_PUBLIC_KEY_HEADER", "FLEET_HTTP_SIGNATURE_HEADER", "NodeStatus"},
    "flwr.supercore.control": {"ControlHttpClient"},
    "flwr.supercore.error": {"ApiErrorCode", "FlowerError"},
    "flwr.supercore.fab": {"Fab"},
    "flwr.supercore.inflatable.inflatable_object": {
        "get_object_body",
        "get_object_head_values_from_object_content",
        "iterate_object_tree",
    },
    "flwr.supercore.interceptors": {"RuntimeVersionHttpInterceptor", "SuperExecAuthHttpInterceptor"},
    "flwr.supercore.primitives.asymmetric": {
        "bytes_to_private_key",
        "bytes_to_public_key",
        "generate_key_pairs",
        "private_key_to_bytes",
        "public_key_to_bytes",
        "verify_signature",
    },
    "flwr.supercore.run": {"RunNotRunningException"},
    "flwr.supercore.runtime": {"RuntimeHttpClient"},
    "flwr.superlink.cli.flower_superlink": {"flower_superlink"},
    "flwr.supernode.cli": {"flwr_clientapp"},
    "flwr.supernode.cli.flower_supernode": {"flower_supernode"},
    "flwr.supernode.start_client_internal": {"_insert_message"},
}
HERE = Path(strata.__file__).parent


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        if module.endswith(".HttpGrid"):
            return getattr(found(module), name)
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(f"Flower has no {path} any more: see what fleet/flower_patches.py needs it for")


@pytest.mark.parametrize("path", DIGESTS)
def test_what_is_replaced_is_what_was_looked_at(path: str) -> None:
    digest = hashlib.sha256(inspect.getsource(found(path)).encode()).hexdigest()[:16]
    assert digest == DIGESTS[path], f"Flower has changed {path}: read it, then see fleet/flower_patches.py"


def test_a_run_is_stopped_where_the_replacement_stands() -> None:
    source = inspect.getsource(importlib.import_module("flwr.superlink.routers.control.router"))
    assert "control_handlers.stop_run(request, account, linkstate)" in source


@pytest.mark.parametrize("module", CALLS)
def test_it_is_called_where_the_replacement_stands(module: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert CALLS[module] in source, f"{module} no longer calls what fleet/flower_patches.py replaces"


def test_every_patch_is_of_something_that_is_looked_at() -> None:
    patches = (
        *flower_patches.server_patches(str, print, None, print),
        *flower_patches.app_patches(),
        *flower_patches.device_patches(1.0, print),
    )
    others = {"uvicorn.run", f"{DEVICE}.time"}  # not Flower's own: see below
    assert {f"{patch.module}.{patch.name}" for patch in patches} <= {*DIGESTS, *others}
    for patch in patches:
        assert callable(patch.made(found(f"{patch.module}.{patch.name}"))) or patch.name == "time"


def test_the_web_server_takes_our_settings() -> None:
    import uvicorn

    names = {"access_log", "forwarded_allow_ips", "http", "loop"}
    assert names <= set(inspect.signature(uvicorn.run).parameters)


def test_the_devices_loop_uses_no_more_of_time_than_sleep() -> None:
    source = inspect.getsource(importlib.import_module(DEVICE))
    assert set(re.findall(r"\btime\.(\w+)", source)) == {"sleep"}
    assert "time.sleep(3)" in source


def test_a_devices_messages_are_kept_where_they_are_looked_for() -> None:
    state: Any = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    with state.lock_msg_store:
        assert state.msg_store == {}
    fields = importlib.import_module(type(state).__module__).MessageEntry.__dataclass_fields__
    assert {"message", "is_retrieved"} <= set(fields)


def test_a_run_hears_of_devices_that_were_shut_out() -> None:
    """By name, unless another key has it now: then the device may come back."""
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.runtime_pb2 import GetNodesResponse

    fleet = [
        NodeInfo(node_id=1, name="a", status="online"),
        NodeInfo(node_id=2, name="b", status="unregistered"),
        NodeInfo(node_id=3, name="c", status="unregistered"),
        NodeInfo(node_id=4, name="c", status="offline"),
        NodeInfo(node_id=5, name="", status="unregistered"),
    ]

    class State:
        def get_node_info(self, statuses: list[str]) -> list[NodeInfo]:
            return [node for node in fleet if node.status in statuses]

    told = flower_patches.with_shut_out(lambda request, state, task: GetNodesResponse(nodes=fleet[:1]))
    assert [(node.name, node.status) for node in told(None, State(), None).nodes] == [
        ("a", "online"), ("b", "unregistered")]  # fmt: skip
    router = inspect.getsource(importlib.import_module("flwr.supercore.routers.runtime.router"))
    assert "handlers.get_nodes(request, state, task)" in router
    main = inspect.getsource(importlib.import_module("flwr.superlink.main"))
    assert "_RUNTIME_HANDLERS: RuntimeHandlers[LinkState] = runtime_handlers" in main


def test_devices_are_not_told_what_the_run_was_asked_for() -> None:
    from flwr.common.serde import user_config_to_proto
    from flwr.proto.run_pb2 import GetRunResponse, Run

    settings = user_config_to_proto({"strata": '{"out": "/srv/runs/a", "request": {"seed": 7}}'})
    told = GetRunResponse(run=Run(run_id=3, fab_hash="ab", override_config=settings))
    asked = flower_patches.without_config(lambda request, state: told)(request=None, state=None)
    assert asked.run.run_id == 3 and asked.run.fab_hash == "ab" and not asked.run.override_config
    assert b"/srv/runs" not in asked.SerializeToString()
    router = inspect.getsource(importlib.import_module("flwr.superlink.routers.fleet.router"))
    assert "fleet_handlers.get_run(request=request, state=state)" in router


def test_a_name_that_is_gone_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"this Flower has no flwr.app.nothing: Strata is made for flwr 1.41"):
        flower_patches.Patch("flwr.app", "nothing", lambda _: None).apply()


def imports() -> list[tuple[Path, str, str]]:
    """Every name of Flower's that a file of Strata's imports: the file, the module and the name."""
    seen = []
    for path in sorted(HERE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                seen += [(path.relative_to(HERE), str(node.module), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                seen += [(path.relative_to(HERE), a.name, "") for a in node.names if a.name.split(".")[0] == "flwr"]
    return seen


def test_only_the_fleet_touches_flower() -> None:
    assert {path.parts[0] for path, _, _ in imports()} == {"fleet"}


def test_public_names_where_there_are_any() -> None:
    private: dict[str, set[str]] = {}
    for _, module, name in imports():
        if module not in PUBLIC:
            private.setdefault(module, set()).add(name)
    assert private == PRIVATE
    for module, names in PRIVATE.items():
        for name in names:
            found(f"{module}.{name}")


def test_flower_is_changed_in_one_file_only() -> None:
    for path in sorted((HERE / "fleet").rglob("*.py")):
        tree = ast.parse(path.read_text())
        theirs = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("flwr", "uvicorn")))
            or (isinstance(node, ast.Import) and node.names[0].name.startswith(("flwr", "uvicorn")))
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    changed = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                    assert not (changed and target.value.id in theirs), f"{path}:{node.lineno} changes Flower"
