"""A Hugging Face hub in miniature, with one repository: owner/name."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The endpoints that huggingface_hub asks for one repository; others are private, gated or not there."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        hub, self.fetched = self, list[str]()  # names of files that were downloaded
        self.files = files

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(*hub.answer(self.path.split("?")[0]), body=False)

            def do_GET(self) -> None:
                if "/resolve/" in self.path:
                    hub.fetched.append(self.path.split("/", 5)[-1])
                self._answer(*hub.answer(self.path.split("?")[0]), body=True)

            def _answer(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if "/gated/" in path:
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if "/owner/name" not in path:
            return 401, b"{}", {"X-Error-Code": "RepoNotFound"}
        if "/revision/" in path and path.endswith(("main", "v1", SHA)):
            return 200, dumps({"id": "owner/name", "sha": SHA, "siblings": []}).encode(), {}
        if f"/tree/{SHA}" in path:
            files = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in self.files.items()]
            return 200, dumps(files).encode(), {}
        if "/resolve/" in path:
            name = path.split("/resolve/")[1].split("/", 1)[1]
            if name in self.files:
                etag = f'"{abs(hash(name)):040x}"'
                return 200, self.files[name], {"ETag": etag, "X-Repo-Commit": SHA}
            return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
