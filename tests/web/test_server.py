"""The HTTP server against a real daemon: what it answers, refuses and outlives."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from bench.rows import Rows
from kvass.cli import serve
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.client.client import Client
from kvass.config import Config
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import session_tag
from kvass.web import routes, server
from kvass.web import source as module_of_source
from kvass.web.access import listen
from kvass.web.server import BODY_BYTES, CONNECTIONS, WebServer
from tests.support.waiting import eventually

TOKEN = "0123456789abcdef"
WRITE = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def serving(daemon_socket: str, folder: Path, **options: Any) -> Iterator[WebServer]:
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    options = {"http_token_file": str(folder / "token"), **options}
    config = Config(socket=daemon_socket, http="127.0.0.1:0", **options)
    with WebServer(config, listen(config)) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield web
        web.shutdown()
        web.source.client.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("web"), "16MiB") as daemon:
        yield daemon


@pytest.fixture
def web(daemon: Daemon, tmp_path: Path) -> Iterator[WebServer]:
    with serving(daemon.socket, tmp_path) as web:
        yield web


def ask(
    web: WebServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and body, JSON decoded."""
    connection = http.client.HTTPConnection("127.0.0.1", web.server_port, timeout=30)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    text = reply.read()
    kind = reply.headers["Content-Type"]
    connection.close()
    return reply.status, json.loads(text) if kind == "application/json" else text


def test_an_answer_that_comes_late_arrives(
    daemon: Daemon, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is the request's, not the answer's."""
    looks, look = list[float](), web.service_actions

    def looking() -> None:
        looks.append(time.monotonic())
        look()

    def slow(*_: Any, **__: Any) -> int:
        monkeypatch.setattr(server, "DEADLINE_S", 0.0)  # the request has arrived
        enough = len(looks) + 2  # one may have begun before
        assert eventually(lambda: len(looks) >= enough)
        return 7

    monkeypatch.setattr(web, "service_actions", looking)

    monkeypatch.setattr(Client, "clear", slow)
    assert ask(web, "POST", "/api/v1/clear", b"", **WRITE) == (200, {"rows": 7})


@pytest.mark.parametrize("sent", [b"", b"{}"])
def test_a_body_that_ends_too_early_changes_nothing(
    sent: bytes, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole body of that content would clear all rows."""
    monkeypatch.setattr(Client, "clear", lambda *_, **__: pytest.fail("it cleared"))
    with socket.create_connection(("127.0.0.1", web.server_port), timeout=30) as connection:
        head = "POST /api/v1/clear HTTP/1.0\r\nHost: localhost\r\nContent-Length: 50\r\n"
        connection.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode() + sent)
        connection.shutdown(socket.SHUT_WR)
        assert b" 408 " in connection.recv(1000)


