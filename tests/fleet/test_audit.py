"""The audit log: what is in it, that nothing of it can be removed or changed unseen, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pwd
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from strata.cli import main
from strata.core.errors import BadInput
from strata.fleet import flower_patches
from strata.fleet.security import audit
from strata.fleet.security.audit import AuditLog, Repeated, Wrong, read_log, verify
from strata.fleet.security.connection_guard import ConnectionGuard
from strata.fleet.security.door_record import NOTES, note
from strata.fleet.security.keys import KeyFolder, make_keys
from strata.fleet.security.signatures import fingerprint, fingerprint_of_file
from strata.fleet.security.tokens import Operator
from strata.fleet.server.members_record import members_record
from strata.fleet.server.run_endings import RunEndings, ending


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def filled(folder: Path, lines: int = 6, largest: int = 300) -> list[Path]:
    """A log of some lines in several files; the files in order."""
    log = AuditLog(folder, Said(), largest)
    for number in range(lines):
        log.record("looked", token="operator", **{"from": f"10.0.0.{number}"})
    return [*sorted(folder.glob("audit-*")), folder / "audit.jsonl"]


def facts(folder: Path) -> list[dict[str, Any]]:
    found = [line.facts for line in read_log(folder)[0]]
    return [fact for fact in found if fact is not None]


def test_lines_are_chained_over_files_that_nobody_else_reads(folder: Path) -> None:
    files = filled(folder)
    assert len(files) == 3 and [path.name for path in files[:2]] == [
        "audit-000000000002.jsonl",
        "audit-000000000004.jsonl",
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    lines = facts(folder)
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[4]["from"] == "10.0.0.4" and lines[4]["time"].endswith("+00:00") and lines[0]["before"] == "0" * 64
    end = verify(folder)
    assert end.line == 6 and end.digest == audit.digest_of(files[-1].read_bytes().splitlines()[-1])
    assert verify(folder, holds=lines[3]["before"]) == end


def test_a_line_that_was_changed_or_removed_shows(folder: Path, tmp_path: Path) -> None:
    whole = {path.name: path.read_bytes() for path in [*filled(folder), folder / "head"]}
    older, newer, current = sorted(name for name in whole if name != "head")
    one, two = whole[older].splitlines(keepends=True)
    three, _ = whole[newer].splitlines(keepends=True)
    five, six = whole[current].splitlines(keepends=True)
    for name, content, wrong in (
        (older, one.replace(b"10.0.0.0", b"10.0.0.9") + two, f"line 1 of the log, before {older}:2, is not as it was"),
        (older, two, f"{older}:1 is line 2 of the log, not 1: what was before it is missing"),
        (older, one, f"{newer}:1 is line 3 of the log, and comes after line 1: lines are missing"),
        (older, one + two.replace(b"10.0.0.1", b"10.0.0.9"), f"line 2 of the log, before {newer}:1"),
        (newer, None, f"{current}:1 is line 5 of the log, and comes after line 2"),
        (newer, three + b"nonsense\n", f"{newer}:2 is not as it was written: it is no line of an audit log"),
        (newer, three + b"[" * 100_000 + b"\n", f"{newer}:2 is not as it was written"),
        (newer, three + b'{"line": "4"}\n', f"{newer}:2 is not as it was written: it has no number"),
        (current, five, "the log ends with line 5, and line 6 was written: lines are missing at the end"),
        (current, five + six.replace(b"10.0.0.5", b"10.0.0.9"), "line 6 of the log is not as it was written"),
        (current, five + b"nonsense\n", f"{current}:2 is not as it was written: it is no line"),
        (current, None, "the log ends with line 4, and line 6 was written"),
        ("head", None, "head is missing or damaged"),
    ):  # fmt: skip
        for path in folder.iterdir():
            path.unlink()
        for kept, old in whole.items():
            if kept != name or content is not None:
                (folder / kept).write_bytes(old if kept != name else content or b"")
        with pytest.raises(Wrong) as error:
            verify(folder)
        assert wrong in str(error.value), (name, content)


def test_a_changed_byte_shows(folder: Path) -> None:
    for path in [*filled(folder, lines=3, largest=200), folder / "head"]:
        whole = path.read_bytes()
        for place in range(0, len(whole) - 1, 7):  # some of them: each costs a millisecond
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(Wrong):
                verify(folder)
        path.write_bytes(whole)
    assert verify(folder).line == 3


def test_what_is_missing_stays_missing_when_the_log_goes_on(folder: Path) -> None:
    *_, current = filled(folder, largest=audit.LARGEST)
    lines = current.read_bytes().splitlines(keepends=True)
    current.write_bytes(b"".join(lines[:-1]))
    AuditLog(folder, Said()).record("looked")
    with pytest.raises(Wrong, match=r"audit.jsonl:6 is line 7 of the log, and comes after line 5: lines are missing"):
        verify(folder)


@pytest.mark.parametrize("lost", [["head"], ["head", "audit.jsonl"]])
def test_without_head_the_log_goes_on_and_says_so(folder: Path, lost: list[str]) -> None:
    kept = {path.name: path.read_bytes() for path in filled(folder) if path.name not in lost}
    for name in lost:
        (folder / name).unlink()
    lines = len(facts(folder))
    AuditLog(folder, Said()).record("looked", token="next")
    assert [line["what"] for line in facts(folder)[lines:]] == ["head was missing", "looked"]
    assert verify(folder).line == lines + 2
    assert all((folder / name).read_bytes().startswith(content) for name, content in kept.items())


def test_no_file_is_written_over(folder: Path) -> None:
    filled(folder, lines=2, largest=audit.LARGEST)
    (folder / "audit-000000000002.jsonl").write_text("older")
    AuditLog(folder, Said(), largest=1).record("looked")
    assert (folder / "audit-000000000002.jsonl").read_text() == "older"
    assert len((folder / "audit-000000000002-again.jsonl").read_text().splitlines()) == 2


def test_older_files_may_be_kept_elsewhere(folder: Path) -> None:
    filled(folder)[0].unlink()
    with pytest.raises(Wrong, match="is line 3 of the log, not 1"):
        verify(folder)
    assert verify(folder, first=3).line == 6
    with pytest.raises(Wrong, match="no line of .* has the hash ab: the log was cut or made anew"):
        verify(folder, first=3, holds="ab")


@pytest.mark.parametrize("cut", [1, 30])
def test_a_writer_that_was_killed_costs_its_own_line(folder: Path, cut: int) -> None:
    """In the middle of a line, or between the line and `head`."""
    *_, current = filled(folder, lines=2, largest=audit.LARGEST)
    head = (folder / "head").read_bytes()
    AuditLog(folder, Said()).record("looked", token="third")
    (folder / "head").write_bytes(head)
    assert verify(folder).line == 3
    current.write_bytes(current.read_bytes()[:-cut])
    verify(folder)
    AuditLog(folder, Said()).record("looked", token="fourth")
    assert verify(folder).line == 5
    assert [line["what"] for line in facts(folder)[-2:]] == ["log mended", "looked"]


def test_the_line_before_head_was_written_counts(folder: Path) -> None:
    filled(folder, lines=2, largest=audit.LARGEST)
    head = (folder / "head").read_bytes()
    AuditLog(folder, Said()).record("looked", token="third")
    (folder / "head").write_bytes(head)
    AuditLog(folder, Said()).record("looked", token="fourth")
    assert verify(folder).line == 4


def test_a_full_disk_is_said_and_costs_its_lines_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    log = AuditLog(folder, said)
    log.record("server started")
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    log.record("run started", run="1")
    log.record("run ended", run="1")
    assert said == [f"the audit log {folder} is not written: No space left on device; all else goes on"]
    assert verify(folder).line == 1
    monkeypatch.setattr(os, "write", write)
    log.record("run started", run="2")
    assert said[1:] == [f"the audit log {folder} is written again"] and verify(folder).line == 3
    again, started = facts(folder)[1:]
    assert (again["what"], again["missed"], started["run"]) == ("log works again", 2, "2")


def test_a_log_that_cannot_be_written_is_said_before_it_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    log = AuditLog(folder, said)
    log.look()
    assert said == []
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
        log.look()
        log.look()
        assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0]
    log.look()
    assert said[1:] == [f"the audit log {folder} is written again"]


def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    for name in ("audit.jsonl", "head"):
        folder.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(other)
        said = Said()
        AuditLog(folder, said).record("looked")
        assert "is a link or no ordinary file" in said[0] and other.read_text() == "precious"
        (folder / name).unlink()
    (tmp_path / "linked").symlink_to(folder)
    said = Said()
    AuditLog(tmp_path / "linked", said).record("looked")
    assert "linked is a link" in said[0]


def test_many_at_a_time(folder: Path) -> None:
    """Each with a log of its own, as processes have."""
    threads = [threading.Thread(target=filled, args=(folder, 5)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(folder).line == 20


def test_what_strangers_repeat_is_counted(folder: Path) -> None:
    now = 100.0
    repeated = Repeated(AuditLog(folder, Said()), clock=lambda: now)
    for number in range(50):
        repeated.record("refused", **{"from": f"10.0.0.{number}"})
        repeated.record("refused", **{"from": "10.0.0.0"})
    repeated.record("device connected", device="a")
    assert len(facts(folder)) == audit.MOST + 1 and not repeated.due
    now += audit.WINDOW
    assert repeated.due
    repeated.flush()
    again, others = facts(folder)[-2:]
    assert (again["from"], again["again"]) == ("10.0.0.0", 50) and others["others"] == 50 - audit.MOST
    assert not repeated.due


# --- at the door -----------------------------------------------------------------------------------------------------


class Links(SimpleNamespace):
    """Of Flower's application, what is asked of it: one registered key."""

    def __init__(self, key: bytes) -> None:
        state = SimpleNamespace(
            get_node_id_by_public_key=lambda shown: 7 if shown == key else None,
            get_node_info=lambda node_ids: [SimpleNamespace(name="pi-1")] if node_ids == [7] else [],
        )
        super().__init__(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state)))


