"""Who may come in: not another page, not a rebound name, not without the token; and what is refused in one line."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys

import httpx
import pytest
from starlette.testclient import TestClient

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.inference.server.serve import bound_socket
from hybrid_rlhf.studio import command
from hybrid_rlhf.studio.studio import News, Refused, Route, Studio
from hybrid_rlhf.studio.studio_app import make_app
from tests.project.docs_blocks import ROOT

TOKEN, PORT = "t" * 32, 8090
BASE = f"http://127.0.0.1:{PORT}"


def refuse(_query, _body):
    raise Refused(409, "no", "data.sources")


def fail(_query, _body):
    raise KeyError("x")


@pytest.fixture
def client(tmp_path):
    routes = [Route("GET", "/api/echo", lambda query, _body: query),
              Route("POST", "/api/echo", lambda _query, body: body),
              Route("GET", "/api/refuse", refuse), Route("GET", "/api/fail", fail)]
    with TestClient(make_app(Studio(tmp_path), routes, TOKEN, PORT), base_url=BASE, follow_redirects=False) as found:
        yield found


@pytest.fixture
def inside(client):
    assert client.get("/", params={"token": TOKEN}).status_code == 303
    return client


def test_the_printed_address_lets_in_and_hides_its_token(client):
    assert client.get("/").status_code == 401
    answer = client.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    page = client.get("/")
    assert page.status_code == 200 and "studio.js" in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("token", ["", "x", TOKEN + "t", "é"])
def test_a_wrong_token_opens_nothing(client, token):
    assert client.get("/", params={"token": token}).status_code == 401
    assert client.get("/api/echo", cookies={f"studio_{PORT}": "x"}).status_code == 401
    assert client.get("/api/echo", params={"token": TOKEN}).status_code == 401  # the first address alone takes it


@pytest.mark.parametrize("headers", [
    {"host": "evil.example"}, {"host": f"evil.example:{PORT}"}, {"host": "127.0.0.1"}, {"host": "127.0.0.1:1"},
    {"host": f"127.0.0.1:{PORT}@evil.example"}, {"host": f"127.0.0.1.evil.example:{PORT}"}, {"host": ""},
    {"host": f"127.0.0.1:{PORT}/x"}, {"host": f"[::1].evil.example:{PORT}"}, {"origin": f"127.0.0.1:{PORT}"},
    {"origin": f"http://127.0.0.2:{PORT}"}, {"host": "[::1"}, {"host": "127.0.0.1:x"},
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": f"https://127.0.0.1:{PORT}"},
    {"origin": "http://127.0.0.1:1"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_and_other_pages_are_refused(inside, headers, method):
    answer = inside.request(method, "/api/echo", headers=headers, **({"json": {}} if method == "POST" else {}))
    assert answer.status_code == 403


@pytest.mark.parametrize("host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}"])
def test_names_of_this_machine_are_let_in(inside, host):
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin",
               "cookie": f"studio_{PORT}={TOKEN}"}
    assert inside.get("/api/echo", params={"a": "b"}, headers=headers).json() == {"a": "b"}


# -- a studio that other devices open


def opened_from(tmp_path, host: str, headers: dict, method: str = "GET") -> int:
    """The status of a request with the cookie to a studio that listens on `host`."""
    routes = [Route("GET", "/api/echo", lambda query, _body: query), Route("POST", "/api/echo", lambda _q, body: body)]
    with TestClient(make_app(Studio(tmp_path), routes, TOKEN, PORT, (), host), base_url=BASE,
                    cookies={f"studio_{PORT}": TOKEN}) as client:
        return client.request(method, "/api/echo", headers=headers, **({"json": {}} if method == "POST" else {})
                              ).status_code


@pytest.mark.parametrize("name", ["192.168.1.5", "127.0.0.1", "[fe80::1]", "localhost", socket.gethostname(),
                                  f"{socket.gethostname()}.local".upper()])
def test_listening_for_others_each_number_and_own_name_is_let_in(tmp_path, name):
    for method in ("GET", "POST"):
        headers = {"host": f"{name}:{PORT}", "origin": f"http://{name}:{PORT}"}
        assert opened_from(tmp_path, "0.0.0.0", headers, method) == 200


@pytest.mark.parametrize("headers", [
    {"host": f"evil.example:{PORT}"}, {"host": f"192.168.1.5.evil.example:{PORT}"}, {"host": "192.168.1.5:1"},
    {"host": "192.168.1.5"}, {"host": f"192.168.1.5:{PORT}", "origin": "http://evil.example"},
    {"host": f"192.168.1.5:{PORT}", "origin": f"http://192.168.1.6:{PORT}"},
    {"host": f"192.168.1.5:{PORT}", "origin": "http://192.168.1.5:3000"},
    {"host": f"192.168.1.5:{PORT}", "origin": "null"}, {"host": f"cafe.be:{PORT}"},
    {"host": f"192.168.1.5:{PORT}", "sec-fetch-site": "cross-site"}])
def test_listening_for_others_a_foreign_name_or_page_is_refused(tmp_path, headers):
    assert opened_from(tmp_path, "0.0.0.0", headers) == opened_from(tmp_path, "::", headers, "POST") == 403


def test_a_name_to_listen_on_is_let_in_and_loopback_alone_lets_no_number_in(tmp_path):
    assert opened_from(tmp_path, "studio.lan", {"host": f"Studio.LAN:{PORT}"}) == 200
    assert opened_from(tmp_path, "127.0.0.2", {"host": f"127.0.0.2:{PORT}"}) == 200
    assert opened_from(tmp_path, "127.0.0.2", {"host": f"127.0.0.3:{PORT}"}) == 403
    assert opened_from(tmp_path, "127.0.0.1", {"host": f"{socket.gethostname()}:{PORT}"}) == 403


def test_the_printed_address_is_one_that_another_device_can_open(monkeypatch):
    assert command.reachable("192.168.1.5") == "192.168.1.5" and command.reachable("::1") == "[::1]"
    assert command.reachable("0.0.0.0") not in ("0.0.0.0", "127.0.0.1", "")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    assert command.reachable("::") == socket.gethostname()


@pytest.mark.parametrize("token", ["short", "has a space in it", "with/slashes/in", "é" * 12])
def test_a_token_that_is_short_or_not_plain_is_refused(monkeypatch, token):
    monkeypatch.setenv(command.TOKEN_VARIABLE, token)
    with pytest.raises(UserError, match="cannot be a token; give 12 letters"):
        command.parse([])


def test_an_address_that_cannot_be_listened_on_is_one_line_of_the_studio():
    for host, port in (("no such name", 0), ("203.0.113.7", 0)):
        with pytest.raises(UserError, match=r"^studio: cannot listen on .* give another --port or --host$"):
            bound_socket("studio", host, port)


def test_a_studio_for_the_home_network_says_what_that_means_and_needs_its_token(tmp_path):
    studio = subprocess.Popen(
        [sys.executable, "-m", "hybrid_rlhf", "studio", "--outputs", str(tmp_path / "outputs"), "--host", "0.0.0.0",
         "--port", "0", "--no_browser"], stderr=subprocess.PIPE, text=True, env=os.environ | {
            "PYTHONPATH": str(ROOT), command.TOKEN_VARIABLE: "a-token-of-home"})
    try:
        host, token = re.search(r"http://([^/]+)/\?token=(\S+)", studio.stderr.readline()).groups()
        assert token == "a-token-of-home" and re.match("note: each .*nothing is encrypted", studio.stderr.readline())
        base = f"http://127.0.0.1:{host.rpartition(':')[2]}"
        with httpx.Client(base_url=base, headers={"host": host}, timeout=30,
                          transport=httpx.HTTPTransport(retries=50)) as phone:
            assert phone.get("/").status_code == phone.get("/api/runs").status_code == 401
            assert phone.get("/", params={"token": token}).status_code == 303
            assert phone.get("/api/runs").json()["runs"] == []
            assert phone.get("/api/runs", headers={"host": "evil.example"}).status_code == 403
    finally:
        studio.terminate()
        studio.wait(120)
        studio.stderr.close()


def test_odd_cookies_of_other_programs_do_not_hide_the_studio_s(inside):
    for other in ("k[1]=2", 'x={"a": 1}', "=", "a"):
        assert inside.get("/api/echo", headers={"cookie": f"{other}; studio_{PORT}={TOKEN}"}).status_code == 200


def test_a_link_from_elsewhere_may_open_the_page_alone(inside):
    assert inside.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_bodies_are_json_of_a_bounded_size(inside):
    assert inside.post("/api/echo", json={"a": [1]}).json() == {"a": [1]}
    assert inside.post("/api/echo", json={"a": "x" * 20 * 2**20}).status_code == 413


def test_refusals_and_faults_are_one_line(inside):
    assert inside.get("/api/refuse").json() == {"error": "no", "option": "data.sources"}
    answer = inside.get("/api/fail")
    assert answer.status_code == 500 and "KeyError" in answer.json()["error"] and "Traceback" not in answer.text
    assert inside.get("/../studio.py").status_code == 404


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../b", "/etc", "a//b", ".studio", "a/.git", "a\0b",
                                  "link", "link/inner", "none", "file", pytest.param("x" * 10_000, id="long")])
def test_only_folders_below_the_outputs_are_runs(tmp_path, name):
    outputs = tmp_path / "outputs"
    (outputs / "a").mkdir(parents=True)
    (tmp_path / "secret" / "inner").mkdir(parents=True)
    (outputs / ".studio").mkdir()
    (outputs / "file").write_text("")
    (outputs / "link").symlink_to(tmp_path / "secret")
    assert Studio(outputs).folder("a") == outputs / "a"
    with pytest.raises(Refused):
        Studio(outputs).folder(name)


def test_tabs_that_listen_end_with_the_studio():
    async def listen() -> list[str]:
        news, heard = News(), []
        stream = news.listen()
        heard.append(await anext(stream))
        news.publish("runs", {})
        heard.append(await anext(stream))
        news.end()
        heard += [text async for text in stream]
        return heard

    found = asyncio.run(asyncio.wait_for(listen(), 60))
    assert found[1:] == ["event: runs\ndata: {}\n\n"]
