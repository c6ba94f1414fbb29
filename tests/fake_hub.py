"""A small stand-in for the Hugging Face Hub on this machine: model info, file lists and files.

``repos`` holds owner/name -> file -> contents of the branch main; owner/name@revision is another.
"""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """What it serves and what it was asked for."""

    repos: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()  # listed to all, files only with a token
    token: str = "hf_let_me_in"
    url: str = ""
    asked: list[str] = field(default_factory=list)  # paths of GET requests
    status: Mapping[str, int] = field(default_factory=dict)  # repository -> answer to everything
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes sent before each cut
    ranges: list[str] = field(default_factory=list)  # "file: bytes=N-" of resumed downloads

    def find(self, repo: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Commit and files of a revision: a branch, a tag or the commit itself."""
        if revision in ("main", COMMIT):
            return COMMIT, self.repos[repo]
        for name, files in self.repos.items():
            branch = name.removeprefix(f"{repo}@")
            if name != branch and revision in (branch, commit_of(branch)):
                return commit_of(branch), files
        return None

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
        if repo in self.hub.status:
            return self._send(self.hub.status[repo], b"", {})
        if repo not in self.hub.repos:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        found = self.hub.find(repo, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if api and "tree" in rest:
            entries = [{"type": "file", "oid": "0", **_entry(f, b)} for f, b in files.items()]
            return self._send(200, json.dumps(entries).encode(), {})
        if api:
            siblings = [{"rfilename": file} for file in files]
            info = {"id": repo, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
            return self._send(200, json.dumps(info).encode(), {})
        if repo in self.hub.gated and self.hub.token not in self.headers.get("Authorization", ""):
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        contents = files.get("/".join(rest[2:]))  # resolve/REVISION/FILE
        if contents is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = f'"{hashlib.sha1(contents).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return self._send_file("/".join(rest[2:]), contents, headers, body=body)

    def _send_file(
        self, file: str, contents: bytes, headers: dict[str, str], *, body: bool
    ) -> None:
        """Send a file, its rest where a Range asks for that, a piece where it is to be cut."""
        status, asked = 200, self.headers.get("Range", "")
        if body and asked.startswith("bytes="):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(contents) - 1}/{len(contents)}"
            status, contents = 206, contents[start:]
            self.hub.ranges.append(f"{file}: {asked}")
        cuts = self.hub.cuts.get(file, [])
        sent = cuts.pop(0) if body and cuts else None
        self._send(status, contents, headers, body=body, sent=sent)

    def _send(
        self,
        status: int,
        contents: bytes,
        headers: Mapping[str, str],
        *,
        body: bool = True,
        sent: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(contents[:sent])


def commit_of(branch: str) -> str:
    """The commit that a revision other than main points to."""
    return hashlib.sha1(branch.encode()).hexdigest()


def _entry(file: str, contents: bytes) -> dict[str, object]:
    return {"path": file, "size": len(contents)}


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep downloads and tokens below ``folder``."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Take ``url`` for the Hub in this process, as HF_ENDPOINT does in a new one."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


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