def known(shown: str) -> Operator | None:
    return {"sesame": Operator("operator", "run"), "look": Operator("ada", "watch")}.get(shown)


def call(guard: ConnectionGuard, path: str, app: Any = None, token: str | None = None) -> None:
    asyncio.run(calling(guard, path, app, token))


async def calling(guard: ConnectionGuard, path: str, app: Any = None, token: str | None = None) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    scope = {"type": "http", "path": path, "client": ("10.0.0.9", 5), "headers": headers, "app": app}
    await guard(scope, receive, send)


def answering(status: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        note(run="42", out="/srv/a") if "start" in scope["path"] else None
        await send({"type": "http.response.start", "status": status, "headers": []})

    return app


def without_chain(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("line", "time", "before")} for line in facts(folder)]


def test_who_controls_is_written_down(folder: Path) -> None:
    log = AuditLog(folder, Said())
    guard = ConnectionGuard(answering(200), known, None, log)
    call(guard, "/v1/control/start-run", token="sesame")
    call(guard, "/v1/control/start-run", token="sesam")
    call(guard, "/v1/control/list-runs", token="sesame")
    call(guard, "/health")
    call(guard, "/v1/control/start-run", token="look")
    call(ConnectionGuard(answering(412), known, None, log), "/v1/control/stop-run", token="sesame")
    started, refused, looked, watcher, stopped = without_chain(folder)
    who = {"token": "operator", "from": "10.0.0.9"}
    assert started == {"what": "run started", **who, "run": "42", "out": "/srv/a"}
    assert refused["what"] == "refused" and refused["from"] == "10.0.0.9" and refused["path"].endswith("start-run")
    assert (watcher["what"], watcher["token"], watcher["why"]) == ("refused", "ada", "not for the role watch")
    assert looked == {"what": "looked", **who} and stopped == {"what": "run stopped", **who, "failed": 412}


