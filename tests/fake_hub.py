"""A small stand-in for the Hugging Face Hub on this machine: model info, file lists and files."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """What it serves and what it was asked for."""

    repos: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()  # listed to all, files only with a token
    token: str = "hf_let_me_in"
    url: str = ""
    asked: list[str] = field(default_factory=list)  # paths of GET requests

    def repos_asked(self) -> list[str]:
        """Repositories whose listing was asked for, in order, each once."""
        names = ["/".join(p.split("/")[3:5]) for p in self.asked if p.startswith("/api/models/")]
        return list(dict.fromkeys(names))

    def files_fetched(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {path.rpartition("/")[2] for path in self.asked if "/resolve/" in path}


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self.hub.asked.append(self.path)
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        api = path.startswith("api/models/")
        owner, name, *rest = path.removeprefix("api/models/").split("/")
        repo = f"{owner}/{name}"
        files = self.hub.repos.get(repo)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if api and "tree" in rest:
            entries = [{"type": "file", "oid": "0", **_entry(f, b)} for f, b in files.items()]
            return self._send(200, json.dumps(entries).encode(), {})
        if api:
            siblings = [{"rfilename": file} for file in files]
            info = {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}
            return self._send(200, json.dumps(info).encode(), {})
        if repo in self.hub.gated and self.hub.token not in self.headers.get("Authorization", ""):
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        contents = files.get("/".join(rest[2:]))  # resolve/REVISION/FILE
        if contents is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        etag = f'"{hashlib.sha1(contents).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(200, contents, headers, body=body)

    def _send(
        self, status: int, contents: bytes, headers: Mapping[str, str], *, body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(contents)


def _entry(file: str, contents: bytes) -> dict[str, object]:
    return {"path": file, "size": len(contents)}


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the server while the block lasts; ``hub.url`` is for HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
