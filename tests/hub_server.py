"""A server on this machine that speaks the protocol of the Hugging Face Hub, for tests."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_S3CR3T"
_LARGE, _PAGE = 1 << 16, 2  # bytes from which a file is stored as a large file; names per page


# Changes the headers and the content of an answer to a request: "GET /api/models/…".
Change = Callable[[str, dict[str, str], bytes], bytes]


@dataclass
class Hub:
    """The content of a hub, and the requests that it received."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # status, code; by repository
    change: Change | None = None  # of a malicious server
    cuts: int = 0  # answers with a large file that end early
    requests: list[str] = field(default_factory=list)
    url: str = ""
    user: dict[str, Any] = field(default_factory=lambda: {"name": "me", "orgs": []})
    public: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files, by their hash
    drops: str = ""  # requests whose connection is closed: the beginning of "PUT /lfs/…"

    def fetched(self) -> set[str]:
        """Return the names of the files whose content was requested."""
        return {each.split(" ")[1] for each in self.requests if each.startswith("BODY ")}


@contextmanager
def serving(hub: Hub, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve `hub` as the Hub of this process, with an empty cache directory in `folder`."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    options = {"HF_HUB_OFFLINE": False, "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": url}
    for name, value in {**options, "DOWNLOAD_CHUNK_SIZE": 1 << 14}.items():
        patch.setattr(constants, name, value)
    patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    patch.delenv("HF_TOKEN", raising=False)
    for module in ("file_download", "utils._http"):
        patch.setattr(f"huggingface_hub.{module}.time", mock.Mock(wraps=time, sleep=lambda s: None))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.served, urlsplit(self.path)
        hub.requests.append(f"{self.command} {self.path} {self.headers.get('Authorization', '')}")
        parts = [unquote(each) for each in url.path.strip("/").split("/")]
        if parts == ["api", "whoami-v2"]:
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self._answer(200 if is_known else 401, json.dumps(hub.user))
        if parts[0] == "cdn":
            everything = hub.models | hub.datasets
            return self._body("/".join(parts[4:]), everything["/".join(parts[2:4])])
        api = parts.pop(0) if parts[0] == "api" else ""
        kind = parts.pop(0) if parts[0] == "datasets" or api else "models"
        name, rest = "/".join(parts[:2]), parts[2:]
        status, code = hub.refused.get(name, (0, ""))
        if status and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(status, b"", {"X-Error-Code": code} if code else {})
        files = {"models": hub.models, "datasets": hub.datasets}.get(kind, {}).get(name)
        if files is None:
            return self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if rest[1:] and rest[1] not in ("main", SHA, "v2"):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if api and rest[:1] == ["tree"]:
            return self._page(files, "".join(f"{x}/" for x in rest[2:]), parse_qs(url.query))
        if api:
            options = {"id": name, "sha": SHA, "siblings": [{"rfilename": each} for each in files]}
            return self._answer(200, json.dumps({**options, "private": name not in hub.public}))
        return self._file(kind, name, "/".join(rest[2:]), files)

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        hub, size = self.served, int(self.headers["Content-Length"])
        what = f"{self.command} {self.path}"
        hub.requests.append(f"{what} {self.headers.get('Authorization', '')}")
        if hub.drops and what.startswith(hub.drops):
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if self.command == "PUT":
            hub.stored[urlsplit(self.path).path.split("/")[2]] = body
            self._answer(200, b"")
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}" or hub.user.get("refused"):
            self._answer(403, b"")
        elif self.path == "/api/validate-yaml":
            self._answer(200, json.dumps({"errors": [], "warnings": []}))
        elif self.path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            hub.models.setdefault(name, {".gitattributes": b""})
            hub.public |= {name} if request.get("visibility") != "private" else set()
            self._answer(200, json.dumps({"url": f"{hub.url}/{name}"}))
        else:
            self._answer(200, json.dumps(self._written("/".join(self.path.split("/")[3:5]), body)))

    def _written(self, name: str, body: bytes) -> dict[str, Any]:
        """Return how to upload files, or commit them."""
        hub = self.served
        if "/preupload/" in self.path:
            request = json.loads(body)["files"]
            modes = [(x["path"], "lfs" if x["size"] >= _LARGE else "regular") for x in request]
            files = [{"path": a, "uploadMode": b, "shouldIgnore": False} for a, b in modes]
            return {"files": files}
        if self.path.endswith("/objects/batch"):
            objects = [each["oid"] for each in json.loads(body)["objects"]]
            url = f"{hub.url}/lfs/"
            return {"objects": [
                {"oid": x, "size": 0} | ({} if x in hub.stored else {"actions":
                 {"upload": {"href": f"{url}{x}?X-Amz-Signature=S3CR3T", "header": {}}}})
                for x in objects
            ]}  # fmt: skip
        content = dict(hub.models[name])
        for line in map(json.loads, body.splitlines()):
            value, path = line["value"], line["value"].get("path", "")
            if line["key"] == "file":
                content[path] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content[path] = hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del content[path]
        hub.models[name] = content
        return {"commitUrl": f"{hub.url}/{name}/commit/{SHA}", "commitOid": SHA}

    def _page(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        """Answer with a page of the files below a folder, or of the entries in it."""
        inside = {each: "file" for each in files if each.startswith(folder)}
        if query["recursive"] != ["true"]:
            deep = [each.removeprefix(folder).partition("/") for each in inside]
            inside = {folder + name: "directory" if more else "file" for name, more, _ in deep}
        first = int(query.get("cursor", ["0"])[0])
        results = [
            {"type": kind, "path": name, "size": len(files.get(name, b"")), "oid": _hash(name)}
            for name, kind in [*inside.items()][first : first + _PAGE]
        ]
        again = f"{self.served.url}{urlsplit(self.path).path}?recursive={query['recursive'][0]}"
        more = {"Link": f'<{again}&cursor={first + _PAGE}>; rel="next"'}
        self._answer(200, json.dumps(results), more if first + _PAGE < len(inside) else {})

    def _file(self, kind: str, repo: str, name: str, files: dict[str, bytes]) -> None:
        if name not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
        content = files[name]
        options = {"X-Repo-Commit": SHA, "ETag": f'"{_hash(content)}"'}
        if len(content) < _LARGE:
            return self._body(name, files, options)
        options |= {"X-Linked-Etag": options.pop("ETag"), "X-Linked-Size": str(len(content))}
        other = self.served.url.replace("127.0.0.1", "localhost")  # another host
        url = f"{other}/cdn/{kind}/{repo}/{name}?X-Amz-Signature=S3CR3T"
        return self._answer(302, b"", {**options, "Location": url})

    def _body(self, name: str, files: dict[str, bytes], more: dict[str, str] | None = None) -> None:
        content = files[name]
        span = self.headers.get("Range", "")
        first = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
        if self.command == "GET":
            self.served.requests.append(f"BODY {name} {first}")
        rest = content[first:]
        is_cut = len(content) >= _LARGE and self.served.cuts > 0 and self.command == "GET"
        self.served.cuts -= is_cut
        part = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if span else {}
        self._answer(206 if span else 200, rest, {**(more or {}), **part}, is_cut=is_cut)

    def _answer(
        self, status: int, content: bytes | str, options: dict[str, str] | None = None, is_cut=False
    ) -> None:
        body = content.encode() if isinstance(content, str) else content
        options = dict(options or {})
        if self.served.change:
            body = self.served.change(f"{self.command} {self.path}", options, body)
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **options}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut:
            self.close_connection = True


def _hash(content: bytes | str) -> str:
    return hashlib.sha1(content if isinstance(content, bytes) else content.encode()).hexdigest()