def test_a_clear_that_takes_long_keeps_no_probe_waiting(
    daemon: Daemon, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon answers a clear when its tiers have; until then it answers others."""
    began, end = threading.Event(), threading.Event()
    wait = Client.wait

    def slow(client: Client, seq: int, timeout_s: float) -> Any:
        with client.lock:  # as every wait for an answer
            if timeout_s > 100:
                began.set()
                end.wait(60)
            return wait(client, seq, timeout_s)

    monkeypatch.setattr(Client, "wait", slow)
    with ThreadPoolExecutor(1) as pool:
        clear = pool.submit(ask, web, "POST", "/api/v1/clear", b"", **WRITE)
        assert began.wait(10)
        time.sleep(module_of_source.FRESH_S)
        assert ask(web, "GET", "/healthz")[0] == 200
        assert not clear.done()
        end.set()
        assert clear.result()[0] == 200


def test_a_thread_that_cannot_be_started_costs_no_room(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.ThreadingMixIn, "process_request", none_left)
        for _ in range(CONNECTIONS):
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(web, "GET", "/healthz")
    assert ask(web, "GET", "/healthz")[0] == 200


def test_what_can_be_read(web: WebServer, daemon: Daemon) -> None:
    assert ask(web, "GET", "/healthz") == (200, {"status": "ok"})
    assert eventually(lambda: ask(web, "GET", "/readyz") == (200, {"status": "ready"}))
    status, fields = ask(web, "GET", "/status")
    assert (status, fields["boot"]) == (200, daemon.boot.hex())
    assert ask(web, "GET", "/api/v1/status")[0] == 200
    status, text = ask(web, "GET", "/metrics")
    assert status == 200
    assert b"kvass_up 1.0" in text
    assert b"<title>kvass" in ask(web, "GET", "/")[1]


def test_the_dashboard_loads_nothing_from_elsewhere(web: WebServer) -> None:
    """All that the page names is served here; the policy allows neither more nor inline scripts."""
    page = ask(web, "GET", "/")[1].decode()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"uplot.js", "charts.js", "dashboard.js", "uplot.css"} < set(named)
    for name in named:
        if name != "data:,":
            status, content = ask(web, "GET", f"/{name}")
            assert (status, len(content) > 1000) == (200, True)
            assert not re.findall(rb"fetch\(['\"]http|url\(|@import|importScripts", content)
    connection = http.client.HTTPConnection("127.0.0.1", web.server_port, timeout=30)
    connection.request("GET", "/")
    policy = connection.getresponse().headers["Content-Security-Policy"]
    connection.close()
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src")
    assert "unsafe" not in policy


def test_the_history_grows_by_a_sample(web: WebServer) -> None:
    web.source.sample()
    _, history = ask(web, "GET", "/api/v1/history")
    (sample,) = history["samples"]
    assert sample[1 + history["columns"].index("l1_used_bytes")] == 0
    assert history["events"][0][1].startswith("a daemon is up")
    assert ask(web, "GET", f"/api/v1/history?since={sample[0]}")[1]["samples"] == []


def test_clear_and_prefetch(web: WebServer, daemon: Daemon) -> None:
    with ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        keys = [os.urandom(WIDTH) for _ in range(2)]
        rows.store(keys)
        namespace = daemon.status()["namespaces"][0]["namespace"]
        asked = {"namespace": namespace, "digests": b"".join(keys).hex()}
        body = json.dumps(asked).encode()
        assert ask(web, "POST", "/api/v1/prefetch", body, **WRITE) == (200, {"chunks": 2})
        body = json.dumps({"namespace": namespace}).encode()
        assert ask(web, "POST", "/api/v1/clear", body, **WRITE) == (200, {"rows": 2})
        rows.store(keys)
        assert ask(web, "POST", "/api/v1/clear", b"", **WRITE) == (200, {"rows": 2})
        assert rows.find(keys).chunks == 0
        for named in ({"model": "kvass bench"}, {"tenant": "default"}):
            rows.store(keys)
            body = json.dumps(named).encode()
            assert ask(web, "POST", "/api/v1/clear", body, **WRITE) == (200, {"rows": 2})


_WRONG_SESSIONS: Final[list[dict[str, Any]]] = [
    *({}, {"session": 1}, {"session": "s", "x": 1}),
    *({"session": "s", "tenant": t} for t in (1, "t" * 65, "t" * 5_000, "\ud800", "a b")),
]


def test_a_session_is_shown_fetched_and_released(web: WebServer, daemon: Daemon) -> None:
    def said(fields: dict[str, Any]) -> Any:
        return ask(web, "POST", "/api/v1/session", json.dumps(fields).encode(), **WRITE)

    with ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store([os.urandom(WIDTH) for _ in range(2)], session=session_tag("w"))
        status, shown = said({"session": "w"})
        assert (status, shown["chunks"], shown["l1_bytes"]) == (200, 2, 128 << 10)
        fetched = {"model": "mine", "chunks": 2, "hit_chunks": 2, "fetching": 0}
        assert said({"session": "w", "do": "fetch"}) == (200, fetched | {"model": shown["model"]})
        assert said({"session": "w", "tenant": "t", "do": "release"}) == (200, {"rows": 0})
        assert said({"session": "w", "do": "release"}) == (200, {"rows": 2})
        assert said({"session": "x"})[1]["chunks"] == 0
    for wrong in (*_WRONG_SESSIONS, {"session": "w", "do": "x"}, {"session": "w", "do": ["fetch"]}):
        assert said(wrong)[0] == 400
    assert ask(web, "POST", "/api/v1/session", b'{"session": "w"}')[0] == 401


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"model": "nine"}, "model 'nine': the daemon knows no such model; "),
        ({"tenant": "defalt"}, "no such tenant; the nearest: default"),
        ({"tenant": "other"}, "other has no quota, so its rows count for 'default'"),
        ({"tenant": 1}, "give the name of one of them"),
        ({"tenant": "t" * 5_000}, "the daemon knows no such tenant"),
        ({"model": "\ud800"}, "the daemon knows no such model"),
        ({"model": "m", "tenant": "t"}, "give the name of one of them"),
        ({"model": "m", "tiers": True}, "unknown field 'tiers'"),
    ],
)
def test_what_cannot_be_cleared_by_name(
    web: WebServer, asked: dict[str, object], error: str
) -> None:
    status, reply = ask(web, "POST", "/api/v1/clear", json.dumps(asked).encode(), **WRITE)
    assert (status, error in reply["error"]) == (400, True), reply


def test_explain(web: WebServer, daemon: Daemon) -> None:
    with ExitStack() as ending:
        rows = Rows(daemon.socket, "explained", 64 << 10, ending)
        rows.find([os.urandom(WIDTH)])
        status, said = ask(web, "GET", "/api/v1/explain?engine=explained&limit=1")
        assert status == 200
        (one,) = said["lookups"]
        assert one["why"] == "absent"
        assert one["text"].startswith("Nobody stored")
        assert ask(web, "GET", "/api/v1/explain?request=none") == (200, {"lookups": []})
        limits = ("0", "x", "257", "0000000011111111")
        wrong = [(f"limit={limit}", "limit: give") for limit in limits]
        for query, text in (*wrong, ("n=1", "'n'")):
            status, said = ask(web, "GET", f"/api/v1/explain?{query}")
            assert status == 400
            assert text in said["error"]


def test_tiers(tmp_path: Path) -> None:
    (folder := tmp_path / "disk").mkdir(mode=0o755)
    tier = f"disk:{folder}?capacity=64MiB&quota=default=:1MiB&write=1GiB/day"
    with (
        running_daemon(tmp_path, "16MiB", tier=[tier]) as daemon,
        serving(daemon.socket, tmp_path) as web,
        ExitStack() as ending,
    ):
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store([os.urandom(WIDTH) for _ in range(2)])

        def listed() -> dict[str, Any]:
            status, said = ask(web, "GET", "/api/v1/tiers")
            assert status == 200
            (one,) = said["tiers"]
            return dict(one)

        assert eventually(lambda: listed().get("records") == 2)
        one = listed()
        assert (one["tier"], one["state"], one["place"]) == (f"disk:{folder}", "up", 1)
        assert one["tenants"]["default"]["reserved_bytes"] == 1 << 20
        assert (one["over_budget"], one["write_budget_bytes"]) == (False, 1 << 30)
        body = json.dumps({"tier": f"disk:{folder}", "clear": True}).encode()
        assert ask(web, "POST", "/api/v1/tiers", body)[0] == 401
        assert ask(web, "POST", "/api/v1/tiers", body, **WRITE)[0] == 200
        assert eventually(lambda: listed()["records"] == 0)
        assert daemon.status()["rows"] == 2
        for wrong, why in (
            ({"tier": "redis:h", "clear": True}, f"there is no such; there are: disk:{folder}"),
            ({"tier": f"disk:{folder}"}, "clear: say true"),
            ({"tier": f"disk:{folder}", "clear": 1}, "clear: say true"),
            ({"tier": 1, "clear": True}, "give the name of a tier"),
            ({"clear": True}, "give the name of a tier"),
            ({"tier": f"disk:{folder}", "retry": True}, "unknown field"),
        ):
            status, said = ask(web, "POST", "/api/v1/tiers", json.dumps(wrong).encode(), **WRITE)
            assert (status, why in said["error"]) == (400, True), said


def test_quotas(web: WebServer, daemon: Daemon) -> None:
    body = json.dumps({"tenant": "team-a", "cap": "8MiB", "reserved": 1 << 20}).encode()
    assert ask(web, "POST", "/api/v1/quotas", body)[0] == 401
    assert ask(web, "POST", "/api/v1/quotas", body, **WRITE) == (200, {"tenant": "team-a"})
    (team,) = [t for t in daemon.status()["tenants"] if t["quota"]]
    assert (team["cap_bytes"], team["reserved_bytes"]) == (8 << 20, 1 << 20)
    assert ask(web, "GET", "/api/v1/quotas")[0] == 200
    for wrong, why in (
        ({"tenant": "b", "cap": "1MiB", "reserved": "2MiB"}, "below what is reserved"),
        ({"tenant": "b", "reserved": "16MiB"}, "L1 has"),
        ({"tenant": "b", "cap": "lots"}, "no size"),
        ({"tenant": 1}, "give a name"),
        ({"tenant": "b", "cap": "99999999999999999999"}, "at most"),
        ({"tenant": "b", "limit": 1}, "unknown field"),
        ({"tenant": "b", "remove": True}, "there is none"),
    ):
        status, said = ask(web, "POST", "/api/v1/quotas", json.dumps(wrong).encode(), **WRITE)
        assert (status, why in said["error"]) == (400, True), said
    body = json.dumps({"tenant": "team-a", "remove": True}).encode()
    assert ask(web, "POST", "/api/v1/quotas", body, **WRITE)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nothing", None, {}, 404),
        ("GET", "/../status", None, {}, 404),
        ("POST", "/metrics", b"", {}, 405),
        ("GET", "/api/v1/clear", None, {}, 405),
        ("PUT", "/metrics", None, {}, 501),
        ("POST", "/api/v1/clear", b"", {}, 401),
        ("POST", "/api/v1/clear", b"", {"Authorization": "Bearer 0123456789abcdee"}, 401),
        ("POST", "/api/v1/clear", b"{", WRITE, 400),
        ("POST", "/api/v1/clear", b"[" * 100_000, WRITE, 400),
        ("POST", "/api/v1/clear", b"[]", WRITE, 400),
        ("POST", "/api/v1/clear", b'{"namespace": 1}', WRITE, 400),
        ("POST", "/api/v1/clear", b'{"nonsense": 1}', WRITE, 400),
        ("POST", "/api/v1/clear", b'{"namespace": ""}', WRITE, 400),
        ("POST", "/api/v1/clear", b'{"tiers": "no"}', WRITE, 400),
        ("POST", "/api/v1/prefetch", b'{"width": "x"}', WRITE, 400),
        ("POST", "/api/v1/prefetch", b'{"width": %d}' % (1 << 70), WRITE, 400),
        ("POST", "/api/v1/tiers", b'{"tier": "%s", "clear": true}' % (b"x" * 100_000), WRITE, 400),
        ("POST", "/api/v1/clear", b'{"tiers": true}', WRITE, 503),
        ("POST", "/api/v1/clear", b"", {**WRITE, "Content-Length": str(BODY_BYTES + 1)}, 413),
        ("POST", "/api/v1/clear", b"", {**WRITE, "Content-Length": "-1"}, 411),
        ("GET", "/metrics", None, {"Host": "evil.example"}, 403),
        ("GET", "/metrics", None, {"Origin": "http://evil.example"}, 403),
        ("GET", "/metrics", None, {"X": "y" * 70_000}, 431),
    ],
)
def test_what_is_refused(
    web: WebServer, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    seen, said = ask(web, method, path, body, **headers)
    assert seen == status
    assert list(said) == ["error"]
    assert "\n" not in said["error"]
    assert TOKEN not in json.dumps(said)


def held_open(web: WebServer, number: int, ending: ExitStack) -> list[socket.socket]:
    """Connections that sent a part of a request."""
    address = ("127.0.0.1", web.server_port)
    slow = [ending.enter_context(socket.create_connection(address)) for _ in range(number)]
    for each in slow:
        each.sendall(b"GET /metr")
    return slow


def test_there_are_at_most_so_many_connections(web: WebServer) -> None:
    """Further ones are closed at once. A connection that ends makes room for another."""
    with ExitStack() as ending:
        slow = held_open(web, CONNECTIONS, ending)
        for _ in range(3):
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(web, "GET", "/healthz")
        slow[0].sendall(b"ics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in slow[0].recv(100)
        assert eventually(lambda: healthy(web.server_port))


def test_requests_that_arrive_too_slowly_make_room(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._Handler, "timeout", None)  # each read has a bound, too
    with ExitStack() as ending:
        held_open(web, CONNECTIONS, ending)
        assert not healthy(web.server_port)
        monkeypatch.setattr(server, "DEADLINE_S", 0.3)
        assert eventually(lambda: healthy(web.server_port))


def test_a_request_that_arrives_too_slowly_ends(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte that it sends does not prolong it."""
    monkeypatch.setattr(server, "DEADLINE_S", 0.5)
    with ExitStack() as ending:
        (slow,) = held_open(web, 1, ending)
        slow.settimeout(0.05)
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            try:
                slow.send(b"i")
                if not slow.recv(1000):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it did not end")


@pytest.mark.parametrize(("there", "status"), [(3, 503), (8, 200)])
def test_what_is_not_populated_yet_is_not_ready_and_says_how_far_it_is(
    there: int, status: int
) -> None:
    fields = {"l1_populated_bytes": there, "l1_capacity_bytes": 8, "tiers": []}
    source: Any = SimpleNamespace(status=lambda: (fields, ""))
    reply = routes._ready(source, "")
    assert reply.status == status
    assert ("not populated yet: 37 % of it" in str(reply)) == (status == 503)


def test_what_needs_no_token_names_nothing() -> None:
    """No place of a socket or a tier, which may be a host or a bucket. ``/status`` has them."""
    open_to_all = {path for path, (need, _) in routes.READS.items() if need == "nothing"}
    assert open_to_all == {"/healthz", "/readyz", *routes.STATIC}
    tiers = [{"tier": "redis:secret", "up": up, "place": 1} for up in (True, False)]
    whole = {"l1_populated_bytes": 8, "l1_capacity_bytes": 8, "tiers": tiers}
    for fields, trouble in ((None, "no daemon at secret"), (whole, "")):
        source: Any = SimpleNamespace(status=lambda fields=fields, why=trouble: (fields, why))
        for path in open_to_all:
            assert "secret" not in str(routes.READS[path][1](source, "")), path
        reply = routes._ready(source, "")
        assert (reply.status, list(reply.body)) == (503, ["error"])
    assert reply.body["error"] == "tiers down: 1 of 2"


def test_a_daemon_that_is_gone_and_one_that_hangs(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, serving(daemon.socket, tmp_path) as web:
        assert ask(web, "GET", "/healthz")[0] == 200
        daemon.suspend()
        assert eventually(lambda: ask(web, "GET", "/healthz")[0] == 503)
        daemon.resume()
        assert eventually(lambda: ask(web, "GET", "/healthz")[0] == 200)
        daemon.kill()
        assert eventually(lambda: ask(web, "GET", "/healthz")[0] == 503)
        assert ask(web, "GET", "/metrics")[1].endswith(b"kvass_up 0.0\n")
        assert ask(web, "GET", "/status")[0] == ask(web, "GET", "/readyz")[0] == 503
        daemon.start()
        assert eventually(lambda: ask(web, "GET", "/healthz")[0] == 200)


def test_many_scrapes_and_dashboards_leave_nothing_behind(web: WebServer) -> None:
    """Of 30 dashboards at once, each of which asks for all it shows."""
    ask(web, "GET", "/metrics")
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(300):
        ask(web, "GET", "/metrics")
    paths = ["/", "/api/v1/history?since=0", "/api/v1/status"] * 30
    with ThreadPoolExecutor(30) as browsers:
        assert {status for status, _ in browsers.map(lambda p: ask(web, "GET", p), paths)} == {200}
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert eventually(lambda: threading.active_count() <= threads and not web._opened_s)


# ---------------------------------------------------------------- kvass serve --http


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def pss_bytes(pid: int) -> int:
    """A process's share of memory."""
    return 1024 * int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_serve_starts_it_again_and_takes_it_along(tmp_path: Path, end: str) -> None:
    port = free_port()
    with running_daemon(tmp_path, "16MiB", http=f"127.0.0.1:{port}") as daemon:
        assert eventually(lambda: healthy(port))
        (first,) = children(daemon.pid)
        assert pss_bytes(first) <= 24 << 20
        assert "numpy" not in Path(f"/proc/{first}/maps").read_text()
        os.kill(first, 9)
        assert eventually(lambda: first not in children(daemon.pid) and healthy(port))
        (second,) = children(daemon.pid)
        assert getattr(daemon, end)() in (0, None)
        assert eventually(lambda: not Path(f"/proc/{second}").exists())
        assert not healthy(port)
    assert "the web process ended" in daemon.log()


def test_a_web_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, tries = threading.Event(), list[Any]()

    def none_left(command: list[str], **_: Any) -> None:
        tries.append(command)
        if len(tries) == 2:
            over.set()
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(serve, "_PAUSE_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", none_left)
    serve._keep_web(Config(socket="s", http="127.0.0.1:0"), 0, over)
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--http", "0.0.0.0:9273"], "--http-token-file"),
        (["--http", "nowhere"], "ADDRESS:PORT"),
        (["--http", "127.0.0.1:{taken}"], "in use"),
    ],
)
def test_what_serve_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = [flag.format(taken=listener.getsockname()[1]) for flag in flags]
        assert main(["serve", "--socket", str(tmp_path / "s.sock"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
