"""`--push-to-hub` against a local server that stands in for the Hugging Face Hub."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from helpers_cli import arguments, make_folder

from fwanda_pruner.cli import main


class Hub(ThreadingHTTPServer):
    """Answers what an upload asks, and keeps the files that it gets.

    Attributes:
        files: path -> bytes, of the repository me/model.
        calls: method and path of each request.
        created: body of the request that made the repository.
        refuse: parts of the paths of requests that fail.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files, self.calls, self.created, self.refuse = {}, [], None, ()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("GET")

    def do_POST(self):
        self.answer("POST")

    def log_message(self, *_args):
        pass

    def answer(self, method):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.calls.append(f"{method} {path}")
        allowed = self.headers.get("Authorization") == "Bearer hf_right"
        status, value = (200, self.value(path, body)) if allowed else (401, {"error": "Invalid token"})
        if any(part in path for part in hub.refuse):
            status, value = 403, {"error": "refused by the stand-in"}
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def value(self, path, body):
        hub = self.server
        if path == "/api/repos/create":
            hub.created = json.loads(body)
            return {"url": f"{hub.url}/me/model"}
        if "/tree/" in path:
            return [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in hub.files]
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del hub.files[line["value"]["path"]]
            return {"success": True, "commitUrl": f"{hub.url}/me/model/commit/{'1' * 40}", "commitOid": "1" * 40}
        if path == "/api/models/me/model":
            return {"id": "me/model", "sha": "0" * 40, "siblings": []}
        return {"errors": [], "warnings": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()


@pytest.fixture
def command(folder, tmp_path):
    return arguments(folder, tmp_path / "out", "--push-to-hub", "me/model")


def test_the_folder_is_uploaded_to_a_private_repository(hub, command, tmp_path, capsys):
    hub.files = {
        "model-00001-of-00002.safetensors": b"old",
        "model.safetensors.index.json": b"old",
        "notes.txt": b"mine",
    }
    assert main(command) == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == {**expected, "notes.txt": b"mine"}  # and no weights of before, which would be loaded instead
    made = hub.created
    assert made.get("private") or made["visibility"] == "private"  # by version of huggingface_hub
    assert (made["organization"], made["name"]) == ("me", "model")
    assert f"uploaded    {hub.url}/me/model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("name", "--push-to-hub must be NAME or OWNER/NAME, got 'a//b'"),
        ("no token", "needs a token of the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN"),
        ("wrong token", "--push-to-hub me/model: "),
        ("not mine", "--push-to-hub me/model: "),
        ("no write access", "--push-to-hub me/model: "),
        ("no hub", "--push-to-hub me/model: "),
    ],
)
def test_what_would_fail_at_the_end_fails_before_the_model_is_read(
    fault, expected, hub, command, tmp_path, capsys, monkeypatch
):
    if fault == "name":
        command[-1] = "a//b"
    if fault == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if fault == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.refuse = {"not mine": ["/create", "/me/model"], "no write access": ["/create", "/auth-check"]}.get(fault, ())
    if fault == "no hub":
        hub.shutdown()
        hub.server_close()
    command[1] = str(tmp_path / "no-model")
    assert main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fwanda: error: ")]
    assert expected in line and not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def test_a_failed_upload_leaves_the_folder_and_says_how_to_upload_it_later(hub, command, tmp_path, capsys):
    hub.refuse = ["/commit/"]
    assert main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fwanda: error: ")]
    assert f"{tmp_path / 'out'} is complete; upload it by the same command with --resume" in line
    assert f"hf upload me/model {tmp_path / 'out'}" in line
    hub.refuse, before = (), (tmp_path / "out" / "model.safetensors").read_bytes()
    assert main([*command, "--resume"]) == 0  # uploads what is there
    assert hub.files["model.safetensors"] == before and f"uploaded    {hub.url}/me/model" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out")