def test_which_device_comes_is_written_down(folder: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    registered = make_keys(tmp_path / "keys", [], ["pi-1"]).folder.registered
    public = (registered / "pi-1.pub").read_bytes()
    key = public_key_to_bytes(load_ssh_public_key(public))
    assert fingerprint(key) == fingerprint_of_file(public) and fingerprint_of_file(b"nothing") == ""
    log = AuditLog(folder, Said())
    guard = ConnectionGuard(answering(200), known, lambda scope: key, log)
    for call_of_device in ("register-node", "activate-node", "pull-messages", "deactivate-node"):
        call(guard, f"/v1/fleet/{call_of_device}", Links(key))
    stranger = ConnectionGuard(answering(403), known, lambda scope: key, log)
    call(stranger, "/v1/fleet/activate-node", Links(b"another"))
    call(ConnectionGuard(answering(200), known, lambda scope: None, log), "/v1/fleet/pull-messages")
    device = {"device": "pi-1", "key": fingerprint(key), "from": "10.0.0.9"}
    came, left, refused, unsigned = without_chain(folder)
    assert came == {"what": "device connected", **device} and left == {"what": "device left", **device}
    assert refused == {"what": "device refused", "key": fingerprint(key), "from": "10.0.0.9"}
    assert unsigned["why"] == "not signed by a registered device"


def test_a_disk_that_hangs_keeps_no_device_waiting(folder: Path) -> None:
    hangs, works = threading.Event(), threading.Event()

    class Hanging(AuditLog):
        def record(self, what: str, **facts: Any) -> None:
            hangs.set()
            assert works.wait(60)
            super().record(what, **facts)

    guard = ConnectionGuard(answering(200), known, lambda scope: b"key", Hanging(folder, Said()))

    async def play() -> None:
        refused = [asyncio.create_task(calling(guard, f"/{number}")) for number in range(50)]
        assert await asyncio.to_thread(hangs.wait, 60)
        assert guard.record._repeated is not None
        guard.record._repeated.until = 0.0  # time to write what was counted
        await calling(guard, "/v1/fleet/pull-messages", Links(b"key"))
        assert not any(task.done() for task in refused)
        works.set()
        await asyncio.gather(*refused)

    asyncio.run(play())
    lines = facts(folder)
    assert [line["what"] for line in lines] == ["refused"] * len(lines) and verify(folder).line > audit.MOST


def test_a_run_is_named_by_what_began_and_stopped_it() -> None:
    from strata.fleet.app_bundle import bundle
    from strata.fleet.protocol.settings import KEY

    began: list[Any] = []
    start = flower_patches.only_strata_starts(
        lambda *_: SimpleNamespace(run_id=5), told=lambda: None, began=lambda *run: began.append(run)
    )
    notes: dict[str, Any] = {}
    NOTES.set(notes)
    config = {KEY: SimpleNamespace(string=json.dumps({"out": "/srv/a"}))}
    start(SimpleNamespace(app_spec="", fab=SimpleNamespace(content=bundle()), override_config=config), "me", "state")
    assert notes == {"run": "5", "out": "/srv/a"} and began == [(5, "state")]
    flower_patches.noted_stop(lambda *_: None)(SimpleNamespace(run_id=6), "me", "state")
    assert notes["run"] == "6"


def test_how_a_run_ended_is_written_down(folder: Path) -> None:
    status = SimpleNamespace(status="running", sub_status="")
    state = SimpleNamespace(get_run_info=lambda run_ids: [SimpleNamespace(status=status)])
    assert ending(state, 1) is None and ending(None, 1) is None
    assert ending(SimpleNamespace(get_run_info=lambda run_ids: []), 1) == "unknown"
    written = threading.Event()

    class Log(AuditLog):
        def record(self, what: str, **facts: Any) -> None:
            super().record(what, **facts)
            written.set()

    RunEndings(Log(folder, Said()), pause=0.001).began(1, state)
    status.status, status.sub_status = "finished", "failed"
    assert written.wait(30)
    assert without_chain(folder) == [{"what": "run ended", "run": "1", "state": "failed"}]


# --- commands --------------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = str(tmp_path / "keys")
    assert main(["fleet", "keys", keys, "--devices", "a,b"]) == 0
    assert main(["fleet", "revoke", "b", "--keys", keys]) == 0
    assert main(["fleet", "rotate", "token", "--keys", keys]) == 0
    capsys.readouterr()
    assert main(["fleet", "audit", "--keys", keys]) == 0
    made, a, b, revoked, rotated = capsys.readouterr().out.splitlines()
    assert "fleet made" in made and "device=a" in a and "token rotated  user=" in rotated
    assert "device revoked" in revoked and b.partition("key=")[2] == revoked.partition("key=")[2] != ""
    assert main(["fleet", "audit", "--keys", keys, "--verify"]) == 0
    told = capsys.readouterr().out
    assert "is whole: 5 lines; the last one's hash" in told
    assert main(["fleet", "audit", "--keys", keys, "--verify", "--json", "--holds", told.split()[-1]]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == 5
    file = tmp_path / "keys" / "audit" / "audit.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"device": "b"', b'"device": "c"', 1))
    for wrong, sentence in (
        (["--verify"], "strata fleet: line 3 of the log, before audit.jsonl:4, is not as it was written: its hash is"),
        (["--holds", "ab"], "strata fleet: --first and --holds are for checking"),
    ):
        assert main(["fleet", "audit", "--keys", keys, *wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith(sentence) and error.count("\n") == 1
    assert main(["fleet", "audit", "--keys", str(tmp_path)]) == 2
    assert "there is no audit log" in capsys.readouterr().err


def test_a_command_works_where_the_log_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_keys(tmp_path / "keys", [], ["a"]).folder
    (folder.path / "audit").write_text("in the way")
    assert main(["fleet", "revoke", "a", "--keys", str(folder.path)]) == 0
    assert "is not written" in capsys.readouterr().err and KeyFolder(folder.path).names() == []
    with pytest.raises(BadInput, match="there is no audit log"):
        read_log(folder.path / "audit")


def test_what_a_stranger_writes_does_not_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strata.fleet.output import show_audit

    AuditLog(folder, Said()).record("refused", path="/\x1b[2J\n" + "x" * 1000)
    show_audit(read_log(folder)[0], as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.count("\n") == 1 and len(shown) < 500


def test_who_gives_a_command_is_the_systems_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """$LOGNAME is anybody's."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert audit.this_user() == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert audit.this_user() == "number 4000000"


def test_who_joins_a_run_is_written_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server app, which is told where the log is."""
    monkeypatch.delenv(audit.AUDIT, raising=False)
    assert members_record(7) is None  # a plain-text server has no log
    monkeypatch.setenv(audit.AUDIT, str(folder))
    told = members_record(7)
    assert told is not None
    told("device joined run", "pi-3", public_key_to_bytes(generate_key_pairs()[1]))
    told("device left run", "pi-3", b"")
    joined, left = facts(folder)
    assert (joined["what"], joined["run"], joined["device"]) == ("device joined run", "7", "pi-3")
    assert joined["key"].startswith("SHA256:") and left["what"] == "device left run" and "key" not in left
